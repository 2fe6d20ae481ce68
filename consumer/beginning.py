"""What a rank starts from: the checkpoint that its job names, trained weights of elsewhere, or fresh ones."""

from __future__ import annotations

from pathlib import Path

import torch

from consumer.checkpoint import read_state
from consumer.checkpoints import read_cursor, read_manifest
from consumer.config import DrafterConfig
from consumer.drafter import Drafter, initialise
from consumer.state import restore_state
from consumer.target_ends import TargetEnds
from consumer.target_init import copy_target_layers
from consumer.warm_start import warm_start
from protocol.cursor import Cursor
from protocol.job import Job, read_section


def begin(
    run_dir: Path, job: Job, drafter: Drafter, optimiser: torch.optim.Optimizer, ends: TargetEnds, seed: int
) -> tuple[Cursor | None, float]:
    """Fills drafter and optimiser. Returns the checkpoint's cursor (None: nothing is trained yet) and the best
    acceptance length up to it."""
    if job.checkpoint is not None:
        checkpoint = Path(job.checkpoint)
        cursor = read_cursor(checkpoint)
        restore_state(drafter, optimiser, read_state(checkpoint))
        return cursor, read_manifest(checkpoint).best_acceptance
    config = read_section(run_dir, "drafter", DrafterConfig)
    if config.init_from is not None:
        warm_start(drafter, optimiser, ends, Path(config.init_from), config.init_optimiser)
    else:
        initialise(drafter, seed)
        if config.init == "target":
            copy_target_layers(drafter, run_dir / "drafter_init.safetensors")
    return None, 0.0
