"""What this machine offers: memory within the job's limits, processors, GPUs. Read without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Gpu(msgspec.Struct, frozen=True):
    """One visible GPU; memory in bytes. `index` and `uuid` are the machine's names for it, whatever is visible."""

    name: str
    total_bytes: int
    free_bytes: int
    index: str = ""
    uuid: str = ""


# The files of a memory cgroup, version 2 and 1: its limit, its use, and what of that is page cache (in memory.stat;
# version 1 has other keys for sums over its children).
_LIMIT_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def free_memory_bytes() -> int:
    """Memory that this process may still use: the host's available bytes, or what its cgroup leaves if that is less.

    Page cache counts as free in both, since the kernel gives it back when asked.
    """
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    left = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    return min(left + [left_bytes for folder in _cgroup_folders() for left_bytes in _left_bytes(folder)])


def _left_bytes(folder: Path) -> list[int]:
    """What the limits of one cgroup leave; empty without any."""
    left = []
    for limit_name, used_name, cache_keys in _LIMIT_FILES:
        try:
            limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
        except OSError:
            continue
        if limit != "max":
            left.append(max(int(limit) - used + _page_cache_bytes(folder, cache_keys), 0))
    return left


def _page_cache_bytes(folder: Path, keys: tuple[str, ...]) -> int:
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return sum(int(stat.get(key, 0)) for key in keys)


def _cgroup_folders() -> list[Path]:
    """This process's memory cgroups (version 2 and 1) and all above them: the tightest limit counts."""
    mount = Path("/sys/fs/cgroup")
    try:
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    folders: list[Path] = []
    for _, controllers, own in entries:
        if controllers == "" or "memory" in controllers.split(","):
            root = mount / "memory" if controllers else mount
            folder = root / own.lstrip("/")
            folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return folders


def processors() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_per_process() -> int:
    """Threads of each producer and consumer. Fixed whatever their number is: results depend on it."""
    return max(1, min(processors() // 2, 8))


def describe_machine(gpus: Sequence[Gpu]) -> str:
    """Its GPUs, if there are any, and processors, in words."""
    kinds = Counter(gpu.name for gpu in gpus)
    named = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(":")[2].strip() if models else "unknown model"
    return f"{named or 'no GPU'}, {processors()} processors ({model})"


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order; empty without a driver.

    A GPU without memory of its own, for which nvidia-smi says [N/A], has what is free of the host's.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode != 0:
        return []
    gpus: dict[tuple[str, str], Gpu] = {}
    for line in answer.stdout.strip().splitlines():
        index, uuid, name, *memory = (part.strip() for part in line.split(","))
        total_bytes, free_bytes = (int(mib) << 20 if mib.isdecimal() else free_memory_bytes() for mib in memory)
        gpus[index, uuid] = Gpu(name, total_bytes, free_bytes, index, uuid)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(gpus.values()) if chosen is None else _chosen(gpus, chosen)


def _chosen(gpus: dict[tuple[str, str], Gpu], chosen: str) -> list[Gpu]:
    """As CUDA reads its list: indices or unique beginnings of UUIDs, up to the first entry that names no GPU; a list
    that names one twice is worth nothing."""
    names: list[tuple[str, str]] = []
    for entry in map(str.strip, chosen.split(",")):
        found = [name for name in gpus if name[0] == entry or (entry.startswith("GPU-") and name[1].startswith(entry))]
        if len(found) != 1:
            break
        names += found
    return [gpus[name] for name in names] if len(set(names)) == len(names) else []
