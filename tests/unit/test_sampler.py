"""Keyed sampling: the distribution is right, and a row's draws are its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from producer.decoding import Decoding, Sampling, check_decoding, decoding_of, row_seed
from producer.sampler import KeyedSampler, draw
from protocol.errors import RequestError

LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0, 3.0]])


def shares(sampling: Sampling, count: int = 20_000) -> torch.Tensor:
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = draw(LOGITS.expand(count, -1), uniform, sampling)
    return torch.bincount(drawn, minlength=5) / count


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tokens_come_with_their_probabilities(temperature: float) -> None:
    wanted = torch.softmax(LOGITS[0] / temperature, -1)
    assert torch.allclose(shares(Sampling(temperature=temperature)), wanted, atol=1e-3)


def test_top_k_and_top_p_leave_the_likeliest() -> None:
    assert shares(Sampling(temperature=1.0, top_k=2)).nonzero()[:, 0].tolist() == [0, 4]
    assert shares(Sampling(temperature=1.0, top_p=0.01)).nonzero()[:, 0].tolist() == [4]
    kept = shares(Sampling(temperature=1.0, top_p=0.8))  # 0.64 and 0.24 of all
    assert kept.nonzero()[:, 0].tolist() == [0, 4]
    assert kept[4] / kept[0] == pytest.approx(np.e, rel=0.01)


@given(st.floats(0, 1, exclude_max=True), st.floats(0.01, 100), st.floats(0.001, 1), st.integers(0, 9))
def test_every_draw_is_a_token(uniform: float, temperature: float, top_p: float, top_k: int) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    assert 0 <= int(draw(LOGITS, torch.tensor([uniform], dtype=torch.float64), sampling)[0]) < 5


def test_a_row_draws_the_same_in_any_batch() -> None:
    sampling = Sampling(temperature=1.0)
    both, alone = KeyedSampler(sampling, [4, 9], 8), KeyedSampler(sampling, [9], 8)
    together = [both(None, LOGITS.expand(2, -1)).argmax(-1)[1].item() for _ in range(8)]
    assert together == [alone(None, LOGITS).argmax(-1)[0].item() for _ in range(8)]
    assert len(set(together)) > 1


def test_seeds_are_those_of_a_row_and_turn() -> None:
    seeds = [
        row_seed(Sampling(temperature=1.0, seed=seed), row, turn)
        for seed in (0, 1)
        for row in (0, 1)
        for turn in (0, 1)
    ]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(
    ("decoding", "words"),
    [
        (Decoding(sampling=Sampling(temperature=-1.0)), "--temperature"),
        (Decoding(sampling=Sampling(temperature=float("nan"))), "--temperature"),
        (Decoding(sampling=Sampling(temperature=1.0, top_p=0.0)), "--top-p"),
        (Decoding(sampling=Sampling(temperature=1.0, top_k=-1)), "--top-k"),
        (Decoding(sampling=Sampling(seed=3)), "no effect on greedy"),
        (Decoding(sampling=Sampling(top_p=0.5)), "no effect on greedy"),
        (Decoding(with_tokens=True, turns="each"), "--turns last"),
    ],
)
def test_case_u3_no_setting_is_taken_without_effect(decoding: Decoding, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_decoding(decoding)


def test_words_that_are_none_are_refused() -> None:
    for options in (("all", None), ("last", "maybe")):
        with pytest.raises(RequestError, match="write"):
            decoding_of(5, {}, *options, False)
    assert decoding_of(5, {"temperature": 1.0}, "each", "on", False).sampling.temperature == 1.0
