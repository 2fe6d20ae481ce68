"""The window: unreleased blocks at hand and the slots that they hold, in plan order.

It decides who gets a slot (`reserve`), what a slot's state is and what may be leased (`settle`), and how a block starts
again (`refill`). The ledger turns messages into calls of these.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping

from protocol.grants import BlockSource, Entry, Key, Lease, LiveLease, PartsOf, Walk, split
from protocol.slots import DELIVERED, FREE, LEASED, LOST, READY, RESERVED, SPILLING, Slots


class Window:
    """Blocks from the oldest unreleased one to the last that has a slot, for `consumers` ranks over `slots` slots."""

    def __init__(self, source: BlockSource, slots: int, consumers: int, parts_of: PartsOf) -> None:
        self.slots = Slots(slots)
        self.entries: dict[Key, Entry] = {}
        self.undelivered: list[list[Key]] = [[] for _ in range(consumers)]  # by rank; sorted
        self.open: defaultdict[str, list[Key]] = defaultdict(list)  # leasable blocks by kind; sorted
        self.live: dict[int, LiveLease] = {}  # by attempt
        self.writers: list[set[int]] = [set() for _ in range(slots)]  # live attempts by slot
        self.quarantined: dict[int, str] = {}
        self.revocations: list[Lease] = []
        self.walk = Walk(source, 0)
        self._source, self._parts_of = source, parts_of
        self._owner: list[Entry | None] = [None] * slots
        self._waiting: list[Key] = []  # before the walk, not empty and without a slot; sorted
        self._limit = (slots + 1) * consumers  # bounds runs of empty blocks, which need no slot
        self._highest: Key = (0, 0)  # no block at hand comes after it

    @property
    def lowest_without_slot(self) -> Key:
        """The next block to get a slot; nothing after it is leased, so that its slot comes."""
        return self._waiting[0] if self._waiting else self.walk.key

    @property
    def starved(self) -> bool:
        """Every slot is lost and a block needs one."""
        return self.slots.usable == 0 and (bool(self._waiting) or self.walk.block is not None)

    # --- slots ---

    def reserve(self) -> None:
        """Give slots to the lowest blocks without one, for as long as there are slots to give."""
        while self._waiting or self._pass_empty_blocks():
            slot = self._claim_slot(self.lowest_without_slot)
            if slot is None:
                return
            entry = self.entries[self._waiting.pop(0)] if self._waiting else self._admit()
            entry.slot = slot
            self._owner[slot] = entry
            self.settle(entry)

    def settle(self, entry: Entry) -> None:
        """Derive the slot's state and what may be leased from the block: the one place that decides both."""
        leasable = False
        if entry.slot is not None:
            writers = self.writers[entry.slot]
            if writers:
                state = LEASED
            elif entry.delivery is not None:
                state = DELIVERED
            else:
                state = READY if entry.filled else RESERVED
            if state != self.slots.state(entry.slot):
                self.slots.move(entry.slot, state)
            # Two producers may fill disjoint parts at once, but nobody joins a writer whose layout is outdated.
            leasable = state in (LEASED, RESERVED) and not any(self.live[writer].fenced for writer in writers)
        kinds = {part.kind for part in entry.parts if part.open} if leasable else set()
        for kind in kinds | self.open.keys():
            queue = self.open[kind]
            at = bisect_left(queue, entry.key)
            listed = at < len(queue) and queue[at] == entry.key
            if kind in kinds and not listed:
                queue.insert(at, entry.key)
            elif listed and kind not in kinds:
                del queue[at]

    def leave_slot(self, entry: Entry, state: str = FREE) -> None:
        """Part a block from its slot, which goes to `state` once nobody writes it."""
        slot, entry.slot = entry.slot, None
        self.settle(entry)
        if slot is not None:
            self._owner[slot] = None
            if not self.writers[slot] and self.slots.state(slot) != LOST:
                self.slots.move(slot, state)

    def lose(self, slot: int) -> None:
        """Give a leased slot up for good; its block waits for another."""
        self.slots.move(slot, LOST)
        if (entry := self._owner[slot]) is not None:
            self._displace(entry)

    def after_writing(self, slot: int) -> None:
        """A producer or the spill has ended with this slot: its block goes on, or another gets it."""
        owner = self._owner[slot]
        if owner is not None:
            self.settle(owner)
        elif not self.writers[slot] and self.slots.state(slot) in (LEASED, SPILLING):
            self.slots.move(slot, FREE)
        self.reserve()

    def _claim_slot(self, key: Key) -> int | None:
        """A slot for block `key`: a free one, else that of the latest block after it that nobody writes or reads."""
        slot = self.slots.reserve()
        if slot is not None or key > self._highest:
            return slot
        later = [entry for entry in self.entries.values() if entry.slot is not None and entry.key > key]
        idle = [entry for entry in later if self.slots.state(entry.slot or 0) in (RESERVED, READY)]
        if not idle:
            return None
        self._displace(max(idle, key=lambda entry: entry.key))
        return self.slots.reserve()

    def _displace(self, entry: Entry) -> None:
        """Take the slot from an undelivered block, which will be filled from the start in another."""
        self.fence(entry)
        self.leave_slot(entry)
        entry.parts = split(entry.samples, self._parts_of)
        if entry.key < self.walk.key:
            insort(self._waiting, entry.key)
        else:
            self.undelivered[entry.rank].remove(entry.key)
            del self.entries[entry.key]

    def _pass_empty_blocks(self) -> bool:
        """Walk on to the next block that needs a slot; whether there is one at hand."""
        while (block := self.walk.block) is not None:
            if self.walk.key in self.entries:  # kept whole through a rewind
                self.walk.advance()
            elif self._sound(block.samples):
                return True
            elif len(self.entries) < self._limit:
                self._admit()
            else:
                return False
        return False

    def _admit(self) -> Entry:
        """Take the block at the walk into the window."""
        block = self.walk.block
        assert block is not None
        samples = self._sound(block.samples)
        parts = split(samples, self._parts_of)
        entry = Entry(self.walk.key, block.rank, block.micro_step, block.samples, samples, parts)
        self.entries[entry.key] = entry
        insort(self.undelivered[entry.rank], entry.key)
        self._highest = max(self._highest, entry.key)
        self.walk.advance()
        return entry

    # --- content ---

    def refill(self, entry: Entry) -> None:
        """Open a whole block again, less what is quarantined; the layout changes, so all its writers are fenced."""
        self.fence(entry)
        entry.samples = self._sound(entry.planned)
        entry.parts = split(entry.samples, self._parts_of)
        if entry.samples:
            self.settle(entry)
            return
        self.leave_slot(entry)
        if entry.key in self._waiting:
            self._waiting.remove(entry.key)

    def quarantine(self, samples: set[int], reason: str) -> list[Key]:
        """Take samples out of every block that no consumer holds, and all to come. Returns the blocks changed."""
        self.quarantined.update(dict.fromkeys(sorted(samples - self.quarantined.keys()), reason))
        changed = [
            entry for entry in self.entries.values() if entry.delivery is None and not samples.isdisjoint(entry.samples)
        ]
        for entry in changed:
            self.refill(entry)
        return [entry.key for entry in changed]

    def rewind(self, step: int, quarantined: Mapping[int, str]) -> None:
        """Start again at `step`: keep what is whole in the ring and still wanted, take back what consumers hold."""
        self.quarantined = dict(quarantined)
        self.walk = Walk(self._source, step)
        self._waiting.clear()
        self.undelivered = [[] for _ in self.undelivered]
        for key, entry in list(self.entries.items()):
            if entry.slot is not None and key >= self.walk.key and entry.samples == self._sound(entry.planned):
                entry.delivery = None
                insort(self.undelivered[entry.rank], key)
                self.settle(entry)
            else:
                self.fence(entry)
                self.leave_slot(entry)
                del self.entries[key]
        self._highest = max(self.entries, default=self.walk.key)
        self.reserve()
        self.revoke()

    def _sound(self, samples: tuple[int, ...]) -> tuple[int, ...]:
        if not self.quarantined:
            return samples
        return tuple(sample for sample in samples if sample not in self.quarantined)

    # --- writers ---

    def fence(self, entry: Entry) -> None:
        """Nothing that is being written for this block counts any more."""
        for part in entry.parts:
            if part.live is not None:
                part.live.fenced = True
                self._ask_back([part.live])
                part.live = None

    def revoke(self) -> None:
        """Ask back leases of blocks that stand in the way of an earlier one."""
        ceiling = self.lowest_without_slot
        self._ask_back(live for live in self.live.values() if not live.fenced and live.lease.key > ceiling)

    def _ask_back(self, leases: Iterable[LiveLease]) -> None:
        for live in leases:
            if not live.revoked:
                live.revoked = True
                self.revocations.append(live.lease)
