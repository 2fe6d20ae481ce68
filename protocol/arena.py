"""The ring's memory: S equal slots in one sealed memfd, fully backed and prefaulted before anyone runs.

A memfd belongs to no file system: nothing is left behind after kill -9, and the size of /dev/shm does not matter. It
is allocated with posix_fallocate at start, because a sparse one would kill a process with SIGBUS hours later, and
sealed, because a peer could otherwise truncate it under another.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from protocol.errors import RequestError
from protocol.units import show_bytes

PAGE_BYTES = 4096


def slot_stride_bytes(slot_bytes: int) -> int:
    """Bytes from one slot to the next: the payload rounded up to whole pages."""
    return -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES


def create_arena(slots: int, slot_bytes: int, free_bytes: int) -> int:
    """A sealed memfd of `slots` slots, every page allocated; returns its file descriptor.

    `free_bytes` is what this process may still use (host or cgroup limit). Raises RequestError, with nothing left
    allocated, naming the bytes asked, the bytes free and the setting.
    """
    size_bytes = slots * slot_stride_bytes(slot_bytes)
    hint = f"ring of {slots} slots x {show_bytes(slot_bytes)} = {show_bytes(size_bytes)}"
    if size_bytes > free_bytes:
        raise RequestError(f"{hint} but only {show_bytes(free_bytes)} of memory is free: lower ring.bytes")
    fd = os.memfd_create("draftwire-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise RequestError(f"{hint} could not be allocated ({error.strerror}): lower ring.bytes") from error
    return fd


class Arena:
    """One process's mapping of the ring. `slot(i)` is a writable memoryview of slot i's payload."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self._stride_bytes = slot_stride_bytes(slot_bytes)
        # MAP_POPULATE moves the page faults of the mapping to start-up.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(fd, slots * self._stride_bytes, flags=flags)

    def slot(self, index: int) -> memoryview:
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        start = index * self._stride_bytes
        return memoryview(self._map)[start : start + self.slot_bytes]
