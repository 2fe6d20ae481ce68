"""No slot is written by two at once: a model of one run with a local producer that maps the ring, remote ones whose
sessions break at any moment, and an ingest that is as late as it likes. The real conductor and the real intake decide;
what is under way between them is delivered in a drawn order, chunks of dead sessions included."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.conductor import LAUNCHER, Conductor
from launch.intake import Intake
from launch.pace import Pace
from protocol import messages as m
from protocol.job import Listening
from protocol.plan import Plan

LOCAL, CONSUMER, INGEST = "producer-0", "consumer-0", "ingest"
REMOTES = ("remote-a", "remote-b")
CHUNKS = 3  # of each block; a byte each


class TinyDataset:
    def __init__(self, samples: int) -> None:
        self.lengths = np.full(samples, 8)

    def tokens(self, index: int) -> Any:
        return np.full(8, index, np.int32)

    def mask(self, index: int) -> Any:
        return np.ones(8, np.uint8)


def greeting(name: str) -> m.Hello:
    role = "producer" if name in REMOTES else name.partition("-")[0]
    return m.Hello(role=role, name=name, rank=0, pid=1, host="h", token="t", schema="s", versions={})


class World:
    """`ring` says which attempt wrote each byte of each slot last; a consumer finds only the attempt that it was told
    of. Messages wait in `wires`, first come first served on each, and `turn` delivers one of them."""

    def __init__(self, conductor: Conductor, slots: int, maps_ring: bool) -> None:
        self.conductor, self.intake, self.maps_ring = conductor, Intake(), maps_ring
        self.ring = {slot: [0] * CHUNKS for slot in range(slots)}
        self.wires: dict[tuple[str, str, int], deque[m.Message]] = defaultdict(deque)
        self.session = dict.fromkeys((LOCAL, *REMOTES), 0)
        self.joined: set[str] = set()
        self.trained: list[tuple[int, int]] = []
        self.leases: dict[int, m.Lease] = {}  # of remote producers
        self.credit: set[int] = set()
        self.seats: dict[str, int] = {}  # at ingest: the session of each remote name
        for name in (LAUNCHER, INGEST, CONSUMER, LOCAL):
            conductor.joined(greeting(name))
        self.say(CONSUMER, m.Credit(blocks=2))
        self.say(CONSUMER, m.Reached(step=0))
        if maps_ring:
            self.say(LOCAL, m.Want(kind="model"))
        else:
            self.wires[LOCAL, INGEST, 0].append(greeting(LOCAL))
        for name in REMOTES:
            self.come(name)

    def say(self, name: str, message: m.Message) -> None:
        self.wires[name, "coordinator", self.session.get(name, 0)].append(message)

    def come(self, name: str) -> None:
        """A new session, as soon as the coordinator is done with the one before."""
        if name not in self.joined and not self.conductor.closing(name):
            self.joined.add(name)
            self.session[name] += 1
            self.conductor.joined(greeting(name))
            self.wires[name, INGEST, self.session[name]].append(greeting(name))

    def breaks(self, name: str) -> None:
        """The coordinator takes a session for dead. What it has sent to ingest may still arrive, at any time."""
        if name in self.joined:
            self.joined.remove(name)
            self.wires.pop((name, "coordinator", self.session[name]), None)
            self.wires.pop(("coordinator", name, self.session[name]), None)
            self.conductor.left(name, "cut")

    def turn(self, draw: Any) -> bool:
        """Delivers one message, or lets the world end: False when nothing is under way."""
        pending, self.conductor.out = self.conductor.out, []
        for name, message in pending:
            self.wires["coordinator", name, self.session.get(name, 0)].append(message)
        waiting = sorted(wire for wire, messages in self.wires.items() if messages)
        if not waiting:
            return False
        sender, receiver, session = wire = waiting[draw(len(waiting))]
        message = self.wires[wire].popleft()
        if receiver == "coordinator":
            if sender not in REMOTES or (sender in self.joined and session == self.session[sender]):
                self.conductor.handle(sender, message)
        elif receiver == INGEST:
            self.at_ingest(sender, session, message)
        elif receiver == CONSUMER:
            self.at_consumer(message)
        elif receiver in REMOTES and session == self.session[receiver] and receiver in self.joined:
            self.at_remote(receiver, message)
        elif receiver == LOCAL and self.maps_ring and isinstance(message, m.Lease):
            self.ring[message.slot] = [message.attempt] * CHUNKS
            self.filled(LOCAL, message)
        elif receiver == LOCAL:
            self.at_remote(LOCAL, message)  # it sends its payload as they do
        return True

    def filled(self, name: str, lease: m.Lease) -> None:
        block = {"step": lease.step, "index": lease.index, "kind": lease.kind, "attempt": lease.attempt}
        self.say(name, m.Ready(**block, checksum=lease.attempt, busy_s=0.0, halved=0, figures=()))
        self.say(name, m.Want(kind="model"))

    def at_remote(self, name: str, message: m.Message) -> None:
        """As producer/outlet.py: asks for work when ingest has let it in, sends once it has a lease and credit, and is
        ready when all of it has arrived."""
        match message:
            case m.Reject():
                self.breaks(name)
            case m.Welcome():
                self.say(name, m.Want(kind="model"))
            case m.Lease(attempt=attempt):
                self.leases[attempt] = message
                self.send_if_credited(name, attempt)
            case m.ChunkAck(attempt=attempt, received=0):
                self.credit.add(attempt)
                self.send_if_credited(name, attempt)
            case m.ChunkAck(attempt=attempt, received=received):
                assert received == CHUNKS
                self.filled(name, self.leases[attempt])

    def send_if_credited(self, name: str, attempt: int) -> None:
        if attempt in self.leases and attempt in self.credit:
            for offset in range(CHUNKS):
                chunk = m.Chunk(attempt=attempt, offset=offset, checksum=0, last=offset == CHUNKS - 1)
                self.wires[name, INGEST, self.session[name]].append(chunk)

    def at_ingest(self, sender: str, session: int, message: m.Message) -> None:
        match message:
            case m.Expect(holder=holder):
                self.answer(holder, self.intake.expect(message))
            case m.Fence(holder=holder):
                self.intake.fence(holder)
                self.seats.pop(holder, None)
                self.say(INGEST, m.Fenced(holder=holder))
            case m.Hello() if sender in self.seats:  # a late one, or one that a late one has overtaken
                self.wires[INGEST, sender, session].append(m.Reject(reason="here already"))
            case m.Hello():
                self.seats[sender] = session
                self.answer(sender, m.Welcome(slots=1, slot_bytes=CHUNKS, heartbeat_s=0.0))
            case m.Chunk() if self.seats.get(sender) == session:
                place = self.intake.place(sender, message)
                if isinstance(place, tuple):
                    slot, offset, _ = place
                    self.ring[slot][offset] = message.attempt
                    if (ack := self.intake.arrived(message, 1, 1, 0)) is not None:
                        self.answer(sender, ack)

    def answer(self, name: str, message: m.Message) -> None:
        if (session := self.seats.get(name)) is not None:
            self.wires[INGEST, name, session].append(message)

    def at_consumer(self, message: m.Message) -> None:
        match message:
            case m.Deliver():
                key = {"step": message.step, "index": message.index, "attempt": message.attempt}
                assert self.ring[message.slot] == [message.checksum] * CHUNKS, "torn"
                self.say(CONSUMER, m.Verified(**key))
                self.say(CONSUMER, m.Release(**key))
            case m.Go(step=step, micro_step=micro_step):
                self.trained.append((step, micro_step))
                self.say(CONSUMER, m.Credit(blocks=1))
                if micro_step + 1 == self.conductor._plan.micro_steps(step):
                    self.say(CONSUMER, m.Reached(step=step + 1))


@pytest.fixture(scope="session")
def make_world(make_job: Any) -> Any:
    def make(slots: int, transport: str = "shm") -> tuple[World, Plan]:
        dataset = TinyDataset(12)
        job = make_job(
            plan={"batch_tokens": 16, "microbatch_tokens": 8},
            slots=slots,
            transport=transport,
            hosts=Listening(address="", payload_address="", producers=2),
        )
        plan = Plan(dataset.lengths, dataset.lengths - 1, job.plan, "data")
        return World(Conductor(job, plan, dataset, Pace(job, plan.total_steps)), slots, transport == "shm"), plan

    return make


@settings(max_examples=200, deadline=None)
@given(data=st.data(), slots=st.integers(1, 3), transport=st.sampled_from(["shm", "zmq"]))
def test_late_chunks_of_broken_sessions_never_reach_the_next_writer_s_block(
    make_world: Any, data: st.DataObject, slots: int, transport: str
) -> None:
    world, plan = make_world(slots, transport)
    breaks = data.draw(st.lists(st.tuples(st.integers(0, 150), st.sampled_from(REMOTES)), max_size=12))
    choices = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=150))
    turns, endless = 0, itertools.cycle(choices)
    while world.turn(lambda n: next(endless) % n) or world.joined != set(REMOTES):
        turns += 1
        for at, name in breaks:
            if at == turns:
                world.breaks(name)
        for name in REMOTES:
            if (turns + len(name)) % 3 == 0 or turns > 150:
                world.come(name)
        assert turns < 5000
    expected = [(step, micro) for step in range(plan.total_steps) for micro in range(plan.micro_steps(step))]
    assert world.trained == expected
    events = {row["what"] for kind, row in world.conductor.rows if kind == "event"}
    assert events <= {"joined", "left", "leased again"}


def test_a_slot_stays_its_dead_writer_s_until_ingest_has_fenced_it(make_world: Any) -> None:
    """The hole that FENCE closes, step by step: a local producer is told of the slot and writes at once, while a chunk
    of its last holder, for whom nobody expects anything else there, still lies in a socket."""
    world, _ = make_world(1)
    conductor = world.conductor
    conductor.out.clear()
    conductor.handle("remote-a", m.Want(kind="model"))
    (_, expect), (_, lease) = conductor.out
    world.intake.expect(expect)
    chunk = m.Chunk(attempt=lease.attempt, offset=0, checksum=0, last=False)
    conductor.out.clear()
    conductor.handle(LOCAL, m.Want(kind="model"))
    conductor.left("remote-a", "cut")
    assert conductor.out == [(INGEST, m.Fence(holder="remote-a"))]
    assert conductor.closing("remote-a")
    assert conductor.ledger.counts["leased"] == 1
    assert isinstance(world.intake.place("remote-a", chunk), tuple)  # it may still be written, so the slot is not free
    conductor.out.clear()
    world.intake.fence("remote-a")
    assert world.intake.place("remote-a", chunk) is None
    conductor.handle(INGEST, m.Fenced(holder="remote-a"))
    ((to, again),) = conductor.out
    assert (to, again.slot, again.attempt > lease.attempt) == (LOCAL, lease.slot, True)
    assert not conductor.closing("remote-a")
    conductor.out.clear()
    conductor.handle(INGEST, m.Fenced(holder="remote-a"))  # once more, or of somebody unknown: nothing
    assert conductor.out == []


def test_fenced_of_anyone_but_ingest_opens_nothing(make_world: Any) -> None:
    world, _ = make_world(1)
    world.conductor.handle("remote-a", m.Want(kind="model"))
    world.conductor.left("remote-a", "cut")
    for name in (LOCAL, "remote-b", CONSUMER):
        assert not world.conductor.handle(name, m.Fenced(holder="remote-a"))
    assert world.conductor.closing("remote-a")


def test_a_lease_that_was_not_yet_sent_does_not_reach_whoever_comes_under_its_name(make_world: Any) -> None:
    world, _ = make_world(1)
    conductor = world.conductor
    conductor.out.clear()
    conductor.handle("remote-a", m.Want(kind="model"))
    conductor.left("remote-a", "cut")
    assert [to for to, _ in conductor.out] == [INGEST, INGEST]
    conductor.handle(INGEST, m.Fenced(holder="remote-a"))
    conductor.joined(greeting("remote-a"))
    assert [message for to, message in conductor.out if to == "remote-a"] == []
