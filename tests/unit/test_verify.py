"""Unsound features are found, by sample and tap, before anything is trained on them: case E1 of the public failure
reports."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from consumer.verify import differing_tensor, unsound_samples

TAPS, HIDDEN = 3, 4
OFFSETS = np.array([0, 5, 6, 10], np.int32)  # a sample of 5 tokens, one of 1, one of 4
TOKENS = np.array([3, 4, 5, 6, 7, 8, 1, 1, 1, 2], np.int32)


def features(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(10, TAPS * HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)


def tap(rows: Tensor, index: int) -> Tensor:
    return rows[:, index * HIDDEN : (index + 1) * HIDDEN]


def check(rows: Tensor, tokens: np.ndarray = TOKENS) -> dict[int, str]:
    return unsound_samples(rows, tokens, OFFSETS, TAPS)


def zeros(rows: Tensor) -> None:
    tap(rows, 1)[0:5] = 0


def one_nan(rows: Tensor) -> None:
    tap(rows, 2)[3, 1] = torch.nan


def one_infinity(rows: Tensor) -> None:
    tap(rows, 0)[4, 3] = -torch.inf


def one_row_repeated(rows: Tensor) -> None:
    tap(rows, 1)[0:5] = tap(rows, 1)[2].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (zeros, "tap 1 is all zero"),
        (one_nan, "tap 2 is not finite"),
        (one_infinity, "tap 0 is not finite"),
        (one_row_repeated, "tap 1 is one row repeated"),
    ],
)
def test_damage_names_sample_and_tap(damage: Callable[[Tensor], None], problem: str, dtype: torch.dtype) -> None:
    """E1: zeros, one NaN, one infinity, one row for every token."""
    rows = features(dtype)
    assert check(rows) == {}
    damage(rows)
    assert check(rows) == {0: problem}


def test_every_damaged_sample_is_named() -> None:
    rows = features()
    rows[5] = 0
    tap(rows, 1)[6:10] = 1.5
    assert check(rows) == {1: "tap 0 is all zero", 2: "tap 1 is one row repeated"}


def test_a_large_bf16_value_is_sound() -> None:
    """E1: 70,000 is infinite in fp16 only."""
    rows = features(torch.bfloat16)
    rows[0, 0] = 70_000
    assert check(rows) == {}


def test_some_zero_rows_and_some_repeated_rows_are_sound() -> None:
    rows = features()
    rows[0] = 0
    rows[3] = rows[4]
    assert check(rows) == {}


def test_a_conversation_of_one_token_repeated_has_rightly_one_row_repeated() -> None:
    rows, tokens = features(), TOKENS.copy()
    rows[6:10] = rows[6].clone()
    tokens[6:10] = 1
    assert check(rows, tokens) == {}
    assert check(rows) == {2: "tap 0 is one row repeated"}


def test_repetition_does_not_reach_over_a_border() -> None:
    """A sample whose rows all equal the last row before it, but for its own later rows."""
    rows = features()
    rows[5] = rows[4]
    rows[6] = rows[5]
    assert check(rows) == {}


def test_negative_zero_is_zero() -> None:
    rows = features()
    tap(rows, 0)[6:10] = -0.0
    assert check(rows) == {2: "tap 0 is all zero"}


def test_an_empty_block_is_sound() -> None:
    """What a rank gets when another one's samples are all quarantined."""
    empty = torch.zeros(0, TAPS * HIDDEN)
    assert unsound_samples(empty, np.zeros(0, np.int32), np.zeros(1, np.int32), TAPS) == {}


class TwoRows:
    def tokens(self, sample: int) -> np.ndarray:
        return np.arange(3 + sample, dtype=np.int32)

    def mask(self, sample: int) -> np.ndarray:
        return np.ones(3 + sample, np.uint8)


def small_tensors() -> dict[str, np.ndarray]:
    rows = TwoRows()
    return {
        "token_ids": np.concatenate([rows.tokens(1), rows.tokens(0)]),
        "loss_mask": np.concatenate([rows.mask(1), rows.mask(0)]),
        "offsets": np.array([0, 4, 7], np.int32),
    }


def test_any_flipped_bit_of_a_small_tensor_is_found_by_its_name() -> None:
    assert differing_tensor(TwoRows(), (1, 0), **small_tensors()) == ""
    for name, tensor in small_tensors().items():
        for bit in range(8 * tensor.nbytes):
            damaged = small_tensors()
            damaged[name].view(np.uint8)[bit // 8] ^= 1 << bit % 8
            assert differing_tensor(TwoRows(), (1, 0), **damaged) == name


def test_an_empty_block_has_nothing_to_differ() -> None:
    nothing = (np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(1, np.int32))
    assert differing_tensor(TwoRows(), (), *nothing) == ""
