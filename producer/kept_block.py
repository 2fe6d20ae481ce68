"""What a build keeps of a block: its features as they are computed, or quantised on the device that computed them.

Either way they lie in this process's memory when `fill` returns, sample by sample.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from producer.fill import fill
from producer.forward import features_into
from producer.lease_layout import lease_offsets, lease_table
from producer.quantise import quantise
from producer.stage import Stage, make_stage
from producer.taps import Taps
from producer.target import Target
from protocol.block import views
from protocol.job import Job
from protocol.messages import Lease

Rows = NDArray[np.generic]


class KeptBlock(Protocol):
    """Room for one block at a time. `samples` are those that the last lease asked for, in its order: features `[L,
    width]` as a cache keeps them, and the scales `[L, taps]` of quantised ones."""

    def fill(self, target: Target, taps: Taps, lease: Lease) -> None: ...

    def samples(self, lease: Lease) -> list[tuple[Rows, NDArray[np.float32] | None]]: ...


class AsComputed:
    """In the target's dtype."""

    def __init__(self, job: Job, stage: Stage) -> None:
        self._job, self._stage = job, stage
        self._buffer = memoryview(bytearray(job.slot_bytes))

    def fill(self, target: Target, taps: Taps, lease: Lease) -> None:
        filled, _ = fill(target, taps, lease, self._buffer, self._job, self._stage)
        filled.wait()

    def samples(self, lease: Lease) -> list[tuple[Rows, NDArray[np.float32] | None]]:
        features, offsets = views(self._buffer, lease_table(lease, self._job))["features"], lease_offsets(lease)
        return [(features[offsets[at] : offsets[at + 1]], None) for at in lease.positions]


class Quantised:
    """In fp8 with scales: what leaves the device is half of the bytes of bfloat16."""

    def __init__(self) -> None:
        self._values = np.empty((0, 0), np.uint8)
        self._scales = np.empty((0, 0), np.float32)

    def fill(self, target: Target, taps: Taps, lease: Lease) -> None:
        offsets, token_ids = lease_offsets(lease), np.frombuffer(lease.token_ids, "<i4")
        rows = [token_ids[offsets[at] : offsets[at + 1]] for at in lease.positions]
        width = len(taps.ids) * int(target.facts["hidden_size"])
        out = torch.empty((sum(map(len, rows)), width), dtype=target.dtype, device=target.device)
        features_into(out, target, taps, rows)
        values, scales = quantise(out, len(taps.ids))
        self._values, self._scales = values.view(torch.uint8).cpu().numpy(), scales.cpu().numpy()

    def samples(self, lease: Lease) -> list[tuple[Rows, NDArray[np.float32] | None]]:
        ends = np.cumsum([lease.lengths[at] for at in lease.positions])[:-1]
        return list(zip(np.split(self._values, ends), np.split(self._scales, ends), strict=True))


def kept_blocks(count: int, quantised: bool, target: Target, job: Job) -> list[KeptBlock]:
    """Room for `count` blocks, of which one may be filled while others are read."""
    if quantised:
        return [Quantised() for _ in range(count)]
    stage = make_stage(target, job.slot_bytes, job.width)
    return [AsComputed(job, stage) for _ in range(count)]
