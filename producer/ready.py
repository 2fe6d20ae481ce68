"""A child's target, loaded and ready to fill blocks: on its devices, within its budget, tapped and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from producer.compiled import compile_and_warm_up
from producer.config import TargetConfig
from producer.ranks import loaded
from producer.taps import Taps
from producer.target import Target
from protocol.job import Job, read_section


@contextmanager
def ready_target(run_dir: Path, job: Job, index: int) -> Iterator[tuple[Target, Taps]]:
    """The target of producer `index`, for as long as the context is open."""
    devices = job.producer_devices(index)
    device = devices[0]
    if device != "cpu":
        torch.cuda.set_device(device)
        if job.producer_bytes:
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(job.producer_bytes / total_bytes, device)
    config = read_section(run_dir, "target", TargetConfig)
    log_path = run_dir / "log" / f"{job.producer_names[index]}.log"
    with loaded(Path(job.target_dir), config, devices, log_path) as whole:
        target = replace(whole, padding_mask=job.padding_mask)
        with Taps(target.layers, job.taps) as taps:
            if config.compiles_on(device):
                compile_and_warm_up(target, taps)
            yield target, taps
            if device != "cpu":
                print(f"held {torch.cuda.max_memory_allocated(device)} bytes of its GPU at most", flush=True)
