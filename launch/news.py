"""What of the coordinator's snapshots a person is told in lines of their own, each of them once. Pure."""

from __future__ import annotations

from typing import Any


class News:
    """Follows the snapshots of one start of a run (`launch.tally`)."""

    def __init__(self) -> None:
        self._told = 0
        self._checkpoint_problem: str | None = None

    def of(self, state: dict[str, Any]) -> list[str]:
        """The lines that are new in this snapshot; of very many at once the newest."""
        untold = max(0, len(state["news"]) - state["news_count"] + self._told)
        lines: list[str] = state["news"][untold:]
        self._told = state["news_count"]
        problem = state["checkpoint_problem"]
        if problem != self._checkpoint_problem:
            self._checkpoint_problem = problem
            return [*lines, f"not saved: {problem}; the run goes on, and so do the checkpoints before it"]
        return lines
