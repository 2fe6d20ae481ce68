"""The documents say what the code says: keys and defaults, messages and fields, commands, limits, links."""

from __future__ import annotations

import re
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.cli import app
from launch.config import Config
from launch.summary import summarise
from protocol import messages
from protocol.block import CARRIERS, Table
from protocol.codec import MAX_FRAME_BYTES
from protocol.job import TOKEN_VARIABLE
from protocol.sockets import HIGH_WATER_MARK
from protocol.version import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
PROTOCOL = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
MESSAGES: tuple[type[messages.Message], ...] = typing.get_args(messages.AnyMessage)

# Machine paths have no place in documents; a path under a home folder is written with ~.
MACHINE_PATH = re.compile(r"(?<![\w.~:/])/(?:work|tmp|home|root|usr|mnt|opt|var|srv|data|Users)/\S*")
CODE = re.compile(r"^```.*?^```|^ {4}.*?$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[`$ ])draftwire ([a-z]+)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def config_keys() -> Iterator[tuple[str, Any]]:
    """(section.key, default or msgspec.NODEFAULT) of every key; those of a list's entries as section.key[].entry."""
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            name = f"{section.name}.{field.name}"
            yield (
                name,
                field.default_factory()
                if field.default is msgspec.NODEFAULT and callable(field.default_factory)
                else field.default,
            )
            for entry in typing.get_args(field.type):
                if isinstance(entry, type) and issubclass(entry, msgspec.Struct):
                    for inner in msgspec.structs.fields(entry):
                        yield f"{name}[].{inner.name}", inner.default


KEYS = dict(config_keys())
# One table row: its keys, and the cell with the default.
ROWS = {
    key: default
    for cells, default in re.findall(r"^\| ((?:`[a-z]+\.[^`]+`(?:, )?)+) \|[^|]*\| ([^|]*?) \|", CONFIGURATION, re.M)
    for key in re.findall(r"`([^`]+)`", cells)
}


def test_the_configuration_is_read_as_it_is_meant() -> None:
    assert {"run.name", "data.train[].path", "drafter.taps", "train.lr", "ring.bytes"} <= KEYS.keys()
    assert KEYS["data.train"] == []
    assert KEYS["data.train[].path"] is msgspec.NODEFAULT
    assert KEYS["train.lr"] == 6e-4


def test_every_key_is_documented_and_no_other() -> None:
    assert ROWS.keys() == KEYS.keys()


@pytest.mark.parametrize("key", KEYS)
def test_a_documented_default_is_the_default(key: str) -> None:
    words = {"required": msgspec.NODEFAULT, "none": None}
    cell = ROWS[key]
    documented = words[cell] if cell in words else tomllib.loads(f"value = {cell.strip('`')}")["value"]
    assert documented == KEYS[key]
    assert type(documented) is type(KEYS[key])


def grammar(tag: str) -> dict[str, str]:
    """Field -> type of the rule `tag` in docs/protocol.md."""
    rule = re.search(rf"^{tag} += \{{ (.*?) \}}$", PROTOCOL, re.MULTILINE | re.DOTALL)
    assert rule, f"docs/protocol.md has no rule {tag}"
    body = " ".join(rule[1].split())
    return dict(re.findall(r"(\w+): (.+?)(?=, \w+: |$)", body))


def type_in_grammar(hint: Any) -> str:
    """How docs/protocol.md writes a field's Python type."""
    plain = {str: "text", int: "int", float: "float", bool: "bool", bytes: "bytes", Any: "any", Table: "table"}
    if hint in plain:
        return plain[hint]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return f"[* {type_in_grammar(arguments[0])}]"
    assert typing.get_origin(hint) is dict, f"no way to write {hint}"
    return "{ * " + f"{type_in_grammar(arguments[0])}: {type_in_grammar(arguments[1])}" + " }"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_a_message_s_rule_is_its_struct(message: type[messages.Message]) -> None:
    tag = message.__name__.lower()
    fields = {field.name: type_in_grammar(field.type) for field in msgspec.structs.fields(message)}
    assert grammar(tag) == {"t": f'"{tag}"'} | fields
    assert re.search(rf"^\| {message.__name__.upper()} \| [^|]+ \| [^|]+ \|$", PROTOCOL, re.MULTILINE)


def test_no_rule_is_left_of_a_message_that_is_gone() -> None:
    assert set(re.findall(r'\{ t: "(\w+)"', PROTOCOL)) == {message.__name__.lower() for message in MESSAGES}


def test_all_messages_of_the_module_can_be_sent() -> None:
    of_module = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, messages.Message) and value is not messages.Message
    }
    assert of_module == set(MESSAGES)
    assert isinstance(messages.AnyMessage, types.UnionType)


def test_versions_and_limits_are_the_code_s() -> None:
    assert f"version     = {PROTOCOL_VERSION} " in PROTOCOL
    assert f"{MAX_FRAME_BYTES >> 20} MiB (`MAX_FRAME_BYTES`" in PROTOCOL
    assert f"{HIGH_WATER_MARK:,} messages each way" in PROTOCOL
    dtypes = re.search(r"^dtype +=(.+)$", PROTOCOL, re.MULTILINE)
    assert dtypes
    assert re.findall(r'"(\w+)"', dtypes[1]) == list(CARRIERS)
    assert f"`{TOKEN_VARIABLE}`" in CONFIGURATION


def command_names() -> set[str]:
    own = {str(command.name or command.callback.__name__) for command in app.registered_commands if command.callback}
    return own | {str(group.name) for group in app.registered_groups}


def test_every_command_is_documented_and_no_other() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    documented = {name for text in texts for code in CODE.findall(text) for name in COMMAND.findall(code)}
    assert documented == command_names()


def test_every_key_of_status_is_documented(tmp_path: Path) -> None:
    (row,) = re.findall(r"^\| `draftwire status.*$", CONFIGURATION, re.MULTILINE)
    assert [key for key in summarise(tmp_path) if f"`{key}`" not in row] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_no_machine_path_and_its_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert MACHINE_PATH.findall(text) == []
    assert [link for link in LINK.findall(text) if not (path.parent / link).exists()] == []


def test_what_is_a_machine_path() -> None:
    assert MACHINE_PATH.search("in /home/somebody/runs")
    assert MACHINE_PATH.search("`/tmp/x`")
    assert not MACHINE_PATH.search("~/.cache/draftwire, runs/data/x, /dev/shm, https://example.org/home/x")
