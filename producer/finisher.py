"""The end of a block: wait until its last byte is there, let it go, ask for the next one.

On a GPU that is waited for by a thread, so that the next block can be enqueued meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from msgspec import Struct

from producer.figures import EVERY_BLOCKS, tap_figures
from producer.lease_layout import Features, written_ranges
from producer.outlet import Outlet
from producer.stage import Filled
from protocol.messages import Lease, Ready, Stop, Want
from protocol.peer import Peer


class _Block(Struct, frozen=True):
    lease: Lease
    slot: memoryview
    filled: Filled
    halved: int


class Finisher:
    """`threaded`: `submit` returns at once. What goes wrong then comes as a STOP into the peer's inbox."""

    def __init__(
        self, job: Features, outlet: Outlet, peer: Peer, finished: Callable[[Lease], None], threaded: bool
    ) -> None:
        self._job, self._outlet, self._peer, self._finished = job, outlet, peer, finished
        self._finished_blocks = 0
        self._blocks: queue.Queue[_Block | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="finisher", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, lease: Lease, slot: memoryview, filled: Filled, halved: int) -> None:
        block = _Block(lease, slot, filled, halved)
        if self._thread is None:
            self._finish(block)
        else:
            self._blocks.put(block)

    def close(self) -> None:
        """Returns when everything submitted is let go."""
        if self._thread is not None:
            self._blocks.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            while (block := self._blocks.get()) is not None:
                self._finish(block)
        except Exception as error:
            self._peer.inbox.put(Stop(reason=f"a block could not be finished: {error}"))

    def _finish(self, block: _Block) -> None:
        lease = block.lease
        checksum, busy_s = block.filled.wait()
        looks = self._finished_blocks % EVERY_BLOCKS == 0
        self._finished_blocks += 1
        ready = Ready(
            step=lease.step,
            index=lease.index,
            kind=lease.kind,
            attempt=lease.attempt,
            checksum=checksum,
            busy_s=busy_s,
            halved=block.halved,
            figures=tap_figures(lease, block.slot, self._job) if looks else (),
        )
        self._outlet.commit(lease, written_ranges(lease, self._job), ready)
        self._finished(lease)
        self._peer.send(Want(kind="model"))
        self._peer.progress += 1
