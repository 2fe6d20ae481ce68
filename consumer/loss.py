"""Cross-entropy of draft slots through the frozen head, fused so that no logits outlive their chunk.

The head is frozen, so the gradient with respect to the hidden states is all that is wanted and it is formed in the
forward pass: logits of a few hundred rows become loss, then probabilities, then gradient, in one buffer. Only
supervised slots reach the head. Softmax is fp32; both products run in the hidden states' dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from consumer.bounds import CHUNK_ROWS, TILE_ELEMENTS
from consumer.upload import upload

LossKind = Literal["ce", "dpace"]
DPACE_ALPHA = 0.5


@dataclass(frozen=True)
class LossParts:
    """Unnormalised sums: add them over micro-steps and ranks, then divide once.

    loss: fp32 [], differentiable: sum of weight * CE. denominator: fp32 []: sum of weights for "ce", number of
    supervised slots for "dpace" (whose weights carry meaning in their size; a denominator by rows would make the
    gradient grow with the number of anchors and leave its length to the clip). correct, count: int64 [B], per slot,
    supervised slots whose argmax is the label, and supervised slots. Slot 0 is always zero.
    """

    loss: Tensor
    denominator: Tensor
    correct: Tensor
    count: Tensor


def default_gamma(block_size: int) -> float:
    """7, 5, 4 for blocks of 16, 10, 8 as published (reference section 3.1); linear between, and on below and above.

    Below 10 the published slope is 1/2 per slot, above it 1/3; never under 1.
    """
    slope = 1 / 2 if block_size <= 10 else 1 / 3
    return max(1.0, 5.0 + (block_size - 10) * slope)


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """fp32 [B]: exp(-(k - 1) / gamma) for slot k >= 1 and 0 for slot 0 (paper section 4.2)."""
    weights = torch.exp(-(torch.arange(block_size, dtype=torch.float64) - 1) / gamma)
    weights[0] = 0
    return weights.float()


def dpace_weights(ce: Tensor, supervised: Tensor, alpha: float = DPACE_ALPHA) -> Tensor:
    """D-PACE slot weights, fp32 [blocks, B] from CE and supervision of the same shape (arXiv 2605.18810, eq. 7 to 9).

    s_k = (1 - alpha) exp(-CE_k) + alpha; w_k = sum over m >= k of product over i <= m of s_i. Unsupervised slots
    count as 1 in products and as nothing in sums.
    """
    smoothed = torch.where(supervised, (1 - alpha) * torch.exp(-ce) + alpha, 1.0)
    reached = torch.where(supervised, smoothed.cumprod(dim=-1), 0.0)
    return torch.where(supervised, reached.flip(-1).cumsum(dim=-1).flip(-1), 0.0)


def draft_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, supervised: Tensor, *, kind: LossKind = "ce", gamma: float = 7.0
) -> LossParts:
    """Loss sums of A draft blocks.

    hidden [A, B, H] from `Drafter.forward`; head [V, H] in hidden's dtype, without gradient. labels int [A, B] and
    supervised bool [A, B], slot 0 false, are host tensors: how the work is cut is decided there, so that nobody waits
    for a GPU. Zero blocks, or none supervised, give zeros and a zero gradient.
    """
    device, slots = hidden.device, hidden.shape[1]
    rows = supervised.flatten().nonzero()[:, 0]
    block, slot = upload(rows // slots, device), upload(rows % slots, device)
    plan = _Plan(kind, upload(decay_weights(slots, gamma), device), block, slot, _chunks(supervised, device.type))
    picked = hidden.flatten(0, 1).index_select(0, upload(rows, device))
    label = upload(labels.flatten()[rows].long(), device)
    loss, weight, correct = _HeadLoss.apply(picked, head, label, plan)  # type: ignore[no-untyped-call]
    count = upload(supervised.sum(dim=0), device)
    denominator = weight if kind == "ce" else count.sum().float()
    return LossParts(loss, denominator, torch.zeros_like(count).index_add(0, slot, correct.long()), count)


class _Chunk(NamedTuple):
    """Some whole draft blocks: their picked rows, and the blocks from `first` up to `stop`."""

    rows: slice
    first: int
    stop: int


@dataclass(frozen=True)
class _Plan:
    """block, slot [R]: where each picked row stands."""

    kind: LossKind
    decay: Tensor
    block: Tensor
    slot: Tensor
    chunks: list[_Chunk]

    def weights(self, ce: Tensor, chunk: _Chunk) -> Tensor:
        """Weight of each row of one chunk, [r]."""
        slot = self.slot[chunk.rows]
        if self.kind == "ce":
            return self.decay[slot]
        block = self.block[chunk.rows] - chunk.first
        grid = torch.zeros(chunk.stop - chunk.first, len(self.decay), device=ce.device)
        supervised = torch.zeros_like(grid, dtype=torch.bool)
        grid[block, slot] = ce
        supervised[block, slot] = True
        return dpace_weights(grid, supervised)[block, slot]


def _chunks(supervised: Tensor, device_type: str) -> list[_Chunk]:
    """As many whole blocks each as fit, at least one."""
    chunks: list[_Chunk] = []
    first = start = total = 0
    for block, rows in enumerate(supervised.sum(dim=1).tolist()):
        if total + rows - start > CHUNK_ROWS[device_type] and total > start:
            chunks.append(_Chunk(slice(start, total), first, block))
            first, start = block, total
        total += rows
    return chunks if total == start else [*chunks, _Chunk(slice(start, total), first, len(supervised))]


class _HeadLoss(torch.autograd.Function):
    """(rows [R, H], head [V, H], labels [R], plan) -> loss [], weight sum [], correct bool [R]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, head: Tensor, labels: Tensor, plan: _Plan) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(rows)
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        weight_sum = torch.zeros_like(loss)
        correct = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        widest = max((chunk.rows.stop - chunk.rows.start for chunk in plan.chunks), default=0)
        logits = rows.new_empty(widest, head.shape[0])
        to_residual = _residual_of(logits)
        for chunk in plan.chunks:
            part = torch.mm(rows[chunk.rows], head.t(), out=logits[: chunk.rows.stop - chunk.rows.start])
            ce = to_residual(part, labels[chunk.rows], correct[chunk.rows])
            weights = plan.weights(ce, chunk)
            loss += (weights * ce).sum()
            weight_sum += weights.sum()
            gradient[chunk.rows] = torch.mm(part, head).float() * weights[:, None]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight_sum, correct)
        return loss, weight_sum, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * grads[0]).to(gradient.dtype), None, None, None


def _residual_of(logits: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The function (logits [r, V], labels [r], correct [r]) -> CE [r] for the device; it turns logits into softmax
    minus one-hot, in place, and fills correct. `logits` has the most rows that there will be."""
    if logits.is_cuda:
        from consumer.residual import to_residual

        return to_residual
    tile_rows = min(max(1, TILE_ELEMENTS // logits.shape[1]), len(logits))
    wide = logits.new_empty(tile_rows, logits.shape[1], dtype=torch.float32)
    return partial(_to_residual, wide=wide)


def _to_residual(logits: Tensor, labels: Tensor, correct: Tensor, wide: Tensor) -> Tensor:
    """`_residual_of` on a CPU; wide, fp32 [tile, V], is scratch."""
    ce = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), len(wide)):
        tile, label = logits[start : start + len(wide)], labels[start : start + len(wide), None]
        p = wide[: len(tile)].copy_(tile)
        at_label = p.gather(1, label)
        rival = p.scatter_(1, label, float("-inf")).amax(dim=1, keepdim=True)
        p.scatter_(1, label, at_label)
        top = torch.maximum(at_label, rival)
        _mark_correct(tile, label[:, 0], at_label[:, 0], rival[:, 0], correct[start : start + len(wide)])
        torch.softmax(p, dim=1, out=p)
        # The largest probability is at least 1/V, so its logarithm gives the normaliser without another pass.
        ce[start : start + len(wide)] = (top - p.amax(dim=1, keepdim=True).log() - at_label)[:, 0]
        tile.copy_(p.scatter_add_(1, label, p.new_full(label.shape, -1.0)))
    return ce


def _mark_correct(logits: Tensor, labels: Tensor, at_label: Tensor, rival: Tensor, correct: Tensor) -> None:
    """Fills correct [r]: whether the label's logit, at_label [r], is the greedy choice; rival [r] is the best other."""
    torch.gt(at_label, rival, out=correct)
    # bf16 logits tie often and greedy decoding takes the first of them. Only ties are searched: argmax is slow on a
    # CPU, and run on every row that is right it made steps slower the better the drafter became.
    tied = (at_label == rival).nonzero()[:, 0]
    correct[tied] = logits[tied].argmax(dim=1) == labels[tied]
