"""Which keys each draft slot sees, as ranges, and which tiles of a score matrix that makes. Pure numpy.

A GPU computes attention in tiles. The keys of a block stand in one row: `context_rows` of packed context, then one key
a draft slot. What a slot sees of it (`consumer.attention.visible`) is one range of context and one of slots, so that
four numbers a query are its mask, and tiles that nobody looks into cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumer.attention import Layout

# Rows and columns of a tile.
TILE = 128

Int32 = NDArray[np.int32]


class Order(NamedTuple):
    """Tiles of one kind, line by line: how many of them stand in a line, int32 [lines], and which, int32 [lines, tiles]
    (so many of each line count)."""

    many: Int32
    which: Int32


class Tiles(NamedTuple):
    """Tiles that are seen in part and those that are seen whole, by rows of queries and, for the way back, by keys."""

    partial: Order
    full: Order
    partial_of_keys: Order
    full_of_keys: Order


def whole_tiles(rows: int) -> int:
    """`rows` rounded up to whole tiles."""
    return -(-rows // TILE) * TILE


def visible_ranges(
    layout: Layout, slots: int, context_rows: int, rows: int, *, causal: bool, window: int | None
) -> Int32:
    """[4, rows]: first and past the last context key of each query, then of its slots' keys; queries are the draft
    slots of `layout`, block by block. Padding sees itself as far as the last used tile reaches, and then nothing: a
    softmax over nothing would not be a number. All slots are in use."""
    position = layout.anchor[:, None] + np.arange(slots)
    start = layout.offsets[layout.document][:, None]
    first, stop = (
        np.broadcast_to(start, position.shape),
        np.broadcast_to(start + layout.anchor[:, None], position.shape),
    )
    slot = np.broadcast_to(np.arange(slots), position.shape)
    own_first, own_stop = np.zeros_like(slot), slot + 1 if causal else np.full_like(slot, slots)
    if window is not None:
        first = np.maximum(first, start + position - window + 1)
        own_first = np.maximum(own_first, slot - window + 1)
        own_stop = np.minimum(own_stop, slot + window)
    block = context_rows + slots * np.arange(len(layout.anchor))[:, None]
    used = position.size
    padding = slice(used, whole_tiles(used))
    ranges = np.zeros((4, rows), np.int32)
    ranges[2, padding] = context_rows + np.arange(padding.start, padding.stop)
    ranges[3, padding] = ranges[2, padding] + 1
    for line, values in enumerate((first, np.maximum(stop, first), block + own_first, block + own_stop)):
        ranges[line, :used] = values.reshape(-1)
    return ranges


def tiles_of(ranges: Int32, context_rows: int) -> Tiles:
    """The tiles of `ranges` [4, rows]; both numbers of rows are multiples of TILE. Lines have room for every tile, so
    that shapes do not depend on the block."""
    lines, across = ranges.shape[1] // TILE, context_rows // TILE
    begins = TILE * np.arange(across)
    first, stop, own_first, own_stop = ranges.reshape(4, lines, TILE)
    seen = np.zeros((lines, across + lines), bool)
    whole = np.zeros_like(seen)
    low, high = first[:, :, None], stop[:, :, None]
    seen[:, :across] = ((low < begins + TILE) & (high > begins) & (low < high)).any(1)
    whole[:, :across] = ((low <= begins) & (high >= begins + TILE)).all(1)
    # Slots see a range of slots around themselves, which crosses a tile's border where a draft block does.
    tile = np.arange(across + lines)
    seen |= (tile >= own_first.min(1)[:, None] // TILE) & (tile <= (own_stop.max(1)[:, None] - 1) // TILE)
    partial = seen & ~whole
    return Tiles(_order(partial), _order(whole), _order(partial.T), _order(whole.T))


def _order(chosen: NDArray[np.bool_]) -> Order:
    index = np.argsort(~chosen, axis=1, kind="stable")
    return Order(chosen.sum(1).astype(np.int32), index.astype(np.int32))
