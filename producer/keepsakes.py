"""What is made once with the target and kept in a cache, so that a run from the cache needs none."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from producer.target_io import is_current


class Keepsakes:
    """`folder`: the cache, or None when there is none. A kept file's name holds what it was made with, so that several
    data sets may share a cache."""

    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say

    def is_current(self, path: Path, fingerprint: str) -> bool:
        """Whether `path` is there with this fingerprint, by now: it is fetched from the cache if that has it, and kept
        there if that has not."""
        if not is_current(path, fingerprint) and not self._fetch(path, fingerprint):
            return False
        self.keep(path, fingerprint)
        return True

    def keep(self, path: Path, fingerprint: str) -> None:
        """Puts a copy of `path` into the cache."""
        if self._folder is not None and not is_current(kept := self._kept(path, fingerprint), fingerprint):
            _copy(path, kept)

    def _fetch(self, path: Path, fingerprint: str) -> bool:
        if self._folder is None or not is_current(kept := self._kept(path, fingerprint), fingerprint):
            return False
        _copy(kept, path)
        self._say(f"took {path.name} from {self._folder}")
        return True

    def _kept(self, path: Path, fingerprint: str) -> Path:
        assert self._folder is not None
        made_with = hashlib.blake2b(fingerprint.encode(), digest_size=6).hexdigest()
        return self._folder / f"{path.stem}-{made_with}{path.suffix}"


def _copy(source: Path, to: Path) -> None:
    """A copy that is complete or absent under its name."""
    part = to.with_name(f"{to.name}.part-{os.getpid()}")
    try:
        shutil.copyfile(source, part)
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.replace(to)
    finally:
        part.unlink(missing_ok=True)
