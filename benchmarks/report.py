"""What every benchmark prints: a table for people, or with --json one object for scripts."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch


def row(name: str, value: float, unit: str, reference: float) -> dict[str, Any]:
    """One measurement beside its limit or peer, measured in the same run; `ratio` is value over reference."""
    return {"name": name, "value": value, "unit": unit, "reference": reference, "ratio": value / reference}


def machine() -> dict[str, Any]:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": model[0].partition(":")[2].strip() if model else platform.processor(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def publish(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rows": rows, "machine": machine(), "command": " ".join(sys.argv)}))
        return
    print(f"{machine()}\n{' '.join(sys.argv)}\n")
    print(f"{'what':58} {'value':>12} {'unit':12} {'reference':>12} {'ratio':>7}")
    for entry in rows:
        figures = f"{entry['value']:12.4g} {entry['unit']:12} {entry['reference']:12.4g} {entry['ratio']:7.3f}"
        print(f"{entry['name']:58} {figures}")
