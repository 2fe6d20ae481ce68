"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math

from consumer.config import TrainConfig

# Warm-up, stable, decay: the last fifth falls linearly to a tenth (the best published independent recipe).
WSD_DECAY_SHARE = 0.2
WSD_FLOOR = 0.1


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of the update made at 0-based `step` of `total_steps`: linear warm-up, then cosine to 0 or WSD."""
    warmup_steps = max(1, round(config.warmup * total_steps)) if config.warmup else 0
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "cosine":
        done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    decay_steps = max(1, round(WSD_DECAY_SHARE * total_steps))
    left = min(1.0, (total_steps - step) / decay_steps)
    return config.lr * (WSD_FLOOR + (1 - WSD_FLOOR) * left)
