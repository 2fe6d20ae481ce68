"""The ring's memory: S equal slots in one sealed memfd, fully backed and prefaulted before anyone runs.

A memfd belongs to no file system: nothing is left behind after kill -9, and the size of /dev/shm does not matter. It
is allocated with posix_fallocate at start, because a sparse one would kill a process with SIGBUS hours later, and
sealed, because a peer could otherwise truncate it under another. Each slot lies between marks (protocol/marks.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Collection

import numpy as np

from protocol.errors import RequestError
from protocol.marks import CANARY_BYTES, lay, problem_of, sign
from protocol.pages import HUGE_PAGE_BYTES, fill_with_huge_pages, reserved_bytes, transparent_are_offered
from protocol.units import show_bytes

PAGE_BYTES = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def slot_stride_bytes(slot_bytes: int) -> int:
    """Bytes from one slot to the next: a page for the header, the payload and its canary rounded up to whole pages."""
    return PAGE_BYTES + _whole(slot_bytes + CANARY_BYTES, PAGE_BYTES)


def create_arena(slots: int, slot_bytes: int, free_bytes: int) -> int:
    """A sealed memfd of `slots` slots, every page allocated; returns its file descriptor.

    `free_bytes` is what this process may still use (host or cgroup limit). Its pages are huge where the kernel offers
    them; from the reserved ones it then takes whole ones. Raises RequestError, with nothing left allocated, naming the
    bytes asked, the bytes free and the setting.
    """
    size_bytes = slots * slot_stride_bytes(slot_bytes)
    hint = f"ring of {slots} slots x {show_bytes(slot_bytes)} = {show_bytes(size_bytes)}"
    free = f"only {show_bytes(free_bytes)} of memory is free"
    if size_bytes > free_bytes:
        raise RequestError(f"{hint} but {free}: lower ring.bytes")
    huge_bytes = _whole(size_bytes, HUGE_PAGE_BYTES)
    fd = -1
    if huge_bytes <= reserved_bytes():
        # Another program may be faster, or a limit of its own apply to them: small pages will do.
        with contextlib.suppress(OSError):
            fd = _allocate(huge_bytes, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    try:
        fd = fd if fd >= 0 else _allocate(size_bytes, 0)
    except OSError as error:
        raise RequestError(
            f"{hint} could not be allocated ({error.strerror}), {free.removeprefix('only ')}: lower ring.bytes"
        ) from error
    arena = Arena(fd, slots, slot_bytes, at_once=False)
    for index in range(slots):
        arena.mend(index)
    return fd


class Arena:
    """One process's mapping of the ring, all of it `at_once` or as it is used. `slot(i)` is a writable memoryview of
    slot i's payload."""

    def __init__(self, fd: int, slots: int, slot_bytes: int, at_once: bool = True) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self._stride_bytes = slot_stride_bytes(slot_bytes)
        # Reserved huge pages are mapped whole. MAP_POPULATE moves the page faults of the mapping to start-up.
        nbytes = max(slots * self._stride_bytes, os.fstat(fd).st_size)
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0))

    @property
    def location(self) -> tuple[int, int]:
        """(address, bytes) of the mapping, for a device that copies into it."""
        whole = np.frombuffer(self._map, np.uint8)
        return whole.ctypes.data, whole.nbytes

    def slot(self, index: int) -> memoryview:
        return self._parts(index)[1]

    def sign(self, index: int, attempt: int) -> None:
        """Marks slot `index` as being filled by `attempt`: before its first byte is written, and once more after the
        last, so that a late writer gives itself away."""
        sign(self._parts(index)[0], index, attempt)

    def mend(self, index: int) -> None:
        """Makes the canary of slot `index` whole, for whoever has found it damaged and said so."""
        lay(self._parts(index)[2])

    def problem(self, index: int, attempts: Collection[int]) -> str:
        """What the marks of slot `index` say against its being what `attempts` wrote; "" when nothing does."""
        header, _, canary = self._parts(index)
        return problem_of(header, canary, index, attempts)

    def _parts(self, index: int) -> tuple[memoryview, memoryview, memoryview]:
        """Header, payload and canary."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        start = index * self._stride_bytes
        payload = start + PAGE_BYTES
        behind, end = payload + self.slot_bytes, start + self._stride_bytes
        whole = memoryview(self._map)
        return whole[start:payload], whole[payload:behind], whole[behind:end]


def _allocate(nbytes: int, flags: int) -> int:
    """A sealed memfd of `nbytes`, all of them there. Raises OSError, leaving nothing open."""
    fd = os.memfd_create("draftwire-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        if not flags and transparent_are_offered():
            os.ftruncate(fd, nbytes)
            fill_with_huge_pages(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _whole(nbytes: int, unit_bytes: int) -> int:
    return -(-nbytes // unit_bytes) * unit_bytes
