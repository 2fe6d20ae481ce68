"""From the times of blocks and steps of one rank (consumer/alone.py) to a TrainerRate. Pure."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

from launch.measurements import TrainerRate

CHUNKS = 4


def fit_trainer(found: dict[str, Any], need_bytes: int) -> TrainerRate:
    """`found`: costs, blocks_s, finishes_s, and steps with cost, blocks and seconds.

    A block's time is a line over its cost, neither part below 0. Whole steps are run without waiting in between, so all
    parts are scaled to what those took.
    """
    costs, blocks_s = np.array(found["costs"]), np.array(found["blocks_s"])
    block_s, cost_s = _line(costs, blocks_s)
    finish_s = statistics.median(found["finishes_s"])
    expected = [block_s * step["blocks"] + cost_s * step["cost"] + finish_s for step in found["steps"]]
    taken = [step["seconds"] for step in found["steps"]]
    scale = sum(taken) / sum(expected)
    ratios = [one / other for one, other in zip(taken, expected, strict=True)]
    size = -(-len(ratios) // CHUNKS)
    parts = [statistics.fmean(ratios[start : start + size]) for start in range(0, len(ratios), size)]
    spread = statistics.pstdev(parts) / statistics.fmean(parts)
    return TrainerRate(
        cost_s=cost_s * scale,
        block_s=block_s * scale,
        finish_s=finish_s * scale,
        spread=min(spread, 0.9),
        need_bytes=need_bytes,
    )


def _line(costs: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Least squares, both parts at least 0: seconds at no cost, and for each unit of it."""
    mean_cost, mean_s = float(costs.mean()), float(seconds.mean())
    varied = float(((costs - mean_cost) ** 2).sum())
    slope = float(((costs - mean_cost) * (seconds - mean_s)).sum()) / varied if varied else math.inf
    if slope < 0:
        return mean_s, 0.0
    if (offset := mean_s - slope * mean_cost) >= 0:
        return offset, slope
    return 0.0, float((costs * seconds).sum() / (costs**2).sum())
