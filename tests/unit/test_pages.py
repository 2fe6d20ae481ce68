"""Huge pages: taken where they are offered, done without where they are not, and said either way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol import arena as arena_module
from protocol import pages
from protocol.arena import Arena, create_arena
from protocol.pages import HUGE_PAGE_BYTES, describe_pages, reserved_bytes, transparent_are_offered

MIB = 1 << 20


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Says what the kernel offers: reserved pages free and promised, and `shmem_enabled`."""
    monkeypatch.setattr(pages, "_POOL", tmp_path)
    monkeypatch.setattr(pages, "_SHMEM_ENABLED", tmp_path / "shmem_enabled")

    def offer(free: int = 0, promised: int = 0, shmem: str = "always within_size advise [never] deny force") -> None:
        (tmp_path / "free_hugepages").write_text(f"{free}\n")
        (tmp_path / "resv_hugepages").write_text(f"{promised}\n")
        (tmp_path / "shmem_enabled").write_text(f"{shmem}\n")

    return offer


@pytest.mark.parametrize(
    ("chosen", "offered"),
    [
        ("[always] within_size advise never deny force", True),
        ("always [within_size] advise never deny force", True),
        ("always within_size [advise] never deny force", True),
        ("always within_size advise [never] deny force", False),
        ("always within_size advise never [deny] force", False),
    ],
)
def test_transparent_huge_pages_are_offered_by_name(kernel: Callable[..., None], chosen: str, offered: bool) -> None:
    kernel(shmem=chosen)
    assert transparent_are_offered() == offered


def test_what_is_promised_to_others_is_not_free(kernel: Callable[..., None], tmp_path: Path) -> None:
    kernel(free=10, promised=3)
    assert reserved_bytes() == 7 * HUGE_PAGE_BYTES
    kernel(free=1, promised=3)
    assert reserved_bytes() == 0
    (tmp_path / "free_hugepages").unlink()
    assert reserved_bytes() == 0


@pytest.mark.parametrize("offers", [{}, {"shmem": "always within_size [advise] never deny force"}])
def test_without_reserved_pages_the_ring_is_whole_and_says_what_it_is_made_of(
    kernel: Callable[..., None], offers: dict[str, str]
) -> None:
    """Whatever the kernel makes of the advice, every page is there."""
    kernel(**offers)
    fd = create_arena(3, 3 * MIB, 1 << 40)
    try:
        stat = os.fstat(fd)
        assert stat.st_blocks * 512 >= stat.st_size == 3 * (3 * MIB + 8192)
        Arena(fd, 3, 3 * MIB).sign(2, 1)
        assert describe_pages(fd).startswith("9.462 MB")
        assert "pages" in describe_pages(fd)
    finally:
        os.close(fd)


def test_reserved_pages_are_asked_for_whole_when_enough_are_free(
    kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    real = arena_module._allocate

    def allocate(nbytes: int, flags: int) -> int:
        asked.append((nbytes, flags))
        return real(nbytes, 0)

    monkeypatch.setattr(arena_module, "_allocate", allocate)
    for free, expected in ((5, (10 * MIB, os.MFD_HUGETLB | os.MFD_HUGE_2MB)), (4, (3 * (3 * MIB + 8192), 0))):
        kernel(free=free)
        fd = create_arena(3, 3 * MIB, 1 << 40)
        assert asked.pop() == expected
        # A mapping of it is as long as the memory is, and no slot is different.
        arena = Arena(fd, 3, 3 * MIB)
        arena.sign(2, 4)
        assert arena.problem(2, [4]) == ""
        os.close(fd)


def test_a_pool_that_others_emptied_meanwhile_costs_nothing_but_the_pages(
    kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch, open_fds: Callable[[], int]
) -> None:
    kernel(free=100)
    real = os.posix_fallocate

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        if os.fstatvfs(fd).f_bsize == HUGE_PAGE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    before = open_fds()
    fd = create_arena(3, 3 * MIB, 1 << 40)
    assert describe_pages(fd) == "9.462 MB in pages of 4 KiB"
    os.close(fd)
    assert open_fds() == before
