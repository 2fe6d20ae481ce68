"""Unigram and bigram drafters: what they count, and how they are walked."""

import numpy as np
import pytest

from consumer import baselines
from consumer.baselines import Ngrams, baseline_acceptance, fit
from consumer.walk import Answers
from protocol.errors import RunError


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (np.array([7, 7, 7, 7, 1, 2, 3], np.int32), np.array([0, 0, 0, 0, 1, 1, 1], np.uint8)),
        (np.array([7, 1, 2, 4], np.int32), np.array([0, 1, 1, 1], np.uint8)),
        (np.array([1, 2, 4, 2], np.int32), np.array([1, 1, 1, 1], np.uint8)),
    ]


@pytest.mark.parametrize("flush", [1, 1 << 22])
def test_counts_supervised_tokens_only(flush: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "FLUSH_TOKENS", flush)
    ngrams = fit(documents())
    assert ngrams.top == 2
    assert ngrams.after(np.array([1, 2, 4, 7, 99, 0])).tolist() == [2, 4, 2, 1, 2, 2]


def test_ties_go_to_the_lower_id() -> None:
    ngrams = fit([(np.array([5, 9, 5, 3]), np.ones(4, np.uint8))])
    assert ngrams.after(np.array([5])).tolist() == [3]
    assert ngrams.top == 3


def test_nothing_to_count_is_an_error() -> None:
    with pytest.raises(RunError, match="baselines"):
        fit([(np.array([5, 9]), np.zeros(2, np.uint8))])


def test_the_bigram_chains_its_own_predictions() -> None:
    ngrams = Ngrams(8, np.array([1, 2, 3]), np.array([2, 3, 4]))
    answers = Answers(np.array([0, 1, 2, 3, 4, 8, 8, 1]), np.array([0, 8]), np.array([1]))
    result = baseline_acceptance(ngrams, answers, block_size=5, max_new_tokens=50)
    # From 1: 2 3 4 then `top` for the unseen 4: all four drafts right, five committed; then the last token alone.
    assert result["bigram"].lengths == ((5, 1),)
    # `top` is right at the fifth and sixth positions only.
    assert result["unigram"].lengths == ((1, 1, 1, 3),)
