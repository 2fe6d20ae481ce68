"""What a block must be before anything is trained on it: of the rows that were asked for, and per tap finite, not all
zero, not one row repeated.

These are what broken extraction looks like from outside; a loss curve shows none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Rows(Protocol):
    """What is asked of the token dataset."""

    def tokens(self, sample: int) -> NDArray[np.int32]: ...

    def mask(self, sample: int) -> NDArray[np.uint8]: ...


def differing_tensor(
    rows: Rows,
    samples: Sequence[int],
    token_ids: NDArray[np.int32],
    loss_mask: NDArray[np.uint8],
    offsets: NDArray[np.int32],
) -> str:
    """The name of a tensor, `token_ids` `[T]`, `loss_mask` `[T]` or `offsets` `[n + 1]`, that is not what the dataset
    has for these `n` samples; "" when all are. The producer's sum is of the features alone."""
    tokens = [rows.tokens(sample) for sample in samples]
    if offsets.tolist() != np.cumsum([0, *map(len, tokens)]).tolist():
        return "offsets"
    # One array more, so that there is one for an empty block.
    if not np.array_equal(token_ids, np.concatenate([*tokens, token_ids[:0]])):
        return "token_ids"
    if not np.array_equal(loss_mask, np.concatenate([*map(rows.mask, samples), loss_mask[:0]])):
        return "loss_mask"
    return ""


def unsound_samples(
    features: torch.Tensor, token_ids: NDArray[np.int32], offsets: NDArray[np.int32], taps: int
) -> dict[int, str]:
    """Position in the block -> what is wrong with that sample; empty when all are sound.

    `features` `[T, taps x hidden]` on any device, `token_ids` `[T]`, `offsets` `[n + 1]`. Three `[T, taps]` masks are
    made on the device and read back once.
    """
    rows = features.view(len(features), taps, features.shape[1] // taps)
    finite = torch.isfinite(rows).all(-1)
    zero = (rows == 0).all(-1)
    repeats = torch.zeros_like(zero)
    repeats[1:] = (rows[1:] == rows[:-1]).all(-1)
    verdicts = torch.stack((finite, zero, repeats)).cpu().numpy()
    found: dict[int, str] = {}
    for position, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        # A conversation of one token repeated has, rightly, one row repeated.
        distinct = len(np.unique(token_ids[start:end])) > 1
        problem = _problem(verdicts[:, start:end], distinct)
        if problem:
            found[position] = problem
    return found


def _problem(verdicts: NDArray[np.bool_], distinct: bool) -> str | None:
    finite, zero, repeats = verdicts
    checks: Sequence[tuple[NDArray[np.bool_], str]] = (
        (~finite.all(0), "is not finite"),
        (zero.all(0), "is all zero"),
        (repeats[1:].all(0) & distinct, "is one row repeated"),
    )
    for bad, what in checks:
        if bad.any():
            return f"tap {int(bad.argmax())} {what}"
    return None
