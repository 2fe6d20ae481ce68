"""Features in fp8: exact against an independent computation, bounded for every finite input, and back without torch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from producer.dequantise import E4M3, dequantise_into
from producer.quantise import LEAST_SCALE, quantise, quantise_rows

TAPS, HIDDEN = 3, 8
FINITE_WORDS = st.integers(0, 0xFFFF).filter(lambda word: word & 0x7F80 != 0x7F80)
BLOCKS = arrays(np.uint16, st.tuples(st.integers(0, 4), st.just(TAPS * HIDDEN)), elements=FINITE_WORDS)
# The largest bfloat16, its smallest, both zeros.
EXTREMES = np.resize(np.array([0x7F7F, 0xFF7F, 0x0001, 0x8001, 0x0000, 0x8000], np.uint16), (2, TAPS * HIDDEN))


def widened(words: np.ndarray) -> np.ndarray:
    """bfloat16 words as float64."""
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def nearest_e4m3(numbers: np.ndarray) -> np.ndarray:
    """The bytes of float64 numbers within +-448, found by trying all: the nearest, of two equally near the even one."""
    every = [
        (sign * ((8 + m) / 8 * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6), byte)
        for sign, first in ((1, 0), (-1, 128))
        for e in range(16)
        for m in range(8)
        if (byte := first + 8 * e + m) not in (0x7F, 0xFF)
    ]
    found = []
    for number in numbers.ravel():
        negative = np.signbit(number)
        own = [(value, byte) for value, byte in every if (byte >= 128) == negative]
        found.append(min(own, key=lambda each: (abs(each[0] - number), each[1] % 2))[1])
    return np.array(found, np.uint8).reshape(numbers.shape)


def test_the_bytes_are_those_of_an_independent_computation() -> None:
    draw = np.random.default_rng(5)
    numbers = draw.standard_normal((7, TAPS * HIDDEN)) * 10.0 ** draw.integers(-8, 8, (7, 1))
    numbers[2, :HIDDEN] = 0
    numbers[3, HIDDEN:] = [448, 208, -216, 1.0625, 0.009765625, -0.0009765625, 0.0029296875, 17] * 2  # ties
    features = torch.from_numpy(numbers).to(torch.bfloat16)
    values, scales = quantise(features, TAPS)
    states = features.to(torch.float32).numpy().reshape(7, TAPS, HIDDEN)
    expected = np.maximum(np.abs(states).max(axis=2) / np.float32(448), np.float32(LEAST_SCALE))
    assert expected.dtype == np.float32
    assert np.array_equal(scales.numpy(), expected)
    scaled = np.clip(states / expected[:, :, None], -448, 448).astype(np.float64)
    assert np.array_equal(values.view(torch.uint8).numpy(), nearest_e4m3(scaled).reshape(7, -1))


@settings(max_examples=40, deadline=None)
@given(BLOCKS)
@example(EXTREMES)
@example(np.zeros((1, TAPS * HIDDEN), np.uint16))
@example(np.full((1, TAPS * HIDDEN), 0x7F7F, np.uint16))
@example(np.full((1, TAPS * HIDDEN), 0x0001, np.uint16))
def test_what_comes_back_is_near_for_every_finite_input(words: np.ndarray) -> None:
    values, scales = quantise_rows(words, "bfloat16", TAPS)
    assert np.isfinite(scales).all()
    assert not np.isin(values, (0x7F, 0xFF)).any()
    back = np.empty_like(words)
    dequantise_into(back, values, scales, "bfloat16")
    was, found = widened(words), widened(back)
    assert np.isfinite(found).all()
    scale = np.repeat(scales.astype(np.float64), HIDDEN, axis=1)
    # Reading back rounds to bfloat16 once more: at most half of its last digit, 2^-134 among its smallest.
    rounding = np.maximum(2.0**-9 * np.abs(found), 2.0**-134)
    bound = np.where(np.abs(was) >= 2.0**-6 * scale, 2.0**-4 * np.abs(was), 2.0**-10 * scale) + rounding
    assert (np.abs(found - was) <= bound).all()
    assert np.array_equal(np.signbit(found), np.signbit(was))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_no_number_overflows_and_torch_reads_the_same(dtype: str) -> None:
    kind = getattr(torch, dtype)
    most = torch.finfo(kind).max
    features = torch.randn(40, TAPS * HIDDEN, generator=torch.Generator().manual_seed(1)).to(kind)
    features[1], features[2, 3], features[3], features[4] = most, -most, 0, torch.finfo(kind).tiny
    values, scales = quantise(features, TAPS)
    back = torch.empty(features.shape, dtype=kind)
    carried = back.view(torch.uint16) if dtype == "bfloat16" else back
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dequantise_into(carried.numpy(), values.view(torch.uint8).numpy(), scales.numpy(), dtype)
    expected = values.to(torch.float32).view(40, TAPS, HIDDEN) * scales[:, :, None]
    assert torch.equal(back, expected.flatten(1).to(kind))
    assert torch.isfinite(back).all()
    assert torch.equal(back[3], features[3])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_feature_that_is_not_finite_shows_in_its_scale_and_in_no_other(wrong: float) -> None:
    features = torch.ones(4, TAPS * HIDDEN, dtype=torch.bfloat16)
    features[2, HIDDEN + 1] = wrong
    _, scales = quantise(features, TAPS)
    assert np.argwhere(~np.isfinite(scales.numpy())).tolist() == [[2, 1]]


def test_blocks_longer_than_a_piece_are_quantised_row_by_row() -> None:
    features = torch.randn(2500, TAPS * HIDDEN, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    whole = quantise(features, TAPS)
    parts = [quantise(part, TAPS) for part in features.split(7)]
    for at in (0, 1):
        joined = torch.cat([part[at].view(torch.uint8) for part in parts])
        assert torch.equal(whole[at].view(torch.uint8), joined)


def test_all_bytes_stand_for_what_torch_says() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    assert np.array_equal(E4M3, torch.nan_to_num(every, nan=0.0).numpy())
