"""Random interleavings of producers, consumers and failures against the ledger, over a simulated ring memory.

Every writer that has not said READY or NACK and was not reaped may write its slot at any time; each delivered block
must still be exactly what its parts wrote. Afterwards a fair scheduler must be able to finish the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.grants import Delivery, Key, Lease
from protocol.ledger import Ledger
from protocol.packing import BlockSpec

PICK = st.integers(0, 30)
SAMPLES = 8  # of the simulated dataset: few, so that epochs repeat them inside one window


def nth(choices: Sequence[Any], pick: int) -> Any:
    return choices[pick % len(choices)]


class TinyPlan:
    """Steps given as lists of sample tuples, one tuple a block."""

    def __init__(self, steps: list[list[tuple[int, ...]]], consumers: int) -> None:
        self.total_steps = len(steps)
        self._blocks = [
            [BlockSpec(s, j, j % consumers, j // consumers, held, len(held), 0) for j, held in enumerate(blocks)]
            for s, blocks in enumerate(steps)
        ]

    def blocks(self, step: int) -> list[BlockSpec]:
        return self._blocks[step]

    def all_blocks(self) -> dict[Key, BlockSpec]:
        return {(b.step, b.index): b for blocks in self._blocks for b in blocks}


class LedgerMachine(RuleBasedStateMachine):
    """Model of the world around a ledger; `writing` are the leases whose holders may still touch memory."""

    @initialize(
        seed=st.integers(0, 2**32), consumers=st.integers(1, 3), slots=st.integers(1, 5), poison=st.integers(0, 2)
    )
    def start(self, seed: int, consumers: int, slots: int, poison: int) -> None:
        world = Random(seed)
        steps = []
        for _ in range(world.randint(1, 3)):
            left = world.sample(range(SAMPLES), SAMPLES)
            while left:
                held: list[list[int]] = [[] for _ in range(consumers * world.randint(1, 2))]
                for sample in left[: (size := world.randint(1, 4))]:
                    world.choice(held).append(sample)
                del left[:size]
                steps.append([tuple(samples) for samples in held])
        self.plan = TinyPlan(steps, consumers)
        self.blocks = self.plan.all_blocks()
        self.cached = set(world.sample(range(SAMPLES), world.choice([0, SAMPLES // 2, SAMPLES])))
        self.poison = set(world.sample(range(SAMPLES), poison))
        self.consumers, self.total = consumers, slots
        self.ledger = Ledger(self.plan, slots, consumers, parts_of=self.parts_of)
        self.kinds = {"m0": "model", "m1": "model", "r0": "replay"}  # live producers
        self.spawned = 3
        self.writing: dict[int, Lease] = {}
        self.zombies: dict[int, Lease] = {}
        self.memory: list[dict[int, object]] = [{} for _ in range(slots)]
        self.held: list[dict[Key, Delivery]] = [{} for _ in range(consumers)]
        self.released: set[Key] = set()
        self.past: list[Lease | Delivery] = []
        self.spills: list[int] = []
        self.lists: list[dict[int, str]] = [{}]

    def parts_of(self, samples: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {
            "model": tuple(s for s in samples if s not in self.cached),
            "replay": tuple(s for s in samples if s in self.cached),
        }

    # --- memory ---

    def write(self, lease: Lease, final: bool) -> None:
        places = {sample: place for place, sample in enumerate(lease.block_samples)}
        for sample in lease.samples:
            self.memory[lease.slot][places[sample]] = (lease.key, sample, lease.attempt if final else None)

    def check_content(self, delivery: Delivery) -> None:
        wrote = {sample: part.attempt for part in delivery.parts for sample in part.samples}
        assert wrote.keys() == set(delivery.samples)
        for place, sample in enumerate(delivery.samples):
            assert delivery.slot is not None
            assert self.memory[delivery.slot][place] == (delivery.key, sample, wrote[sample])

    # --- producers ---

    def grant(self, holder: str) -> bool:
        lease = self.ledger.want(holder, self.kinds[holder])
        if lease is None:
            return False
        assert set(lease.samples) <= set(lease.block_samples)
        assert lease.block_samples == self.sound(lease.key)
        earlier = [e for k, e in self.ledger._window.entries.items() if k < lease.key and e.samples]
        assert all(entry.slot is not None for entry in earlier), "leased past a block that has no slot"
        self.writing[lease.attempt] = lease
        self.past.append(lease)
        return True

    def sound(self, key: Key) -> tuple[int, ...]:
        return tuple(s for s in self.blocks[key].samples if s not in self.ledger.quarantined)

    @rule(pick=PICK)
    def want(self, pick: int) -> None:
        self.grant(nth(sorted(self.kinds), pick))

    @rule(grants=st.integers(0, 6), fills=st.integers(0, 6), pick=PICK)
    def flow(self, grants: int, fills: int, pick: int) -> None:
        """Ordinary progress, so that failures meet full rings."""
        for turn in range(grants):
            if self.kinds:
                self.grant(nth(sorted(self.kinds), pick + turn))
        for _ in range(min(fills, len(self.writing))):
            self.fill(nth(sorted(self.writing), pick))
        for rank in range(self.consumers):
            if len(self.held[rank]) < 2:
                self.deliver(rank)

    def fill(self, attempt: int) -> None:
        lease = self.writing.pop(attempt)
        self.write(lease, final=True)
        self.ledger.ready(lease.key, lease.kind, lease.attempt, lease.holder)

    @precondition(lambda self: self.writing or self.zombies)
    @rule(pick=PICK)
    def scribble(self, pick: int) -> None:
        everyone = self.writing | self.zombies
        self.write(everyone[nth(sorted(everyone), pick)], final=False)

    @precondition(lambda self: self.writing)
    @rule(pick=PICK)
    def ready(self, pick: int) -> None:
        self.fill(nth(sorted(self.writing), pick))

    @precondition(lambda self: self.writing)
    @rule(pick=PICK, retryable=st.booleans(), named=st.booleans(), uncache=st.booleans())
    def nack(self, pick: int, retryable: bool, named: bool, uncache: bool) -> None:
        lease = self.writing.pop(nth(sorted(self.writing), pick))
        if uncache:
            self.cached -= set(lease.samples[:1])
        self.ledger.nack(
            lease.key, lease.kind, lease.attempt, lease.holder, retryable, lease.samples[:1] if named else None
        )

    @precondition(lambda self: self.past)
    @rule(pick=PICK, twist=st.sampled_from(["old", "holder", "key", "kind"]))
    def stale(self, pick: int, twist: str) -> None:
        old = nth(self.past[::-1], pick)
        before, stale = self.ledger.counts, self.ledger.stale
        if isinstance(old, Delivery):
            known = old in self.held[old.rank].values()
            attempt = old.attempt + 1000 if known else old.attempt
            if twist == "old":
                assert not self.ledger.release(old.key, attempt)
            else:
                assert not self.ledger.bad(old.key, attempt)
        else:
            key, kind, holder = old.key, old.kind, old.holder
            if old.attempt in self.writing:
                key = (99, 0) if twist in ("key", "old") else key
                kind = "other" if twist == "kind" else kind
                holder = "nobody" if twist == "holder" else holder
            if twist == "kind":
                assert not self.ledger.nack(key, kind, old.attempt, holder, retryable=False)
            else:
                assert not self.ledger.ready(key, kind, old.attempt, holder)
        assert (self.ledger.counts, self.ledger.stale) == (before, stale + 1)

    @precondition(lambda self: len(self.kinds) > 1)
    @rule(pick=PICK, restarts=st.booleans())
    def die(self, pick: int, restarts: bool) -> None:
        holder = nth(sorted(self.kinds), pick)
        self.writing = {a: lease for a, lease in self.writing.items() if lease.holder != holder}
        self.ledger.holder_died(holder)
        if not restarts:
            del self.kinds[holder]

    @precondition(lambda self: len(self.kinds) > 1)
    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        holder = nth(sorted(self.kinds), pick)
        gone = {a: lease for a, lease in self.writing.items() if lease.holder == holder}
        lost = {lease.slot for lease in gone.values()} - {lease.slot for lease in self.zombies.values()}
        if len(lost) >= self.total - self.ledger.counts["lost"]:
            return
        self.writing = {a: lease for a, lease in self.writing.items() if a not in gone}
        self.zombies |= gone
        assert set(self.ledger.holder_lost(holder)) == lost
        del self.kinds[holder]
        assert self.ledger.want(holder, "model") is None

    @rule(kind=st.sampled_from(["model", "replay"]))
    def spawn(self, kind: str) -> None:
        self.kinds[f"{kind}{self.spawned}"] = kind
        self.spawned += 1

    # --- consumers ---

    def deliver(self, rank: int) -> bool:
        delivery = self.ledger.next_delivery(rank)
        if delivery is None:
            return False
        mine = [key for key, block in self.blocks.items() if block.rank == rank]
        assert delivery.key == min(key for key in mine if key not in self.released and key not in self.held[rank])
        assert delivery.micro_step == self.blocks[delivery.key].micro_step
        assert delivery.samples == self.sound(delivery.key)
        assert (delivery.slot is None) == (not delivery.samples)
        self.check_content(delivery)
        self.held[rank][delivery.key] = delivery
        self.past.append(delivery)
        return True

    def release(self, delivery: Delivery, spill: bool = False) -> None:
        del self.held[delivery.rank][delivery.key]
        self.check_content(delivery)
        assert delivery.key not in self.released
        self.released.add(delivery.key)
        assert self.ledger.release(delivery.key, delivery.attempt, spill)
        if spill and delivery.samples:
            self.spills.append(delivery.attempt)

    def bad(self, delivery: Delivery, named: tuple[int, ...] | None) -> None:
        del self.held[delivery.rank][delivery.key]
        tries = self.ledger.history(delivery.key)[0]
        assert self.ledger.bad(delivery.key, delivery.attempt, named)
        if tries == 2 and set(delivery.samples).isdisjoint(self.lists[-1]):
            assert set(named or delivery.samples) & set(self.ledger.quarantined)

    @rule(pick=PICK)
    def deliver_one(self, pick: int) -> None:
        rank = pick % self.consumers
        if len(self.held[rank]) < 2:
            self.deliver(rank)

    @precondition(lambda self: any(self.held))
    @rule(pick=PICK, spill=st.booleans(), bad=st.booleans(), named=st.booleans())
    def finish_one(self, pick: int, spill: bool, bad: bool, named: bool) -> None:
        held = [delivery for rank in self.held for delivery in rank.values()]
        delivery = nth(held, pick)
        if bad and delivery.samples:
            self.bad(delivery, delivery.samples[-1:] if named else None)
        else:
            self.release(delivery, spill)

    @precondition(lambda self: self.spills)
    @rule()
    def spilled(self) -> None:
        assert self.ledger.spilled(self.spills.pop(0))

    # --- the run ---

    @rule(pick=PICK, older=PICK, forward=st.booleans())
    def rewind(self, pick: int, older: int, forward: bool) -> None:
        last = self.plan.total_steps if forward else self.ledger.lowest_unreleased_step
        step = pick % (last + 1)
        self.lists.append(nth([self.ledger.quarantined, *self.lists], older))
        self.ledger.rewind(step, self.lists[-1])
        assert self.ledger.quarantined == self.lists[-1]
        self.released = {key for key in self.blocks if key < (step, 0)}
        self.held = [{} for _ in range(self.consumers)]
        assert self.ledger.lowest_unreleased_step == step

    @rule()
    def answer_revocations(self) -> None:
        for lease in self.ledger.take_revocations():
            if self.writing.pop(lease.attempt, None) is not None:
                tries = self.ledger.history(lease.key)
                self.ledger.nack(lease.key, lease.kind, lease.attempt, lease.holder, retryable=False)
                assert self.ledger.history(lease.key) == tries, "giving up on request is no failure"

    @invariant()
    def slots_add_up(self) -> None:
        counts = self.ledger.counts
        assert sum(counts.values()) == self.total
        assert counts["delivered"] == sum(bool(d.samples) for rank in self.held for d in rank.values())
        assert counts["lost"] == len({lease.slot for lease in self.zombies.values()})
        assert counts["spilling"] == len(self.spills)

    @invariant()
    def no_slot_has_two_writers(self) -> None:
        assert {lease.slot for lease in self.writing.values()} <= self.ledger.slots_in("leased") | self.ledger.slots_in(
            "lost"
        )
        for slot in range(self.total):
            writers = [lease for lease in self.writing.values() if lease.slot == slot]
            written = [sample for lease in writers for sample in lease.samples]
            assert len(written) == len(set(written))
            assert len({(lease.key, lease.block_samples) for lease in writers}) <= 1
            zombies = any(lease.slot == slot for lease in self.zombies.values())
            assert not zombies or self.ledger.slots_in("lost") >= {slot}

    @invariant()
    def free_slots_are_reserved(self) -> None:
        window = self.ledger._window
        assert self.ledger.counts["free"] == 0 or window.walk.block is None or len(window.entries) >= window._limit

    def teardown(self) -> None:
        """A fair scheduler finishes the plan, poison and all."""
        if not hasattr(self, "ledger"):
            return
        self.spawn("model")
        self.spawn("replay")
        for _ in range(400):
            if self.ledger.finished and not self.writing and not self.spills:
                break
            moved = False
            for zombie in self.zombies.values():
                self.write(zombie, final=False)
            for holder in sorted(self.kinds):
                moved |= self.grant(holder)
            for lease in list(self.writing.values()):
                self.fill(lease.attempt)
                moved = True
            for attempt in self.spills:
                moved |= self.ledger.spilled(attempt)
            self.spills.clear()
            for rank in range(self.consumers):
                moved |= self.deliver(rank)
                for delivery in list(self.held[rank].values()):
                    moved = True
                    if poison := tuple(self.poison & set(delivery.samples)):
                        self.bad(delivery, poison)
                    else:
                        self.release(delivery)
            self.slots_add_up()
            self.no_slot_has_two_writers()
            assert moved or self.ledger.finished, f"deadlock: {self.ledger.counts}"
        assert self.ledger.finished
        assert self.released == set(self.blocks)
        counts = self.ledger.counts
        assert counts["free"] + counts["lost"] == self.total


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
)
