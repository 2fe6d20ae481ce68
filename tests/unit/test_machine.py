"""What the machine offers, from a fake /proc, /sys and nvidia-smi."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import machine
from launch.machine import Gpu, free_memory_bytes, processors, visible_gpus
from protocol.arena import create_arena
from protocol.errors import RequestError

MIB = 1 << 20
CARDS = """\
4, GPU-aaaa, NVIDIA H200, 143771, 143000
5, GPU-bbbb, NVIDIA H200, 143771, 90
6, GPU-cccc, NVIDIA L4, 23034, 22000
"""
FOUR, FIVE, SIX = (
    Gpu("NVIDIA H200", 143771 * MIB, 143000 * MIB, "4", "GPU-aaaa"),
    Gpu("NVIDIA H200", 143771 * MIB, 90 * MIB, "5", "GPU-bbbb"),
    Gpu("NVIDIA L4", 23034 * MIB, 22000 * MIB, "6", "GPU-cccc"),
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file system of its own: /proc/meminfo says 8,000 MiB are available, and there is no cgroup."""
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / path.lstrip("/"))
    write(
        tmp_path / "proc/meminfo", f"MemTotal: {9000 * 1024} kB\nMemAvailable:   {8000 * 1024} kB\nHugePages_Total: 0\n"
    )
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit(folder: Path, most: str, used_mib: int) -> None:
    write(folder / "memory.max", f"{most}\n")
    write(folder / "memory.current", f"{used_mib * MIB}\n")


def test_without_a_cgroup_the_host_counts(root: Path) -> None:
    assert free_memory_bytes() == 8000 * MIB
    write(root / "proc/self/cgroup", "4:memory:/job\n")
    assert free_memory_bytes() == 8000 * MIB


def test_a_ring_that_the_job_s_limit_does_not_hold_is_refused_with_asked_free_and_the_setting(root: Path) -> None:
    """Never SIGBUS: the host has 8,000 MiB, the job 20 left."""
    write(root / "proc/self/cgroup", "0::/job\n")
    limit(root / "sys/fs/cgroup/job", str(120 * MIB), 100)
    with pytest.raises(RequestError) as refused:
        create_arena(4, 10 * MIB, free_memory_bytes())
    said = str(refused.value)
    assert all(part in said for part in ("4 slots x 10.49 MB = 41.98 MB", "only 20.97 MB", "lower ring.bytes")), said


@pytest.mark.parametrize(
    ("own", "parent", "expected_mib"),
    [
        (("max", 100), ("max", 100), 8000),
        ((str(3000 * MIB), 1000), ("max", 100), 2000),
        (("max", 100), (str(3000 * MIB), 2500), 500),  # the job above is the tighter one
        ((str(1000 * MIB), 100), (str(9000 * MIB), 100), 900),
        ((str(100 * MIB), 200), ("max", 0), 0),  # over its limit already
        ((str(90_000 * MIB), 0), ("max", 0), 8000),
    ],
)
def test_the_tightest_limit_counts(
    root: Path, own: tuple[str, int], parent: tuple[str, int], expected_mib: int
) -> None:
    write(root / "proc/self/cgroup", "1:name=systemd:/\n0::/job/step\n")
    limit(root / "sys/fs/cgroup/job/step", *own)
    limit(root / "sys/fs/cgroup/job", *parent)
    assert free_memory_bytes() == expected_mib * MIB


def test_a_container_that_sees_its_cgroup_as_the_root(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    limit(root / "sys/fs/cgroup", str(500 * MIB), 100)
    assert free_memory_bytes() == 400 * MIB


def test_page_cache_counts_as_free(root: Path) -> None:
    """A container that has just read a large model file: nearly all of its limit is cache."""
    write(root / "proc/self/cgroup", "0::/\n")
    limit(root / "sys/fs/cgroup", str(1000 * MIB), 950)
    write(root / "sys/fs/cgroup/memory.stat", f"anon {50 * MIB}\ninactive_file {800 * MIB}\nactive_file {100 * MIB}\n")
    assert free_memory_bytes() == 950 * MIB


def limit_v1(folder: Path, most: int, used_mib: int, cache_mib: int) -> None:
    write(folder / "memory.limit_in_bytes", f"{most}\n")
    write(folder / "memory.usage_in_bytes", f"{used_mib * MIB}\n")
    stat = f"inactive_file 7\ntotal_inactive_file {cache_mib * MIB}\ntotal_active_file {10 * MIB}\n"
    write(folder / "memory.stat", stat)


def test_the_limits_of_cgroup_version_1_count(root: Path) -> None:
    memory = root / "sys/fs/cgroup/memory"
    write(root / "proc/self/cgroup", "9:cpu,cpuacct:/job\n4:hugetlb,memory:/job/step\n")
    limit_v1(memory, 9223372036854771712, 5000, 0)  # none
    assert free_memory_bytes() == 8000 * MIB
    limit_v1(memory / "job", 3000 * MIB, 1000, 490)
    assert free_memory_bytes() == 2500 * MIB
    limit_v1(memory / "job/step", 600 * MIB, 500, 40)
    assert free_memory_bytes() == 150 * MIB


def test_both_versions_side_by_side(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/elsewhere\n0::/\n")
    limit_v1(root / "sys/fs/cgroup/memory", 700 * MIB, 100, 0)
    limit(root / "sys/fs/cgroup", str(650 * MIB), 100)
    assert free_memory_bytes() == 550 * MIB


def test_processors_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert processors() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert processors() == len(allowed)


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Puts an nvidia-smi on PATH that prints `output` if it is asked the right question, and ends with `code`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(output: str, code: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        question = "--query-gpu=index,uuid,name,memory.total,memory.free --format=csv,noheader,nounits"
        program.write_text(f'#!/bin/sh\n[ "$*" = "{question}" ] || exit 9\ncat <<END\n{output}END\nexit {code}\n')
        program.chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, [FOUR, FIVE, SIX]),
        ("", []),
        ("5", [FIVE]),
        ("6,4", [SIX, FOUR]),
        (" 4 , 6 ", [FOUR, SIX]),
        ("GPU-cccc", [SIX]),
        ("GPU-bbbb,GPU-aaaa", [FIVE, FOUR]),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_the_visible_gpus_in_their_order(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: list[Gpu]
) -> None:
    nvidia_smi(CARDS)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("4,-1,6", [FOUR]),  # CUDA stops at the first entry that it does not know
        ("4,17,6", [FOUR]),
        ("6,,4", [SIX]),
        ("6,4,6", []),  # one device twice: CUDA shows none
        ("4,GPU-aaaa", []),
        ("GPU-b", [FIVE]),  # CUDA takes a prefix that is unique
        ("GPU-c,GPU-,GPU-a", [SIX]),  # and stops at one that is not
        ("b", []),
    ],
)
def test_the_list_is_read_as_cuda_reads_it(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, chosen: str, expected: list[Gpu]
) -> None:
    nvidia_smi(CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == expected


def test_a_gpu_without_memory_of_its_own_has_the_host_s(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 7 * MIB)
    nvidia_smi("0, GPU-dddd, NVIDIA GB10, [N/A], [N/A]\n4, GPU-aaaa, NVIDIA H200, 143771, 143000\n")
    assert visible_gpus() == [Gpu("NVIDIA GB10", 7 * MIB, 7 * MIB, "0", "GPU-dddd"), FOUR]


def test_without_a_driver_there_are_none(
    nvidia_smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9)
    assert visible_gpus() == []
    nvidia_smi("")
    assert visible_gpus() == []
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert visible_gpus() == []
