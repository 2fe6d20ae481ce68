"""Ranges and tiles against the definition of who sees what, and FlexAttention under them against `draft_attention`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from consumer.attention import Layout, Rows, draft_attention, visible
from consumer.flex import FlexMasks
from consumer.tiles import TILE, Order, tiles_of, visible_ranges

KINDS = [(False, None), (True, 5), (False, 5), (True, None), (True, 200)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Up to four documents, each with some of its positions as anchors."""
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    anchors = [sorted(draw(st.sets(st.integers(0, length - 1), max_size=12))) for length in lengths]
    document = np.repeat(np.arange(len(lengths)), [len(each) for each in anchors])
    return Layout(np.cumsum([0, *lengths]), document, np.array([a for each in anchors for a in each], np.int64))


def defined(layout: Layout, slots: int, context_rows: int, rows: int, causal: bool, window: int | None) -> Tensor:
    """Bool [draft slots, context_rows + rows] out of `visible`."""
    blocks = len(layout.anchor)
    anchor = torch.from_numpy(layout.anchor).repeat_interleave(slots)
    document = torch.from_numpy(layout.document).repeat_interleave(slots)
    block = torch.arange(blocks).repeat_interleave(slots)
    query = Rows(document, anchor + torch.arange(slots).repeat(blocks), block, anchor, torch.full_like(anchor, slots))
    position = torch.cat([torch.arange(size) for size in np.diff(layout.offsets).tolist()])
    owner = torch.arange(len(layout.offsets) - 1).repeat_interleave(torch.from_numpy(np.diff(layout.offsets)))
    nothing = torch.zeros_like(position)
    context = Rows(owner, position, nothing - 1, nothing, nothing)
    one, keys = Rows(*(x[:, None] for x in query)), [Rows(*(x[None] for x in part)) for part in (context, query)]
    seen = torch.zeros(blocks * slots, context_rows + rows, dtype=torch.bool)
    seen[:, : len(position)] = visible(one, keys[0], causal=causal, window=window)
    seen[:, context_rows : context_rows + blocks * slots] = visible(one, keys[1], causal=causal, window=window)
    return seen


def by_ranges(ranges: np.ndarray, keys: int) -> np.ndarray:
    first, stop, own_first, own_stop = ranges[:, :, None]
    key = np.arange(keys)
    return ((key >= first) & (key < stop)) | ((key >= own_first) & (key < own_stop))


@given(layouts(), st.integers(2, 17), st.sampled_from(KINDS))
def test_ranges_are_what_each_slot_sees(layout: Layout, slots: int, kind: tuple[bool, int | None]) -> None:
    context_rows, rows = 3 * TILE, 7 * TILE
    ranges = visible_ranges(layout, slots, context_rows, rows, causal=kind[0], window=kind[1])
    used = len(layout.anchor) * slots
    seen = by_ranges(ranges, context_rows + rows)
    np.testing.assert_array_equal(seen[:used], defined(layout, slots, context_rows, rows, *kind).numpy())
    # Padding of a tile that is used sees something, if only itself; tiles beyond see nothing.
    edge = -(-used // TILE) * TILE
    assert seen[:edge].any(1).all()
    assert not seen[edge:].any()


@given(layouts(), st.integers(2, 17), st.sampled_from(KINDS))
def test_tiles_cover_what_is_seen_and_whole_ones_are_seen_whole(
    layout: Layout, slots: int, kind: tuple[bool, int | None]
) -> None:
    context_rows, rows = 3 * TILE, 7 * TILE
    ranges = visible_ranges(layout, slots, context_rows, rows, causal=kind[0], window=kind[1])
    tiles = tiles_of(ranges, context_rows)
    seen = by_ranges(ranges, context_rows + rows).reshape(rows // TILE, TILE, -1, TILE).transpose(0, 2, 1, 3)
    some, every = seen.any((2, 3)), seen.all((2, 3))
    partial, full = as_matrix(tiles.partial, some.shape), as_matrix(tiles.full, some.shape)
    assert not (partial & full).any()
    assert (some <= (partial | full)).all()
    assert (full <= every).all()
    # A tile of context that is not seen at all costs nothing.
    assert not (partial & ~some)[:, : context_rows // TILE].any()
    np.testing.assert_array_equal(as_matrix(tiles.partial_of_keys, some.T.shape), partial.T)
    np.testing.assert_array_equal(as_matrix(tiles.full_of_keys, some.T.shape), full.T)


def as_matrix(order: Order, shape: tuple[int, int]) -> np.ndarray:
    chosen = np.zeros(shape, bool)
    for line, count in enumerate(order.many.tolist()):
        chosen[line, order.which[line, :count]] = True
    return chosen


def test_shapes_do_not_depend_on_the_block() -> None:
    empty = Layout(np.array([0, 5]), np.empty(0, np.int64), np.empty(0, np.int64))
    full = Layout(np.array([0, 300]), np.zeros(64, np.int64), np.arange(64))
    ranges = [visible_ranges(each, 4, 3 * TILE, 2 * TILE, causal=True, window=None) for each in (empty, full)]
    shapes = [[table.shape for order in tiles_of(each, 3 * TILE) for table in order] for each in ranges]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", KINDS)
def test_attention_under_the_masks(kind: tuple[bool, int | None]) -> None:
    """Forward only: FlexAttention has no way back on a CPU; tests/gpu has."""
    slots, heads, kv_heads, dim = 5, 4, 2, 16
    masks = FlexMasks({kind}, slots, 250, 200, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for lengths, anchors in (((130, 3, 60), ([0, 4, 5, 129], [], [17, 59])), ((7,), ([3],))):
        document = np.repeat(np.arange(len(lengths)), [len(each) for each in anchors])
        layout = Layout(np.cumsum([0, *lengths]), document, np.array([a for each in anchors for a in each], np.int64))
        blocks, rows = len(document), sum(lengths)
        sizes = [(blocks, slots, heads, dim), *[(blocks, slots, kv_heads, dim)] * 2, *[(rows, kv_heads, dim)] * 2]
        q, k, v, context_k, context_v = (torch.randn(size, generator=generator) for size in sizes)
        masks.fill(layout)
        with torch.no_grad():
            found = masks.attend(q, k, v, context_k, context_v, causal=kind[0], window=kind[1])
        expected = draft_attention(q, k, v, context_k, context_v, layout, causal=kind[0], window=kind[1])
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
