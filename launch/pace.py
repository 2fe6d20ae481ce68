"""When a run ends other than with its plan, and what GO says of it: the hours of train.max_hours, and a cool-down that
was ordered. Only the coordinator has one of these; the clock is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from protocol.gate import COOLDOWN, FINISH, STOP, VerifiedGate
from protocol.job import Job
from protocol.messages import Go
from protocol.pace import cooldown_end
from protocol.units import show_seconds


class Pace:
    """Of one start of a run with `total_steps` in its plan. Hours count from its first GO, on top of those of earlier
    starts; `clock` must stand still while the machine does. `rows` holds (kind, row) pairs for metrics.jsonl."""

    def __init__(self, job: Job, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []
        self.cooldown_step = job.cooldown_step
        self._max_s, self._before_s, self._total_steps, self._clock = job.max_s, job.trained_s, total_steps, clock
        self._began_s: float | None = None

    @property
    def trained_s(self) -> float:
        """Seconds that the run has trained, waits included."""
        return self._before_s + (self._clock() - self._began_s if self._began_s is not None else 0.0)

    @property
    def left_s(self) -> float | None:
        """Seconds that it may still train; None: as many as it takes."""
        return max(0.0, self._max_s - self.trained_s) if self._max_s is not None else None

    @property
    def last_step(self) -> int:
        """The number of steps after which the run ends, if its hours last."""
        return self._total_steps if self.cooldown_step is None else cooldown_end(self.cooldown_step, self._total_steps)

    def why_over(self, step: int) -> str | None:
        """Why the run is done at the boundary before `step`; None when it is not."""
        if self.left_s == 0.0:
            return f"the {show_seconds(self._max_s or 0.0)} of train.max_hours are over"
        if step >= self.last_step:
            return "all steps are done" if self.cooldown_step is None else "the cool-down is over"
        return None

    def go(self, gate: VerifiedGate) -> Go | None:
        """The next micro-step that the gate lets through, with what every rank has to know for it."""
        why = self.why_over(gate.next[0])
        if why is not None and not gate.finished:
            gate.order([FINISH])
        if (ahead := gate.go()) is None:
            return None
        stop = STOP in ahead.orders
        finish = FINISH in ahead.orders and not stop
        if COOLDOWN in ahead.orders:
            self._cool_down(ahead.step)
        if finish:
            text = f"{why}: the run ends after step {ahead.step}"
            self.rows.append(("event", {"what": "finish", "text": text, "step": ahead.step}))
        elif not stop and self._began_s is None:
            self._began_s = self._clock()
        return Go(
            step=ahead.step,
            micro_step=ahead.micro_step,
            stop=stop or finish,
            finish=finish,
            trained_s=self.trained_s,
            cooldown_step=-1 if self.cooldown_step is None else self.cooldown_step,
        )

    def _cool_down(self, step: int) -> None:
        """Lets the rate fall from `step` on, unless it does already, or would not come to the floor any sooner."""
        if self.cooldown_step is None and cooldown_end(step, self._total_steps) < self._total_steps:
            self.cooldown_step = step
            text = f"the learning rate falls from step {step} on, and the run ends after step {self.last_step}"
        else:
            text = f"no other cool-down: the run ends after step {self.last_step} as it is"
        row = {"what": "cooldown", "text": text, "step": step, "last_step": self.last_step}
        self.rows.append(("event", row))
