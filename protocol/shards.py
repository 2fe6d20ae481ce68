"""The format of the disk cache's shards: plain safetensors files that any tool can read, and an index beside each.

    shard-0123456789ab.safetensors   per sample K.features [L, taps x hidden],
                                     K.token_ids int32 [L], K.loss_mask uint8 [L]
                                     and, of features in fp8, K.scales float32 [L, taps]
    shard-0123456789ab.json          which samples it holds, where, and their checksums; written when the shard is whole

K is the sample's key: the hash of its token ids, which with the cache's fingerprint decide its features. Checksums are
xxh3 of 64 bits. All features come first, then all scales, then all token ids, then all masks, so that every tensor is
aligned. The number of tensors in a shard is bounded, since readers refuse headers of a hundred megabytes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.block import CARRIERS
from protocol.direct import PAGE_BYTES

SHARD_NAME = re.compile(r"shard-[0-9a-f]{12}\.safetensors")
PART_SUFFIX = ".part"
FP8 = "float8_e4m3fn"
# What safetensors calls the dtypes of features, and the numpy dtype that carries each: there is no fp8 in numpy.
STORED = {
    "bfloat16": ("BF16", CARRIERS["bfloat16"]),
    "float16": ("F16", CARRIERS["float16"]),
    "float32": ("F32", CARRIERS["float32"]),
    FP8: ("F8_E4M3", CARRIERS["uint8"]),
}
SCALE_BYTES = 4
_HEADER_BYTES_A_TENSOR = 160  # an entry with numbers of fourteen digits
_HEADER_BYTES_BESIDE = 1024


class Limits(msgspec.Struct, frozen=True):
    """When a shard is full: `nbytes` of features and so many samples, of `tensors` tensors each."""

    nbytes: int = 2 << 30
    samples: int = 4096
    tensors: int = 3

    @property
    def head_bytes(self) -> int:
        """What is set aside for the header of a shard, in whole pages."""
        needed_bytes = _HEADER_BYTES_BESIDE + self.samples * self.tensors * _HEADER_BYTES_A_TENSOR
        return -(-needed_bytes // PAGE_BYTES) * PAGE_BYTES


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Where a sample lies in its shard, in bytes from the start of the file, and what it adds up to. `features` is the
    checksum of features and scales together, `small` that of token ids and loss mask."""

    key: str
    tokens: int
    features_at: int
    token_ids_at: int
    loss_mask_at: int
    features: int
    small: int
    scales_at: int = 0


class Index(msgspec.Struct, frozen=True):
    """`nbytes` is the size of the shard's file, `header` the checksum of its header with the length before it."""

    nbytes: int
    header_bytes: int
    header: int
    samples: list[Sample]


def sample_key(token_ids: NDArray[np.int32]) -> str:
    """The name of a sample in every cache: 128 bits of its token ids, in hex."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(token_ids, "<i4").data)


def shard_name() -> str:
    return f"shard-{secrets.token_hex(6)}.safetensors"


def index_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def header_of(
    samples: Sequence[Sample], width: int, dtype: str, scales: int, metadata: dict[str, str], head_bytes: int
) -> bytes:
    """The head of a shard: the length of the header, then the header, padded with blanks to `head_bytes`.

    `features_at` and its like count from the start of the file, as in the index; `scales` a token, 0: none.
    """
    kind, carrier = STORED[dtype]
    table: dict[str, object] = {"__metadata__": metadata}
    tensors: list[tuple[str, str, tuple[int, ...], int]] = [
        ("features", kind, (width,), carrier.itemsize * width),
        ("token_ids", "I32", (), 4),
        ("loss_mask", "U8", (), 1),
    ]
    if scales:
        tensors.insert(1, ("scales", "F32", (scales,), SCALE_BYTES * scales))
    for name, kind, row, row_bytes in tensors:
        for sample in samples:
            start = getattr(sample, f"{name}_at") - head_bytes
            shape = [sample.tokens, *row]
            offsets = [start, start + sample.tokens * row_bytes]
            table[f"{sample.key}.{name}"] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    length = head_bytes - 8
    if len(text) > length:
        raise AssertionError(f"a header of {len(text)} bytes does not fit into {length}")
    return length.to_bytes(8, "little") + text.ljust(length)
