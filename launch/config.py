"""The configuration of a run: TOML in, `config.resolved.json` out.

Each section lives beside the code that it configures; here they are composed, overridden (`--set a.b=c`) and checked.
Every error names the file, the line where there is one, and the key, and says what to write instead.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from consumer.config import DrafterConfig, EvalConfig, TrainConfig
from consumer.config import check as check_consumer
from consumer.presets import filled
from launch.hosts import HostsConfig
from launch.hosts import check as check_hosts
from launch.log_config import LogConfig, check_log
from launch.placement import GpusConfig
from launch.toml_lines import Place, place_of, toml_lines
from producer.config import EMBEDDED, HUB, DataConfig, TargetConfig
from producer.config import check as check_producer
from protocol.cache_config import CacheConfig
from protocol.cache_config import check as check_cache
from protocol.errors import RequestError
from protocol.ring import RingConfig
from protocol.units import parse_seconds

# What may stand beside a key's words.
_PLAIN: dict[Any, str] = {int: "a whole number", float: "a number", tuple: "a list of whole numbers"}
_KEY = re.compile(r"(?:unknown key '|\[)?([\w.\[\]-]+)")


# Peers beat every two seconds, and a busy machine may delay a beat or two.
LEAST_HANG_S = 8.0


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[run] — the run's name (default: the config file's name), the folder that holds the runs, and how long a process
    may show no life before it is ended and started again."""

    name: str = ""
    dir: str = "runs"
    hang_after: str | int = "5min"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration; docs/configuration.md lists every key."""

    run: RunConfig = RunConfig()
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig = DrafterConfig()
    train: TrainConfig = TrainConfig()
    ring: RingConfig = RingConfig()
    cache: CacheConfig = CacheConfig()
    gpus: GpusConfig = GpusConfig()
    hosts: HostsConfig = HostsConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Reads, overrides and checks a TOML config. Raises RequestError on anything that is not understood.

    Relative paths of data and of a drafter to start from are taken from the config file's own folder, as is
    target.model when it is a folder there.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RequestError(f"{path}: {error}") from None
    lines = toml_lines(text)
    for override in overrides:
        replaced = _override(data, override)
        # What an override says stands on no line.
        lines = {place: line for place, line in lines.items() if place[: len(replaced)] != replaced} | {replaced: 0}
    try:
        _refuse_unknown_keys(Config, data, "")
        if isinstance(drafter := data.get("drafter"), dict):
            data["drafter"] = filled(drafter)
        config = msgspec.convert(data, Config)
        _check_run(config.run)
        check_producer(config.target, config.data)
        check_consumer(config.drafter, config.train, config.eval)
        check_hosts(config.hosts)
        check_cache(config.cache)
        check_log(config.log)
    except RequestError as error:
        raise RequestError(f"{path}{_line(lines, str(error))}: {error}") from None
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        said = f"{place.strip('`')}: {reason}" if place else reason
        if advice := _advice(Config, place_of(place.strip("`"))):
            said += f": write {advice}"
        raise RequestError(f"{path}{_line(lines, said)}: {said}") from None
    return _anchored(config, path)


def _check_run(run: RunConfig) -> None:
    # RUN@STEP names a checkpoint.
    wrong = run.name in (".", "..") or any(letter in "/\\@" or not letter.isprintable() for letter in run.name)
    if wrong or len(run.name.encode()) > 200:
        raise RequestError(f"run.name is {run.name!r}: write a file name of at most 200 bytes, without / and @")
    if parse_seconds(run.hang_after, "run.hang_after") < LEAST_HANG_S:
        raise RequestError(f"run.hang_after is {run.hang_after!r}: write at least {LEAST_HANG_S:.0f} s")


def fork_config(config: Config, checkpoint: Path, with_optimiser: bool) -> Config:
    """The same configuration, starting from `checkpoint`: what `--fork` means."""
    replace = msgspec.structs.replace
    return replace(
        config,
        drafter=replace(
            config.drafter, init="random", init_from=str(checkpoint.resolve()), init_optimiser=with_optimiser
        ),
    )


def _override(data: dict[str, Any], override: str) -> Place:
    """Sets one key in `data`; returns its place."""
    key, found, value = override.partition("=")
    parts = key.strip().split(".")
    if not found or not all(parts):
        raise RequestError(f"--set {override}: write it as section.key=value")
    for part in parts[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise RequestError(f"--set {override}: {part} is not a section")
    try:
        data[parts[-1]] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        data[parts[-1]] = value.strip()  # a bare word: --set run.name=first
    return tuple(parts)


def _refuse_unknown_keys(kind: type[msgspec.Struct], data: dict[str, Any], dotted: str) -> None:
    """RequestError, its key first, for what `kind`, its sections and their lists of tables do not have."""
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in data.items():
        here = f"{dotted}.{key}" if dotted else key
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            near = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(known))}"
            raise RequestError(f"unknown key {here!r}; {near}")
        if _is_section(known[key]):
            if not isinstance(value, dict):
                raise RequestError(f"[{key}] is a section, not a value")
            _refuse_unknown_keys(known[key], value, here)
        for entry_kind in filter(_is_section, typing.get_args(known[key])):
            for index, entry in enumerate(value if isinstance(value, list) else ()):
                if isinstance(entry, dict):
                    _refuse_unknown_keys(entry_kind, entry, f"{here}[{index}]")


def _advice(kind: Any, place: Place) -> str:
    """What to write for the key at `place`, if it takes certain words, alone or beside something else."""
    for part in place:
        if isinstance(part, int):
            (kind,) = (typing.get_args(each)[0] for each in _members(kind) if typing.get_origin(each) in (list, tuple))
        else:
            kind = {field.name: field.type for field in msgspec.structs.fields(kind)}[part]
    kinds = _members(kind)
    literals = [word for each in kinds if typing.get_origin(each) is typing.Literal for word in typing.get_args(each)]
    if not literals:
        return ""
    words = [*literals, *(["true", "false"] if bool in kinds else [])]
    others = [text for each in kinds if (text := _PLAIN.get(typing.get_origin(each) or each))]
    return " or ".join([*words, *others]) if others else f"one of {', '.join(words)}"


def _members(kind: Any) -> tuple[Any, ...]:
    """The types that a union consists of; one that is none, alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _line(lines: Mapping[Place, int], said: str) -> str:
    """ ":6" when the key that `said` begins with, or what it lies in, stands on line 6 of the file."""
    place = place_of(match[1]) if (match := _KEY.match(said)) else ()
    for depth in range(len(place), 0, -1):
        if place[:depth] in lines:
            return f":{lines[place[:depth]]}" if lines[place[:depth]] else ""
    return ""


def _anchored(config: Config, path: Path) -> Config:
    """Resolves the run's name and the paths that a config writes relative to itself."""
    folder = path.resolve().parent

    def anchor(name: str) -> str:
        return name if name.startswith(HUB) else str(folder / Path(name).expanduser())

    replace = msgspec.structs.replace
    train = [replace(source, path=anchor(source.path)) for source in config.data.train]
    held_out = [replace(source, path=anchor(source.path)) for source in config.data.eval]
    model, drafter = config.target.model, config.drafter
    if model != EMBEDDED and Path(anchor(model)).is_dir():  # else it is a hub id, or a path that is not there
        model = anchor(model)
    return replace(
        config,
        run=replace(config.run, name=config.run.name or path.stem),
        target=replace(config.target, model=model),
        data=replace(config.data, train=train, eval=held_out),
        drafter=replace(drafter, init_from=_anchored_drafter(drafter.init_from, anchor)),
    )


def _anchored_drafter(name: str | None, anchor: Callable[[str], str]) -> str | None:
    """A folder beside the config file, or, where there is none and it could be one, a hub id as it is written."""
    if name is None or (name.count("/") == 1 and name[0] not in "/.~" and not Path(anchor(name)).is_dir()):
        return name
    return anchor(name)
