"""The S equal slots of the ring and the state of each. Holds no bytes: the arena does."""

from __future__ import annotations

import heapq

FREE, RESERVED, LEASED, READY, DELIVERED, SPILLING, LOST = (
    "free",
    "reserved",
    "leased",
    "ready",
    "delivered",
    "spilling",
    "lost",
)
STATES = (FREE, RESERVED, LEASED, READY, DELIVERED, SPILLING, LOST)

_ALLOWED = {
    FREE: {RESERVED},
    RESERVED: {LEASED, FREE},
    LEASED: {RESERVED, READY, FREE, LOST},
    READY: {DELIVERED, RESERVED, FREE},  # reserved again when its content changes, free when it is dropped
    DELIVERED: {FREE, SPILLING, RESERVED, READY},  # reserved again on BAD, ready again on a rewind
    SPILLING: {FREE},
    LOST: set(),
}


class SlotError(AssertionError):
    """A slot was asked for a transition that does not exist: a defect of the ledger, never of a peer."""


class Slots:
    """States of `total` slots; `free + reserved + leased + ready + delivered + spilling + lost == total`, always."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise SlotError(f"a ring needs at least one slot, not {total}")
        self.total = total
        self._state = [FREE] * total
        self._counts = dict.fromkeys(STATES, 0) | {FREE: total}
        self._free = list(range(total))  # a heap: the lowest free slot is taken first

    def state(self, slot: int) -> str:
        """State of one slot."""
        return self._state[slot]

    def count(self, state: str) -> int:
        """How many slots are in `state`."""
        return self._counts[state]

    @property
    def counts(self) -> dict[str, int]:
        """How many slots are in each state."""
        return dict(self._counts)

    @property
    def usable(self) -> int:
        """Slots that are not lost."""
        return self.total - self._counts[LOST]

    def reserve(self) -> int | None:
        """Take the lowest free slot, or None when there is none."""
        if not self._free:
            return None
        slot = self._free[0]
        self.move(slot, RESERVED)
        return slot

    def move(self, slot: int, state: str) -> None:
        """Put `slot` into `state`. Raises SlotError for a transition that does not exist."""
        old = self._state[slot]
        if state not in _ALLOWED[old]:
            raise SlotError(f"slot {slot} cannot go from {old} to {state}")
        if old == FREE and slot != self._free[0]:
            raise SlotError(f"slot {slot} was reserved out of turn: the lowest free slot comes first")
        if old == FREE:
            heapq.heappop(self._free)
        elif state == FREE:
            heapq.heappush(self._free, slot)
        self._state[slot] = state
        self._counts[old] -= 1
        self._counts[state] += 1
        if sum(self._counts.values()) != self.total or self._counts[FREE] != len(self._free):
            raise SlotError(f"the slot count does not add up after slot {slot} went from {old} to {state}")
