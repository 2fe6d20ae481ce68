"""What the taps put out, in a few figures, now and then in a run: a broken tap shows long before a broken drafter."""

from __future__ import annotations

import numpy as np
import torch

from producer.lease_layout import Features, lease_offsets, lease_table
from producer.selfcheck import statistics
from protocol.block import views
from protocol.messages import Lease

# One block in so many is looked at, and of it so many rows: no measurable work.
EVERY_BLOCKS = 100
ROWS = 512


def tap_figures(lease: Lease, slot: memoryview, job: Features) -> tuple[tuple[float, float, float], ...]:
    """(mean, standard deviation, share of exact zeros) of each tap, over the first ROWS rows of the leased samples in a
    filled slot."""
    features = torch.from_numpy(views(slot, lease_table(lease, job))["features"]).view(getattr(torch, job.dtype))
    offsets = lease_offsets(lease)
    rows = np.concatenate([np.arange(offsets[at], offsets[at + 1]) for at in lease.positions])[:ROWS]
    chosen = features[torch.from_numpy(rows)]
    hidden = job.width // len(job.taps)
    return tuple(statistics(chosen[:, place * hidden : (place + 1) * hidden]) for place in range(len(job.taps)))
