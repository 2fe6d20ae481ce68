"""Filling a leased block with the target: the small tensors and the features."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from producer.forward import features_into
from producer.lease_layout import Features, fill_small_tensors, lease_offsets, lease_table
from producer.stage import Filled, Stage
from producer.taps import Taps
from producer.target import Target
from protocol.block import views
from protocol.messages import Lease


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
    fill_small_tensors(lease, tensors)
    rows: list[NDArray[np.int32]] = [token_ids[offsets[at] : offsets[at + 1]] for at in lease.positions]
    features = torch.from_numpy(tensors["features"])
    features = features if features.dtype == target.dtype else features.view(target.dtype)
    pieces = [features[offsets[at] : offsets[at + 1]] for at in lease.positions]
    if lease.positions == tuple(range(len(lease.samples))):
        pieces = [features]
    out = stage.begin(pieces)
    halved = features_into(out, target, taps, rows, wanted)
    return stage.end(out, pieces), halved
