"""What this machine offers: memory within the job's limits, processors, GPUs. Read without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec


class Gpu(msgspec.Struct, frozen=True):
    """One visible GPU; memory in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


def free_memory_bytes() -> int:
    """Memory that this process may still use: the host's available bytes, or what its cgroup leaves if that is less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    for folder in _cgroup_folders():
        try:
            limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text()
        except OSError:
            continue
        if limit != "max":
            free = min(free, max(int(limit) - int(used), 0))
    return free


def _cgroup_folders() -> list[Path]:
    """This process's cgroup (version 2) and all above it: the tightest limit counts."""
    root = Path("/sys/fs/cgroup")
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((entry.split("::", 1)[1] for entry in entries if entry.startswith("0::")), None)
    if own is None:
        return []
    folder = root / own.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def processors() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order; empty without a driver."""
    program = shutil.which("nvidia-smi")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or chosen == "":
        return []
    query = [program, "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode != 0:
        return []
    gpus: dict[str, Gpu] = {}
    by_uuid: dict[str, Gpu] = {}
    for line in answer.stdout.strip().splitlines():
        index, uuid, name, total_mib, free_mib = (part.strip() for part in line.split(","))
        gpus[index] = by_uuid[uuid] = Gpu(name, int(total_mib) << 20, int(free_mib) << 20)
    if chosen is None:
        return list(gpus.values())
    wanted = [part.strip() for part in chosen.split(",") if part.strip()]
    return [gpu for part in wanted if (gpu := gpus.get(part) or by_uuid.get(part)) is not None]
