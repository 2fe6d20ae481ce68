"""The layout of a StateBlock inside one ring slot: a named table of tensors, each at an aligned offset.

A StateBlock is the unit that travels: some whole samples of one step, unpadded and concatenated. With T tokens, n
samples and a feature width of taps x hidden:

    token_ids  int32  [T]        loss_mask  uint8  [T]
    offsets    int32  [n + 1]    samples    int64  [n]     (dataset sample ids)
    features   dtype  [T, taps x hidden]                   (bf16 as uint16 words: numpy has no bfloat16)

The table is open: another drafter may add tensors under other names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.errors import ProtocolError

ALIGN_BYTES = 64
# The numpy dtype that carries each wire dtype; bfloat16 travels as its 16-bit words, bit for bit.
CARRIERS: Mapping[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a block: `dtype` is a key of CARRIERS, `offset` counts bytes from the slot's payload start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * CARRIERS[self.dtype].itemsize


Table = tuple[TensorSpec, ...]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def block_table(tokens: int, samples: int, width: int, dtype: str) -> Table:
    """The table of a DFlash block: `tokens` T, `samples` n, `width` = taps x hidden, `dtype` of the features."""
    shapes: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("token_ids", "int32", (tokens,)),
        ("loss_mask", "uint8", (tokens,)),
        ("offsets", "int32", (samples + 1,)),
        ("samples", "int64", (samples,)),
        ("features", dtype, (tokens, width)),
    )
    table: list[TensorSpec] = []
    offset = 0
    for name, kind, shape in shapes:
        table.append(TensorSpec(name, kind, shape, offset))
        offset += _aligned(table[-1].nbytes)
    return tuple(table)


def table_bytes(table: Table) -> int:
    """Payload bytes that a table occupies, padding between tensors included."""
    return max((spec.offset + _aligned(spec.nbytes) for spec in table), default=0)


def views(payload: memoryview, table: Table) -> dict[str, NDArray[np.generic]]:
    """Numpy views `{name: array}` over a slot's payload, without a copy.

    Raises ProtocolError when the table names an unknown dtype, reaches past the payload or has a shape that numpy
    cannot hold, which is what a broken or hostile peer would send.
    """
    arrays: dict[str, NDArray[np.generic]] = {}
    for spec in table:
        carrier = CARRIERS.get(spec.dtype)
        if carrier is None:
            raise ProtocolError(f"tensor {spec.name}: unknown dtype {spec.dtype!r}")
        if spec.offset < 0 or any(size < 0 for size in spec.shape) or spec.offset + spec.nbytes > len(payload):
            raise ProtocolError(f"tensor {spec.name} of {spec.nbytes} bytes at {spec.offset} leaves the slot")
        flat = np.frombuffer(payload, carrier, math.prod(spec.shape), spec.offset)
        try:
            arrays[spec.name] = flat.reshape(spec.shape)
        except (ValueError, OverflowError) as error:
            raise ProtocolError(f"tensor {spec.name}: {error}") from None
    return arrays


def checksum(features: NDArray[np.generic]) -> int:
    """The 64-bit sum of a contiguous array's bytes, read as little-endian words (modulo 2**64).

    Catches a flipped bit, a torn or a stale slot; sums of parts add up to the sum of the whole when every part is a
    whole number of 8-byte words, else 2-byte words are summed.
    """
    words = features.reshape(-1).view(np.uint64 if features.shape[-1] * features.itemsize % 8 == 0 else np.uint16)
    return int(words.sum(dtype=np.uint64))
