"""Writing released blocks to the cache, in a thread of the process that replays it.

Slots are read where they lie: the bytes are copied once, into the buffer that goes to the disk.
"""

from __future__ import annotations

import logging
import queue
import threading

import numpy as np

from protocol.arena import Arena
from protocol.block import views
from protocol.cache import Cache
from protocol.messages import Spill, Spilled
from protocol.peer import Peer
from protocol.shard_writer import Full, ShardWriter
from protocol.shards import sample_key

log = logging.getLogger(__name__)


class Spiller:
    """`write` takes orders from any thread; each is answered with SPILLED, whatever became of it."""

    def __init__(self, cache: Cache, writer: ShardWriter, arena: Arena, peer: Peer) -> None:
        self._cache, self._writer, self._arena, self._peer = cache, writer, arena, peer
        self._orders: queue.Queue[Spill | None] = queue.Queue()
        self._ids: dict[str, int] = {}  # of the open shard: key -> dataset sample
        self._problem = ""
        self._epoch = -1
        self._thread = threading.Thread(target=self._run, name="spiller", daemon=True)
        self._thread.start()

    def write(self, order: Spill) -> None:
        self._orders.put(order)

    def close(self) -> None:
        """Returns when every order is carried out and the open shard is complete."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if not self._problem:
                self._attempt(order)
            durable = self._durable()
            self._peer.send(Spilled(attempt=order.attempt, durable=durable, problem=self._problem))
            self._peer.progress += 1
        try:
            self._writer.close()
        except (Full, OSError) as error:
            log.warning("the last shard is not kept: %s", error)

    def _attempt(self, order: Spill) -> None:
        # A full disk, or one that fails, costs what would have been kept, and never the run.
        try:
            if order.epoch != self._epoch:
                self._writer.close()  # so that the new epoch can use what the last one has left
                self._epoch = order.epoch
            tensors = views(self._arena.slot(order.slot), order.table)
            offsets = tensors["offsets"]
            for at, sample in enumerate(order.samples):
                rows = slice(int(offsets[at]), int(offsets[at + 1]))
                ids, mask = tensors["token_ids"][rows].view(np.int32), tensors["loss_mask"][rows].view(np.uint8)
                self._ids[sample_key(ids)] = sample
                self._writer.add(ids, mask, tensors["features"][rows])
        except (Full, OSError) as error:
            self._problem = str(error)
            log.warning("nothing more is kept: %s", error)

    def _durable(self) -> tuple[int, ...]:
        """The samples of shards that were completed since the last call; the open cache knows them from here on."""
        found: list[int] = []
        for path in self._writer.take_completed():
            found += [self._ids.pop(key) for key in self._cache.take_in(path) if key in self._ids]
        return tuple(found)
