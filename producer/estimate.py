"""A random sample of training rows, tokenised: what a corpus will come to before all of it is prepared.

The rows are drawn evenly from all of them, never taken from the beginning: files are often sorted by length.
"""

from __future__ import annotations

import math
from typing import Any

from producer.config import DataConfig
from producer.rows import SkipRow
from producer.samples import Item, SampleMaker
from protocol.dataset import eligible_anchors
from protocol.keyed import words

# Set the draws apart from every other draw.
_DRAW, _COPIES = 7, 8


def draw_rows(
    data: DataConfig, tokenizer: Any, facts: dict[str, Any], wanted: int
) -> tuple[list[list[tuple[int, int]]], int]:
    """(tokens, eligible anchors) of the sample that each of `wanted` drawn rows makes, no entry for a skipped one, and
    how many rows there are. Rows behind the first `data.max_samples` readable ones are none.

    Every row is read, only the drawn ones are tokenised, and no more than those are held. Raises RequestError.
    """
    maker = SampleMaker(tokenizer, int(facts["vocab_size"]), data.limit)
    held: list[Item | None] = []
    rows = readable = 0
    for found in maker.items(data.train):
        if readable == data.max_samples:
            break
        item = None if isinstance(found, tuple) else found
        readable += item is not None
        rows += 1
        # Vitter's algorithm R: row number n replaces one of those held with the probability wanted / n.
        if len(held) < wanted:
            held.append(item)
        elif (place := int(words(1, _DRAW, rows)[0] % rows)) < wanted:
            held[place] = item
    return [_measured(maker, item) for item in held], rows


def _measured(maker: SampleMaker, item: Item | None) -> list[tuple[int, int]]:
    if item is None:
        return []
    (made,) = maker.samples([item])
    if isinstance(made, SkipRow):
        return []
    kept = [(sample.ids[: maker.max_length], sample.mask[: maker.max_length]) for sample in made.samples]
    return [(len(ids), eligible_anchors(mask)) for ids, mask in kept for _ in range(_copies(item))]


def _copies(item: Item) -> int:
    """How often a row counts: a part of its source's weight is a chance, drawn from the row's line."""
    whole = math.floor(item.source.weight)
    chance = float(words(1, _COPIES, item.row.line)[0]) / 2**64
    return whole + (chance < item.source.weight - whole)
