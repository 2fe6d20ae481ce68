"""Which checkpoints there are and which are whole. No torch: the launcher asks before it starts anything.

checkpoints/step-000500/{drafter,state}.safetensors, config.json, cursor.json, manifest.json    latest  best
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path

import msgspec

from consumer.shape import DrafterShape
from consumer.zlab import shape_from_config_json
from protocol.cursor import Cursor, decode_cursor
from protocol.errors import RequestError

FILES = frozenset({"drafter.safetensors", "state.safetensors", "config.json", "cursor.json"})
_STEP_FOLDER = re.compile(r"step-(\d{6,})")
_CHUNK_BYTES = 16 << 20


class FileFacts(msgspec.Struct, frozen=True):
    """What a file must be to count as undamaged."""

    bytes: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True):
    """manifest.json. `target` is the target's fingerprint, `best_acceptance` the run's highest so far."""

    target: str
    best_acceptance: float
    files: dict[str, FileFacts]


def point(folder: Path, name: str, target: Path) -> None:
    """Makes the link `folder`/`name` lead to the checkpoint `target`, atomically."""
    link = folder / f".{name}.part"
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    link.rename(folder / name)


def prune(folder: Path, keep: int, known_good: Collection[Path] = ()) -> None:
    """Removes what lies behind the newest `keep` undamaged checkpoints, but never `best` or `latest`.

    Those in `known_good` are not read again: a checkpoint may be tens of gigabytes.
    """
    linked = {(folder / name).resolve() for name in ("best", "latest")}
    good = 0
    for checkpoint in reversed(checkpoints(folder)):
        if good < keep:
            good += checkpoint in known_good or problem_of(checkpoint) is None
        elif checkpoint.resolve() not in linked:
            shutil.rmtree(checkpoint)


def checkpoints(folder: Path) -> list[Path]:
    """Complete-looking checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if _STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def problem_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None when each has its recorded size and crc32."""
    try:
        files = read_manifest(checkpoint).files
        if missing := FILES - files.keys():
            return f"manifest.json does not list {', '.join(sorted(missing))}"
        for name, facts in files.items():
            path = checkpoint / name
            if path.stat().st_size != facts.bytes:
                return f"{name} has {path.stat().st_size} bytes, not {facts.bytes}"
            if crc32(path) != facts.crc32:
                return f"{name} has another crc32 than recorded"
    except (OSError, msgspec.MsgspecError) as error:
        return f"manifest.json: {error}"
    return None


def newest_good(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, and one line for each damaged one that was passed over."""
    passed: list[str] = []
    for checkpoint in reversed(checkpoints(folder)):
        problem = problem_of(checkpoint)
        if problem is None:
            return checkpoint, passed
        passed.append(f"{checkpoint} is damaged and was passed over: {problem}")
    return None, passed


def read_cursor(checkpoint: Path) -> Cursor:
    """Where the checkpoint stands. Raises RequestError when its file is missing or no cursor."""
    path = checkpoint / "cursor.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    return decode_cursor(data, str(path))


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises msgspec's errors for a manifest that is not one; `problem_of` says so before."""
    return msgspec.json.decode((checkpoint / "manifest.json").read_bytes(), type=Manifest)


def read_shape(checkpoint: Path) -> DrafterShape:
    """The drafter's shape."""
    return shape_from_config_json(json.loads((checkpoint / "config.json").read_text()))


def crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
