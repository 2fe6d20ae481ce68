"""Filling a cache without training: `python -P -m producer.builder BUILD_DIR INDEX`, started by the launcher.

Goes through the first epoch's blocks as a run with the same configuration would, so that the features are that run's
bit for bit before they are quantised, if they are, and computes of each block what the cache lacks. Nothing is skipped:
the target waits for the disk.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from producer.kept_block import KeptBlock, kept_blocks
from producer.ready import ready_target
from protocol.cache import Cache
from protocol.cache_config import CacheConfig
from protocol.child import run_child
from protocol.dataset import TokenDataset
from protocol.errors import RunError
from protocol.job import Job, read_job, read_section
from protocol.messages import Lease
from protocol.packing import BlockSpec
from protocol.plan import Plan
from protocol.shard_writer import Full, ShardWriter

SAY_EVERY_S = 10.0
# One is written to the disk while the other is filled.
BUFFERS = 2

log = logging.getLogger(__name__)


class Builder:
    """Producer `index` of a build: every so many blocks of the plan, and shards of its own."""

    def __init__(self, job: Job, index: int, dataset: TokenDataset, cache: Cache, writer: ShardWriter) -> None:
        self._job, self._index, self._dataset, self._writer = job, index, dataset, writer
        self._plan = Plan(dataset.lengths, dataset.eligible, job.plan, dataset.fingerprint)
        self._held = cache.held(dataset)
        self.computed = self.unsound = 0
        self._said_s = time.monotonic()

    def leases(self) -> Iterator[Lease]:
        """What is missing, block by block."""
        number, builders = 0, len(self._job.producer_names)
        for step in range(self._plan.total_steps):
            for block in self._plan.blocks(step):
                missing = tuple(place for place, sample in enumerate(block.samples) if not self._held[sample])
                if number % builders == self._index and missing:
                    yield self._lease(block, missing)
                number += 1
            self._say(step)

    def keep(self, lease: Lease, block: KeptBlock) -> None:
        """Writes the computed samples of a filled block to the cache. Raises Full, OSError."""
        for at, (features, scales) in zip(lease.positions, block.samples(lease), strict=True):
            sample = lease.samples[at]
            # A scale is as finite as the features that it was made from.
            if not (is_finite(features, self._job.dtype) if scales is None else is_finite(scales, "float32")):
                self.unsound += 1
                log.warning("sample %d: its features are not finite; it is not kept", sample)
                continue
            self._writer.add(self._dataset.tokens(sample), self._dataset.mask(sample), features, scales)

    def _lease(self, block: BlockSpec, missing: tuple[int, ...]) -> Lease:
        self.computed += len(missing)
        return Lease(
            step=block.step,
            index=block.index,
            kind="model",
            attempt=0,
            slot=0,
            samples=block.samples,
            lengths=tuple(self._dataset.lengths[list(block.samples)].tolist()),
            positions=missing,
            token_ids=np.concatenate([self._dataset.tokens(at) for at in block.samples]).astype("<i4").tobytes(),
            loss_mask=np.concatenate([self._dataset.mask(at) for at in block.samples]).tobytes(),
        )

    def _say(self, step: int) -> None:
        if self.computed and time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            print(f"step {step + 1} of {self._plan.total_steps}: {self.computed} samples computed", flush=True)


def is_finite(features: NDArray[np.generic], dtype: str) -> bool:
    """Whether no number of `features` is infinite or none; bfloat16 comes as its words."""
    if dtype == "bfloat16":
        words = features.view(np.uint16)
        return not bool(np.any((words & 0x7F80) == 0x7F80))
    return bool(np.isfinite(features.astype(np.float32) if dtype == "float16" else features).all())


def main(build_dir: Path, index: int) -> None:
    """Raises RunError when the budget or the disk is full; whole shards stay."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    job = read_job(build_dir)
    config = read_section(build_dir, "cache", CacheConfig)
    cache, dataset = Cache.open(config.folder), TokenDataset.open(job.dataset_dir)
    writer = ShardWriter(cache, config.budget, len(job.producer_names))
    builder = Builder(job, index, dataset, cache, writer)
    try:
        with ready_target(build_dir, job, index) as (target, taps), ThreadPoolExecutor(1) as disk:
            blocks = kept_blocks(BUFFERS, cache.manifest.scales > 0, target, job)
            writing: Future[None] | None = None
            for turn, lease in enumerate(builder.leases()):
                if stopped:
                    break
                block = blocks[turn % BUFFERS]
                block.fill(target, taps, lease)
                if writing is not None:
                    writing.result()
                writing = disk.submit(builder.keep, lease, block)
            if writing is not None:
                writing.result()
        writer.close()
    except Full as full:
        raise RunError(
            f"cache.dir {config.dir}: {full}; whole shards stay, and the same command goes on when there is room: free "
            "some, or raise cache.max_bytes"
        ) from None
    if builder.unsound:
        raise RunError(
            f"{builder.unsound} samples have features that are not finite: `draftwire run` says more of them"
        )


if __name__ == "__main__":
    arguments = Path(sys.argv[1]), int(sys.argv[2])
    run_child(f"builder-{arguments[1]}", lambda: main(*arguments))
