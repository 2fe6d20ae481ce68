"""A producer that computes nothing: it fills each lease with numbers of the right shapes, at FAKE_TOKENS_PER_S.

Started like producer.worker: `python -P -m fake_producer RUN_DIR INDEX RING_FD`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from producer.assignments import Assignments
from protocol.arena import Arena
from protocol.block import block_table, checksum, views
from protocol.child import run_child
from protocol.job import read_job, run_token
from protocol.messages import Ready, Stop, Want
from protocol.peer import Peer, hello


def main(run_dir: Path, index: int, ring_fd: int) -> None:
    job, tokens_per_s = read_job(run_dir), float(os.environ["FAKE_TOKENS_PER_S"])
    peer = Peer(job.address, job.run_id, hello("producer", f"producer-{index}", index, run_token(), job.schema), 300)
    arena, assignments = Arena(ring_fd, job.slots, job.slot_bytes), Assignments(peer.inbox)
    for _ in range(2):  # the next lease is there when this one is done
        peer.send(Want(kind="model"))
    done_s = time.monotonic()
    while not isinstance(lease := assignments.next(), Stop):
        started_s = time.monotonic()
        tokens, samples = sum(lease.lengths), len(lease.samples)
        arena.sign(lease.slot, lease.attempt)
        tensors = views(arena.slot(lease.slot), block_table(tokens, samples, job.width, job.dtype))
        tensors["token_ids"][:] = np.frombuffer(lease.token_ids, "<i4")
        tensors["loss_mask"][:] = np.frombuffer(lease.loss_mask, np.uint8)
        tensors["offsets"][:] = np.cumsum([0, *lease.lengths])
        tensors["samples"][:] = lease.samples
        tensors["features"][:] = np.arange(tokens * job.width).reshape(tokens, job.width)
        # A sleep that was a little too long is made up for by the next one.
        done_s = max(done_s, started_s - 0.02) + tokens / tokens_per_s
        time.sleep(max(done_s - time.monotonic(), 0.0))
        arena.sign(lease.slot, lease.attempt)
        place = {"step": lease.step, "index": lease.index, "kind": lease.kind, "attempt": lease.attempt}
        busy_s = tokens / tokens_per_s
        peer.send(Ready(**place, checksum=checksum(tensors["features"]), busy_s=busy_s, halved=0, figures=()))
        peer.send(Want(kind="model"))
        peer.progress += 1
    peer.close()


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    run_child(f"producer-{arguments[1]}", lambda: main(*arguments))
