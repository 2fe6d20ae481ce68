"""Drafters that know only token statistics: what acceptance costs nothing, walked over the same rows. Pure numpy."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from consumer.walk import Acceptance, Answers, Int, walk
from protocol.errors import RunError

FLUSH_TOKENS = 1 << 22  # pairs counted at once: bounds memory on any data set


@dataclass(frozen=True)
class Ngrams:
    """top: the commonest token. previous int64 [m], ascending, and following int64 [m]: its commonest successor."""

    top: int
    previous: Int
    following: Int

    def after(self, tokens: Int) -> Int:
        """The likeliest successor of each token; `top` after a token never seen."""
        place = np.minimum(np.searchsorted(self.previous, tokens), len(self.previous) - 1)
        return np.where(self.previous[place] == tokens, self.following[place], self.top)


def fit(documents: Iterable[tuple[NDArray[np.integer], NDArray[np.generic]]]) -> Ngrams:
    """Count supervised tokens, alone and after their predecessor, over (token_ids [L], mask [L]) documents.

    Ties go to the lower token id. Raises RunError when no supervised token has a predecessor.
    """
    pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    waiting: list[Int] = []
    size = 0
    for tokens, mask in documents:
        wide = tokens.astype(np.int64)
        waiting.append(((wide[:-1] << 32) | wide[1:])[mask[1:] != 0])
        size += len(waiting[-1])
        if size > FLUSH_TOKENS:
            pairs, counts = _merge(pairs, counts, waiting)
            waiting, size = [], 0
    pairs, counts = _merge(pairs, counts, waiting)
    if not len(pairs):
        raise RunError("baselines: the training data has no supervised token after another token")
    previous, following = pairs >> 32, pairs & 0xFFFFFFFF
    # Sorted by predecessor, then falling count, then token: the first of each predecessor is its best.
    order = np.lexsort((following, -counts, previous))
    seen, first = np.unique(previous[order], return_index=True)
    alone, place = np.unique(following, return_inverse=True)
    top = int(alone[np.argmax(np.bincount(place, weights=counts))])
    return Ngrams(top, seen, following[order][first])


def baseline_acceptance(
    ngrams: Ngrams, answers: Answers, *, block_size: int, max_new_tokens: int, seed: int = 0
) -> dict[str, Acceptance]:
    """{"unigram": .., "bigram": ..}: the bigram chains its own predictions over the block."""

    def unigram(prompts: Int, _anchors: Int, _sizes: Int) -> Int:
        return np.full((len(prompts), block_size - 1), ngrams.top, np.int64)

    def bigram(prompts: Int, anchors: Int, _sizes: Int) -> Int:
        last = answers.token_ids[answers.offsets[prompts] + anchors].astype(np.int64)
        return np.stack([last := ngrams.after(last) for _ in range(block_size - 1)], axis=1)

    return {
        name: walk(answers, propose, block_size=block_size, max_new_tokens=max_new_tokens, seed=seed)
        for name, propose in (("unigram", unigram), ("bigram", bigram))
    }


def _merge(pairs: Int, counts: Int, waiting: list[Int]) -> tuple[Int, Int]:
    new, new_counts = np.unique(np.concatenate([np.empty(0, np.int64), *waiting]), return_counts=True)
    merged, place = np.unique(np.concatenate([pairs, new]), return_inverse=True)
    return merged, np.bincount(place, np.concatenate([counts, new_counts]), len(merged)).astype(np.int64)
