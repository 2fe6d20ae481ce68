"""Where `prepare` puts what it has tokenised until the dataset is complete, so that interrupted work goes on.

`NAME.work/` beside the dataset `NAME` holds `tokens.bin` int32, `mask.bin` uint8, `samples.bin` int64 `[n, 4]` (length,
file, row, count of the row), and `state.json`, which says how much of them is good and what was counted so far.
Samples lie here uncut when the length limit is not known yet.
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
SAMPLE_COLUMNS = 4  # length, file, row, count of the row over all data


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
        """Adds samples: tokens and mask `[T]` of all of them, `samples` `[n, 4]`."""
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

    def read(self) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.int64]]:
        """What was appended, memory-mapped: tokens `[T]`, mask `[T]`, samples `[n, 4]`."""
        for stream in self._files:
            stream.flush()
        tokens, mask, samples = (
            np.memmap(self.folder / name, dtype, mode="r")
            if (self.folder / name).stat().st_size
            else np.empty(0, dtype)
            for name, dtype in zip(_NAMES, (np.int32, np.uint8, np.int64), strict=True)
        )
        return tokens, mask, samples.reshape(-1, SAMPLE_COLUMNS)

    def close(self) -> None:
        """Leaves the folder as it is."""
        for stream in self._files:
            stream.close()

    def discard(self) -> None:
        """Closes and deletes the folder: the work is done, or cannot be."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def samples_of(
    tokens: NDArray[Any], mask: NDArray[np.uint8], lengths: NDArray[np.int64]
) -> Iterator[tuple[NDArray[Any], NDArray[np.uint8]]]:
    """The samples one after the other, as views."""
    start = 0
    for length in lengths.tolist():
        yield tokens[start : start + length], mask[start : start + length]
        start += length


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
