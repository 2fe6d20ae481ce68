"""One producer: `python -P -m producer.worker RUN_DIR INDEX [RING_FD]`, started by the launcher.

Asks for work, fills the leased block, lets it go, asks again. Memory comes with the work, so that it never has to wait
for room. Without a ring to map, payload leaves over ZeroMQ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from producer.assignments import Assignments
from producer.fill import fill
from producer.finisher import Finisher
from producer.forward import Unwanted
from producer.lease_layout import Features
from producer.outlet import ArenaOutlet, ChunkOutlet, Outlet, nack
from producer.ready import ready_target
from producer.stage import Stage, make_stage, pinned_arena
from producer.taps import Taps
from producer.target import Target
from protocol.arena import Arena
from protocol.child import run_child
from protocol.errors import RunError
from protocol.job import Job, read_job, run_token
from protocol.messages import TAKEN_BACK, Lease, Nack, Stop, Want
from protocol.peer import Peer, hello


class Producer:
    """A joined producer with its target loaded."""

    def __init__(
        self,
        job: Features,
        target: Target,
        taps: Taps,
        peer: Peer,
        outlet: Outlet,
        stage: Stage,
        finished: Callable[[Lease], None] = lambda lease: None,
    ) -> None:
        self._job, self._target, self._taps, self._peer, self._outlet = job, target, taps, peer, outlet
        self._stage = stage
        self._assignments = Assignments(peer.inbox)
        self._finisher = Finisher(job, outlet, peer, finished, threaded=stage.ahead > 1)

    def run(self) -> str:
        """Fills leases until the coordinator says stop or is lost; returns the reason."""
        try:
            for _ in range(self._stage.ahead):
                self._peer.send(Want(kind="model"))
            while not isinstance(lease := self._assignments.next(), Stop):
                if (refusal := self._work(lease)) is not None:
                    self._outlet.abandon(lease)
                    self._peer.send(refusal)
                    self._peer.send(Want(kind="model"))
                    self._peer.progress += 1
            return lease.reason
        finally:
            self._finisher.close()

    def _work(self, lease: Lease) -> Nack | None:
        """Fills one block and lets it go, or says why not."""
        try:
            if (room := self._outlet.room(lease, lambda: self._assignments.wanted(lease))) is None:
                raise Unwanted
            goes_on = partial(self._goes_on, lease)
            filled, halved = fill(self._target, self._taps, lease, room, self._job, self._stage, goes_on)
        except Unwanted:
            return nack(lease, TAKEN_BACK, retryable=True)
        except torch.OutOfMemoryError as error:
            # Even one sample alone did not fit, and will not the next time either.
            advice = "lower data.max_length, or give the producers GPUs of their own (gpus.split)"
            first_line = str(error).partition("\n")[0].partition(". ")[0]
            return nack(lease, f"out of memory with one sample alone: {advice}; {first_line}", retryable=False)
        self._finisher.submit(lease, room, filled, halved)
        return None

    def _goes_on(self, lease: Lease) -> bool:
        """Asked before each forward pass: that is the progress by which a slow producer differs from one that hangs."""
        self._peer.progress += 1
        return self._assignments.wanted(lease)


def main(run_dir: Path, index: int, ring_fd: int | None) -> None:
    """Raises RunError when the coordinator is lost."""
    job = read_job(run_dir)
    with ready_target(run_dir, job, index) as (target, taps):
        reason = _serve(run_dir, job, index, ring_fd, target, taps)
    if reason != "done":
        raise RunError(reason)


def _serve(run_dir: Path, job: Job, index: int, ring_fd: int | None, target: Target, taps: Taps) -> str:
    """Joins and fills leases until the run ends; returns the reason."""
    greeting = hello("producer", job.producer_names[index], index, run_token(), job.schema)
    peer = Peer(job.address, job.run_id, greeting, job.hang_s)
    with ExitStack() as stack:
        outlet: Outlet
        if ring_fd is not None:
            arena = Arena(ring_fd, job.slots, job.slot_bytes)
            stack.enter_context(pinned_arena(arena, target.device))
            outlet = ArenaOutlet(arena, peer)
        else:
            outlet = ChunkOutlet(job.payload_address, job.run_id, greeting, job.slot_bytes, peer)
        stage = make_stage(target, job.slot_bytes, job.width)
        reason = Producer(job, target, taps, peer, outlet, stage).run()
        outlet.close()
    peer.close()
    return reason


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
    run_child(f"producer-{arguments[1]}", lambda: main(*arguments))
