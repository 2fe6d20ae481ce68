"""The ledger: the pure state machine of every block. No clock and no I/O; the coordinator feeds it events.

Rules (docs/design.md, "Rules that make it exact", 1 to 4):

- Free slots are reserved in plan order, whether or not anyone asks. A reservation stays with its block until RELEASE
  or quarantine; a lease is the lowest reserved block that the asker may fill. No slot, no lease.
- When a block has no slot while later ones hold all of them (after a rewind or a lost slot), the latest block that
  nobody writes or reads gives its slot up, and nothing later than the waiting block is leased.
- A slot is never reused before every writer in it has said READY or NACK or has been reaped; else it is lost.
- Messages of an earlier attempt, another holder or an unknown block are dropped and counted; they never raise.

A delivered block is taken to come back by RELEASE, BAD or rewind without waiting for other blocks: deliver on credit.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from itertools import count

from protocol.grants import BlockSource, Delivery, Entry, Key, Lease, LiveLease, PartsOf, all_model
from protocol.holders import Holders
from protocol.slots import FREE, LOST, READY, SPILLING
from protocol.window import Window


class Ledger:
    """Every block from `next_step` on, over `slots` ring slots and `consumers` ranks.

    `parts_of` cuts samples by the kind of producer that fills them; it is asked anew whenever something is filled
    again. A block is ready when all its parts are filled. `stale` counts dropped messages; while `paused` nothing is
    leased.
    """

    def __init__(
        self,
        source: BlockSource,
        slots: int,
        consumers: int,
        *,
        parts_of: PartsOf = all_model,
        max_tries: int = 3,
        next_step: int = 0,
        quarantined: Mapping[int, str] | None = None,
    ) -> None:
        self.paused = False
        self.stale = 0
        self._parts_of, self._max_tries = parts_of, max_tries
        self._holders = Holders()
        self._window = Window(source, slots, consumers, parts_of)
        self._attempts = count(1)
        self._spilling: dict[int, int] = {}  # delivery attempt -> slot
        self.rewind(next_step, quarantined or {})

    # --- answers ---

    @property
    def finished(self) -> bool:
        """Every block of the plan is released."""
        return not self._window.entries and self._window.walk.block is None

    @property
    def exhausted(self) -> bool:
        """Every slot is lost while blocks are left: the run cannot go on."""
        return self._window.starved

    @property
    def lowest_unreleased_step(self) -> int:
        """The first step that still has an unreleased block; the plan's number of steps at the end."""
        return min(self._window.entries.keys() | {self._window.walk.key})[0]

    @property
    def counts(self) -> dict[str, int]:
        """Slots in each state."""
        return self._window.slots.counts

    def slots_in(self, state: str) -> set[int]:
        """The slots that are in one state: which ones are lost, say."""
        return {slot for slot in range(self._window.slots.total) if self._window.slots.state(slot) == state}

    @property
    def quarantined(self) -> dict[int, str]:
        """Sample -> reason, for the cursor."""
        return dict(self._window.quarantined)

    @property
    def empty_blocks(self) -> int:
        """Unreleased empty blocks at hand; they occupy no slot."""
        return sum(not entry.samples for entry in self._window.entries.values())

    @property
    def live_leases(self) -> list[Lease]:
        """Leases whose holders may still write, fenced ones included, oldest first."""
        return [live.lease for live in self._window.live.values()]

    def history(self, key: Key) -> tuple[int, int]:
        """(tries failed, holders that died) of an unreleased block."""
        past = self._holders.history(key)
        return past.tries, past.deaths

    def take_revocations(self) -> list[Lease]:
        """Leases that became useless since the last call: tell their holders to give up (a NACK of theirs is free)."""
        taken, self._window.revocations = self._window.revocations, []
        return taken

    # --- producers ---

    def join(self, holder: str, kind: str) -> None:
        """A producer is there; `want` implies it. Known holders decide whether a failed block can avoid one."""
        self._holders.join(holder, kind)

    def want(self, holder: str, kind: str) -> Lease | None:
        """The lowest reserved block that this holder may fill, or None: no slot, no lease."""
        if self.paused or holder in self._holders.lost:
            return None
        self.join(holder, kind)
        ceiling = self._window.lowest_without_slot
        for key in self._window.open[kind]:
            if key > ceiling:
                return None
            if not self._holders.should_leave(key, holder, kind):
                return self._grant(self._window.entries[key], holder, kind)
        return None

    def ready(self, key: Key, kind: str, attempt: int, holder: str) -> bool:
        """A part is filled. Whether it counted: False when stale, fenced or no longer needed."""
        live = self._end_lease(key, kind, attempt, holder)
        if live is None:
            return False
        self.stale += live.fenced
        if not live.fenced:
            live.part.filled = live.lease
        self._window.after_writing(live.lease.slot)
        entry = self._window.entries.get(key)
        return entry is not None and any(part.filled is live.lease for part in entry.parts)

    def nack(
        self,
        key: Key,
        kind: str,
        attempt: int,
        holder: str,
        retryable: bool,
        samples: tuple[int, ...] | None = None,
        reason: str = "cannot be computed",
        harmless: bool = False,
    ) -> bool:
        """A part cannot be filled; `samples` names the culprits, else all of the part are. `harmless`: that is no try
        of theirs. Whether it was current."""
        live = self._end_lease(key, kind, attempt, holder)
        if live is None:
            return False
        if not live.fenced:
            entry = self._window.entries[key]
            entry.reopen(live.part, self._parts_of)
            if not (live.revoked or harmless):
                self._fail(entry, {holder}, _named(live.part.samples, samples), reason, final=not retryable)
        self._window.after_writing(live.lease.slot)
        return not live.fenced

    def holder_died(self, holder: str) -> list[Lease]:
        """A producer has been reaped: it writes no more. Returns the leases that are open again; no try is counted."""
        reopened = []
        gone = self._forget(holder)
        for live in gone:
            if not live.fenced:
                self._window.entries[live.lease.key].reopen(live.part, self._parts_of)
                self._holders.died(live.lease.key)
                reopened.append(live.lease)
        for live in gone:
            self._window.after_writing(live.lease.slot)
        return reopened

    def holder_lost(self, holder: str) -> list[int]:
        """A producer cannot be reaped: the slots that it may write are lost for good, and so is its name."""
        self._holders.lost.add(holder)
        written = sorted({live.lease.slot for live in self._forget(holder)})
        slots = [slot for slot in written if self._window.slots.state(slot) != LOST]
        for slot in slots:
            self._window.lose(slot)
        self._window.reserve()
        self._window.revoke()
        return slots

    # --- consumers ---

    def next_delivery(self, rank: int) -> Delivery | None:
        """The rank's lowest undelivered block, if that one is ready or empty: never one out of plan order."""
        queue = self._window.undelivered[rank]
        if not queue or queue[0] >= self._window.walk.key:
            return None
        entry = self._window.entries[queue[0]]
        if entry.samples and (entry.slot is None or self._window.slots.state(entry.slot) != READY):
            return None
        del queue[0]
        entry.delivery = next(self._attempts)
        self._window.settle(entry)
        parts = tuple(part.filled for part in entry.parts if part.filled is not None)
        place = (*entry.key, entry.rank, entry.micro_step)
        return Delivery(*place, entry.delivery, entry.slot, entry.samples, parts)

    def release(self, key: Key, attempt: int, spill: bool = False) -> bool:
        """The consumer has copied the block out and found it sound. With `spill` the slot is kept until `spilled`."""
        entry = self._delivered(key, attempt)
        if entry is None:
            return False
        del self._window.entries[key]
        self._holders.forget_blocks([key])
        if entry.slot is not None and spill:
            self._spilling[attempt] = entry.slot
        self._window.leave_slot(entry, SPILLING if spill else FREE)
        self._window.reserve()
        return True

    def spilled(self, attempt: int) -> bool:
        """The disk writer is done, well or not, with the block that was delivered as `attempt`."""
        slot = self._spilling.pop(attempt, None)
        if slot is None:
            self.stale += 1
            return False
        self._window.after_writing(slot)
        return True

    def bad(
        self, key: Key, attempt: int, samples: tuple[int, ...] | None = None, reason: str = "unsound states"
    ) -> bool:
        """The consumer found poison; `samples` names the culprits, else all are. Whether it was current."""
        entry = self._delivered(key, attempt)
        if entry is None or not entry.samples:
            self.stale += entry is not None
            return False
        held, named = entry.samples, _named(entry.samples, samples)
        culprits = {p.filled.holder for p in entry.parts if p.filled is not None and not named.isdisjoint(p.samples)}
        entry.delivery = None
        insort(self._window.undelivered[entry.rank], key)
        self._window.refill(entry)
        if entry.samples == held:  # else what failed held a sample that is quarantined by now
            self._fail(entry, culprits, named, reason, final=False)
        self._window.reserve()
        return True

    # --- the run ---

    def rewind(self, step: int, quarantined: Mapping[int, str]) -> None:
        """Go to the cursor of a checkpoint, whose quarantine list replaces the ledger's.

        Blocks from `step` on that are whole in the ring stay there unless an earlier one needs the slot; what consumers
        hold becomes ready again; leases that still serve the plan live on, others are fenced.
        """
        self._holders.forget_before((step, 0))
        self._window.rewind(step, quarantined)

    # --- inside ---

    def _grant(self, entry: Entry, holder: str, kind: str) -> Lease:
        assert entry.slot is not None
        part = next(part for part in entry.parts if part.open and part.kind == kind)
        attempt = next(self._attempts)
        lease = Lease(*entry.key, kind, attempt, holder, entry.slot, part.samples, entry.samples)
        part.live = self._window.live[attempt] = LiveLease(lease, part)
        self._window.writers[entry.slot].add(attempt)
        self._window.settle(entry)
        return lease

    def _end_lease(self, key: Key, kind: str, attempt: int, holder: str) -> LiveLease | None:
        live = self._window.live.get(attempt)
        if live is None or (live.lease.key, live.lease.kind, live.lease.holder) != (key, kind, holder):
            self.stale += 1
            return None
        self._take_out(live)
        return live

    def _forget(self, holder: str) -> list[LiveLease]:
        self._holders.leave(holder)
        gone = [live for live in self._window.live.values() if live.lease.holder == holder]
        for live in gone:
            self._take_out(live)
        return gone

    def _take_out(self, live: LiveLease) -> None:
        del self._window.live[live.lease.attempt]
        self._window.writers[live.lease.slot].remove(live.lease.attempt)
        live.part.live = None

    def _fail(self, entry: Entry, holders: set[str], samples: set[int], reason: str, final: bool) -> None:
        tries = self._holders.failed(entry.key, holders)
        if final or tries >= self._max_tries:
            self._holders.forget_blocks(self._window.quarantine(samples, reason))

    def _delivered(self, key: Key, attempt: int) -> Entry | None:
        entry = self._window.entries.get(key)
        if entry is None or entry.delivery != attempt:
            self.stale += 1
            return None
        return entry


def _named(held: tuple[int, ...], samples: tuple[int, ...] | None) -> set[int]:
    """The named samples that are held, or all of them when none is named."""
    return set(held).intersection(samples or ()) or set(held)
