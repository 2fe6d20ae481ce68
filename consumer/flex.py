"""Attention of a training step on a GPU: all draft blocks of a StateBlock in one FlexAttention kernel, compiled once.

Shapes are those of the largest block whatever a block holds: tiles of padding are never visited, and nothing is
compiled after the first step. Masks are one function each over a buffer that is filled in place: a new function would
be a new kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from consumer.attention import Layout
from consumer.tiles import TILE, Tiles, tiles_of, visible_ranges, whole_tiles
from consumer.upload import upload

Kind = tuple[bool, int | None]  # causal, window: see consumer.attention.visible


class _Mask:
    """The mask of one kind of layer, on the device, for blocks of at most `context_rows` and `rows` draft slots."""

    def __init__(self, kind: Kind, slots: int, context_rows: int, rows: int, device: torch.device) -> None:
        self._kind, self._slots, self._context_rows, self._rows = kind, slots, context_rows, rows
        self._ranges = torch.zeros(4, rows, dtype=torch.int32, device=device)
        empty = np.zeros((4, rows), np.int32)
        tables = _flat(tiles_of(empty, context_rows))
        self._tables = [torch.zeros(table.shape, dtype=torch.int32, device=device)[None, None] for table in tables]
        kv, kv_tiles, full_kv, full_kv_tiles, q, q_tiles, full_q, full_q_tiles = self._tables
        self.block_mask = BlockMask(
            (rows, context_rows + rows),
            kv,
            kv_tiles,
            full_kv,
            full_kv_tiles,
            q,
            q_tiles,
            full_q,
            full_q_tiles,
            BLOCK_SIZE=(TILE, TILE),
            mask_mod=_seen(self._ranges),
        )

    def fill(self, layout: Layout) -> None:
        """Puts the mask of this block in place of the one before; only enqueued."""
        causal, window = self._kind
        ranges = visible_ranges(layout, self._slots, self._context_rows, self._rows, causal=causal, window=window)
        self._ranges.copy_(upload(ranges, self._ranges.device))
        for table, values in zip(self._tables, _flat(tiles_of(ranges, self._context_rows)), strict=True):
            table.copy_(upload(values[None, None], table.device))


class FlexMasks:
    """What `Layout` is elsewhere, for blocks of at most `context_tokens` and `draft_tokens` in blocks of `slots`."""

    def __init__(
        self, kinds: set[Kind], slots: int, context_tokens: int, draft_tokens: int, device: torch.device
    ) -> None:
        self.context_rows, self.rows = whole_tiles(context_tokens), whole_tiles(draft_tokens)
        self._masks = {kind: _Mask(kind, slots, self.context_rows, self.rows, device) for kind in kinds}
        # On a CPU, for tests, as it is: there is no kernel to be had.
        self._attention = torch.compile(_attention, dynamic=False) if device.type == "cuda" else _attention

    def fits(self, layout: Layout, slots: int) -> bool:
        return int(layout.offsets[-1]) <= self.context_rows and len(layout.anchor) * slots <= self.rows

    def fill(self, layout: Layout) -> None:
        """Makes these the masks of `layout`, which must fit."""
        for mask in self._masks.values():
            mask.fill(layout)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, *, causal: bool, window: int | None
    ) -> Tensor:
        """`consumer.attention.draft_attention` under the filled masks; same shapes."""
        blocks, slots, heads, dim = q.shape
        queries = _padded([(q.flatten(0, 1), self.rows)])
        keys = _padded([(context_k, self.context_rows), (k.flatten(0, 1), self.rows)])
        values = _padded([(context_v, self.context_rows), (v.flatten(0, 1), self.rows)])
        out = self._attention(queries, keys, values, self._masks[causal, window].block_mask)
        return out[0, :, : blocks * slots].transpose(0, 1).reshape(blocks, slots, heads, dim)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def _flat(tiles: Tiles) -> list[NDArray[np.int32]]:
    return [table for order in tiles for table in order]


def _seen(ranges: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether query row `q` sees key `k`: in one of its two ranges, int32 [4, rows]."""

    def seen(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        context = (k >= ranges[0, q]) & (k < ranges[1, q])
        slot = (k >= ranges[2, q]) & (k < ranges[3, q])
        return context | slot

    return seen


def _padded(parts: list[tuple[Tensor, int]]) -> Tensor:
    """[1, heads, rows, dim] of parts [n, heads, dim], each padded to its number of rows."""
    pieces: list[Tensor] = []
    for part, rows in parts:
        pieces += [part, part.new_zeros(rows - len(part), *part.shape[1:])]
    return torch.cat(pieces).transpose(0, 1)[None]
