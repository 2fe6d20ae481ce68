"""Puts `gpus.split` into a config file and leaves every other byte of it as it is."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from launch.toml_lines import toml_lines
from protocol.errors import RequestError

_VALUE = re.compile(r"""(split["']?\s*=\s*)("[^"\\\n]*"|'[^'\n]*')""")
_HEADER = re.compile(r"\s*\[\s*gpus\s*\]\s*(?:#.*)?")


def write_split(path: Path, split: str) -> bool:
    """Writes it, in one step; False when the file has it already. Raises RequestError when the file has no place for
    it."""
    raw = path.read_bytes()
    text = raw.decode("utf-8")
    changed = with_split(text, split, str(path))
    if changed == text:
        return False
    real = path.resolve()
    part = real.with_name(real.name + ".part")
    part.write_bytes(changed.encode("utf-8"))
    shutil.copymode(real, part)
    part.rename(real)
    return True


def with_split(text: str, split: str, name: str) -> str:
    """The TOML text with this split; `name` is what errors call it."""
    before = tomllib.loads(text)
    gpus = before.get("gpus", {})
    if named := [key for key in ("producers", "consumers") if key in gpus]:
        raise RequestError(
            f"{name}: gpus.{named[0]} names devices, so there is no place for gpus.split: remove it first"
        )
    if gpus.get("split") == split:
        return text
    changed = _edited(text, split)
    wanted: dict[str, Any] = before | {"gpus": gpus | {"split": split}}
    try:
        sound = changed is not None and tomllib.loads(changed) == wanted
    except tomllib.TOMLDecodeError:
        sound = False
    if changed is None or not sound:
        raise RequestError(
            f'{name}: cannot be edited without touching more than the split: write gpus.split = "{split}"'
        )
    return changed


def _edited(text: str, split: str) -> str | None:
    """The text with the line changed or added; None where that is not one line's matter."""
    places = toml_lines(text)
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    end = "\r\n" if "\r\n" in text else "\n"
    if ("gpus", "split") in places:
        at = places["gpus", "split"] - 1
        lines[at], replaced = _VALUE.subn(lambda found: f'{found[1]}"{split}"', lines[at])
        return "".join(lines) if replaced == 1 else None
    if ("gpus",) in places:
        at = places["gpus",] - 1
        if not _HEADER.fullmatch(lines[at]):
            return None
        lines[at] = lines[at] if lines[at].endswith("\n") else lines[at] + end
        return "".join([*lines[: at + 1], f'split = "{split}"{end}', *lines[at + 1 :]])
    gap = "" if not text or text.endswith("\n") else end
    return f'{text}{gap}{end}[gpus]{end}split = "{split}"{end}'
