"""The Job that benchmarks of the plumbing run under: blocks as the arithmetic of docs/design.md has them, and the CPU
time of the processes that take part."""

from __future__ import annotations

import time
from typing import Any

from protocol.job import Job
from protocol.plan import PlanParams

TOKENS = 335  # a sample of the chat corpus that docs/design.md does its arithmetic with
SAMPLES_PER_BLOCK = 12
BLOCKS_PER_STEP = 4
WIDTH = 25600  # five taps of a target of width 5,120
DTYPE = "bfloat16"


def plan_params(**changes: Any) -> PlanParams:
    return PlanParams(
        **{
            "seed": 0,
            "epochs": 1,
            "batch_tokens": BLOCKS_PER_STEP * SAMPLES_PER_BLOCK * TOKENS,
            "anchors": 1,
            "block_size": 16,
            "microbatch_tokens": SAMPLES_PER_BLOCK * TOKENS,
            "microbatch_draft_tokens": 1 << 20,
            "consumers": 1,
            **changes,
        }
    )


def plain_job(**changes: Any) -> Job:
    """One consumer, on the CPU, payload through shared memory."""
    return Job(
        **{
            "run_id": "benchmark",
            "incarnation": 0,
            "address": "",
            "transport": "shm",
            "payload_address": "",
            "target_dir": "",
            "padding_mask": True,
            "dataset_dir": "",
            "taps": (0,),
            "width": WIDTH,
            "dtype": DTYPE,
            "slots": 16,
            "slot_bytes": 1,
            "schema": "",
            "shape": {},
            "plan": plan_params(),
            "plan_hash": "",
            "start_step": 0,
            "checkpoint": None,
            "quarantined": {},
            "producers": ("cpu",),
            "consumers": ("cpu",),
            "producer_bytes": 0,
            "consumer_bytes": 0,
            "quarantine_limit": 0.0,
            "hang_s": 300.0,
            **changes,
        }
    )


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, user and system, all of its threads, to the nanosecond (Linux)."""
    return time.clock_gettime((~pid << 3) | 2)  # the clock id that clock_getcpuclockid(3) gives
