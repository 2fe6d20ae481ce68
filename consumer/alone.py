"""A rank that trains without any producer: `python -P -m consumer.alone RUN_DIR RANK SECONDS`, started by
`draftwire tune`.

The blocks are the plan's own, their tokens and masks the dataset's; only the features are made up. Rank 0 writes
`alone.json`: seconds of each block and of the optimiser, waited for one by one, and of whole steps as a run does them.
With several ranks (RANK, WORLD_SIZE) it is the reduction alone that is timed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from consumer.config import TrainConfig
from consumer.drafter import Drafter, initialise
from consumer.feed import DeviceBlock
from consumer.gpu_step import masks_for
from consumer.memory import saying_what_to_lower
from consumer.precision import compute_dtype
from consumer.reduce import join_ranks, leave_ranks, sum_over_ranks
from consumer.shape import DrafterShape
from consumer.target_ends import read_target_ends
from consumer.trainer import Trainer
from consumer.warm_up import warm_up
from protocol.child import run_child
from protocol.dataset import TokenDataset
from protocol.job import Job, read_job, read_section
from protocol.packing import DRAFT_TOKEN_COST, BlockSpec
from protocol.plan import Plan

REDUCTIONS = 8
LEAST_STEPS = 3
COPIED_BYTES = 256 << 20
Clock = list[float]


class Alone:
    """A trainer with blocks that are always there."""

    def __init__(self, run_dir: Path, job: Job, device: torch.device) -> None:
        self._job, self._device = job, device
        self._dataset = TokenDataset.open(Path(job.dataset_dir))
        self._plan = Plan(self._dataset.lengths, self._dataset.eligible, job.plan, self._dataset.fingerprint)
        config = read_section(run_dir, "train", TrainConfig)
        ends = read_target_ends(run_dir / "target_io.safetensors", device)
        shape = msgspec.convert(job.shape, DrafterShape)
        self._drafter = Drafter(shape, compute_dtype(config.precision, device)).to(device)
        initialise(self._drafter, config.seed)
        masks = masks_for(self._drafter, job.plan.microbatch_tokens, job.plan.microbatch_draft_tokens)
        self._trainer = Trainer(self._drafter, ends.embedding, ends.head, config, self._plan.total_steps, masks)
        if masks is not None:
            warm_up(self._trainer, job, int(self._dataset.lengths.max()), device)
        self._step = 0

    def measure(self, seconds: float) -> dict[str, Any]:
        """costs and seconds of blocks, seconds of the optimiser; cost, blocks and seconds of whole steps."""
        self._whole_step()  # the first compiles and allocates
        costs, blocks_s, finishes_s = self._parts(seconds / 2)
        found: dict[str, Any] = {"costs": costs, "blocks_s": blocks_s, "finishes_s": finishes_s, "steps": []}
        until_s = time.monotonic() + seconds / 2
        while len(found["steps"]) < LEAST_STEPS or time.monotonic() < until_s:
            found["steps"].append(self._whole_step())
        return found

    def reductions_s(self) -> Clock:
        """Seconds of all-reduces of all gradients, one after the other."""
        gradients = [torch.zeros_like(parameter) for parameter in self._drafter.parameters()]
        totals = torch.zeros(8, dtype=torch.float64, device=self._device)
        taken: Clock = []
        for _ in range(REDUCTIONS):
            started_s = self._now()
            sum_over_ranks(gradients, totals)
            taken.append(self._now() - started_s)
        return taken[REDUCTIONS // 2 :]  # the first ones set up connections

    def copy_bytes_per_s(self) -> float:
        """From host memory as a run has it to the device; on a CPU, of a plain copy there."""
        on_gpu = self._device.type == "cuda"
        source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        there = torch.empty_like(source, device=self._device)
        there.copy_(source)
        started_s = self._now()
        there.copy_(source)
        return COPIED_BYTES / (self._now() - started_s)

    # --- inside ---

    def _now(self) -> float:
        """Monotonic, the device's work done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    def _parts(self, seconds: float) -> tuple[Clock, Clock, Clock]:
        costs: Clock = []
        blocks_s: Clock = []
        finishes_s: Clock = []
        until_s = time.monotonic() + seconds
        while len(finishes_s) < LEAST_STEPS or time.monotonic() < until_s:
            for spec in self._next_step():
                block, started_s = self._block(spec), self._now()
                self._trainer.micro_step(block)
                blocks_s.append(self._now() - started_s)
                costs.append(_cost(spec))
            started_s = self._now()
            self._trainer.finish_step(self._step).result()
            finishes_s.append(self._now() - started_s)
        return costs, blocks_s, finishes_s

    def _whole_step(self) -> dict[str, float]:
        """One without a wait inside; features are made before it."""
        specs = self._next_step()
        blocks = [self._block(spec) for spec in specs]
        started_s = self._now()
        for block in blocks:
            self._trainer.micro_step(block)
        self._trainer.finish_step(self._step).result()
        return {"cost": sum(map(_cost, specs)), "blocks": len(specs), "seconds": self._now() - started_s}

    def _next_step(self) -> list[BlockSpec]:
        """The blocks of the plan's next step that have samples; the plan begins again at its end."""
        blocks = [spec for spec in self._plan.blocks(self._step % self._plan.total_steps) if spec.samples]
        self._step += 1
        return blocks

    def _block(self, spec: BlockSpec) -> DeviceBlock:
        """As it would have come out of the ring, with random features."""
        dtype, samples = getattr(torch, self._job.dtype), spec.samples
        return DeviceBlock(
            step=spec.step,
            micro_step=spec.micro_step,
            micro_steps=1,
            epoch=0,
            samples=np.array(samples, np.int64),
            token_ids=np.concatenate([self._dataset.tokens(sample) for sample in samples]).astype(np.int32),
            loss_mask=np.concatenate([self._dataset.mask(sample) for sample in samples]).astype(np.uint8),
            offsets=np.cumsum([0, *(self._dataset.lengths[sample] for sample in samples)]).astype(np.int32),
            features=torch.randn(spec.tokens, self._job.width, device=self._device).to(dtype),
        )


def _cost(spec: BlockSpec) -> float:
    return float(spec.tokens + DRAFT_TOKEN_COST * spec.draft_tokens)


def main(run_dir: Path, rank: int, seconds: float) -> None:
    job = read_job(run_dir)
    device = torch.device(job.consumers[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = join_ranks(device)
    with saying_what_to_lower(job.plan):
        alone = Alone(run_dir, job, device)
        if ranks > 1:
            found: dict[str, Any] = {"ranks": ranks, "reductions_s": alone.reductions_s()}
        else:
            found = alone.measure(seconds) | {"copy_bytes_per_s": alone.copy_bytes_per_s()}
    if rank == 0:
        (run_dir / "alone.json").write_text(json.dumps(found), encoding="utf-8")
    if ranks > 1:
        leave_ranks()
        # Two of six times a rank was aborted while the interpreter took itself apart: gloo's threads outlive the group.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    run_child(f"alone-{arguments[1]}", lambda: main(*arguments))
