"""Start from trained weights: an exported or published drafter (z-lab or speculators), or a checkpoint of another run.

A checkpoint gives its fp32 masters, and with them, if asked, AdamW's moments; the others only the weights that they
serve. The plan, the schedule and the counters are those of the new run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from consumer.checkpoint import read_state, read_weights
from consumer.drafter import Drafter, load
from consumer.export import load_trained
from consumer.shape import other_arithmetic
from consumer.state import MASTER, restore_state
from consumer.target_ends import TargetEnds
from protocol.errors import RequestError

# Below this, drafts are accepted no more often than by chance.
USELESS = 1.05


def warm_start(
    drafter: Drafter, optimiser: torch.optim.Optimizer, ends: TargetEnds, folder: Path, with_optimiser: bool
) -> None:
    """Loads `folder` into the drafter. Raises RequestError when it is damaged, is neither a drafter nor a checkpoint,
    has another shape, brings another embedding or head than the target's, or lacks the optimiser that is asked for."""
    is_checkpoint = (folder / "cursor.json").exists()
    if with_optimiser and not is_checkpoint:
        raise RequestError(
            f"drafter.init_optimiser: {folder} is an export, which holds no optimiser: name a checkpoint"
        )
    weights, shape = read_weights(folder) if is_checkpoint else load_trained(folder, ends)
    if differing := other_arithmetic(shape, drafter.shape):
        raise RequestError(f"drafter.init_from: {folder} has another {', '.join(differing)} than [drafter] asks for")
    if not is_checkpoint:
        load(drafter, weights)
        return
    state = read_state(folder)
    kept = state if with_optimiser else {name: value for name, value in state.items() if name.startswith(MASTER)}
    restore_state(drafter, optimiser, kept)


def first_measure(folder: str, acceptance: float) -> dict[str, Any]:
    """The event that says what the weights of `folder` were worth before the first step."""
    text = f"acceptance length {acceptance:.3f} before the first step, with the weights of {folder}"
    if acceptance < USELESS:
        text += (
            ": WARNING, hardly any draft is accepted. Does it belong to this very target, taps and chat template? "
            "Training on would start from nothing"
        )
    return {"what": "init_from", "text": text, "acceptance_mean": acceptance}
