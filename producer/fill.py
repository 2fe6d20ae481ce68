"""Filling a leased block: the small tensors, the features, and which bytes were written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from producer.forward import features_into
from producer.stage import Filled, Stage
from producer.taps import Taps
from producer.target import Target
from protocol.block import Table, block_table, table_bytes, views
from protocol.messages import Lease


class Features(Protocol):
    """What is asked of a job: columns of the features (taps x hidden), their dtype, and the taps."""

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def taps(self) -> tuple[int, ...]: ...


def lease_table(lease: Lease, job: Features) -> Table:
    """The layout of the whole block that a lease belongs to."""
    return block_table(sum(lease.lengths), len(lease.samples), job.width, job.dtype)


def lease_offsets(lease: Lease) -> NDArray[np.int32]:
    """`[n + 1]`: sample i of the whole block is rows offsets[i] to offsets[i + 1]."""
    return np.concatenate(([0], np.cumsum(lease.lengths))).astype(np.int32)


def fill(
    target: Target,
    taps: Taps,
    lease: Lease,
    slot: memoryview,
    job: Features,
    stage: Stage,
    wanted: Callable[[], bool] = lambda: True,
) -> tuple[Filled, int]:
    """Writes the leased samples into the slot; returns what to wait for until all of it is there, and how often a batch
    was halved for lack of memory.

    A part of a block writes only its own samples' rows; the small tensors are the same whoever writes them. Raises
    Unwanted as soon as `wanted` says no between two forward passes; then nothing more is written.
    """
    tensors = views(slot, lease_table(lease, job))
    offsets = lease_offsets(lease)
    token_ids = np.frombuffer(lease.token_ids, "<i4")
    tensors["token_ids"][:] = token_ids
    tensors["loss_mask"][:] = np.frombuffer(lease.loss_mask, np.uint8)
    tensors["offsets"][:] = offsets
    tensors["samples"][:] = lease.samples
    rows: list[NDArray[np.int32]] = [token_ids[offsets[at] : offsets[at + 1]] for at in lease.positions]
    features = torch.from_numpy(tensors["features"])
    features = features if features.dtype == target.dtype else features.view(target.dtype)
    pieces = [features[offsets[at] : offsets[at + 1]] for at in lease.positions]
    if lease.positions == tuple(range(len(lease.samples))):
        pieces = [features]
    out = stage.begin(pieces)
    halved = features_into(out, target, taps, rows, wanted)
    return stage.end(out, pieces), halved


def written_ranges(lease: Lease, job: Features) -> list[tuple[int, int]]:
    """The byte ranges of the slot that `fill` writes for this lease, ascending."""
    table = lease_table(lease, job)
    if len(lease.positions) == len(lease.samples):
        return [(0, table_bytes(table))]
    (features,) = (spec for spec in table if spec.name == "features")
    ranges = [(spec.offset, spec.offset + spec.nbytes) for spec in table if spec.name != "features"]
    offsets = lease_offsets(lease).tolist()
    row_bytes = features.nbytes // offsets[-1]
    for at in sorted(lease.positions):
        ranges.append((features.offset + offsets[at] * row_bytes, features.offset + offsets[at + 1] * row_bytes))
    return ranges
