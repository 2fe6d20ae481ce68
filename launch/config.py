"""The configuration of a run: TOML in, `config.resolved.json` out.

Each section lives beside the code that it configures; here they are composed, overridden (`--set a.b=c`) and checked.
Every error names the file, the line where there is one, and the key, and says what to write instead.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from consumer.config import DrafterConfig, EvalConfig, TrainConfig
from consumer.config import check as check_consumer
from launch.placement import GpusConfig
from producer.config import EMBEDDED, DataConfig, TargetConfig
from producer.config import check as check_producer
from protocol.errors import RequestError
from protocol.ring import RingConfig


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[run] — the run's name (default: the config file's name) and the folder that holds the runs."""

    name: str = ""
    dir: str = "runs"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration; docs/configuration.md lists every key."""

    run: RunConfig = RunConfig()
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig = DrafterConfig()
    train: TrainConfig = TrainConfig()
    ring: RingConfig = RingConfig()
    gpus: GpusConfig = GpusConfig()
    eval: EvalConfig = EvalConfig()


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Reads, overrides and checks a TOML config. Raises RequestError on anything that is not understood.

    Relative data paths and a relative target folder are taken from the config file's own folder.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RequestError(f"{path}: {error}") from None
    for override in overrides:
        _override(data, override)
    _refuse_unknown_keys(Config, data, path, text)
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise RequestError(f"{path}: {_where(str(error), text)}") from None
    try:
        check_producer(config.target, config.data)
        check_consumer(config.drafter, config.train, config.eval)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    return _anchored(config, path)


def read_resolved(run_dir: Path) -> Config:
    """The configuration that a run folder was started with."""
    path = run_dir / "config.resolved.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise RequestError(f"{path}: not a run's configuration ({error})") from None


def _override(data: dict[str, Any], override: str) -> None:
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


def _refuse_unknown_keys(kind: type[msgspec.Struct], data: dict[str, Any], path: Path, text: str) -> None:
    sections = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for section, content in data.items():
        known: Iterable[str] = sections
        unknown, dotted = section, section
        if section in sections:
            if not isinstance(content, dict):
                raise RequestError(f"{path}: [{section}] is a section, not a value")
            known = [field.name for field in msgspec.structs.fields(sections[section])]
            unknown = next((key for key in content if key not in known), "")
            dotted = f"{section}.{unknown}"
        if not unknown or (section in sections and unknown in known):
            continue
        close = difflib.get_close_matches(unknown, list(known), n=1, cutoff=0.5)
        near = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(known))}"
        raise RequestError(f"{path}{_line(text, unknown)}: unknown key {dotted!r}; {near}")


def _where(error: str, text: str) -> str:
    """msgspec's "... - at `$.train.lr`" as "train.lr: ...", with the line when the key stands in the file."""
    reason, _, place = error.partition(" - at `$")
    dotted = place.strip("`.")
    return f"{_line(text, dotted.rpartition('.')[2])[1:]}: {dotted}: {reason}".lstrip(": ") if dotted else reason


def _line(text: str, key: str) -> str:
    for number, line in enumerate(text.splitlines(), 1):
        if line.split("=")[0].strip() in (key, f"[{key}]"):
            return f":{number}"
    return ""


def _anchored(config: Config, path: Path) -> Config:
    """Resolves the run's name and the paths that a config writes relative to itself."""
    folder = path.resolve().parent

    def anchor(name: str) -> str:
        if name == EMBEDDED:
            return name
        inside = folder / Path(name).expanduser()
        return str(inside) if inside.exists() else name

    replace = msgspec.structs.replace
    train = [replace(source, path=anchor(source.path)) for source in config.data.train]
    held_out = [replace(source, path=anchor(source.path)) for source in config.data.eval]
    drafter = config.drafter
    return replace(
        config,
        run=replace(config.run, name=config.run.name or path.stem),
        target=replace(config.target, model=anchor(config.target.model)),
        data=replace(config.data, train=train, eval=held_out),
        drafter=replace(drafter, init_from=drafter.init_from and anchor(drafter.init_from)),
    )
