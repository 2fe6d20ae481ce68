"""How fast the disk of a cache takes and gives back features: one file of the cache's own kind, past the page cache."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from protocol.direct import BUFFER_BYTES, PAGE_BYTES, DirectFile

# The file is so large at most, and not started where the disk would be full with it.
MOST_BYTES = 4 << 30


class Disk(NamedTuple):
    """Free bytes, and bytes/s of one writer (until they are durable) and of one reader."""

    free_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    return there


def measure_disk(folder: Path, seconds: float) -> Disk | None:
    """Of the disk where `folder` is or will be: writes for so many seconds, MOST_BYTES at most, and reads the same
    again. None where there is no room for that, or no leave to write."""
    there = existing(folder)
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < 2 * MOST_BYTES:
        return None
    path = there / f".disk-rate-{os.getpid()}"
    try:
        written, write_s = _write(path, seconds)
        return Disk(free_bytes, written / write_s, written / _read_s(path))
    except OSError:
        return None
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, seconds: float) -> tuple[int, float]:
    piece = memoryview(os.urandom(BUFFER_BYTES))  # nothing that a file system could compress
    started_s = time.perf_counter()
    file = DirectFile(path, PAGE_BYTES)
    try:
        while file.size < MOST_BYTES and time.perf_counter() - started_s < seconds:
            file.append(piece)
        file.finish(b"")
        return file.size, time.perf_counter() - started_s
    finally:
        file.close()


def _read_s(path: Path) -> float:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    flags = os.O_RDONLY | os.O_CLOEXEC
    with suppress(OSError):  # some file systems read through their cache alone
        os.close(os.open(path, flags | os.O_DIRECT))
        flags |= os.O_DIRECT
    with mmap.mmap(-1, BUFFER_BYTES) as buffer:
        started_s = time.perf_counter()
        fd = os.open(path, flags)
        try:
            at = 0
            while done := os.preadv(fd, [buffer], at):
                at += done
                if done % PAGE_BYTES:
                    break  # the end of the file; direct reads begin at whole pages
        finally:
            os.close(fd)
        return time.perf_counter() - started_s
