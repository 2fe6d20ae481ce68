"""What a run's arithmetic is and which GPUs it has for it: looked up once, for the MFU that the live view shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from consumer.config import TrainConfig
from launch.flops import Costs, costs_of
from launch.machine import Gpu, visible_gpus
from producer.locate import read_target_facts
from protocol.dataset import TokenDataset
from protocol.job import Job, read_section


def run_costs(job: Job, run_dir: Path, dataset: TokenDataset) -> Costs:
    """The costs of a run; all unknown where nothing runs on a GPU. A side that computes in fp32 has no known peak."""
    if not any(device.startswith("cuda") for device in (*job.producers, *job.consumers)):
        return Costs()
    gpus = visible_gpus()
    trains_in_16_bits = read_section(run_dir, "train", TrainConfig).precision != "fp32"
    return costs_of(
        job.shape,
        read_target_facts(Path(job.target_dir)),
        dataset.lengths,
        np.minimum(dataset.eligible, job.plan.anchors),
        _of(job.producers, gpus, job.dtype != "float32"),
        _of(job.consumers, gpus, trains_in_16_bits),
    )


def _of(devices: Sequence[str], gpus: Sequence[Gpu], in_16_bits: bool) -> list[Gpu | None]:
    """The GPU of each process, None where its peak says nothing."""
    indices = [int(device.partition(":")[2] or -1) for device in devices]
    return [gpus[index] if in_16_bits and 0 <= index < len(gpus) else None for index in indices]
