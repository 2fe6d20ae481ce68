"""The arena: sealed, backed, disjoint slots that another process sees, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest

from protocol.arena import PAGE_BYTES, Arena, create_arena, slot_stride_bytes
from protocol.block import block_table, table_bytes, views
from protocol.errors import RequestError
from protocol.marks import CANARY_BYTES

SLOTS, SLOT_BYTES = 3, 5000
SIZE_BYTES = SLOTS * 3 * PAGE_BYTES  # a header page each, and two for payload and canary


@pytest.fixture
def fd() -> Iterator[int]:
    made = create_arena(SLOTS, SLOT_BYTES, 1 << 30)
    yield made
    os.close(made)


def test_a_slot_is_whole_pages_with_room_for_its_marks() -> None:
    sizes = (1, PAGE_BYTES - CANARY_BYTES, PAGE_BYTES - CANARY_BYTES + 1, PAGE_BYTES, PAGE_BYTES + 1)
    assert [slot_stride_bytes(size) for size in sizes] == [8192, 8192, 12288, 12288, 12288]


def test_every_page_is_there_from_the_start(fd: int) -> None:
    stat = os.fstat(fd)
    assert stat.st_size == SIZE_BYTES
    assert stat.st_blocks * 512 >= SIZE_BYTES


@pytest.mark.parametrize("size", [0, SIZE_BYTES - 1, SIZE_BYTES + 1])
def test_nobody_can_cut_or_grow_it(fd: int, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(fd, size)
    assert os.fstat(fd).st_size == SIZE_BYTES


def test_it_is_not_inherited_unless_handed_over(fd: int) -> None:
    assert not os.get_inheritable(fd)


def test_more_than_is_free_is_refused_with_both_numbers(open_fds: Callable[[], int]) -> None:
    before = open_fds()
    with pytest.raises(RequestError) as refused:
        create_arena(4, 1_000_000, 3_000_000)
    said = str(refused.value)
    assert "4 slots x 1 MB = 4.03 MB but" in said
    assert "only 3 MB of memory is free" in said
    assert "lower ring.bytes" in said
    assert open_fds() == before


def test_exactly_what_is_free_is_enough() -> None:
    os.close(create_arena(SLOTS, SLOT_BYTES, SIZE_BYTES))
    with pytest.raises(RequestError):
        create_arena(SLOTS, SLOT_BYTES, SIZE_BYTES - 1)


def test_an_allocation_that_fails_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, open_fds: Callable[[], int]
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_fds()
    said = r"3 slots x 5 kB = 36\.86 kB .*No space left on device.* 1\.074 GB of memory is free: lower ring\.bytes"
    with pytest.raises(RequestError, match=said):
        create_arena(SLOTS, SLOT_BYTES, 1 << 30)
    assert open_fds() == before


def test_slots_do_not_overlap(fd: int) -> None:
    arena = Arena(fd, SLOTS, SLOT_BYTES)
    for index in range(SLOTS):
        slot = arena.slot(index)
        assert (len(slot), slot.readonly) == (SLOT_BYTES, False)
        slot[:] = bytes([index + 1]) * SLOT_BYTES
    for index in range(SLOTS):
        assert set(arena.slot(index)) == {index + 1}


@pytest.mark.parametrize("index", [-1, SLOTS])
def test_other_slots_do_not_exist(fd: int, index: int) -> None:
    with pytest.raises(IndexError, match=f"slot {index} of {SLOTS}"):
        Arena(fd, SLOTS, SLOT_BYTES).slot(index)


def test_two_mappings_share_every_bit(fd: int) -> None:
    """A block of NaN payloads, written through one mapping and read through another."""
    table = block_table(20, 2, 8, "bfloat16")
    assert table_bytes(table) <= SLOT_BYTES
    sent = np.arange(0x7F80, 0x7F80 + 160, dtype=np.uint16).reshape(20, 8)
    views(Arena(fd, SLOTS, SLOT_BYTES).slot(2), table)["features"][...] = sent
    assert views(Arena(fd, SLOTS, SLOT_BYTES).slot(2), table)["features"].tobytes() == sent.tobytes()


def test_a_child_with_the_descriptor_sees_the_bytes_and_writes_back(fd: int) -> None:
    arena = Arena(fd, SLOTS, SLOT_BYTES)
    arena.slot(1)[:5] = b"hello"
    script = (
        "import sys; from protocol.arena import Arena;"
        f"arena = Arena(int(sys.argv[1]), {SLOTS}, {SLOT_BYTES});"
        "assert bytes(arena.slot(1)[:5]) == b'hello';"
        "arena.slot(2)[:5] = b'world'"
    )
    subprocess.run([sys.executable, "-P", "-c", script, str(fd)], pass_fds=[fd], check=True, timeout=20)
    assert bytes(arena.slot(2)[:5]) == b"world"


def test_a_mapping_larger_than_the_ring_is_refused(fd: int) -> None:
    with pytest.raises(ValueError, match="length"):
        Arena(fd, SLOTS + 1, SLOT_BYTES)


GROUP = """
import os, subprocess, sys, time
from protocol.arena import Arena, create_arena
if len(sys.argv) == 1:
    fd = create_arena(4, 64 << 20, 1 << 40)
    subprocess.Popen([sys.executable, "-P", __file__, str(fd)], pass_fds=[fd])
else:
    fd = int(sys.argv[1])
arena = Arena(fd, 4, 64 << 20)
arena.sign(0, 1)
os.write(1, b"%d\\n" % os.fstat(fd).st_ino)  # whole, although two write to the pipe
time.sleep(60)
"""


def shared_bytes() -> int:
    """The machine's shared memory in use, memfds included."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


@pytest.fixture
def decoys() -> Iterator[tuple[int, Path]]:
    """A memfd and a POSIX shared-memory segment of another program."""
    memfd = os.memfd_create("draftwire-ring")
    os.write(memfd, b"not yours")
    segment = shared_memory.SharedMemory(name=f"decoy-{os.getpid()}", create=True, size=PAGE_BYTES)
    segment.buf[:9] = b"nor yours"
    yield memfd, Path(f"/dev/shm/{segment.name}")
    os.close(memfd)
    segment.close()
    segment.unlink()


def test_kill_9_of_a_whole_group_frees_every_byte_and_touches_no_other_program_s(
    tmp_path: Path, decoys: tuple[int, Path]
) -> None:
    """The creator and a process that maps the ring die at once; segment and memfd of somebody else, by the ring's own
    name, are as they were."""
    memfd, segment = decoys
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    group = subprocess.Popen([sys.executable, "-P", str(script)], stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        assert group.stdout is not None
        inodes = {group.stdout.readline(), group.stdout.readline()}
        assert len(inodes) == 1
        held_bytes = shared_bytes()
    finally:
        os.killpg(group.pid, signal.SIGKILL)
    group.communicate(timeout=20)
    deadline = time.monotonic() + 20
    while shared_bytes() > held_bytes - (200 << 20):  # of 256 MiB: others on this machine come and go
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert os.pread(memfd, 20, 0) == b"not yours"
    assert segment.read_bytes()[:9] == b"nor yours"


def test_no_file_and_no_descriptor_is_left(open_fds: Callable[[], int]) -> None:
    before = open_fds()
    for _ in range(3):
        fd = create_arena(SLOTS, SLOT_BYTES, 1 << 30)
        arena = Arena(fd, SLOTS, SLOT_BYTES)
        arena.slot(0)[:1] = b"x"
        # A memfd has no name in any file system, so kill -9 leaves nothing either.
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:draftwire-ring (deleted)")
        assert not list(Path("/dev/shm").glob("*draftwire*"))
        os.close(fd)
        del arena
    assert open_fds() == before
