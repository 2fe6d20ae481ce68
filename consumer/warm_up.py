"""A block as large as any of the run, made up: what it needs is compiled and allocated before the first real one."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from consumer.feed import DeviceBlock
from consumer.trainer import Trainer
from protocol.job import Job
from protocol.plan import PlanParams

log = logging.getLogger(__name__)


def warm_up(trainer: Trainer, job: Job, longest: int, device: torch.device) -> None:
    """Does all that a step does with the largest block, on a GPU, and changes nothing: whether it fits is known before
    a producer has done anything. `longest`: tokens of the longest sample."""
    started = time.monotonic()
    trainer.warm_up(largest_block(job.plan, longest, job.width, getattr(torch, job.dtype), device))
    torch.cuda.synchronize(device)
    took_s, most = time.monotonic() - started, torch.cuda.max_memory_allocated(device)
    log.info("the largest block takes %.1f GiB in all; compiled in %.0f s", most / 2**30, took_s)


def largest_block(plan: PlanParams, longest: int, width: int, dtype: torch.dtype, device: torch.device) -> DeviceBlock:
    """`plan.microbatch_tokens` tokens in samples of `longest` tokens, with as many anchors as `plan` allows, all near
    the ends, where they see most. Features `[T, width]` are zeros."""
    tokens, anchors = plan.microbatch_tokens, plan.microbatch_draft_tokens // plan.block_size
    whole, rest = divmod(tokens, longest)
    lengths = np.array([longest] * whole + [rest] * (rest > 1))
    each = min(plan.anchors, -(-anchors // len(lengths)))
    mask = np.zeros(lengths.sum(), np.uint8)
    for stop, length in zip(np.cumsum(lengths), lengths, strict=True):
        mine = min(each, length - 1, anchors)
        anchors -= mine
        # One anchor fewer than supervised tokens, unless there is none at all.
        mask[stop - mine - 1 : stop] = mine > 0
    return DeviceBlock(
        step=0,
        micro_step=0,
        micro_steps=1,
        epoch=0,
        samples=np.arange(len(lengths), dtype=np.int64),
        token_ids=np.zeros(len(mask), np.int32),
        loss_mask=mask,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        features=torch.zeros(len(mask), width, dtype=dtype, device=device),
    )
