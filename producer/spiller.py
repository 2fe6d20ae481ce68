"""Writing released blocks to the cache, in a thread of the process that replays it.

Slots are read where they lie: the bytes are copied once, into the buffer that goes to the disk.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from protocol.arena import Arena
from protocol.block import views
from protocol.cache import Cache
from protocol.messages import Flush, Spill, Spilled, Stop
from protocol.peer import Peer
from protocol.shard_writer import Full, ShardWriter
from protocol.shards import sample_key

Quantise = Callable[[NDArray[np.generic], str, int], tuple[NDArray[np.uint8], NDArray[np.float32]]]

log = logging.getLogger(__name__)


class Spiller:
    """`write` takes orders from any thread; each is answered with SPILLED. A full disk, or one that fails, ends the
    keeping and nothing else; what goes wrong otherwise comes as a STOP into the peer's inbox. `quantise` is
    producer.quantise.quantise_rows for a cache of fp8."""

    def __init__(
        self, cache: Cache, writer: ShardWriter, arena: Arena, peer: Peer, quantise: Quantise | None = None
    ) -> None:
        self._quantise = quantise
        self._cache, self._writer, self._arena, self._peer = cache, writer, arena, peer
        self._orders: queue.Queue[Spill | Flush | None] = queue.Queue()
        # Samples of the dataset, by key, that are in the cache as soon as the open shard is; some may be alike.
        self._waiting: defaultdict[str, set[int]] = defaultdict(set)
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="spiller", daemon=True)
        self._thread.start()

    def write(self, order: Spill | Flush) -> None:
        self._orders.put(order)

    def rewrite(self, key: str) -> None:
        """A sample that is damaged where it lies may be written once more."""
        self._writer.forget(key)

    def close(self) -> None:
        """Returns when every order is carried out and the open shard is complete."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                self._obey(order)
                attempt = order.attempt if isinstance(order, Spill) else 0
                self._peer.send(Spilled(attempt=attempt, durable=self._durable(), problem=self._problem))
                self._peer.progress += 1
            self._obey(Flush())
        except Exception as error:
            self._peer.inbox.put(Stop(reason=f"a block could not be kept: {error}"))

    def _obey(self, order: Spill | Flush) -> None:
        if self._problem:
            return
        try:
            if isinstance(order, Spill):
                self._keep(order)
            else:
                self._writer.close()
        except (Full, OSError) as error:
            self._problem = str(error)
            log.warning("nothing more is kept: %s", error)

    def _keep(self, order: Spill) -> None:
        """All of a block or nothing: a sample that is computed alone rounds differently than beside its fellows."""
        tensors = views(self._arena.slot(order.slot), order.table)
        offsets = tensors["offsets"].tolist()
        dtype = next(entry.dtype for entry in order.table if entry.name == "features")
        scales = self._cache.manifest.scales
        fresh = []
        for sample, rows in zip(order.samples, map(slice, offsets, offsets[1:]), strict=True):
            ids, mask = tensors["token_ids"][rows].view(np.int32), tensors["loss_mask"][rows].view(np.uint8)
            self._waiting[key := sample_key(ids)].add(sample)
            if self._writer.lacks(key):
                features = tensors["features"][rows]
                kept = (features, None) if self._quantise is None else self._quantise(features, dtype, scales)
                fresh.append((ids, mask, *kept))
        if fresh:
            self._writer.require(sum(each.nbytes for sample in fresh for each in sample if each is not None))
        for sample_ids, *rest in fresh:
            self._writer.add(sample_ids, *rest)

    def _durable(self) -> tuple[int, ...]:
        """The samples that the open cache knows and did not before, shards included that were completed since."""
        for path in self._writer.take_completed():
            self._cache.take_in(path)
        there = [key for key in self._waiting if key in self._cache.samples]
        return tuple(sample for key in there for sample in sorted(self._waiting.pop(key)))
