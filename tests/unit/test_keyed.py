"""Keyed randomness: pinned values, uniform, and nothing but the key counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.keyed import choose, permutation, words

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)


def test_values_are_pinned() -> None:
    """Another generator, key encoding or sort would change every run's order and anchors without a word."""
    assert words(3, 1, 2).tolist() == [8151483698963392627, 2625609947767655186, 5836234875886943012]
    assert words(2, -1, 2**63 - 1).tolist() == [16902045757440918180, 2305717298139306065]
    assert permutation(10, 7, 3).tolist() == [8, 4, 5, 0, 2, 1, 9, 7, 6, 3]
    assert choose(20, 5, 1, 2, 3).tolist() == [2, 6, 8, 12, 18]


@given(st.integers(0, 80), KEYS)
def test_a_permutation_holds_everything_once(count: int, key: list[int]) -> None:
    order = permutation(count, *key)
    assert (order.dtype, order.shape) == (np.int64, (count,))
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == permutation(count, *key).tolist()


@given(st.integers(0, 60), st.integers(0, 80), KEYS)
def test_a_choice_is_a_sorted_subset_of_the_size_asked(count: int, wanted: int, key: list[int]) -> None:
    chosen = choose(count, wanted, *key)
    assert chosen.dtype == np.int64
    assert len(chosen) == min(count, wanted)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert set(chosen.tolist()) <= set(range(count))


def test_draws_do_not_depend_on_earlier_draws_or_on_global_state() -> None:
    expected = permutation(50, 4, 2).tolist()
    np.random.seed(1)
    choose(1000, 10, 4, 2)
    words(7, 4, 2)
    assert permutation(50, 4, 2).tolist() == expected


def test_every_part_and_the_order_of_a_key_count() -> None:
    keys = [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (-1,), (1, 0, 0), (256,), (1 << 62,)]
    assert len({tuple(words(2, *key).tolist()) for key in keys}) == len(keys)


def test_a_key_outside_64_bits_is_an_error_and_not_a_collision() -> None:
    with pytest.raises(OverflowError):
        words(1, 2**63)


def test_every_candidate_is_chosen_equally_often() -> None:
    """70 candidates, 51 wanted, 1,000 epochs of one sample: each count within 5 deviations of its mean."""
    draws, share = 1000, 51 / 70
    seen = np.zeros(70)
    for epoch in range(draws):
        seen[choose(70, 51, 5, epoch, 9)] += 1
    assert seen.sum() == draws * 51
    assert np.abs(seen - draws * share).max() < 5 * np.sqrt(draws * share * (1 - share))


def test_every_place_of_a_permutation_is_equally_likely() -> None:
    """8 x 8 (value, place) counts over 2,000 seeds: each within 5 deviations of 1 in 8."""
    draws = 2000
    counts = np.zeros((8, 8))
    for seed in range(draws):
        counts[permutation(8, seed), np.arange(8)] += 1
    assert np.abs(counts - draws / 8).max() < 5 * np.sqrt(draws / 8 * 7 / 8)


def test_words_are_balanced_bit_by_bit() -> None:
    bits = np.unpackbits(words(4096, 3).view(np.uint8)).reshape(4096, 64)
    assert np.abs(bits.sum(0).astype(int) - 2048).max() < 5 * 32
