"""What a plan knows about the training data: counted, estimated from a random sample, or told. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from protocol.dataset import TokenDataset
from protocol.errors import RequestError

Interval = tuple[int, int]
# Of a normal distribution: an interval of 95 %.
Z = 1.96


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """Samples and tokens of one epoch, with intervals (95 %) where they are estimated.

    `mean_square` is the mean of the squared lengths; `eligible` and `anchors` are the anchors that there could be and
    those that are used, None where nothing is known of the masks.
    """

    basis: Literal["prepared", "estimate", "given"]
    samples: int
    tokens: int
    mean_square: float
    samples_interval: Interval | None = None
    tokens_interval: Interval | None = None
    eligible: int | None = None
    anchors: int | None = None

    @property
    def mean_tokens(self) -> float:
        return self.tokens / max(self.samples, 1)

    @property
    def mean_context(self) -> float:
        """Tokens before a token of some sample, on average."""
        return self.mean_square / max(self.mean_tokens, 1e-9) / 2


class Drawn(msgspec.Struct, frozen=True):
    """One row of a random sample: tokens and eligible anchors of each training sample that it makes; none if it is
    skipped."""

    lengths: tuple[int, ...]
    eligible: tuple[int, ...]


def counted(dataset: TokenDataset, anchors: int) -> Corpus:
    """Of a prepared dataset; `anchors` is the most that a sample takes."""
    lengths = dataset.lengths.astype(np.float64)
    return Corpus(
        basis="prepared",
        samples=len(dataset),
        tokens=int(dataset.lengths.sum()),
        mean_square=float((lengths * lengths).mean()) if len(lengths) else 0.0,
        eligible=int(dataset.eligible.sum()),
        anchors=int(np.minimum(dataset.eligible, anchors).sum()),
    )


def given(samples: int, mean_tokens: float) -> Corpus:
    """As told on the command line: every sample counts as one of the mean length. Raises RequestError."""
    if samples < 1 or not 1 < mean_tokens < math.inf:
        raise RequestError(
            f"--samples {samples} --mean-tokens {mean_tokens:g}: there must be a sample, and it has two tokens at least"
        )
    return Corpus(
        basis="given", samples=samples, tokens=round(samples * mean_tokens), mean_square=float(mean_tokens) ** 2
    )


def estimated(drawn: Sequence[Drawn], rows: int, anchors: int) -> Corpus:
    """From rows drawn at random out of `rows`, without putting back; exact, without intervals, when all were drawn.
    Raises RequestError when none of them can be used."""
    lengths = np.asarray([length for row in drawn for length in row.lengths], dtype=np.float64)
    if not len(lengths):
        raise RequestError(f"--estimate: none of {len(drawn)} rows drawn can be used; see `draftwire prepare`")
    scale = rows / len(drawn)
    samples, samples_interval = _total([len(row.lengths) for row in drawn], rows)
    tokens, tokens_interval = _total([sum(row.lengths) for row in drawn], rows)
    eligible = [count for row in drawn for count in row.eligible]
    return Corpus(
        basis="estimate",
        samples=samples,
        tokens=tokens,
        mean_square=float((lengths * lengths).mean()),
        samples_interval=samples_interval,
        tokens_interval=tokens_interval,
        eligible=round(scale * sum(eligible)),
        anchors=round(scale * sum(min(count, anchors) for count in eligible)),
    )


def _total(values: Sequence[int], rows: int) -> tuple[int, Interval]:
    """The sum over all rows, from those of a random sample, and its interval."""
    drawn, count = np.asarray(values, dtype=np.float64), len(values)
    if count == rows:
        return sum(values), (sum(values), sum(values))
    total = float(drawn.mean()) * rows
    # The last factor: what is known of a population of which a large part was seen.
    spread = float(drawn.std(ddof=1)) if count > 1 else total / rows
    half = Z * rows * spread / math.sqrt(count) * math.sqrt(max(1 - count / rows, 0))
    # Rows that were seen are there, whatever the interval says.
    return round(total), (max(math.floor(total - half), int(drawn.sum())), math.ceil(total + half))
