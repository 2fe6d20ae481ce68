"""The conductor with simulated peers: every block is trained once and in order, whatever goes wrong on the way."""

from __future__ import annotations

import re
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.conductor import LAUNCHER, Conductor
from launch.pace import Pace
from protocol import messages as m
from protocol.block import block_table, table_bytes
from protocol.plan import Plan


class TinyDataset:
    def __init__(self, samples: int) -> None:
        self.lengths = np.array([6 + index % 5 for index in range(samples)])

    def tokens(self, index: int) -> np.ndarray:
        return np.full(self.lengths[index], index, np.int32)

    def mask(self, index: int) -> np.ndarray:
        return np.ones(self.lengths[index], np.uint8)


@pytest.fixture(scope="session")
def make(make_job):
    """Builds a conductor over a tiny dataset, and the plan it follows."""

    def build(
        samples: int = 20,
        producers: int = 2,
        consumers: int = 1,
        slots: int = 4,
        quarantine_limit: float = 0.2,
        transport: str = "shm",
    ):
        dataset = TinyDataset(samples)
        job = make_job(
            plan={"seed": 1, "epochs": 2, "batch_tokens": 30, "microbatch_tokens": 20, "consumers": consumers},
            slots=slots,
            producers=("cpu",) * producers,
            consumers=("cpu",) * consumers,
            quarantine_limit=quarantine_limit,
            transport=transport,
        )
        plan = Plan(dataset.lengths, dataset.lengths - 1, job.plan, "data")
        return Conductor(job, plan, dataset, Pace(job, plan.total_steps)), plan

    return build


class Peers:
    """Honest producers and consumers, except for what `poison` and `crash` say; messages arrive in a drawn order."""

    def __init__(self, conductor: Conductor, producers: int, consumers: int, poison=(), draw=lambda n: 0) -> None:
        self.conductor, self.poison, self.draw = conductor, set(poison), draw
        self.trained: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {rank: [] for rank in range(consumers)}
        self.blocks: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self.quarantined: dict[str, str] = {}
        self.errors: list[str] = []
        self.stopped_at: dict[int, int] = {}
        self.wire: list[tuple[str, m.Message]] = []
        self.join_consumers(consumers, 0)
        for index in range(producers):
            self.join_producer(index)

    def join_producer(self, index: int) -> None:
        self.conductor.joined(m.Hello(role="producer", name=f"producer-{index}", rank=index, **_identity()))
        self.wire.append((f"producer-{index}", m.Want(kind="model")))

    def join_consumers(self, consumers: int, step: int) -> None:
        for rank in range(consumers):
            self.conductor.joined(m.Hello(role="consumer", name=f"consumer-{rank}", rank=rank, **_identity()))
            self.wire += [(f"consumer-{rank}", m.Credit(blocks=2)), (f"consumer-{rank}", m.Reached(step=step))]

    def lose(self, names: tuple[str, ...]) -> None:
        """These die: what they had sent and nobody has read goes with them, and so does what they were sent."""
        self._collect()
        self.wire = [(sender, message) for sender, message in self.wire if sender not in names]

    def restart_consumers(self, step: int) -> None:
        """All ranks die and come back at the checkpoint before `step`: what they trained after it is undone."""
        names = tuple(f"consumer-{rank}" for rank in self.trained)
        self.lose(names)
        self.blocks.clear()
        self.conductor.handle(
            LAUNCHER, m.Rewind(names=names, step=step, quarantined={}, how="consumer-0 was killed by SIGKILL")
        )
        self.trained = {rank: [done for done in each if done[0] < step] for rank, each in self.trained.items()}
        self.join_consumers(len(names), step)

    def step(self) -> bool:
        """Delivers one message, drawn among those that are first of their sender; False when there is none."""
        self._collect()
        senders = list(dict.fromkeys(name for name, _ in self.wire))
        if not senders:
            return False
        sender = senders[self.draw(len(senders))]
        place = next(at for at, (name, _) in enumerate(self.wire) if name == sender)
        name, message = self.wire.pop(place)
        self.conductor.handle(name, message)
        counts = self.conductor.ledger.counts
        assert sum(counts.values()) == self.conductor._job.slots
        return True

    def micro_steps(self, step: int) -> int:
        return self.conductor._plan.micro_steps(step)

    def _collect(self) -> None:
        pending, self.conductor.out = self.conductor.out, []
        for name, message in pending:
            match message:
                case m.Lease(step=step, index=index, kind=kind, attempt=attempt):
                    block = {"step": step, "index": index, "kind": kind, "attempt": attempt}
                    self.wire.append((name, m.Ready(**block, checksum=attempt, busy_s=0.0, halved=0, figures=())))
                    self.wire.append((name, m.Want(kind="model")))
                case m.Deliver():
                    self._deliver(name, message)
                case m.Go(step=step, micro_step=micro_step, stop=stop):
                    rank = int(name.partition("-")[2])
                    if stop:
                        self.stopped_at[rank] = step
                    else:
                        self.trained[rank].append((step, micro_step, self.blocks.pop((rank, step, micro_step))))
                        self.wire.append((name, m.Credit(blocks=1)))
                        if micro_step + 1 == self.micro_steps(step):
                            self.wire.append((name, m.Reached(step=step + 1)))
                case m.Quarantine(samples=samples):
                    self.quarantined = samples
                case m.Error(text=text):
                    assert name == LAUNCHER
                    self.errors.append(text)

    def _deliver(self, name: str, message: m.Deliver) -> None:
        key = {"step": message.step, "index": message.index, "attempt": message.attempt}
        # The producers here announce their attempt as the sum; an empty block has no writer.
        assert sum(message.writers) == message.checksum
        assert bool(message.writers) == (message.slot >= 0)
        culprits = tuple(self.poison & set(message.samples))
        if culprits:
            self.wire.append((name, m.Bad(**key, samples=culprits, reason="not finite")))
            self.wire.append((name, m.Credit(blocks=1)))
            return
        rank = int(name.partition("-")[2])
        self.blocks[rank, message.step, message.micro_step] = message.samples
        self.wire += [(name, m.Verified(**key)), (name, m.Release(**key))]


def _identity() -> dict[str, object]:
    return {"pid": 1, "host": "h", "token": "t", "schema": "s", "versions": {}}


def expected(plan: Plan, rank: int, without: set[int] = frozenset()):
    return [
        (block.step, block.micro_step, tuple(sample for sample in block.samples if sample not in without))
        for step in range(plan.total_steps)
        for block in plan.blocks(step)
        if block.rank == rank
    ]


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_block_is_trained_once_in_order_while_producers_die(make, data, producers, consumers, slots):
    conductor, plan = make(producers=producers, consumers=consumers, slots=slots)
    peers = Peers(conductor, producers, consumers, draw=lambda n: data.draw(st.integers(0, n - 1)) if n > 1 else 0)
    deaths = data.draw(st.lists(st.integers(0, 200), max_size=4, unique=True))
    for turn in range(100_000):
        if turn in deaths:
            name = f"producer-{turn % producers}"
            peers.lose((name,))
            conductor.handle(LAUNCHER, m.Gone(name=name, reaped=True, how="was killed by SIGKILL"))
            peers.join_producer(turn % producers)
        if not peers.step():
            break
    for rank in range(consumers):
        assert peers.trained[rank] == expected(plan, rank)
    assert conductor.ledger.finished


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_block_is_trained_once_in_order_although_ranks_die_and_go_back(make, data, producers, consumers, slots):
    conductor, plan = make(producers=producers, consumers=consumers, slots=slots)
    peers = Peers(conductor, producers, consumers, draw=lambda n: data.draw(st.integers(0, n - 1)) if n > 1 else 0)
    deaths = data.draw(st.lists(st.integers(0, 250), max_size=3, unique=True))
    for turn in range(100_000):
        if turn in deaths:
            # A checkpoint of a step that every rank has done: the gate has passed it.
            newest = min((each[-1][0] if each else 0) for each in peers.trained.values())
            peers.restart_consumers(data.draw(st.integers(0, newest)))
        if not peers.step():
            break
    for rank in range(consumers):
        assert peers.trained[rank] == expected(plan, rank)
    assert conductor.ledger.finished
    # What a rewind dropped may be left behind; without one nothing is.
    assert deaths or not conductor._descriptors._filled


def test_what_lies_ready_when_a_rank_dies_is_delivered_to_the_next_one_and_not_made_again(make):
    conductor, plan = make(slots=3)
    peers = Peers(conductor, 1, 1)
    while conductor.ledger.counts["ready"] < 3 or peers.wire:
        peers.wire = [(sender, message) for sender, message in peers.wire if sender != "consumer-0"]
        if not peers.step():
            break
    made = conductor.produced_tokens
    peers.restart_consumers(0)
    for _ in range(6):  # credit, its arrival at the step, and what it says of two blocks
        peers.step()
    assert conductor.produced_tokens == made
    assert [row["what"] for kind, row in conductor.rows if kind == "event"] == ["rewind"]
    while peers.step():
        pass
    assert peers.trained[0] == expected(plan, 0)


def test_what_is_bad_is_an_event_that_names_who_sent_it(make):
    """E1: with the producer's name, also when another one did it before or does it next."""
    conductor, _ = make()
    peers = Peers(conductor, 2, 1, poison={3})
    while peers.step():
        pass
    found = [row["text"] for kind, row in conductor.rows if kind == "event" and row["what"] == "bad"]
    assert len(found) == 3
    assert all(re.fullmatch(r"step \d+ block \d+ of producer-[01]: not finite", text) for text in found)
    assert len({text.split()[5] for text in found}) == 2


def test_what_a_producer_says_of_its_taps_is_a_row(make):
    """E1."""
    conductor, _ = make()
    peers = Peers(conductor, 1, 1)
    while not peers.wire or not isinstance(peers.wire[0][1], m.Ready):
        assert peers.step()
    name, ready = peers.wire[0]
    conductor.handle(name, msgspec.structs.replace(ready, figures=((0.5, 2.0, 0.25),)))
    (row,) = [row for kind, row in conductor.rows if kind == "taps"]
    assert row == {
        "step": ready.step,
        "index": ready.index,
        "producer": "producer-0",
        "taps": [{"tap": 0, "mean": 0.5, "deviation": 2.0, "zeros": 0.25}],
    }


def test_a_rewind_takes_back_what_was_quarantined_after_the_checkpoint(make):
    conductor, plan = make()
    peers = Peers(conductor, 2, 1, poison={3})
    while not peers.quarantined:
        peers.step()
    peers.poison.clear()
    peers.restart_consumers(0)
    while peers.step():
        pass
    assert peers.trained[0] == expected(plan, 0)


def test_an_abandoned_step_is_stopped_within_it_when_its_blocks_do_not_come(make):
    conductor, plan = make(slots=1)
    step = next(step for step in range(plan.total_steps) if plan.micro_steps(step) > 1)
    peers = Peers(conductor, 1, 1)
    while not peers.trained[0] or peers.trained[0][-1][:2] != (step, 0):
        assert peers.step()
    peers.lose(("producer-0",))
    conductor.handle(LAUNCHER, m.Gone(name="producer-0", reaped=True, how="was killed by SIGKILL"))
    conductor.handle(LAUNCHER, m.Order(order="stop"))
    while peers.step():
        pass
    assert not peers.stopped_at  # a stop waits for the boundary
    conductor.handle(LAUNCHER, m.Order(order="abandon"))
    while peers.step():
        pass
    assert peers.stopped_at == {0: step}


def test_slots_of_a_producer_that_does_not_end_are_lost_and_the_others_go_on(make):
    conductor, plan = make(producers=2, slots=3)
    peers = Peers(conductor, 2, 1)
    while not any(lease.holder == "producer-0" for lease in conductor.ledger.live_leases):
        peers.step()
    peers.lose(("producer-0",))
    conductor.handle(LAUNCHER, m.Gone(name="producer-0", reaped=False, how="was killed by SIGKILL"))
    assert conductor.ledger.counts["lost"] >= 1
    while peers.step():
        pass
    assert peers.trained[0] == expected(plan, 0)
    assert "slots of the ring lost: " in next(row["text"] for kind, row in conductor.rows if kind == "event")


@pytest.mark.parametrize("consumers", [1, 2])
def test_poison_is_quarantined_after_three_tries_and_the_rest_is_trained(make, consumers):
    conductor, plan = make(consumers=consumers)
    peers = Peers(conductor, 2, consumers, poison={3})
    while peers.step():
        pass
    bad = [row for kind, row in conductor.rows if kind == "event" and row["what"] == "bad"]
    assert len(bad) == 3
    assert set(peers.quarantined) == {"3"}
    assert not peers.errors
    for rank in range(consumers):
        assert peers.trained[rank] == expected(plan, rank, without={3})


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 101])
@pytest.mark.parametrize("filtered", [False, True])
def test_however_few_samples_two_ranks_share_all_micro_steps_come(make, samples, filtered):
    poison = {0, samples - 1} if filtered else set()
    conductor, plan = make(samples=samples, consumers=2, quarantine_limit=1.0)
    peers = Peers(conductor, 2, 2, poison=poison)
    while peers.step():
        pass
    for rank in range(2):
        assert peers.trained[rank] == expected(plan, rank, without=poison)
        assert len(peers.trained[rank]) == sum(plan.micro_steps(step) for step in range(plan.total_steps))


def test_too_much_poison_fails_the_run(make):
    """E1: more than a set share of all samples stops it."""
    conductor, _ = make(quarantine_limit=0.1)
    peers = Peers(conductor, 1, 1, poison={2, 3, 4, 5})
    while peers.step() and not peers.errors:
        pass
    assert "train.quarantine_limit" in peers.errors[0]


def test_a_stop_takes_effect_at_one_step_boundary_for_all_ranks(make):
    conductor, plan = make(consumers=2)
    peers = Peers(conductor, 2, 2)
    for _ in range(40):
        peers.step()
    conductor.handle(LAUNCHER, m.Order(order="stop"))
    while peers.step():
        pass
    (boundary,) = set(peers.stopped_at.values())
    assert len(peers.stopped_at) == 2
    assert 0 < boundary < plan.total_steps
    for rank in range(2):
        done = Counter(step for step, _, _ in peers.trained[rank])
        assert done == Counter({step: plan.micro_steps(step) for step in range(boundary)})


def test_a_cool_down_ends_the_run_at_one_step_for_all_ranks(make):
    conductor, plan = make(samples=80, consumers=2)
    peers = Peers(conductor, 2, 2)
    while len(peers.trained[0]) < 12:
        assert peers.step()
    conductor.handle(LAUNCHER, m.Order(order="cooldown"))
    while peers.step():
        pass
    assert set(peers.stopped_at.values()) == {conductor.pace.last_step}
    assert len(peers.stopped_at) == 2
    assert 0 < conductor.pace.last_step < plan.total_steps
    assert [row["what"] for _, row in conductor.pace.rows] == ["cooldown", "finish"]
    assert conductor.ledger.paused  # nothing is produced for steps that do not come
    for rank in range(2):
        done = Counter(step for step, _, _ in peers.trained[rank])
        assert done == Counter({step: plan.micro_steps(step) for step in range(conductor.pace.last_step)})


def test_hours_that_are_over_end_a_run_that_waits_for_its_producers(make_job):
    dataset, clock = TinyDataset(20), [0.0]
    job = make_job(plan={"batch_tokens": 20, "microbatch_tokens": 20, "microbatch_draft_tokens": 1000}, max_s=50.0)
    plan = Plan(dataset.lengths, dataset.lengths - 1, job.plan, "data")
    conductor = Conductor(job, plan, dataset, Pace(job, plan.total_steps, lambda: clock[0]))
    peers = Peers(conductor, 1, 1)
    while not peers.trained[0]:
        assert peers.step()
    peers.lose(("producer-0",))
    while peers.step():
        pass
    assert not peers.stopped_at
    clock[0] = 50.0
    conductor.pump()
    peers.step()
    assert peers.stopped_at == {0: peers.trained[0][-1][0] + 1}


def test_a_stop_does_not_wait_for_producers_that_never_come(make):
    conductor, _ = make()
    peers = Peers(conductor, 0, 1)
    conductor.handle(LAUNCHER, m.Order(order="stop"))
    while peers.step():
        pass
    assert peers.stopped_at == {0: 0}


def test_messages_of_an_earlier_delivery_change_nothing(make):
    conductor, plan = make()
    peers = Peers(conductor, 1, 1)
    while peers.step():
        for message in (
            m.Verified(step=0, index=0, attempt=999),
            m.Release(step=0, index=0, attempt=999),
            m.Bad(step=0, index=0, attempt=999, samples=(), reason="late"),
            m.Ready(step=0, index=0, kind="model", attempt=999, checksum=0, busy_s=0.0, halved=0, figures=()),
        ):
            conductor.handle("consumer-0" if not isinstance(message, m.Ready) else "producer-0", message)
    assert peers.trained[0] == expected(plan, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("producer-0", m.Credit(blocks=5)),
        ("producer-0", m.Verified(step=0, index=0, attempt=2)),
        ("producer-0", m.Release(step=0, index=0, attempt=2)),
        ("producer-0", m.Bad(step=0, index=0, attempt=2, samples=(), reason="no")),
        ("producer-0", m.Report(kind="step", row={})),
        ("producer-0", m.Checkpointed(next_step=9, stall_s=0.1, write_s=2.0)),
        ("producer-0", m.Reached(step=0)),
        ("producer-0", m.Chunk(attempt=1, offset=0, checksum=0, last=True)),  # payload goes to ingest
        ("ingest", m.Want(kind="model")),
        ("consumer-0", m.Want(kind="model")),
        ("consumer-0", m.Ready(step=0, index=0, kind="model", attempt=1, checksum=0, busy_s=0.0, halved=0, figures=())),
        ("consumer-0", m.Nack(step=0, index=0, kind="model", attempt=1, reason="no", retryable=False, samples=())),
        ("consumer-0", m.Gone(name="producer-0", reaped=True, how="was killed by SIGKILL")),
        ("producer-0", m.Order(order="done")),
        ("launcher", m.Credit(blocks=1)),
        ("consumer-7", m.Credit(blocks=1)),  # never joined
        ("producer-0", m.Stop(reason="no")),  # nobody sends it
    ],
)
def test_a_message_of_another_role_is_noted_and_nothing_else(make, name: str, message: m.AnyMessage) -> None:
    conductor, plan = make()
    peers = Peers(conductor, 1, 1)
    for _ in range(3):
        peers.step()
    counts, out = conductor.ledger.counts, list(conductor.out)
    assert not conductor.handle(name, message)
    assert conductor.rows[-1] == ("event", {"what": "ignored", "text": f"{type(message).__name__} from {name}"})
    assert (conductor.ledger.counts, conductor.out, conductor.ended) == (counts, out, False)
    while peers.step():
        pass
    assert peers.trained[0] == expected(plan, 0)


def _ingest() -> m.Hello:
    return m.Hello(role="ingest", name="ingest", rank=0, **_identity())


def test_over_zeromq_no_work_goes_out_before_ingest_is_there_to_place_it(make):
    conductor, plan = make(transport="zmq")
    peers = Peers(conductor, 1, 1)
    while peers.step():
        pass
    assert peers.trained[0] == []
    conductor.joined(_ingest())
    while peers.step():
        pass
    assert peers.trained[0] == expected(plan, 0)


def test_ingest_is_told_where_each_lease_goes_before_its_producer_is(make):
    conductor, _ = make(transport="zmq", producers=1)
    conductor.joined(_ingest())
    conductor.joined(m.Hello(role="producer", name="producer-0", rank=0, **_identity()))
    conductor.handle("producer-0", m.Want(kind="model"))
    (to, expect), (holder, lease) = conductor.out
    assert (to, holder) == ("ingest", "producer-0")
    table = block_table(sum(lease.lengths), len(lease.samples), 8, "float32")
    assert expect == m.Expect(holder="producer-0", attempt=lease.attempt, slot=lease.slot, nbytes=table_bytes(table))
    conductor.out.clear()
    conductor.handle(LAUNCHER, m.Order(order="done"))
    assert ("ingest", m.Stop(reason="done")) in conductor.out


def test_a_lease_whose_content_changes_is_taken_back_and_the_nack_costs_nothing(make):
    conductor, _ = make(consumers=1)
    peers = Peers(conductor, 1, 1)
    while not (held := [message for _, message in conductor.out if isinstance(message, m.Lease)]):
        conductor.handle(*peers.wire.pop(0))
    (lease,) = held
    conductor.ledger.rewind(1, {})  # nobody wants step 0 any more
    conductor.out.clear()
    conductor.handle("producer-0", m.Want(kind="model"))
    taken = {"step": lease.step, "index": lease.index, "kind": "model", "attempt": lease.attempt}
    assert ("producer-0", m.Revoke(**taken)) in conductor.out
    conductor.handle("producer-0", m.Nack(**taken, reason="taken back", retryable=True, samples=()))
    assert conductor.ledger.history((lease.step, lease.index)) == (0, 0)
    assert not conductor.ledger.quarantined
