"""Whether a child that died is started again, and when. Pure.

Deaths while the whole run makes no progress are a crash loop: it ends after a few. A child that dies again before it
has done any work of its own waits longer each time, however well the others get on: loading a large target over and
over helps nobody.
"""

from __future__ import annotations

from msgspec import Struct

# So often it is started again while the run makes no progress.
RESTARTS = 3
LONGEST_PAUSE_S = 60.0


class _Past(Struct):
    progress: int  # of the run, the furthest at a death
    work: int  # of the child itself, at its last death
    stuck: int = 0  # deaths since the run got on
    idle: int = 0  # deaths since the child did


class Restarts:
    """Counts deaths by name."""

    def __init__(self) -> None:
        self._past: dict[str, _Past] = {}

    def died(self, name: str, progress: int, work: int) -> float | None:
        """Seconds to wait before `name` is started again, or None: it is in a crash loop. `progress` is the step that
        the run has come to; going back to a checkpoint is not progress. `work` grows with what `name` itself does."""
        past = self._past.setdefault(name, _Past(progress - 1, work - 1))
        past.stuck = 1 if progress > past.progress else past.stuck + 1
        past.idle = 1 if work > past.work else past.idle + 1
        past.progress, past.work = max(past.progress, progress), max(past.work, work)
        return None if past.stuck > RESTARTS else min(2.0 ** (past.idle - 1) - 1.0, LONGEST_PAUSE_S)
