"""Cross-entropy of draft slots through the frozen head, fused so that no logits outlive their chunk.

The head is frozen, so the gradient with respect to the hidden states is all that is wanted and it is formed in the
forward pass: logits of a few hundred rows become loss, then probabilities, then gradient, in one buffer. Only
supervised slots reach the head. Softmax is fp32; both products run in the hidden states' dtype.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from consumer.bounds import CHUNK_ROWS, TILE_ELEMENTS

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

    hidden [A, B, H] from `Drafter.forward`; head [V, H] in hidden's dtype, without gradient; labels int [A, B];
    supervised bool [A, B] with slot 0 false. Zero blocks, or none supervised, give zeros and a zero gradient.
    """
    blocks, slots, _ = hidden.shape
    rows = supervised.flatten().nonzero()[:, 0]
    plan = _Plan(kind, decay_weights(slots, gamma).to(hidden.device), rows // slots, rows % slots, _borders(supervised))
    picked = hidden.flatten(0, 1)[rows]
    loss, weight, correct = _HeadLoss.apply(picked, head, labels.flatten()[rows].long(), plan)  # type: ignore[no-untyped-call]
    zeros = torch.zeros(slots, dtype=torch.int64, device=hidden.device)
    count = supervised.sum(dim=0) if blocks else zeros
    denominator = weight if kind == "ce" else count.sum().float()
    return LossParts(loss, denominator, zeros.index_add(0, plan.slot, correct.long()), count)


@dataclass(frozen=True)
class _Plan:
    """block, slot [R]: where each picked row stands; borders: row ranges of the chunks, each whole draft blocks."""

    kind: LossKind
    decay: Tensor
    block: Tensor
    slot: Tensor
    borders: list[int]

    def weights(self, ce: Tensor, rows: slice) -> Tensor:
        """Weight of each row of one chunk, [r]."""
        slot = self.slot[rows]
        if self.kind == "ce":
            return self.decay[slot]
        block = self.block[rows] - self.block[rows.start]
        grid = torch.zeros(int(block[-1]) + 1, len(self.decay), device=ce.device)
        supervised = torch.zeros_like(grid, dtype=torch.bool)
        grid[block, slot] = ce
        supervised[block, slot] = True
        return dpace_weights(grid, supervised)[block, slot]


def _borders(supervised: Tensor) -> list[int]:
    """Chunk borders in picked rows: as many whole blocks as fit, at least one."""
    limit, borders, total = CHUNK_ROWS[supervised.device.type], [0], 0
    for rows in supervised.sum(dim=1).tolist():
        if total + rows - borders[-1] > limit and total > borders[-1]:
            borders.append(total)
        total += rows
    return borders if total == borders[-1] else [*borders, total]


class _HeadLoss(torch.autograd.Function):
    """(rows [R, H], head [V, H], labels [R], plan) -> loss [], weight sum [], correct bool [R]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, head: Tensor, labels: Tensor, plan: _Plan) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(rows)
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        weight_sum = torch.zeros_like(loss)
        correct = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        widest = max((b - a for a, b in zip(plan.borders, plan.borders[1:], strict=False)), default=0)
        logits = rows.new_empty(widest, head.shape[0])
        tile_rows = max(1, TILE_ELEMENTS[rows.device.type] // head.shape[0])
        wide = logits.new_empty(min(tile_rows, widest), head.shape[0], dtype=torch.float32)
        for a, b in zip(plan.borders, plan.borders[1:], strict=False):
            chunk = torch.mm(rows[a:b], head.t(), out=logits[: b - a])
            ce = _to_residual(chunk, labels[a:b], correct[a:b], wide)
            weights = plan.weights(ce, slice(a, b))
            loss += (weights * ce).sum()
            weight_sum += weights.sum()
            gradient[a:b] = torch.mm(chunk, head).float() * weights[:, None]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight_sum, correct)
        return loss, weight_sum, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * grads[0]).to(gradient.dtype), None, None, None


def _to_residual(logits: Tensor, labels: Tensor, correct: Tensor, wide: Tensor) -> Tensor:
    """CE [r] in fp32; turns logits [r, V] into softmax minus one-hot, in place, fills correct [r]; wide is scratch."""
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
