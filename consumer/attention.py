"""Attention of draft blocks over their document's context and their own slots (DFlash, reference section 1.3).

`visible` is the definition, on index tensors. `draft_attention` computes exactly that without ever forming a
[blocks x slots, blocks x slots] mask: block by block, the context rows before the anchor and the block's own slots
share one softmax, and rows of other documents cost nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Scores held at once, per softmax: bounds memory at any anchor count (fp32, so four bytes each).
SCORES_PER_CHUNK = 1 << 24


@dataclass(frozen=True)
class Layout:
    """Where each of A draft blocks stands among n documents packed into T context rows. Host arrays, int64.

    offsets [n + 1]: document borders in the packed context. document [A]: non-decreasing. anchor [A]: position in
    the document, ascending within one; the block sees context positions < anchor. length [A]: slots in use, None
    when all are (slots past it are not seen by the others).
    """

    offsets: NDArray[np.int64]
    document: NDArray[np.int64]
    anchor: NDArray[np.int64]
    length: NDArray[np.int64] | None = None

    def chunks(self, rows_per_block: int, slots: int) -> Iterator[tuple[int, slice, int]]:
        """(document, its blocks, rows of context they can see) in order, cut so that scores stay bounded."""
        counts = np.bincount(self.document, minlength=len(self.offsets) - 1)
        first = 0
        for document, count in enumerate(counts.tolist()):
            last = first + count
            while first < last:
                stop = last
                # Anchors ascend, so fewer blocks also means fewer context rows; halving ends quickly.
                while stop - first > 1 and self._scores(first, stop, rows_per_block, slots) > SCORES_PER_CHUNK:
                    stop = first + (stop - first + 1) // 2
                yield document, slice(first, stop), int(self.anchor[stop - 1])
                first = stop

    def _scores(self, first: int, stop: int, rows_per_block: int, slots: int) -> int:
        return (stop - first) * rows_per_block * (int(self.anchor[stop - 1]) + slots)


class Rows(NamedTuple):
    """Index tensors (int64, one shape) of rows to compare: context rows have block -1, anchor and length unused."""

    document: Tensor
    position: Tensor
    block: Tensor
    anchor: Tensor
    length: Tensor


def visible(query: Rows, key: Rows, *, causal: bool, window: int | None) -> Tensor:
    """Whether a draft slot sees a key row: the definition. Bool, of the two arguments' broadcast shape.

    Context: same document, position strictly before the anchor. Slots: same block, within its length (a slot always
    sees itself), and up to the query if causal. Either: less than `window` tokens away (the window counts itself).
    """
    context = key.position < query.anchor
    slot = (key.block == query.block) & (
        (key.position - query.anchor < query.length) | (key.position == query.position)
    )
    if causal:
        slot = slot & (key.position <= query.position)
    seen = (key.document == query.document) & torch.where(key.block < 0, context, slot)
    if window is not None:
        seen = seen & ((query.position - key.position).abs() < window)
    return seen


def draft_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    layout: Layout,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Attention output [A, B, heads, dim] in q's dtype; products and softmax in fp32; deterministic.

    q [A, B, heads, dim]; k, v [A, B, kv_heads, dim]; context_k, context_v [T, kv_heads, dim]; all rotated already.
    Zero blocks are legal and give every input a zero gradient.
    """
    blocks, slots, heads, _ = q.shape
    if not blocks:
        # Adds nothing, but keeps every input in the graph: its gradient is zeros and not None.
        return q + sum(x.sum() for x in (k, v, context_k, context_v)) * 0
    lengths = np.diff(layout.offsets).tolist()
    keys, values = torch.split(context_k, lengths), torch.split(context_v, lengths)
    out = []
    for document, chunk, stop in layout.chunks(heads * slots, slots):
        anchors = torch.from_numpy(layout.anchor[chunk]).to(q.device)
        used = None if layout.length is None else torch.from_numpy(layout.length[chunk]).to(q.device)
        start = 0 if window is None else max(0, int(layout.anchor[chunk.start]) - window + 1)
        mask = _mask(anchors, used, slots, range(start, stop), causal, window)
        context = keys[document][start:stop], values[document][start:stop]
        out.append(_one_document(q[chunk], k[chunk], v[chunk], *context, mask))
    return torch.cat(out).to(q.dtype)


def _mask(anchors: Tensor, used: Tensor | None, slots: int, context: range, causal: bool, window: int | None) -> Tensor:
    """Bool [blocks, slots, context + slots]: `visible` for the blocks of one document, own slots last."""
    device = anchors.device
    slot = torch.arange(slots, device=device)
    position = torch.arange(context.start, context.stop, device=device)
    seen = (position < anchors[:, None])[:, None, :].expand(-1, slots, -1)
    own = torch.ones(slots, slots, dtype=torch.bool, device=device)
    if causal:
        own = own.tril()
    if window is not None:
        distance = anchors[:, None, None] + slot[:, None] - position
        seen = seen & (distance < window)
        own = own & ((slot[:, None] - slot).abs() < window)
    own = own.expand(len(anchors), -1, -1)
    if used is not None:
        own = own & ((slot < used[:, None])[:, None, :] | torch.eye(slots, dtype=torch.bool, device=device))
    return torch.cat([seen, own], dim=-1)


def _one_document(q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: Tensor) -> Tensor:
    """fp32 [a, B, heads, dim] for a blocks of one document; query heads are grouped by the kv head they share."""
    blocks, slots, heads, dim = q.shape
    kv_heads = k.shape[2]
    rows = context_k.shape[0]
    grouped = (q.float() * dim**-0.5).view(blocks, slots, kv_heads, heads // kv_heads, dim).permute(2, 3, 0, 1, 4)
    flat = grouped.reshape(kv_heads, -1, dim)
    own_q = grouped.permute(2, 0, 1, 3, 4).reshape(blocks, kv_heads, -1, dim)
    on_context = flat @ context_k.float().permute(1, 2, 0)
    on_own = own_q @ k.float().permute(0, 2, 3, 1)
    shape = (kv_heads, heads // kv_heads, blocks, slots)
    own_shape = (blocks, kv_heads, heads // kv_heads, slots, slots)
    scores = torch.cat([on_context.view(*shape, rows), on_own.view(own_shape).permute(1, 2, 0, 3, 4)], dim=-1)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    context_weights, own_weights = torch.split(weights, [rows, slots], dim=-1)
    from_context = context_weights.reshape(*flat.shape[:2], rows) @ context_v.float().transpose(0, 1)
    from_own = own_weights.permute(2, 0, 1, 3, 4).reshape(blocks, kv_heads, -1, slots) @ v.float().transpose(1, 2)
    total: Tensor = from_context.view(*shape, dim).permute(2, 0, 1, 3, 4) + from_own.view(
        blocks, kv_heads, heads // kv_heads, slots, dim
    )
    return total.permute(0, 3, 1, 2, 4).reshape(blocks, slots, heads, dim)
