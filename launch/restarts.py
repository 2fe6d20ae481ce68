"""Whether a child that died is started again, and when. Pure.

Deaths without any progress between them are a crash loop: it ends after a few, each after a longer pause. A child that
dies now and then, while the run gets on, is started again for as long as that goes on.
"""

from __future__ import annotations

# So often it is started again while the run makes no progress.
RESTARTS = 3


class Restarts:
    """Counts deaths by name."""

    def __init__(self) -> None:
        self._deaths: dict[str, tuple[int, int]] = {}  # furthest progress at a death, deaths since it grew

    def died(self, name: str, progress: int) -> float | None:
        """Seconds to wait before `name` is started again, or None: it is in a crash loop. `progress` is the step that
        the run has come to; going back to a checkpoint is not progress."""
        furthest, deaths = self._deaths.get(name, (progress - 1, 0))
        deaths = 1 if progress > furthest else deaths + 1
        self._deaths[name] = (max(furthest, progress), deaths)
        return None if deaths > RESTARTS else 2.0 ** (deaths - 1) - 1.0
