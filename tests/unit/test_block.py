"""The block layout: aligned, disjoint, bit-exact, and closed to what a broken peer may claim."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.block import ALIGN_BYTES, CARRIERS, TensorSpec, block_table, checksum, table_bytes, views
from protocol.errors import ProtocolError

SIZES = (st.integers(0, 200), st.integers(0, 9), st.integers(1, 40), st.sampled_from(sorted(CARRIERS)))


@given(*SIZES)
def test_tensors_are_aligned_in_order_and_do_not_overlap(tokens: int, samples: int, width: int, dtype: str) -> None:
    table = block_table(tokens, samples, width, dtype)
    assert [spec.name for spec in table] == ["token_ids", "loss_mask", "offsets", "samples", "features"]
    assert [spec.shape for spec in table] == [(tokens,), (tokens,), (samples + 1,), (samples,), (tokens, width)]
    assert all(spec.offset % ALIGN_BYTES == 0 for spec in table)
    assert all(first.offset + first.nbytes <= second.offset for first, second in pairwise(table))
    assert table[-1].offset + table[-1].nbytes <= table_bytes(table)
    assert table_bytes(table) - sum(spec.nbytes for spec in table) < len(table) * ALIGN_BYTES


@given(*SIZES)
def test_writing_one_tensor_leaves_the_others_alone(tokens: int, samples: int, width: int, dtype: str) -> None:
    table = block_table(tokens, samples, width, dtype)
    arrays = views(memoryview(bytearray(table_bytes(table))), table)
    for number, array in enumerate(arrays.values(), 1):
        array.fill(number)
    for number, (spec, array) in enumerate(zip(table, arrays.values(), strict=True), 1):
        assert (array == number).all()
        assert (array.shape, array.dtype, array.nbytes) == (spec.shape, CARRIERS[spec.dtype], spec.nbytes)


def test_an_empty_table_takes_nothing() -> None:
    assert table_bytes(()) == 0
    assert views(memoryview(b""), ()) == {}


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (TensorSpec("x", "float8", (4,), 0), "tensor x: unknown dtype 'float8'"),
        (TensorSpec("x", "object", (4,), 0), "tensor x: unknown dtype 'object'"),
        (TensorSpec("x", "uint8", (65,), 0), "tensor x of 65 bytes at 0 leaves the slot"),
        (TensorSpec("x", "uint8", (1,), 64), "tensor x of 1 bytes at 64 leaves the slot"),
        (TensorSpec("x", "uint8", (0,), 65), "leaves the slot"),
        (TensorSpec("x", "uint8", (4,), -4), "leaves the slot"),
        (TensorSpec("x", "uint8", (-1, -4), 0), "leaves the slot"),
        (TensorSpec("x", "int64", (2**62,), 0), "leaves the slot"),  # wraps to 0 in 64-bit arithmetic
        (TensorSpec("x", "int64", (2**40, 2**40), 0), "leaves the slot"),
    ],
)
def test_what_does_not_fit_into_the_slot_is_refused(spec: TensorSpec, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        views(memoryview(bytearray(64)), (spec,))


@pytest.mark.parametrize("shape", [(0, 2**70), (1,) * 70])
def test_shapes_beyond_numpy_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="tensor x"):
        views(memoryview(bytearray(64)), (TensorSpec("x", "uint8", shape, 0),))


# Every bit pattern of 16 bits; of wider types NaNs with payloads (quiet and signalling), -0, infinities and extremes.
EVERY_WORD = np.arange(1 << 16, dtype=np.uint16)
PATTERNS = {
    "bfloat16": EVERY_WORD,
    "float16": EVERY_WORD.view(np.float16),
    "float32": np.array(
        [0x7FC00001, 0xFF800001, 0x7F812345, 0x80000000, 0x7F7FFFFF, 0x00000001, 0x7F800000, 0xFF800000], np.uint32
    ).view(np.float32),
    "int64": np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).max, -1, 0, 1, 2**53 + 1, 7, -7]),
}


@pytest.mark.parametrize("dtype", PATTERNS)
@pytest.mark.parametrize("columns", [1, 8])
def test_every_bit_survives_the_slot_and_the_way_to_torch(dtype: str, columns: int) -> None:
    sent = PATTERNS[dtype].reshape(-1, columns)
    table = block_table(len(sent), 2, columns, dtype)
    slot = bytearray(table_bytes(table))
    views(memoryview(slot), table)["features"][...] = sent
    received = views(memoryview(slot), table)["features"]
    assert (received.dtype, received.shape) == (CARRIERS[dtype], sent.shape)
    assert received.tobytes() == sent.tobytes()
    tensor = torch.from_numpy(received.copy()).view(getattr(torch, dtype))
    assert tuple(tensor.shape) == sent.shape
    bits = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.uint8)
    assert bits.numpy().tobytes() == sent.tobytes()


@pytest.mark.parametrize("dtype", PATTERNS)
def test_a_transposed_source_arrives_as_it_reads(dtype: str) -> None:
    sent = PATTERNS[dtype][:8].reshape(2, 4).T
    table = block_table(4, 1, 2, dtype)
    slot = memoryview(bytearray(table_bytes(table)))
    views(slot, table)["features"][...] = sent
    assert views(slot, table)["features"].tobytes() == np.ascontiguousarray(sent).tobytes()


@pytest.mark.parametrize("dtype", PATTERNS)
@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 1), (0, 1)])
def test_sizes_zero_and_one(dtype: str, tokens: int, samples: int) -> None:
    table = block_table(tokens, samples, 1, dtype)
    features = views(memoryview(bytearray(table_bytes(table))), table)["features"]
    assert (features.shape, features.dtype) == ((tokens, 1), CARRIERS[dtype])
    assert checksum(features) == 0


# --- checksum --------------------------------------------------------------------------------------------------------


def rows(draw: Callable[[st.SearchStrategy[Any]], Any], columns: int) -> np.ndarray:
    count = draw(st.integers(1, 12))
    return np.frombuffer(
        draw(st.binary(min_size=2 * count * columns, max_size=2 * count * columns)), np.uint16
    ).reshape(count, columns)


@given(st.data(), st.integers(1, 9))
def test_the_checksum_is_the_sum_of_little_endian_words(data: st.DataObject, columns: int) -> None:
    features = rows(data.draw, columns)
    word = 8 if columns % 4 == 0 else 2
    raw = features.tobytes()
    expected = sum(int.from_bytes(raw[at : at + word], "little") for at in range(0, len(raw), word)) % 2**64
    assert checksum(features) == expected


@given(st.data(), st.integers(1, 9))
def test_a_flipped_bit_is_seen(data: st.DataObject, columns: int) -> None:
    features = rows(data.draw, columns)
    damaged = features.copy()
    damaged.reshape(-1)[data.draw(st.integers(0, features.size - 1))] ^= np.uint16(1 << data.draw(st.integers(0, 15)))
    assert checksum(damaged) != checksum(features)


@given(st.data(), st.integers(1, 9))
def test_sums_of_parts_add_up(data: st.DataObject, columns: int) -> None:
    features = rows(data.draw, columns)
    cut = data.draw(st.integers(0, len(features)))
    assert (checksum(features[:cut]) + checksum(features[cut:])) % 2**64 == checksum(features)


def test_the_checksum_wraps_at_64_bits() -> None:
    assert checksum(np.full((2, 4), 0xFFFF, np.uint16)) == 2**64 - 2
