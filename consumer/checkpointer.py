"""When the first rank takes checkpoints, and what of it the step loop has to wait for.

The loop waits for a copy into host memory, no longer. That memory holds one snapshot, so a scheduled checkpoint whose
time comes while the one before is still being written is postponed: it is taken at the first step boundary at which
the writer is free, and boundaries of others that pass meanwhile are part of the same postponement. Three cannot be
postponed, and wait for the writer: the last one, the one for a stop, and the best so far. The best must be the weights
that were measured; measuring them took longer than most writes, and went on beside this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from consumer.checkpoint import Snapshot
from consumer.drafter import Drafter
from consumer.saver import Saver
from consumer.staging import Staging
from consumer.state import live_state
from protocol.cursor import Cursor


class Checkpointer:
    """Takes checkpoints every so many steps. `saved_step` is the boundary that is on the disk already, `postponed` is
    called with the step of a checkpoint that has to wait, once until it is taken."""

    def __init__(
        self,
        saver: Saver,
        drafter: Drafter,
        optimiser: torch.optim.Optimizer,
        target: str,
        every: int,
        saved_step: int,
        postponed: Callable[[int], None],
    ) -> None:
        self._saver, self._drafter, self._optimiser, self._target = saver, drafter, optimiser, target
        self._every, self._saved_step, self._postponed = every, saved_step, postponed
        self._waiting = False
        parameters = dict(drafter.named_parameters())
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._staging = Staging(shapes, next(iter(parameters.values())).device)

    def due(self, step: int) -> bool:
        """Whether the boundary before `step` has a checkpoint to take or to postpone. Once true it stays true until
        `scheduled` is called."""
        return step % self._every == 0 or (self._waiting and not self._saver.busy)

    def scheduled(self, step: int, cursor: Cursor, best: float, again: bool = False) -> None:
        """A checkpoint that is due: taken if the writer is free, else postponed. `again`: although it is there already,
        since something besides the weights is new."""
        self._saved_step = -1 if again else self._saved_step
        if not self._saver.busy:
            self.take(step, cursor, best)
        elif not self._waiting:
            self._waiting = True
            self._postponed(step)

    def take(self, step: int, cursor: Cursor, best: float, is_best: bool = False, again: bool = False) -> None:
        """A checkpoint of this very boundary, as soon as the writer is free; nothing if it is there already, unless it
        is to be written `again`. `best` is
        the highest acceptance length so far, `is_best` whether these weights reached it. Raises what ended the writing
        of the one before, unless it was an OSError."""
        if step == self._saved_step and not again:
            return
        started = time.monotonic()
        self._saver.wait()  # it reads the memory that the copy goes to
        state = self._staging.capture(live_state(self._drafter, self._optimiser))
        snapshot = Snapshot(self._drafter.shape, self._drafter.compute_dtype, state, cursor, self._target, best)
        self._saver.submit(snapshot, is_best, time.monotonic() - started)
        self._saved_step, self._waiting = step, False


def postponement(step: int) -> dict[str, Any]:
    """The row for a checkpoint that is not taken at its step."""
    text = f"checkpoint at step {step} is postponed: the one before is still being written"
    return {"what": "checkpoint postponed", "text": text, "step": step}
