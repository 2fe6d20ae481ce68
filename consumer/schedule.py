"""Learning-rate schedules: pure functions of the step and of what GO says of the run's pace."""

from __future__ import annotations

import math
from dataclasses import dataclass

from consumer.config import TrainConfig
from protocol.pace import DECAY_SHARE, cooldown_end

# Warm-up, stable, decay: the last fifth falls linearly to a tenth (the best published independent recipe).
WSD_FLOOR = 0.1


@dataclass(frozen=True)
class Pace:
    """What decides the rate beside the step; GO tells every rank the same. `hours_share` is the part of train.max_hours
    that is over (0 without), `cooldown_step` the step from which on the rate falls."""

    hours_share: float = 0.0
    cooldown_step: int | None = None


STEADY = Pace()


def learning_rate(step: int, total_steps: int, config: TrainConfig, pace: Pace = STEADY) -> float:
    """The rate of the update made at 0-based `step` of `total_steps`: linear warm-up, then cosine to 0 or WSD.

    With hours the schedule stands where the larger of both shares puts it, of the steps or of the hours: how many steps
    the hours are good for is not known. A cool-down falls linearly from the rate at its first step to a tenth of that.
    """
    rate = _scheduled(max(step, min(pace.hours_share, 1.0) * total_steps), total_steps, config)
    start = pace.cooldown_step
    if start is None or step < start:
        return rate
    left = (cooldown_end(start, total_steps) - step) / (cooldown_end(start, total_steps) - start)
    # The hours may have brought the schedule further than that.
    return min(rate, _scheduled(start, total_steps, config) * _to_floor(left))


def _scheduled(step: float, total_steps: int, config: TrainConfig) -> float:
    warmup_steps = max(1, round(config.warmup * total_steps)) if config.warmup else 0
    if step < warmup_steps:
        return config.lr * min(1.0, (step + 1) / warmup_steps)
    if config.schedule == "cosine":
        done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    decay_steps = max(1, round(DECAY_SHARE * total_steps))
    return config.lr * _to_floor(min(1.0, (total_steps - step) / decay_steps))


def _to_floor(left: float) -> float:
    return WSD_FLOOR + (1 - WSD_FLOOR) * left
