"""Start from trained weights: an exported or published drafter, or a checkpoint of another run.

A checkpoint gives its fp32 masters, and with them, if asked, AdamW's moments; an export only its bf16 weights. The
plan, the schedule and the counters are those of the new run.
"""

from __future__ import annotations

from pathlib import Path

import torch

from consumer.checkpoint import read_state, read_weights
from consumer.drafter import Drafter, load
from consumer.export import load_export
from consumer.shape import differing_fields
from consumer.state import MASTER, restore_state
from protocol.errors import RequestError


def warm_start(drafter: Drafter, optimiser: torch.optim.Optimizer, folder: Path, with_optimiser: bool) -> None:
    """Loads `folder` into the drafter. Raises RequestError when it is damaged, is neither an export nor a checkpoint,
    has another shape, or lacks the optimiser that is asked for."""
    is_checkpoint = (folder / "cursor.json").exists()
    if with_optimiser and not is_checkpoint:
        raise RequestError(
            f"drafter.init_optimiser: {folder} is an export, which holds no optimiser: name a checkpoint"
        )
    weights, shape = read_weights(folder) if is_checkpoint else load_export(folder)[:2]
    if differing := differing_fields(shape, drafter.shape):
        raise RequestError(f"drafter.init_from: {folder} has another {', '.join(differing)} than [drafter] asks for")
    if not is_checkpoint:
        load(drafter, weights)
        return
    state = read_state(folder)
    kept = state if with_optimiser else {name: value for name, value in state.items() if name.startswith(MASTER)}
    restore_state(drafter, optimiser, kept)
