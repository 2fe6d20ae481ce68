"""One reduction per step over the ranks: gradients, loss and denominator, and whether everything is finite.

Gradients arrive unnormalised; dividing by the global denominator after the sum is what makes the loss independent of
how samples fell on ranks and micro-steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

# Bounds one step's arithmetic: GO keeps a rank out of collectives while there is no data, and while another evaluates
# or writes.
COLLECTIVE_TIMEOUT = timedelta(hours=1)


def join_ranks(device: torch.device) -> int:
    """Joins the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (torchrun's conventions);
    returns the number of ranks. A single rank needs no group."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    return ranks


def leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(gradients: Sequence[torch.Tensor], totals: torch.Tensor) -> None:
    """Sums gradients and `totals` (float64: loss, denominator, counts) over all ranks, in place."""
    if not dist.is_initialized():
        return
    # All under way before the first is waited for: small ones then cost no latency of their own.
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in (*gradients, totals)]:
        work.wait()
