"""Replay: a producer that fills blocks from a disk cache, `python -P -m producer.replay RUN_DIR INDEX RING_FD`.

It asks, fills and says READY as one with a target does, and loads none. Every sample is compared with its checksum as
it is read, so a damaged shard is named and never trained on. Quantised features go into the ring in the run's dtype.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from producer.assignments import Assignments
from producer.dequantise import dequantise_into
from producer.lease_layout import fill_small_tensors, lease_offsets, lease_table
from producer.outlet import nack
from producer.spiller import Quantise, Spiller
from protocol.arena import Arena
from protocol.block import checksum, views
from protocol.cache import Cache, Damaged, in_use
from protocol.cache_config import CacheConfig
from protocol.child import run_child
from protocol.errors import RunError
from protocol.job import REPLAY, Job, read_job, read_section, run_token
from protocol.messages import TAKEN_BACK, Lease, Nack, Ready, Stop, Want
from protocol.peer import Peer, hello
from protocol.shard_writer import ShardWriter, remove_fragments
from protocol.shards import sample_key

KIND = "replay"
log = logging.getLogger(__name__)
# Leases at hand, so that the disk is never without one.
AHEAD = 2
THREADS = 4


class Replay:
    """A joined replay producer over an open cache."""

    def __init__(self, job: Job, cache: Cache, arena: Arena, peer: Peer, spiller: Spiller | None) -> None:
        self._job, self._cache, self._arena, self._peer = job, cache, arena, peer
        self._spiller = spiller
        self._assignments = Assignments(peer.inbox, *([spiller.write] if spiller is not None else []))
        self._used: set[str] = set()

    def run(self) -> str:
        """Fills leases until the coordinator says stop or is lost; returns the reason."""
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in range(AHEAD):
                self._peer.send(Want(kind=KIND))
            while not isinstance(lease := self._assignments.next(), Stop):
                self._peer.send(self._work(lease, pool))
                self._peer.send(Want(kind=KIND))
                self._peer.progress += 1
        self._cache.touch(self._used)
        return lease.reason

    def _work(self, lease: Lease, pool: ThreadPoolExecutor) -> Ready | Nack:
        if not self._assignments.wanted(lease):
            return nack(lease, TAKEN_BACK, retryable=True)
        started_s = time.monotonic()
        self._arena.sign(lease.slot, lease.attempt)
        tensors = views(self._arena.slot(lease.slot), lease_table(lease, self._job))
        fill_small_tensors(lease, tensors)
        offsets, token_ids = lease_offsets(lease), np.frombuffer(lease.token_ids, "<i4")
        keys = {at: sample_key(token_ids[offsets[at] : offsets[at + 1]]) for at in lease.positions}

        def read(at: int) -> int | Damaged:
            features = tensors["features"][offsets[at] : offsets[at + 1]]
            if keys[at] not in self._cache.samples:
                return Damaged(f"{self._cache.folder}: sample {lease.samples[at]} is not there")
            self._used.add(self._cache.samples[keys[at]][0])
            try:
                read_features(self._cache, keys[at], features, self._job.dtype)
            except Damaged as damage:
                return damage
            return checksum(features)

        sums = dict(zip(lease.positions, pool.map(read, lease.positions), strict=True))
        if damages := {at: found for at, found in sums.items() if isinstance(found, Damaged)}:
            self._strike({keys[at] for at in damages})
            samples = tuple(lease.samples[at] for at in damages)
            return nack(lease, str(next(iter(damages.values()))), retryable=True, samples=samples)
        total = sum(found for found in sums.values() if isinstance(found, int)) % 2**64
        self._arena.sign(lease.slot, lease.attempt)
        busy_s = time.monotonic() - started_s
        return Ready(
            step=lease.step,
            index=lease.index,
            kind=lease.kind,
            attempt=lease.attempt,
            checksum=total,
            busy_s=busy_s,
            halved=0,
            figures=(),
        )

    def _strike(self, keys: set[str]) -> None:
        """What is damaged is not there any more for a run that can compute it, and is kept anew when it has been."""
        if self._spiller is None:
            return
        for key in keys:
            self._spiller.rewrite(key)
        try:
            self._cache.strike(keys & self._cache.samples.keys())
        except OSError as error:  # it stays in the index, and is found damaged again by the next who reads it
            log.warning("%s: %s", self._cache.folder, error)


def read_features(cache: Cache, key: str, features: NDArray[np.generic], dtype: str) -> None:
    """Reads a sample's features into a contiguous array `[L, width]` of `dtype` as protocol.block carries it, whatever
    they are kept in. Raises Damaged."""
    if not cache.manifest.scales:
        cache.read_into(key, features)
        return
    values = np.empty(features.shape, np.uint8)
    scales = np.empty((len(features), cache.manifest.scales), np.float32)
    cache.read_into(key, values, scales)
    dequantise_into(features, values, scales, dtype)


def quantiser() -> Quantise:
    """Loads torch, which nothing else of this process needs."""
    from producer.quantise import quantise_rows

    return quantise_rows


def main(run_dir: Path, index: int, ring_fd: int) -> None:
    """Raises RunError when the coordinator is lost, RequestError when the cache is being pruned."""
    job = read_job(run_dir)
    config = read_section(run_dir, "cache", CacheConfig)
    # The coordinator's STOP ends this process, after the shard that is open; the launcher's patience is bounded anyway.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ExitStack() as stack:
        stack.enter_context(in_use(config.folder))
        if job.spills:
            stack.enter_context(in_use(config.folder, ".writing", alone=True))
            remove_fragments(config.folder)
        cache = Cache.open(config.folder)
        quantise = quantiser() if job.spills and cache.manifest.scales else None
        greeting = hello("producer", REPLAY, index, run_token(), job.schema)
        peer = Peer(job.address, job.run_id, greeting, job.hang_s)
        arena = Arena(ring_fd, job.slots, job.slot_bytes)
        spiller = Spiller(cache, ShardWriter(cache, config.budget), arena, peer, quantise) if job.spills else None
        reason = Replay(job, cache, arena, peer, spiller).run()
        if spiller is not None:
            spiller.close()
        peer.close()
        cache.close()
    if reason != "done":
        raise RunError(reason)


if __name__ == "__main__":
    arguments = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    run_child(f"replay-{arguments[1]}", lambda: main(*arguments))
