"""How evenly the ranks of a run share its work: the slowest over the mean, as planned and as measured. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from protocol.packing import DRAFT_TOKEN_COST
from protocol.plan import Plan

# Means are over so many newest steps.
WINDOW_STEPS = 100


class Balance:
    """Follows what the ranks report of each step. A step counts once all `ranks` have spoken of it."""

    def __init__(self, plan: Plan, ranks: int) -> None:
        self._plan, self._ranks = plan, ranks
        self._busy: dict[int, dict[int, float]] = {}
        self._memory: dict[int, dict[str, Any]] = {}
        self._planned: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._measured: deque[float] = deque(maxlen=WINDOW_STEPS)

    def note(self, row: dict[str, Any]) -> None:
        """A rank's row (consumer/worker.py): its seconds in each of the newest steps, the last of which is `step`."""
        self._memory[row["rank"]] = row
        for step, busy_s in enumerate(row["busy_s"], row["step"] - len(row["busy_s"]) + 1):
            of_step = self._busy.setdefault(step, {})
            of_step[row["rank"]] = busy_s
            if len(of_step) == self._ranks:
                del self._busy[step]
                self._measured.append(imbalance(list(of_step.values())))
                self._planned.append(planned_imbalance(self._plan, step - 1))

    def rewind(self) -> None:
        """All ranks begin again: half-reported steps come anew."""
        self._busy.clear()

    def state(self) -> dict[str, Any]:
        """Its part of a snapshot; None where nothing is known yet."""
        of_rank = [self._memory.get(rank, {}) for rank in range(self._ranks)]
        return {
            "imbalance": _mean(self._measured),
            "imbalance_planned": _mean(self._planned),
            "gpu_memory_bytes": [row.get("gpu_memory_bytes") for row in of_rank],
            "rss_bytes": [row.get("rss_bytes") for row in of_rank],
        }


def imbalance(shares: Sequence[float]) -> float:
    """The largest over the mean, 1.0 when all are equal or nothing was done."""
    return max(shares) * len(shares) / total if (total := sum(shares)) > 0 else 1.0


def planned_imbalance(plan: Plan, step: int) -> float:
    """That of the costs that the plan gives each rank's blocks in 0-based `step`."""
    costs = [0] * plan.params.consumers
    for block in plan.blocks(step):
        costs[block.rank] += block.tokens + DRAFT_TOKEN_COST * block.draft_tokens
    return imbalance(costs)


def _mean(values: deque[float]) -> float | None:
    return sum(values) / len(values) if values else None
