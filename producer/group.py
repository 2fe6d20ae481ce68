"""The process group of one producer's ranks, all on this host, and what a rank other than the first is told of it."""

from __future__ import annotations

import os
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from producer.config import TargetConfig
from protocol.errors import RequestError

# Ranks load at different speeds, and one of them may be compiling.
TIMEOUT = timedelta(hours=2)
# Nothing of one producer concerns another host, and a host's own name may lead outside.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


class Rank(msgspec.Struct, frozen=True):
    """Rank `rank` of a target divided over `devices`."""

    rank: int
    devices: tuple[str, ...]
    target_dir: str
    target: TargetConfig

    @property
    def device(self) -> str:
        return self.devices[self.rank]


def join_group(rank: int, devices: tuple[str, ...], store_fd: int) -> None:
    """Joins the group as `rank`; returns when all have joined. They find each other through the file behind `store_fd`,
    which has no name and so leaves nothing behind. Raises RequestError where torch would take other devices."""
    kind, _, index = devices[rank].partition(":")
    there = torch.accelerator.current_accelerator()
    if kind != (there.type if there is not None else "cpu"):
        raise RequestError(
            f"target.tensor_parallel = {len(devices)}: torch divides targets over {there} here, not over {kind}"
        )
    os.environ.update(LOOPBACK)
    os.environ["LOCAL_RANK"] = index or "0"  # the device that transformers loads to
    store = dist.FileStore(f"/proc/self/fd/{store_fd}", len(devices))  # type: ignore[attr-defined]
    here = None
    if kind == "cuda":
        torch.cuda.set_device(devices[rank])
        here = torch.device(devices[rank])  # NCCL then connects at once, and fails at once where it cannot
    backend = "gloo" if here is None else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=len(devices), timeout=TIMEOUT, device_id=here)
