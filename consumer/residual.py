"""Logits into cross-entropy and its gradient on a GPU: two passes over a row, the second out of the cache.

Triton, which comes with PyTorch's CUDA builds; imported only where there is a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 2048
_WARPS = 8


def to_residual(logits: Tensor, labels: Tensor, correct: Tensor) -> Tensor:
    """CE [r] in fp32; turns logits [r, V] into softmax minus one-hot, in place, and fills correct [r], bool: whether
    the label is the greedy choice, the first of equals. A row with NaN has CE NaN."""
    ce = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _residual[(len(logits),)](
            logits, labels, ce, correct, logits.shape[1], logits.stride(0), COLUMNS=_COLUMNS, num_warps=_WARPS
        )
    return ce


@triton.jit  # type: ignore[untyped-decorator]
def _residual(logits, labels, ce, correct, vocabulary, stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    label = tl.load(labels + row)
    at_label = tl.load(line + label).to(tl.float32)
    lane = tl.arange(0, COLUMNS)
    # Each lane keeps a maximum, where it stands and a sum of its own; finite at first, as inf - inf is not a number.
    top = tl.full([COLUMNS], -3.0e38, tl.float32)
    place = tl.zeros([COLUMNS], tl.int32)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        column = start + lane
        x = tl.load(line + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        place = tl.where(x > top, column, place)
        top = higher
    highest = tl.max(top, axis=0)
    total_of_row = tl.sum(total * tl.exp(top - highest), axis=0)
    first = tl.min(tl.where(top == highest, place, vocabulary), axis=0)
    tl.store(ce + row, tl.log(total_of_row) + highest - at_label)
    tl.store(correct + row, first == label)
    for start in range(0, vocabulary, COLUMNS):
        column = start + lane
        inside = column < vocabulary
        x = tl.load(line + column, mask=inside, other=0.0).to(tl.float32)
        p = tl.exp(x - highest) / total_of_row
        p = tl.where(column == label, p - 1.0, p)
        tl.store(line + column, p.to(logits.dtype.element_ty), mask=inside)
