"""How long a run lasts when it is not by its plan alone: an early cool-down. Pure arithmetic.

The coordinator decides and GO tells every rank the same, so all ranks have one learning rate and end at one step.
"""

from __future__ import annotations

# The share of a run in which its rate falls to the floor ("warm-up, stable, decay", and every cool-down).
DECAY_SHARE = 0.2


def cooldown_end(cooldown_step: int, total_steps: int) -> int:
    """The number of steps of a run that cools down from the boundary before 0-based `cooldown_step` on: the cool-down
    is DECAY_SHARE of all steps that the run then has made, one at least, and never outlasts the plan."""
    steps = max(1, round(cooldown_step * DECAY_SHARE / (1 - DECAY_SHARE)))
    return min(total_steps, cooldown_step + steps)
