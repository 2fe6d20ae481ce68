"""The pages that shared memory is made of: huge ones where the kernel offers them, never required.

Two offers count. Pages that an administrator has reserved (hugetlbfs' pool) are certain; transparent ones depend on
`shmem_enabled` and on how much memory is in one piece. Copies into 4 KiB pages cost up to a fifth more, filling and
mapping those several times as much.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

from protocol.units import show_bytes

HUGE_PAGE_BYTES = 2 << 20
_POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_OFFERS = frozenset({"advise", "always", "within_size", "force"})
# <linux/mman.h>; Python's mmap does not name it.
_MADV_POPULATE_WRITE = 23


def reserved_bytes() -> int:
    """Bytes in reserved huge pages that nobody has, or has been promised; 0 where there are none."""
    try:
        free, promised = (int((_POOL / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
    except (OSError, ValueError):
        return 0
    return max(free - promised, 0) * HUGE_PAGE_BYTES


def transparent_are_offered() -> bool:
    """Whether the kernel gives shared memory huge pages when it is asked to."""
    try:
        words = _SHMEM_ENABLED.read_text().split()
    except OSError:
        return False
    return any(word.strip("[]") in _OFFERS for word in words if word.startswith("["))


def fill_with_huge_pages(fd: int, nbytes: int) -> None:
    """Allocates a memfd's first `nbytes`, its whole size, through a mapping that asks for huge pages: `posix_fallocate`
    alone takes small ones under "advise". What is not filled afterwards is for `posix_fallocate` to fill or to refuse;
    populating reports an error where a touch would end in SIGBUS."""
    with mmap.mmap(fd, nbytes) as memory, contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_MADV_POPULATE_WRITE)


def describe_pages(fd: int) -> str:
    """What a filled memfd is made of, for people."""
    stat = os.fstat(fd)
    if os.fstatvfs(fd).f_bsize == HUGE_PAGE_BYTES:
        return f"{show_bytes(stat.st_size)} in reserved huge pages"
    huge_bytes = _mapped_huge_bytes(fd, stat.st_size) if transparent_are_offered() else 0
    if huge_bytes:
        return f"{show_bytes(stat.st_size)}, {show_bytes(huge_bytes)} of it in transparent huge pages"
    return f"{show_bytes(stat.st_size)} in pages of {mmap.PAGESIZE >> 10} KiB"


def _mapped_huge_bytes(fd: int, nbytes: int) -> int:
    """How much of a memfd a mapping of ours reaches through huge pages, as the kernel counts it."""
    with mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as memory:
        first = ctypes.c_char.from_buffer(memory)
        start = f"{ctypes.addressof(first):x}-"
        del first  # else the mapping cannot be closed
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        for line in lines:
            if line.startswith(start):
                break
        found = next((line for line in lines if line.startswith("ShmemPmdMapped:")), "ShmemPmdMapped: 0 kB")
    return int(found.split()[1]) * 1024
