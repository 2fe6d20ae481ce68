"""A clock that stands still while its own process is paused: what others did in that time is not known."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_TURN_S = 1.0


class AwakeClock:
    """Seconds since its making, as a loop sees them that reads it in each of its turns, which are shorter than
    LONGEST_TURN_S unless the process is stopped or starved."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._read, self._awake_s = clock, clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._awake_s += min(now - self._read, LONGEST_TURN_S)
        self._read = now
        return self._awake_s
