"""What of a run goes to its disk cache: which released blocks wait in their slot for the writer, and which do not.

The trainer never waits for the disk: at most a quarter of the slots are the writer's at a time. A block that finds them
taken is not kept, and counted; the next epoch or the next run computes it again.
"""

from __future__ import annotations

from typing import Any

from launch.parts import Parts
from protocol.block import Table
from protocol.grants import Delivery
from protocol.job import REPLAY
from protocol.ledger import Ledger
from protocol.messages import Spill, Spilled
from protocol.slots import SPILLING

LARGEST_SHARE = 4  # one slot in so many, and one at least


class Spilling:
    """`rows`: (kind, row) pairs for metrics.jsonl, shared with the conductor."""

    def __init__(self, ledger: Ledger, parts: Parts, slots: int, rows: list[tuple[str, dict[str, Any]]]) -> None:
        self.kept = self.passed_over = 0  # samples
        self._ledger, self._parts, self._rows = ledger, parts, rows
        self._most = max(slots // LARGEST_SHARE, 1)
        self._writing: dict[int, int] = {}  # attempt -> slot
        self._full = False

    def takes(self, held: Delivery, there: bool) -> bool:
        """Whether the writer, if it is `there`, takes a block that is being released. What only came from the cache is
        in it already."""
        fresh = sum(len(part.samples) for part in held.parts if part.kind != "replay")
        if not fresh or self._full:
            return False
        if there and self._ledger.counts[SPILLING] < self._most:
            return True
        self.passed_over += fresh
        return False

    def spill(self, held: Delivery, table: Table, epoch: int) -> tuple[str, Spill]:
        """The order to the writer, whose slot it is until SPILLED."""
        assert held.slot is not None
        self._writing[held.attempt] = held.slot
        place = {"step": held.step, "index": held.index, "attempt": held.attempt, "slot": held.slot}
        return REPLAY, Spill(**place, epoch=epoch, table=table, samples=held.samples)

    def done(self, message: Spilled) -> None:
        """The writer is done with a slot. What it has made durable by now may be replayed."""
        if self._writing.pop(message.attempt, None) is not None:
            self._ledger.spilled(message.attempt)
        self.kept += len(message.durable)
        self._parts.learn(message.durable)
        if message.problem and not self._full:
            self._full = True
            text = f"the cache takes nothing more, the run goes on: {message.problem}"
            self._rows.append(("event", {"what": "cache full", "text": text}))

    def writer_gone(self) -> None:
        """The process of the cache has ended, and with it what it was writing: it reads no slot any more."""
        for attempt in list(self._writing):
            del self._writing[attempt]
            self._ledger.spilled(attempt)

    def damaged(self, samples: tuple[int, ...], reason: str) -> None:
        """These could not be replayed: the target computes them."""
        self._parts.forget(samples)
        text = f"{reason}; the target computes {len(samples)} samples instead (`draftwire cache verify` finds more)"
        self._rows.append(("event", {"what": "cache damaged", "text": text}))
