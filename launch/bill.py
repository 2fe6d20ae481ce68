"""The bill of a run before it starts: bytes, steps and anchors of a corpus. Pure."""

from __future__ import annotations

import math

import msgspec

from launch.corpus import Corpus

# A best checkpoint stays beside the newest ones, and one more is there while it is being written.
EXTRA_CHECKPOINTS = 2


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one epoch, and of the whole run where it says so. All in bytes of features as the target makes them;
    a dump of them would take as much, but for names."""

    bytes_per_token: int
    bytes_per_sample: float
    bytes_per_epoch: int
    full_dump_bytes: int
    full_dump_interval: tuple[int, int] | None
    steps: int
    anchor_coverage: float | None


def bill_of(
    corpus: Corpus, width: int, itemsize: int, batch_tokens: int, epochs: int, max_steps: int | None, steps: int | None
) -> Bill:
    """`width` numbers of `itemsize` bytes a token; `steps` of a plan that was made, else they are estimated."""
    bytes_per_token = width * itemsize
    whole = bytes_per_token * corpus.tokens
    interval = corpus.tokens_interval
    return Bill(
        bytes_per_token=bytes_per_token,
        bytes_per_sample=whole / max(corpus.samples, 1),
        bytes_per_epoch=whole,
        full_dump_bytes=whole,
        full_dump_interval=(interval[0] * bytes_per_token, interval[1] * bytes_per_token) if interval else None,
        steps=steps if steps is not None else about_steps(corpus, batch_tokens, epochs, max_steps),
        anchor_coverage=corpus.anchors / corpus.eligible if corpus.anchors is not None and corpus.eligible else None,
    )


def about_steps(corpus: Corpus, batch_tokens: int, epochs: int, max_steps: int | None) -> int:
    """Optimiser steps of a run of which only the mean length is known.

    A step ends before the sample that would exceed `batch_tokens`, so half of such a sample stays free: half of the
    mean of lengths weighted by themselves.
    """
    filled = max(batch_tokens - corpus.mean_context, corpus.mean_tokens)
    each = min(math.ceil(corpus.tokens / filled), corpus.samples)
    return epochs * each if max_steps is None else min(epochs * each, max_steps)


def checkpoints_disk_bytes(each_bytes: int, kept: int) -> int:
    """What the checkpoints of a run take at most, `each_bytes` of masters, moments and served weights in each."""
    return (kept + EXTRA_CHECKPOINTS) * each_bytes
