"""Steps that were skipped because loss or gradient was not finite: what a run says of them, and when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from protocol.errors import FinalError

# The share of skipped steps is of so many newest ones; those that a start has not made yet count as sound.
WINDOW_STEPS = 100
NAMED_SAMPLES = 8


class Skips:
    """Counts the skipped steps of one start of a rank. The reduction tells all ranks the same of a step, so all of them
    come to the same verdict at the same step."""

    def __init__(self, limit_share: float) -> None:
        self._limit_share = limit_share
        self._window: deque[bool] = deque(maxlen=WINDOW_STEPS)

    def note(self, skipped: bool) -> None:
        """One more step. Raises FinalError when more than the limit of the newest steps were skipped."""
        self._window.append(skipped)
        count = sum(self._window)
        if skipped and count > self._limit_share * WINDOW_STEPS:
            raise FinalError(
                f"{count} of the newest {WINDOW_STEPS} steps were skipped because loss or gradient was not finite: "
                f"that is over train.skip_limit = {self._limit_share:g}. metrics.jsonl names the samples of each; look "
                "at them, or lower train.lr, and resume from the last checkpoint"
            )


def skipped_row(step: int, loss: float, grad_norm: float, samples: Sequence[int]) -> dict[str, Any]:
    """The event of a skipped step, the `step`-th: what was not finite, and on which samples of the dataset."""
    named = ", ".join(map(str, samples[:NAMED_SAMPLES])) + (", ..." if len(samples) > NAMED_SAMPLES else "")
    text = f"step {step} changed no weight: loss {loss:g}, gradient norm {grad_norm:g}; samples {named}"
    return {"what": "skipped", "text": text, "step": step, "sample_ids": list(samples)}
