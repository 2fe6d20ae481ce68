"""One producer: `python -P -m producer.worker RUN_DIR INDEX RING_FD`, started by the launcher.

Asks for work, fills the leased slot, says READY, asks again. Memory comes with the work, so that it never has to wait
for room.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from producer.config import TargetConfig
from producer.forward import features_of
from producer.taps import Taps
from producer.target import Target, load_target
from protocol.arena import Arena
from protocol.block import block_table, checksum, views
from protocol.child import run_child
from protocol.errors import RunError
from protocol.job import Job, read_job, read_section, run_token
from protocol.messages import Lease, Nack, Ready, Stop, Want
from protocol.peer import Peer, hello

log = logging.getLogger(__name__)


def fill(target: Target, taps: Taps, lease: Lease, slot: memoryview, job: Job) -> tuple[int, int]:
    """Writes the leased samples into the slot; returns the 64-bit sum of the features it wrote and how often a batch
    was halved for lack of memory.

    A part of a block writes only its own samples' rows; the small tensors are the same whoever writes them.
    """
    table = block_table(sum(lease.lengths), len(lease.samples), job.width, job.dtype)
    tensors = views(slot, table)
    offsets = np.concatenate(([0], np.cumsum(lease.lengths))).astype(np.int32)
    token_ids = np.frombuffer(lease.token_ids, "<i4")
    tensors["token_ids"][:] = token_ids
    tensors["loss_mask"][:] = np.frombuffer(lease.loss_mask, np.uint8)
    tensors["offsets"][:] = offsets
    tensors["samples"][:] = lease.samples
    rows: list[NDArray[np.int32]] = [token_ids[offsets[at] : offsets[at + 1]] for at in lease.positions]
    features = tensors["features"]
    if len(rows) == len(lease.samples):
        halved = features_of(target, taps, rows, features)
        return checksum(features), halved
    part = np.empty((sum(map(len, rows)), job.width), features.dtype)
    halved = features_of(target, taps, rows, part)
    start = 0
    for at, row in zip(lease.positions, rows, strict=True):
        features[offsets[at] : offsets[at + 1]] = part[start : start + len(row)]
        start += len(row)
    return checksum(part), halved


def serve(run_dir: Path, index: int, ring_fd: int) -> None:
    """Fills leases until the coordinator says stop. Raises RunError when the coordinator is lost."""
    job = read_job(run_dir)
    device = job.producers[index]
    if device != "cpu":
        torch.cuda.set_device(device)
    target = load_target(Path(job.target_dir), read_section(run_dir, "target", TargetConfig), device)
    arena = Arena(ring_fd, job.slots, job.slot_bytes)
    name = f"producer-{index}"
    peer = Peer(job.address, job.run_id, hello("producer", name, index, run_token(), job.schema))
    with Taps(target.layers, job.taps) as taps:
        peer.send(Want(kind="model"))
        while not isinstance(message := peer.inbox.get(), Stop):
            if isinstance(message, Lease):
                peer.send(_answer(target, taps, message, arena.slot(message.slot), job))
                peer.send(Want(kind="model"))
                peer.progress += 1
    peer.close()
    if message.reason != "done":
        raise RunError(message.reason)


def _answer(target: Target, taps: Taps, lease: Lease, slot: memoryview, job: Job) -> Ready | Nack:
    step, index, kind, attempt = lease.step, lease.index, lease.kind, lease.attempt
    started = time.monotonic()
    try:
        total, halved = fill(target, taps, lease, slot, job)
    except torch.OutOfMemoryError as error:
        # Even one sample alone did not fit, and will not the next time either.
        reason = f"out of memory: {error}"
        return Nack(step=step, index=index, kind=kind, attempt=attempt, reason=reason, retryable=False)
    busy_s = time.monotonic() - started
    return Ready(step=step, index=index, kind=kind, attempt=attempt, checksum=total, busy_s=busy_s, halved=halved)


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    run_child(f"producer-{arguments[1]}", lambda: serve(*arguments))
