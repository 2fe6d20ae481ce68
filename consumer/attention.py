"""Attention of draft blocks over their document's context and their own slots (DFlash, reference section 1.3).

`visible` is the definition, on index tensors. `draft_attention` computes exactly that without ever forming a
[blocks x slots, blocks x slots] mask: the context rows before the anchor and the block's own slots share one softmax,
and rows of other documents cost nothing. A CPU takes one document after the other. On a GPU that would be thousands of
small launches a layer, so there the documents of a block are padded into a few batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consumer.bounds import SCORES_PER_BATCH, SCORES_PER_CHUNK

Chunk = tuple[int, slice, int]  # a document, some of its blocks in order, rows of context that they can see


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

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, *, causal: bool, window: int | None
    ) -> Tensor:
        """`draft_attention` of these blocks."""
        return draft_attention(q, k, v, context_k, context_v, self, causal=causal, window=window)

    def chunks(self, rows_per_block: int, slots: int) -> Iterator[Chunk]:
        """All blocks in order, cut so that scores stay bounded."""
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
    """Attention output [A, B, heads, dim] in q's dtype; products and softmax in fp32; deterministic on a CPU.

    q [A, B, heads, dim]; k, v [A, B, kv_heads, dim]; context_k, context_v [T, kv_heads, dim]; all rotated already.
    Zero blocks are legal and give every input a zero gradient.
    """
    if not len(q):
        # Adds nothing, but keeps every input in the graph: its gradient is zeros and not None.
        return q + sum(x.sum() for x in (k, v, context_k, context_v)) * 0
    attend = batched if q.is_cuda else document_by_document
    return attend(q, k, v, context_k, context_v, layout, causal=causal, window=window).to(q.dtype)


def document_by_document(
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
    """`draft_attention` of at least one block, in fp32, without padding."""
    _, slots, heads, _ = q.shape
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
    return torch.cat(out)


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


def batched(
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
    """`draft_attention` of at least one block, in fp32, a few padded batches of chunks at a time."""
    _, slots, heads, _ = q.shape
    context_k, context_v = context_k.float(), context_v.float()
    out = []
    for chunks in _batches(list(layout.chunks(heads * slots, slots)), heads * slots, slots):
        first = np.array([chunk.start for _, chunk, _ in chunks])
        count = np.array([chunk.stop - chunk.start for _, chunk, _ in chunks])
        stop = np.array([rows for _, _, rows in chunks])
        start = np.zeros_like(stop) if window is None else np.maximum(layout.anchor[first] - window + 1, 0)
        place = np.arange(count.max())
        inside = place < count[:, None]
        block = first[:, None] + np.where(inside, place, 0)
        position = start[:, None] + np.arange((stop - start).max())
        row = np.minimum(layout.offsets[[document for document, _, _ in chunks], None] + position, len(context_k) - 1)
        length = np.full(block.shape, slots) if layout.length is None else layout.length[block]
        host = (block, layout.anchor[block], length, position, row, np.flatnonzero(inside))
        blocks, anchors, used, positions, rows, real = (torch.from_numpy(x).to(q.device) for x in host)
        mask = _batch_mask(anchors, used, positions, slots, causal, window)
        own = [_gather(x, blocks) for x in (q, k, v)]
        context = [_gather(x, rows) for x in (context_k, context_v)]
        out.append(_one_batch(own[0], own[1], own[2], context[0], context[1], mask).flatten(0, 1).index_select(0, real))
    return torch.cat(out)


def _batches(chunks: list[Chunk], rows_per_block: int, slots: int) -> Iterator[list[Chunk]]:
    """Neighbouring chunks, padded to the largest of each batch, within `SCORES_PER_BATCH`."""
    batch: list[Chunk] = []
    blocks = rows = 0
    for chunk in chunks:
        more, wider = max(blocks, chunk[1].stop - chunk[1].start), max(rows, chunk[2])
        if batch and (len(batch) + 1) * more * rows_per_block * (wider + slots) > SCORES_PER_BATCH:
            yield batch
            batch, more, wider = [], chunk[1].stop - chunk[1].start, chunk[2]
        batch.append(chunk)
        blocks, rows = more, wider
    yield batch


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for index [c, n]. Its gradient adds without sorting first, as that of x[index] does not."""
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


def _batch_mask(
    anchors: Tensor, used: Tensor, positions: Tensor, slots: int, causal: bool, window: int | None
) -> Tensor:
    """Bool [chunks, blocks, slots, context + slots]: `visible`, own slots last. anchors, used [chunks, blocks];
    positions [chunks, context], whose padding lies behind every anchor."""
    slot = torch.arange(slots, device=anchors.device)
    context = positions[:, None, None, :]
    seen = (context < anchors[:, :, None, None]).expand(-1, -1, slots, -1)
    own = slot < used[:, :, None, None]
    own = own | torch.eye(slots, dtype=torch.bool, device=anchors.device)
    if causal:
        own = own.tril()
    if window is not None:
        seen = seen & (anchors[:, :, None, None] + slot[:, None] - context < window)
        own = own & ((slot[:, None] - slot).abs() < window)
    return torch.cat([seen, own], dim=-1)


def _one_batch(q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: Tensor) -> Tensor:
    """fp32 [c, a, B, heads, dim] for c chunks of a blocks: `_one_document` with one more axis in front."""
    chunks, blocks, slots, heads, dim = q.shape
    kv_heads, rows = k.shape[3], context_k.shape[1]
    group = heads // kv_heads
    grouped = (q.float() * dim**-0.5).view(chunks, blocks, slots, kv_heads, group, dim)
    flat = grouped.permute(0, 3, 4, 1, 2, 5).reshape(chunks, kv_heads, -1, dim)
    own_q = grouped.permute(0, 1, 3, 4, 2, 5).reshape(chunks, blocks, kv_heads, -1, dim)
    on_context = flat @ context_k.permute(0, 2, 3, 1)
    on_own = own_q @ k.float().permute(0, 1, 3, 4, 2)
    own_scores = on_own.view(chunks, blocks, kv_heads, group, slots, slots).permute(0, 2, 3, 1, 4, 5)
    scores = torch.cat([on_context.view(chunks, kv_heads, group, blocks, slots, rows), own_scores], dim=-1)
    weights = scores.masked_fill_(~mask[:, None, None], float("-inf")).softmax(dim=-1)
    context_weights, own_weights = torch.split(weights, [rows, slots], dim=-1)
    from_context = context_weights.reshape(chunks, kv_heads, group * blocks * slots, rows) @ context_v.transpose(1, 2)
    flat_own = own_weights.permute(0, 3, 1, 2, 4, 5).reshape(chunks, blocks, kv_heads, group * slots, slots)
    from_own = flat_own @ v.float().transpose(2, 3)
    total: Tensor = from_context.view(chunks, kv_heads, group, blocks, slots, dim).permute(0, 3, 4, 1, 2, 5)
    total = total + from_own.view(chunks, blocks, kv_heads, group, slots, dim).permute(0, 1, 4, 2, 3, 5)
    return total.reshape(chunks, blocks, slots, heads, dim)
