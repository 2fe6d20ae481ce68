"""How the block of a lease lies in its slot. No torch here: replay needs none."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.block import Table, block_table, table_bytes
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


def fill_small_tensors(lease: Lease, tensors: dict[str, NDArray[np.generic]]) -> None:
    """Writes everything of a block but its features: the same whoever writes it, so that two may."""
    tensors["token_ids"][:] = np.frombuffer(lease.token_ids, "<i4")
    tensors["loss_mask"][:] = np.frombuffer(lease.loss_mask, np.uint8)
    tensors["offsets"][:] = lease_offsets(lease)
    tensors["samples"][:] = lease.samples


def written_ranges(lease: Lease, job: Features) -> list[tuple[int, int]]:
    """The byte ranges of the slot that are written for this lease, ascending."""
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
