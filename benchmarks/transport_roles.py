"""The two ends of a hand-over in benchmarks/transport.py: `python -P -m transport_roles ROLE METHOD RUN_DIR RING_FD`.

The producer copies a warm source into the room of each block and commits it; the consumer touches one byte in every
page and gives the slot back. With the ring and over ZeroMQ both use the product's own classes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from producer.outlet import ArenaOutlet, ChunkOutlet
from protocol.arena import PAGE_BYTES, Arena
from protocol.child import run_child
from protocol.job import Job, read_job, run_token
from protocol.messages import Deliver, Lease, Ready, Release, Want
from protocol.peer import Peer, hello

FILES, RING = "safetensors", "ring"


def ready(lease: Lease) -> Ready:
    step, index, kind, attempt = lease.step, lease.index, lease.kind, lease.attempt
    return Ready(step=step, index=index, kind=kind, attempt=attempt, checksum=0, busy_s=0.0, halved=0, figures=())


def file_of(run_dir: Path, attempt: int) -> str:
    return str(run_dir / f"{attempt}.safetensors")


def produce(job: Job, method: str, ring_fd: int, peer: Peer) -> None:
    """Copies the source into the room of each leased block."""
    source = np.resize(np.arange(251, dtype=np.uint8), job.slot_bytes)
    if method == RING:
        outlet = ArenaOutlet(Arena(ring_fd, job.slots, job.slot_bytes), peer)
    else:
        greeting = hello("producer", "producer-0", 0, run_token(), job.schema)
        outlet = ChunkOutlet(job.payload_address, job.run_id, greeting, job.slot_bytes, peer)
    peer.send(Want(kind="model"))  # the outlet is ready for credit
    while isinstance(lease := peer.inbox.get(), Lease):
        np.copyto(np.frombuffer(outlet.room(lease), np.uint8), source)
        outlet.commit(lease, [(0, job.slot_bytes)], ready(lease))
    outlet.close()


def consume(job: Job, ring_fd: int, peer: Peer) -> None:
    """Touches every page of each delivered slot."""
    arena = Arena(ring_fd, job.slots, job.slot_bytes)
    while isinstance(block := peer.inbox.get(), Deliver):
        np.frombuffer(arena.slot(block.slot), np.uint8)[::PAGE_BYTES].max()
        peer.send(Release(step=block.step, index=block.index, attempt=block.attempt))


def produce_files(job: Job, run_dir: Path, peer: Peer) -> None:
    """Writes each leased block as a file, from the tensor that holds it: nothing is copied before."""
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    source = torch.from_numpy(np.resize(np.arange(251, dtype=np.uint8), job.slot_bytes))
    peer.send(Want(kind="model"))
    while isinstance(lease := peer.inbox.get(), Lease):
        save_file({"features": source}, file_of(run_dir, lease.attempt))
        peer.send(ready(lease))


def consume_files(run_dir: Path, peer: Peer) -> None:
    """Loads each file, touches every page of the tensor and deletes the file."""
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    while isinstance(block := peer.inbox.get(), Deliver):
        path = file_of(run_dir, block.attempt)
        load_file(path)["features"].numpy()[::PAGE_BYTES].max()
        Path(path).unlink()
        peer.send(Release(step=block.step, index=block.index, attempt=block.attempt))


def main(role: str, method: str, run_dir: Path, ring_fd: int) -> None:
    job = read_job(run_dir)
    peer = Peer(job.address, job.run_id, hello(role, f"{role}-0", 0, run_token(), job.schema))
    if method == FILES:
        produce_files(job, run_dir, peer) if role == "producer" else consume_files(run_dir, peer)
    elif role == "producer":
        produce(job, method, ring_fd, peer)
    else:
        consume(job, ring_fd, peer)
    peer.close()


if __name__ == "__main__":
    run_child(sys.argv[1], lambda: main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
