"""A run that fills its cache while it reads: which blocks are kept, what comes from there, what a loss of it costs.

The real conductor and ledger, with a writer that answers when the test says so.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.conductor import LAUNCHER, Conductor
from launch.pace import Pace
from launch.parts import Parts
from protocol import messages as m
from protocol.plan import Plan

SAMPLES, LENGTH = 32, 8


class TinyDataset:
    lengths = np.full(SAMPLES, LENGTH)

    def tokens(self, index: int) -> Any:
        return np.full(LENGTH, index, np.int32)

    def mask(self, index: int) -> Any:
        return np.ones(LENGTH, np.uint8)


class World:
    """One target, one rank, and the process of the cache; `step` lets everybody but that writer answer."""

    def __init__(self, job: Any, held: list[int]) -> None:
        self.plan = plan = Plan(TinyDataset.lengths, TinyDataset.lengths - 1, job.plan, "data")
        there = np.zeros(SAMPLES, np.bool_)
        there[held] = True
        self.parts = Parts(there)
        self.conductor = Conductor(job, plan, TinyDataset(), Pace(job, plan.total_steps), self.parts)
        self.spills: list[m.Spill | m.Flush] = []
        self.prompt = False  # whether the writer answers at once: its shard is whole when it is flushed
        self.open: list[int] = []
        self.filled: list[tuple[str, tuple[int, ...]]] = []
        self.trained = 0  # steps done
        self.errors: list[str] = []
        self.again: list[m.Again] = []
        self.damaged: set[int] = set()
        self.join("producer-0", "replay-0", "consumer-0")

    def join(self, *names: str, step: int = 0) -> None:
        for name in names:
            role = "consumer" if name.startswith("consumer") else "producer"
            hello = m.Hello(role=role, name=name, rank=0, pid=1, host="h", token="t", schema="s", versions={})
            self.conductor.joined(hello)
            if role == "consumer":
                self.say(name, m.Credit(blocks=2))
                self.say(name, m.Reached(step=step))
            else:
                self.say(name, m.Want(kind=kind_of(name)))

    def say(self, name: str, message: Any) -> None:
        assert self.conductor.handle(name, message)

    def run(self, messages: int = 10**9) -> None:
        """Until nobody has anything to do, or so many messages have been answered."""
        while self.conductor.out and messages:
            messages -= 1
            self._answer(*self.conductor.out.pop(0))

    def _answer(self, name: str, message: Any) -> None:
        match message:
            case m.Lease():
                self._fill(name, message)
            case m.Deliver(step=step, index=index, attempt=attempt):
                key = {"step": step, "index": index, "attempt": attempt}
                self.say(name, m.Verified(**key))
                self.say(name, m.Release(**key))
            case m.Go(step=step, micro_step=micro_step, stop=False):
                assert step == self.trained
                self.say(name, m.Credit(blocks=1))
                if micro_step + 1 == self.plan.micro_steps(step):
                    self.trained += 1
                    self.say(name, m.Reached(step=step + 1))
            case m.Spill() | m.Flush():
                assert name == "replay-0"
                self.spills.append(message)
                if self.prompt:
                    self.write()
            case m.Error(text=text):
                self.errors.append(text)
            case m.Again():
                self.again.append(message)

    def _fill(self, name: str, lease: m.Lease) -> None:
        key = {"step": lease.step, "index": lease.index, "kind": lease.kind, "attempt": lease.attempt}
        samples = tuple(lease.samples[at] for at in lease.positions)
        culprits = tuple(sample for sample in samples if lease.kind == "replay" and sample in self.damaged)
        if culprits:
            reason = "shard-0123456789ab.safetensors: sample k is damaged"
            self.say(name, m.Nack(**key, reason=reason, retryable=True, samples=culprits))
        else:
            self.filled.append((lease.kind, samples))
            self.say(name, m.Ready(**key, checksum=1, busy_s=1.0, halved=0, figures=()))
        self.say(name, m.Want(kind=kind_of(name)))

    def write(self, problem: str = "") -> None:
        """The writer carries out its oldest order."""
        order = self.spills.pop(0)
        attempt = order.attempt if isinstance(order, m.Spill) else 0
        self.open += order.samples if isinstance(order, m.Spill) else ()
        durable, self.open = ((), self.open) if attempt or problem else (tuple(self.open), [])
        self.say("replay-0", m.Spilled(attempt=attempt, durable=durable, problem=problem))

    def kill_replay(self) -> None:
        """What it had not written, and what lies in its open shard, is gone with it."""
        self.spills.clear()
        self.open.clear()
        self.say(LAUNCHER, m.Gone(name="replay-0", reaped=True, how="was killed by SIGKILL"))
        self.run(1)
        self.join("replay-0")

    def rewind(self, step: int) -> None:
        """The rank dies and begins again after so many steps."""
        self.trained = min(step, self.trained)
        self.say(LAUNCHER, m.Rewind(names=("consumer-0",), step=self.trained, quarantined={}, how="was killed"))
        self.join("consumer-0", step=self.trained)

    def finish(self) -> None:
        self.run()
        while self.spills:
            self.write()
            self.run()

    def state(self) -> dict[str, Any]:
        state = self.conductor.spilling.state()
        assert state is not None
        return state

    def events(self, what: str) -> list[str]:
        return [row["text"] for kind, row in self.conductor.rows if kind == "event" and row["what"] == what]

    def by(self, kind: str) -> list[int]:
        return sorted(sample for filler, samples in self.filled if filler == kind for sample in samples)


def kind_of(name: str) -> str:
    return "replay" if name == "replay-0" else "model"


@pytest.fixture
def world(make_job: Any) -> Any:
    def make(held: list[int] | None = None, slots: int = 8, epochs: int = 1, **changes: Any) -> World:
        plan = {"epochs": epochs, "batch_tokens": 4 * LENGTH, "microbatch_tokens": 4 * LENGTH, "consumers": 1}
        job = make_job(plan=plan, slots=slots, producers=("cpu",), consumers=("cpu",), cached="c", spills=True)
        return World(msgspec.structs.replace(job, **changes), held or [])

    return make


def test_the_writer_has_a_quarter_of_the_slots_at_most_and_what_finds_them_taken_is_counted(world: Any) -> None:
    slow = world()
    slow.run()
    assert slow.trained == 8  # nobody has waited for it
    assert slow.conductor.ledger.counts["spilling"] == 2
    assert slow.state() == {"samples": 32, "held": 0, "kept": 0, "passed_over": 24, "damaged": 0, "full": False}
    slow.finish()
    slow.say("replay-0", m.Spilled(attempt=0, durable=tuple(slow.open), problem=""))
    assert slow.conductor.ledger.counts["spilling"] == 0
    assert slow.conductor.ledger.counts["free"] == 8
    assert (slow.state()["kept"], slow.state()["held"]) == (8, 8)


def test_a_ring_of_fewer_than_four_slots_lends_none(world: Any) -> None:
    small = world(slots=3)
    small.finish()
    assert (small.trained, small.state()["kept"], small.state()["passed_over"]) == (8, 0, 32)


def test_a_block_is_filled_in_two_parts_and_what_came_from_the_cache_alone_is_not_written_again(world: Any) -> None:
    run = world(held=list(range(20)))
    run.finish()
    assert run.by("replay") == list(range(20))
    assert run.by("model") == list(range(20, 32))
    assert sum(kind == "model" for kind, _ in run.filled) + sum(kind == "replay" for kind, _ in run.filled) > 8
    assert run.trained == 8
    assert run.conductor.produced_tokens == 12 * LENGTH  # the target's own, by which its rate is judged
    assert run.conductor.replayed_tokens == 20 * LENGTH
    assert run.conductor.busy_s == sum(kind == "model" for kind, _ in run.filled)
    covered = world(held=list(range(32)))
    covered.finish()
    assert covered.state()["passed_over"] == covered.state()["kept"] == 0


def test_an_epoch_s_end_completes_the_open_shard_and_the_next_one_reads_it(world: Any) -> None:
    run = world(epochs=3)
    run.prompt = True
    run.run()
    assert run.trained == 24
    # What the ring held of the second epoch, when the first one ended, had been cut before.
    assert len(run.by("replay")) == 96 - 32 - len(run.by("model")[32:]) >= 32
    assert run.state()["kept"] == 32


def test_full_coverage_is_said_once(world: Any) -> None:
    run = world(held=list(range(28)), epochs=3)
    run.prompt = True
    run.run()
    assert run.events("cache complete") == ["the cache holds all 32 samples: from here on nothing needs the target"]
    there = world(held=list(range(32)))
    there.finish()
    assert there.events("cache complete") == []


OWN = {"producers": ("cuda:0", "cuda:1"), "consumers": ("cuda:2",)}


def test_gpus_that_are_idle_from_then_on_are_counted_with_what_to_type(world: Any) -> None:
    run = world(held=list(range(28)), epochs=3, **OWN)
    run.prompt = True
    run.run()
    (text,) = run.events("cache complete")
    assert (
        "producers' GPUs are idle (cuda:0, cuda:1): `draftwire stop`, then the same `draftwire run` with `--resume"
        in text
    )
    assert run.again == []


@pytest.mark.parametrize(("epochs", "again"), [(3, True), (1, False)])
def test_with_an_automatic_split_the_run_starts_again_unless_it_is_nearly_over(
    world: Any, epochs: int, again: bool
) -> None:
    run = world(held=list(range(28)), epochs=epochs, regroups=True, **OWN)
    run.prompt = True
    run.run()
    assert [(each.text, each.at_once) for each in run.again] == [
        ("the cache holds all 32 samples: from here on nothing needs the target", False)
    ] * again
    assert len(run.events("cache complete")) == 1


def test_a_full_disk_ends_the_keeping_with_one_event_and_nothing_else(world: Any) -> None:
    run = world(epochs=2)
    run.run()
    while run.spills:
        run.write("cache.max_bytes is used up")
        run.run()
    assert run.trained == 16
    assert run.events("cache full") == ["the cache takes nothing more, the run goes on: cache.max_bytes is used up"]
    assert run.state()["full"]
    assert run.conductor.ledger.counts["spilling"] == 0


def test_the_samples_of_a_damaged_shard_are_computed_and_never_quarantined(world: Any) -> None:
    run = world(held=list(range(32)), epochs=2)
    run.damaged = {3, 4, 5, 6, 7, 8, 9, 10}
    run.prompt = True
    run.run()
    assert run.errors == []
    assert run.trained == 16
    assert run.conductor.ledger.quarantined == {}
    assert set(run.by("model")) == {3, 4, 5, 6, 7, 8, 9, 10}
    assert len(run.events("cache damaged")) == 1  # of one shard
    assert "shard-0123456789ab" in run.events("cache damaged")[0]
    assert run.state()["damaged"] >= 8


def test_without_a_target_a_spilling_run_starts_again_with_one(world: Any) -> None:
    run = world(held=list(range(32)), producers=())
    run.damaged = {3}
    run.run()
    assert run.errors == []
    assert [each.at_once for each in run.again] == [True]
    assert "shard-0123456789ab" in run.again[0].text


def test_without_a_target_a_damaged_shard_ends_the_run(world: Any) -> None:
    run = world(held=list(range(32)), producers=(), spills=False)
    run.damaged = {3}
    run.run()
    assert ["`draftwire cache verify` finds what else is damaged" in text for text in run.errors] == [True]


def test_a_writer_that_dies_gives_its_slots_back_and_its_successor_goes_on(world: Any) -> None:
    run = world(epochs=2)
    run.run()
    assert run.conductor.ledger.counts["spilling"] == 2
    run.say(LAUNCHER, m.Gone(name="replay-0", reaped=True, how="was killed by SIGKILL"))
    assert run.conductor.ledger.counts["spilling"] == 0
    left = list(run.spills)
    run.spills.clear()
    run.run()
    assert run.spills == []  # nothing is lent while nobody is there
    run.join("replay-0")
    run.run()
    for late in left:  # nobody waits for the dead one's words
        if isinstance(late, m.Spill):
            run.say("replay-0", m.Spilled(attempt=late.attempt, durable=(), problem=""))
    run.finish()
    assert run.trained == 16
    assert sum(run.conductor.ledger.counts.values()) == run.conductor.ledger.counts["free"] == 8


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whoever_dies_and_whatever_is_damaged_every_step_is_trained_and_every_slot_comes_back(
    make_job: Any, data: st.DataObject
) -> None:
    plan = {"epochs": 3, "batch_tokens": 5 * LENGTH, "microbatch_tokens": 5 * LENGTH, "consumers": 1}
    slots = data.draw(st.integers(3, 9))
    job = make_job(plan=plan, slots=slots, producers=("cpu",), consumers=("cpu",), cached="c", spills=True)
    world = World(job, sorted(data.draw(st.sets(st.integers(0, SAMPLES - 1)))))
    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["run", "run", "run", "write", "write", "kill", "rewind", "damage"])):
            case "run":
                world.run(data.draw(st.integers(1, 12)))
            case "write" if world.spills:
                world.write()
            case "kill":
                world.kill_replay()
            case "rewind":
                world.rewind(data.draw(st.integers(0, 20)))
            case "damage":
                world.damaged = data.draw(st.sets(st.integers(0, SAMPLES - 1), max_size=6))
        counts = world.conductor.ledger.counts
        assert sum(counts.values()) == slots
        assert counts["spilling"] <= slots // 4
    world.damaged = set()
    world.finish()
    assert world.conductor.ledger.finished
    assert world.trained == world.conductor.pace.last_step
    assert world.conductor.ledger.counts["free"] == slots
    assert world.conductor.ledger.quarantined == {}
    assert world.errors == []


@pytest.mark.parametrize("how", ["uncached", "not reaped"])
def test_a_cache_that_is_lost_for_good_costs_its_work_and_no_more(world: Any, how: str) -> None:
    run = world(held=list(range(16)), epochs=2)
    held_up: list[Any] = []
    answer = run._answer
    run._answer = lambda name, message: (
        held_up.append(message) if isinstance(message, m.Lease) and name == "replay-0" else answer(name, message)
    )
    run.run()
    assert held_up
    if how == "uncached":
        run.say(LAUNCHER, m.Gone(name="replay-0", reaped=True, how="ended with code 2"))
        run.say(LAUNCHER, m.Order(order="uncached"))
    else:
        run.say(LAUNCHER, m.Gone(name="replay-0", reaped=False, how="was killed"))
    run.run()
    assert run.trained == 16
    assert run.by("replay") == []
    assert set(run.by("model")) == set(range(32))
    assert len(run.events("cache lost")) == 1
    assert run.conductor.ledger.counts["lost"] == (0 if how == "uncached" else len(held_up))
