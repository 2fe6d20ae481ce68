"""Keyed sampling: each row of a batch draws from numbers of its own, so that an answer depends on its row alone.

The draw is the inverse of the cumulative distribution at one uniform number a token, made from the row's seed on the
host: batches, order and restarts do not matter, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from producer.decoding import Sampling
from protocol.keyed import words


class KeyedSampler:
    """A logits processor of `generate` for one batch: leaves of each row's scores only the token that was drawn.

    `seeds` has one number a row; at most `max_new_tokens` are drawn.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], max_new_tokens: int) -> None:
        self._sampling = sampling
        # 53 bits: what a float64 holds below 1.
        numbers = [words(max_new_tokens, seed) >> np.uint64(11) for seed in seeds]
        self._uniform = torch.from_numpy(np.stack(numbers).astype(np.float64) * 2.0**-53)
        self._step = 0

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        """Scores `[B, V]` with -inf everywhere but at the drawn tokens."""
        drawn = draw(scores, self._uniform[:, self._step].to(scores.device), self._sampling)
        self._step += 1
        return torch.full_like(scores, -torch.inf).scatter(1, drawn[:, None], 0.0)


def draw(scores: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """Tokens int64 `[B]` drawn from logits `[B, V]` with one number in [0, 1) a row, float64 `[B]`.

    Of the tokens in order of probability those of `top_k` and `top_p` stay; the likeliest always does.
    """
    kept = scores.shape[1] if sampling.top_k == 0 else min(sampling.top_k, scores.shape[1])
    values, order = torch.topk(scores.float() / sampling.temperature, kept, dim=-1)
    probabilities = torch.softmax(values, dim=-1).double()
    before = probabilities.cumsum(-1) - probabilities
    probabilities = torch.where(before < sampling.top_p, probabilities, 0.0)
    cumulated = probabilities.cumsum(-1)
    place = torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    return order.gather(1, torch.minimum(place, last))[:, 0]
