"""What of a run goes to its disk cache: which released blocks wait in their slot for the writer, and which do not.

The trainer never waits for the disk: at most a quarter of the slots are the writer's at a time. A block that finds them
taken is not kept, and counted; the next epoch or the next run computes it again.
"""

from __future__ import annotations

from typing import Any

from launch.parts import Parts
from launch.placement import idle
from launch.senders import LAUNCHER
from protocol.block import Table
from protocol.grants import Delivery
from protocol.job import REPLAY, Job
from protocol.ledger import Ledger
from protocol.messages import Again, Error, Flush, Message, Spill, Spilled
from protocol.plan import Plan
from protocol.slots import SPILLING

LARGEST_SHARE = 4  # one slot in so many
# A run with less of its plan left does not start again for more ranks.
LEAST_LEFT = 0.1
# Under this name what nobody replays any more is taken and given back, so that it falls to the target.
NOBODY = "nobody"


class Spilling:
    """The cache of a run that fills it while it reads, if the job has one. `rows`: (kind, row) pairs for metrics.jsonl,
    shared with the conductor."""

    def __init__(self, job: Job, plan: Plan, ledger: Ledger, parts: Parts, rows: list[tuple[str, Any]]) -> None:
        self.there = job.spills
        self._job, self._plan = job, plan
        self._ledger, self._parts, self._rows = ledger, parts, rows
        self._most = job.slots // LARGEST_SHARE
        self._writing: set[int] = set()  # attempts
        self._kept = self._passed_over = self._damaged = 0  # samples
        self._damaged_shards: set[str] = set()
        self._epoch = plan.epoch_at(job.start_step)
        self._joined = self._full = self._given_up = False
        self._covered = parts.complete

    def state(self) -> dict[str, Any] | None:
        """For the snapshot: `held` of `samples` can be replayed; `kept` by this start, `passed_over` because the writer
        had its quarter of the slots, `damaged` and computed again; `full`: nothing more is kept."""
        if not self.there:
            return None
        return {
            "samples": self._parts.samples,
            "held": self._parts.held,
            "kept": self._kept,
            "passed_over": self._passed_over,
            "damaged": self._damaged,
            "full": self._full,
        }

    # --- the writer ---

    def joined(self, name: str) -> None:
        self._joined = self._joined or name == REPLAY

    def gone(self, name: str, for_good: bool) -> None:
        """If it is the process of the cache: it has ended, or was killed and runs no more, so that it reads no slot
        from here on, and what it was writing is no shard."""
        if name != REPLAY or not self.there:
            return
        self._joined = False
        for attempt in self._writing:
            self._ledger.spilled(attempt)
        self._writing.clear()
        if for_good and not self._given_up:
            self._given_up = self._full = True
            self._parts.forget_all()
            self._say("cache lost", "the process of the cache is not started again: the target computes everything")

    def pass_on(self) -> None:
        """Once nobody replays any more, what waits for that falls to the target."""
        while self._given_up and (lease := self._ledger.want(NOBODY, "replay")) is not None:
            self._ledger.nack(lease.key, lease.kind, lease.attempt, NOBODY, retryable=True, harmless=True)

    # --- blocks ---

    def takes(self, held: Delivery) -> bool:
        """Whether the writer takes a block that is being released. What only came from the cache is in it already."""
        fresh = sum(len(part.samples) for part in held.parts if part.kind != "replay")
        if not fresh or self._full or not self.there:
            return False
        if self._joined and self._ledger.counts[SPILLING] < self._most:
            return True
        self._passed_over += fresh
        return False

    def spill(self, held: Delivery, table: Table) -> tuple[str, Message]:
        """The order to the writer, whose slot that of the block is until SPILLED."""
        assert held.slot is not None
        self._writing.add(held.attempt)
        return REPLAY, Spill(attempt=held.attempt, slot=held.slot, table=table, samples=held.samples)

    def reached(self, epoch: int) -> list[tuple[str, Message]]:
        """Every block before this epoch is released: what has been written of them is to be of use in it."""
        passed, self._epoch = epoch != self._epoch, epoch
        return [(REPLAY, Flush())] if passed and self._joined and not self._full else []

    def done(self, message: Spilled) -> list[tuple[str, Message]]:
        """The writer is done with a slot, or with the open shard. What is durable by now may be replayed; once that is
        everything, the run may be worth another start."""
        if message.attempt in self._writing:
            self._writing.remove(message.attempt)
            self._ledger.spilled(message.attempt)
        before = self._parts.held
        self._parts.learn(message.durable)
        self._kept += self._parts.held - before
        if message.problem and not self._full:
            self._full = True
            self._say("cache full", f"the cache takes nothing more, the run goes on: {message.problem}")
        if self._covered or not self._parts.complete:
            return []
        self._covered = True
        left = self._plan.total_steps - self._ledger.lowest_unreleased_step
        regroups = self._job.regroups and left >= LEAST_LEFT * self._plan.total_steps
        text = f"the cache holds all {self._parts.samples} samples: from here on nothing needs the target"
        text += idle(self._job.producers, self._job.consumers) if not regroups else ""
        self._say("cache complete", text)
        return [(LAUNCHER, Again(text=text, at_once=False))] if regroups else []

    def damaged(self, samples: tuple[int, ...], reason: str) -> list[tuple[str, Message]]:
        """These could not be replayed: the target computes them, and each shard is named once. Where there is no target
        the run ends, or starts again with one."""
        if not self.there:
            text = f"{self._job.cached}: {reason}; `draftwire cache verify` finds what else is damaged"
            return [(LAUNCHER, Error(text=text))]
        self._damaged += len(samples)
        self._parts.forget(samples)
        shard, _, _ = reason.partition(":")
        if shard not in self._damaged_shards:
            self._damaged_shards.add(shard)
            self._say("cache damaged", f"{reason}; what is damaged there is computed and kept again")
        if self._job.producers:
            return []
        return [(LAUNCHER, Again(text=f"{reason}, and no target is loaded", at_once=True))]

    def _say(self, what: str, text: str) -> None:
        self._rows.append(("event", {"what": what, "text": text}))
