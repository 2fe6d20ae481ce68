"""Where `prepare` puts what it has tokenised until the dataset is complete, so that interrupted work goes on.

`NAME.work/` beside the dataset `NAME` holds `tokens.bin` int32, `mask.bin` uint8, `samples.bin` int64 `[n, 5]` (length,
file, row, count of the row, eligible anchors), and `state.json`, which says how much of them is good and what was
counted so far. Samples lie here uncut when the length limit is not known yet.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = ("tokens.bin", "mask.bin", "samples.bin")
SAMPLE_COLUMNS = 5  # length, file, row, count of the row over all data, eligible anchors
_PIECE_TOKENS = 1 << 20


class Spool:
    """The work folder of one dataset, open for appending; `state` is what the last `save` was given, {} at first."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder
        self._fingerprint = fingerprint
        self.state: dict[str, Any] = {}
        sizes = self._recorded()
        if sizes is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            sizes = [0] * len(_NAMES)
        self._files = [(folder / name).open("ab") for name in _NAMES]
        for stream, size in zip(self._files, sizes, strict=True):
            stream.truncate(size)
            stream.seek(size)

    def _recorded(self) -> list[int] | None:
        """How many bytes of each file are good, when this folder holds the same work."""
        try:
            record = json.loads((self.folder / "state.json").read_text())
            sizes = [int(size) for size in record["sizes"]]
            whole = all((self.folder / name).stat().st_size >= size for name, size in zip(_NAMES, sizes, strict=True))
            if record["fingerprint"] != self._fingerprint or not whole:
                return None
            self.state = dict(record["state"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return sizes

    def append(self, tokens: NDArray[np.int32], mask: NDArray[np.uint8], samples: NDArray[np.int64]) -> None:
        """Adds samples: tokens and mask `[T]` of all of them, `samples` `[n, 5]`."""
        for stream, values in zip(self._files, (tokens, mask, samples), strict=True):
            stream.write(np.ascontiguousarray(values).tobytes())

    def save(self, state: dict[str, Any]) -> None:
        """Makes all that was appended durable together with `state`: work goes on here after an interruption."""
        for stream in self._files:
            stream.flush()
            os.fsync(stream.fileno())
        record = {"fingerprint": self._fingerprint, "sizes": [stream.tell() for stream in self._files], "state": state}
        part = self.folder / "state.json.part"
        part.write_text(json.dumps(record))
        part.replace(self.folder / "state.json")

    def table(self) -> NDArray[np.int64]:
        """The rows of `samples.bin`, `[n, 5]`."""
        self._files[-1].flush()
        return np.fromfile(self.folder / _NAMES[-1], np.int64).reshape(-1, SAMPLE_COLUMNS)

    def pieces(self, lengths: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8], slice]]:
        """Tokens `[T]` and mask `[T]` of some samples after the other, and which of `lengths` these are: a million
        tokens at a time, so that memory does not grow with the data."""
        for stream in self._files:
            stream.flush()
        ends = np.cumsum(lengths)
        first, done = 0, 0
        with (self.folder / _NAMES[0]).open("rb") as tokens, (self.folder / _NAMES[1]).open("rb") as mask:
            while first < len(ends):
                last = max(int(ends.searchsorted(done + _PIECE_TOKENS, side="right")), first + 1)
                count = int(ends[last - 1]) - done
                yield np.fromfile(tokens, np.int32, count), np.fromfile(mask, np.uint8, count), slice(first, last)
                first, done = last, done + count

    @property
    def files(self) -> tuple[Path, Path]:
        """Tokens and mask of all samples."""
        return self.folder / _NAMES[0], self.folder / _NAMES[1]

    def close(self) -> None:
        """Leaves the folder as it is."""
        for stream in self._files:
            stream.close()

    def discard(self) -> None:
        """Closes and deletes the folder: the work is done, or cannot be."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of a dataset: two processes that need the same one do not both make it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process prepares {folder}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
