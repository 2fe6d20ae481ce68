"""How long a run will take, from a table of cards and shares of their peaks: an estimate. Pure.

The shares were measured on H200s (docs/performance.md): large bf16 products reach 690 to 780 of the 989 TFLOP/s of the
data sheet; the compiled target reaches 0.80 of that on a real mix of lengths, a hybrid with its kernels about 0.63, the
drafter's step 0.72 to 0.77. Checkpoints, evaluations and the start of a run are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from consumer.shape import DrafterShape
from launch.corpus import Corpus
from launch.flops import DENSE, drafter_flop, peak, target_flop
from launch.machine import Gpu
from producer.kernels import linear_layers

MEASURED_PEAK_SHARE = 0.74
PRODUCER_SHARE = 0.80
HYBRID_SHARE = 0.63
CONSUMER_SHARE = 0.74


class Hours(msgspec.Struct, frozen=True):
    """Of the whole run: what each side needs alone, and what the slower side, or both in turn on shared GPUs, makes of
    it. `source`: a table of cards, or what `draftwire tune` measured here (launch/measured_hours.py)."""

    producer: float
    consumer: float
    total: float
    source: Literal["cards", "measured"] = "cards"


def forward_flop(
    facts: Mapping[str, Any], config: Mapping[str, Any], last_tap: int, context: float
) -> tuple[float, float] | None:
    """(FLOP a token, share of the measured peak) of the target up to its last tap; None where they are not known, as
    for experts. Recurrent layers of a hybrid count as attention of the same heads."""
    known = target_flop(facts, last_tap, context)
    if known is not None:
        return known, PRODUCER_SHARE
    if linear_layers(config) and not any("expert" in key for key in config):
        flop = target_flop({**facts, "model_type": DENSE[0]}, last_tap, context)
        return None if flop is None else (flop, HYBRID_SHARE)
    return None


def hours(
    corpus: Corpus,
    passes: float,
    forward: tuple[float, float] | None,
    shape: DrafterShape,
    anchors: int,
    producers: Sequence[Gpu],
    consumers: Sequence[Gpu],
    shared: bool,
) -> Hours | None:
    """Of `passes` over the corpus; `anchors` is what a sample takes at most. None without a known card or target."""
    peaks = [[peak(gpu.name) for gpu in side] for side in (producers, consumers)]
    if forward is None or not all(side and all(side) for side in peaks):
        return None
    rates = [sum(flop for flop in side if flop) * MEASURED_PEAK_SHARE for side in peaks]
    # Of masks that nobody has seen, every token is taken for an answer's.
    used = corpus.anchors if corpus.anchors is not None else int(corpus.samples * min(anchors, corpus.mean_tokens))
    flop, share = forward
    producer = corpus.tokens * flop / (rates[0] * share)
    trained = drafter_flop(msgspec.to_builtins(shape), corpus.tokens, used, corpus.mean_context)
    consumer = trained / (rates[1] * CONSUMER_SHARE)
    total = producer + consumer if shared else max(producer, consumer)
    producer, consumer, total = (passes * seconds / 3600 for seconds in (producer, consumer, total))
    return Hours(producer, consumer, total)


def by_split(
    corpus: Corpus,
    passes: float,
    forward: tuple[float, float] | None,
    shape: DrafterShape,
    anchors: int,
    gpus: Sequence[Gpu],
    tensor_parallel: int,
) -> list[tuple[str, Hours]]:
    """Every "P:C" of the GPUs with its hours, the quickest first; of equal ones the one with fewer
    producers. Empty without known cards or target."""
    found = []
    for count in range(tensor_parallel, len(gpus), tensor_parallel):
        sides = gpus[:count], gpus[count:]
        if (needed := hours(corpus, passes, forward, shape, anchors, *sides, shared=False)) is not None:
            found.append((f"{count}:{len(gpus) - count}", needed))
    return sorted(found, key=lambda each: each[1].total)
