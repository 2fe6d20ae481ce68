"""What an optimiser step came to, read from the device when somebody asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """One optimiser step over all ranks. `accuracy` is per draft slot from 1 on; `skipped` when it was not finite."""

    loss: float
    accuracy: list[float]
    lr: float
    grad_norm: float
    anchors: int
    samples: int
    tokens: int
    skipped: bool

    def row(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Pending:
    """A step that the device may still be at."""

    def __init__(self, totals: Tensor, norm: Tensor, sound: Tensor, lr: float) -> None:
        """totals float64 [5 + 2 B]: loss, denominator, anchors, samples, tokens, correct and count per slot."""
        values = torch.cat((totals, norm.double()[None], sound.double()[None]))
        self._lr = lr
        self._done: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
        else:
            self._values = values

    @property
    def known(self) -> bool:
        """Whether nobody has to be waited for: there is no device that computes by itself."""
        return self._done is None

    def result(self) -> StepResult:
        """Waits for the step."""
        if self._done is not None:
            self._done.synchronize()
        *totals, norm, sound = self._values.tolist()
        loss, denominator, anchors, samples, tokens, *slots = totals
        correct, count = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        accuracy = [good / all_ if all_ else 0.0 for good, all_ in zip(correct[1:], count[1:], strict=True)]
        mean = loss / denominator if denominator else 0.0
        return StepResult(mean, accuracy, self._lr, norm, int(anchors), int(samples), int(tokens), not sound)
