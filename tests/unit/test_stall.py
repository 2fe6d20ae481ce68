"""What a stalled run says that it waits for: the stage by name, at the right times, whatever the stage is."""

from __future__ import annotations

import pytest

from launch.stall import Watch
from protocol import messages as m
from protocol.gate import VerifiedGate


class Run:
    """Two producers, two consumers, steps of two blocks (one micro-step), told by hand; `now` is the clock."""

    def __init__(self, join: bool = True, start_step: int = 0) -> None:
        self.now = 0.0
        self.watch = Watch(["producer-0", "producer-1"], ["consumer-0", "consumer-1"], start_step, self.now)
        self.gate = VerifiedGate(2, 20, lambda step: 1, start_step)
        if join:
            for name in ("producer-0", "producer-1", "consumer-0", "consumer-1"):
                self.watch.joined(name, self.now)
            self.reach(start_step, 0, 1)

    def reach(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            self.gate.reached(step, rank)

    def lease(self, step: int, index: int, attempt: int, name: str = "producer-0") -> None:
        message = m.Lease(
            step=step, index=index, kind="model", attempt=attempt, slot=0, samples=(), lengths=(), positions=(),
            token_ids=b"", loss_mask=b"",
        )  # fmt: skip
        self.watch.sent(name, message, self.now)

    def ready(self, step: int, index: int, attempt: int, name: str = "producer-0") -> None:
        ready = m.Ready(
            step=step, index=index, kind="model", attempt=attempt, checksum=0, busy_s=0.0, halved=0, figures=()
        )
        self.watch.heard(name, ready, self.now)

    def deliver(self, step: int, rank: int) -> None:
        message = m.Deliver(
            step=step, index=rank, micro_step=0, micro_steps=1, epoch=0, attempt=1, slot=0, table=(), samples=(),
            writers=(1,), checksum=0,
        )  # fmt: skip
        self.watch.sent(f"consumer-{rank}", message, self.now)

    def verify(self, step: int, rank: int) -> None:
        self.gate.verified(step, 0, rank)
        self.watch.heard(f"consumer-{rank}", m.Verified(step=step, index=rank, attempt=1), self.now)

    def all_verified(self, step: int) -> None:
        for rank in (0, 1):
            self.lease(step, rank, 2 * step + rank)
            self.ready(step, rank, 2 * step + rank)
            self.deliver(step, rank)
            self.verify(step, rank)

    def finish(self, step: int, *ranks: int) -> None:
        """The ranks have done `step`: rank 0 reports it, the others only beat."""
        for rank in ranks:
            self.watch.heard(f"consumer-{rank}", m.Heartbeat(progress=step + 1), self.now)
            if rank == 0:
                row = {"step": step + 1}
                self.watch.heard("consumer-0", m.Report(kind="step", row=row), self.now)

    def beat(self, *names: str) -> None:
        for name in names or ("producer-0", "producer-1", "consumer-0", "consumer-1"):
            self.watch.heard(name, m.Heartbeat(progress=0), self.now)

    def after(self, seconds: float, ready: int = 0) -> str | None:
        """What is said when everybody beats and nothing else has happened for that long."""
        self.now += seconds
        self.beat()
        return self.watch.look(self.gate, ready, self.now)


def test_who_has_not_joined() -> None:
    run = Run(join=False)
    everybody = "consumer-0, consumer-1, producer-0 and producer-1 to load and join, for 30 s now"
    line = run.watch.look(run.gate, 0, 30.0)
    assert line == f"no progress for 30 s: waiting for {everybody}; 0 blocks produced, 0 ready, 0 trained"
    run.watch.joined("consumer-0", 30.0)
    run.watch.joined("producer-1", 30.0)
    assert run.watch.waited_for(run.gate, 35.0) == "consumer-1 and producer-0 to load and join, for 35 s now"


def test_producers_that_still_load_while_the_ranks_wait() -> None:
    run = Run(join=False)
    for name in ("consumer-0", "consumer-1"):
        run.watch.joined(name, 1.0)
    run.reach(0, 0, 1)
    assert run.watch.waited_for(run.gate, 9.0) == "producer-0 and producer-1 to load and join, for 9 s now"


def test_a_producer_that_holds_a_lease() -> None:
    run = Run()
    run.all_verified(0)
    assert run.gate.go()
    run.finish(0, 0, 1)
    run.reach(1, 0, 1)
    run.lease(1, 0, 9)
    run.now += 1
    run.lease(1, 1, 10, "producer-1")
    run.lease(2, 0, 11, "producer-1")  # not needed yet
    assert run.after(30) == (
        "no progress for 31 s: waiting for producer-0 (leased step 1 block 0 31 s ago) and producer-1 (leased step 1 "
        "block 1 30 s ago); 2 blocks produced, 0 ready, 2 trained"
    )
    run.ready(1, 0, 9)
    assert run.after(30) == (
        "no progress for 30 s: waiting for producer-1 (leased step 1 block 1 1 min 00 s ago); 3 blocks produced, "
        "0 ready, 2 trained"
    )


def test_a_producer_that_asks_for_nothing_and_a_ring_without_room() -> None:
    run = Run()
    run.watch.heard("producer-1", m.Want(kind="model"), run.now)
    assert run.watch.waited_for(run.gate, 6.0) == "producer-0 to ask for work"
    run.watch.heard("producer-0", m.Want(kind="model"), run.now)
    assert run.watch.waited_for(run.gate, 6.0) == "a free slot of the ring for step 0"


def test_a_rank_that_does_not_take_or_verify_its_block() -> None:
    run = Run()
    for rank in (0, 1):
        run.lease(0, rank, rank)
        run.ready(0, rank, rank)
        run.deliver(0, rank)
    run.verify(0, 0)
    line = run.after(30, ready=4)
    assert line is not None
    assert "waiting for consumer-1 to verify step 0 block 1, delivered 30 s ago; 2 blocks produced, 4 ready" in line


def test_a_rank_that_evaluates_between_steps_is_named_with_its_last_report() -> None:
    run = Run()
    run.all_verified(0)
    assert run.gate.go()
    run.finish(0, 0, 1)
    run.reach(1, 1)
    run.all_verified(1)
    assert run.gate.go() is None
    run.watch.heard("consumer-0", m.Report(kind="eval", row={"step": 1}), run.now)
    line = run.after(30)
    assert line is not None
    assert "waiting for consumer-0 to come to step 1 (evaluates or writes); it last reported eval of step 1" in line


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        ((), "consumer-0 and consumer-1 in step 0"),
        ((0,), "consumer-1 in step 0"),
        ((0, 1), "consumer-0 and consumer-1"),
    ],
)
def test_ranks_inside_a_step(arrived: tuple[int, ...], expected: str) -> None:
    """A rank that is in the reduction has come to the next step already: it waits for the others."""
    run = Run()
    run.all_verified(0)
    assert run.gate.go()
    run.reach(1, *arrived)
    line = run.after(30)
    assert line is not None
    assert f"waiting for {expected}" in line
    assert "(arithmetic or reduction)" in line


def test_the_end_of_the_plan() -> None:
    run = Run(start_step=19)
    run.all_verified(19)
    assert run.gate.go()
    run.finish(19, 0, 1)
    line = run.after(30)
    assert line is not None
    assert "waiting for consumer-0 and consumer-1 to evaluate, export and end; it last reported step of step 20" in line
    assert line.endswith("2 blocks produced, 0 ready, 2 trained")


def test_ingest_is_waited_for_and_named_like_the_others() -> None:
    watch = Watch(["producer-0"], ["consumer-0"], 0, 0.0, ingests=True)
    gate = VerifiedGate(1, 20, lambda step: 1, 0)
    for name in ("producer-0", "consumer-0"):
        watch.joined(name, 0.0)
    gate.reached(0, 0)
    assert watch.waited_for(gate, 4.0) == "ingest to load and join, for 4 s now"
    watch.joined("ingest", 5.0)
    for name in ("producer-0", "consumer-0"):
        watch.heard(name, m.Heartbeat(progress=0), 20.0)
    assert "ingest has been silent for 15 s (stopped?)" in watch.waited_for(gate, 20.0)


def test_a_rank_that_has_done_the_whole_plan_and_left_is_not_called_stopped() -> None:
    run = Run(start_step=19)
    run.all_verified(19)
    assert run.gate.go() is not None
    run.finish(19, 1)
    run.now = 40.0
    run.beat("producer-0", "producer-1", "consumer-0")
    waited_for = run.watch.waited_for(run.gate, run.now)
    assert waited_for == "consumer-0 in step 19 (arithmetic or reduction)"


def test_a_stopped_process_is_named_whatever_the_stage() -> None:
    run = Run()
    run.lease(0, 0, 1)
    run.now = 31.0
    run.beat("producer-1", "consumer-0", "consumer-1")
    line = run.watch.look(run.gate, 0, run.now)
    assert line is not None
    assert (
        "waiting for producer-0 (leased step 0 block 0 31 s ago); producer-0 has been silent for 31 s (stopped?)"
        in line
    )


def test_a_wait_is_told_at_the_limit_and_each_time_it_has_doubled_and_ends_with_progress() -> None:
    run = Run()
    told = [second for second in range(1, 300) if run.after(1) is not None]
    assert told == [30, 60, 120, 240]
    assert run.watch.stall is not None
    run.lease(0, 0, 1)
    run.ready(0, 0, 1)
    assert run.watch.stall is None
    assert run.after(29) is None
    assert run.after(1) is not None


def test_a_long_pause_of_the_coordinator_is_told_once() -> None:
    run = Run()
    assert run.after(500) is not None
    assert run.after(1) is None
    assert run.after(459) is not None


def test_a_wait_is_shown_long_before_it_is_a_stall() -> None:
    run = Run()
    run.lease(0, 0, 1)
    assert run.watch.state(run.gate, 4.0)["waiting"] is None
    assert run.watch.state(run.gate, 6.0)["waiting"] == "producer-0 (leased step 0 block 0 6 s ago)"
    assert run.watch.state(run.gate, 6.0)["stall"] is None


def test_a_producer_that_died_is_loading_again_and_holds_nothing() -> None:
    run = Run()
    run.lease(0, 0, 1)
    run.watch.heard("launcher", m.Gone(name="producer-0", reaped=True, how="was killed by SIGKILL"), 10.0)
    assert run.watch.waited_for(run.gate, 5.0 + 10.0).startswith("producer-0 to load and join, for 5 s now")


def test_a_block_that_was_poison_or_empty_is_not_counted_as_trained() -> None:
    run = Run()
    run.deliver(0, 0)
    run.watch.heard("consumer-0", m.Bad(step=0, index=0, attempt=1, samples=(), reason="zero"), run.now)
    empty = m.Deliver(
        step=0, index=1, micro_step=0, micro_steps=1, epoch=0, attempt=1, slot=-1, table=(), samples=(), writers=(),
        checksum=0,
    )  # fmt: skip
    run.watch.sent("consumer-1", empty, run.now)
    run.finish(0, 0, 1)
    assert run.watch.trained == 0


def test_a_stopped_process_hangs_after_the_limit_and_not_before() -> None:
    run = Run()
    assert run.watch.hung(run.gate, 299.0) == {}
    run.watch.heard("producer-1", m.Heartbeat(progress=0), 290.0)
    silent = ("producer-0", "consumer-0", "consumer-1")
    assert run.watch.hung(run.gate, 301.0) == dict.fromkeys(silent, "it has been silent for 5 min 01 s")


def _beat(run: Run, until: float, **progress: int) -> None:
    """Everybody beats every two seconds; who is named does so with its own count."""
    while run.now < until:
        run.now += 2.0
        for name in ("producer-0", "producer-1", "consumer-0", "consumer-1"):
            run.watch.heard(name, m.Heartbeat(progress=progress.get(name.replace("-", "_"), 0)), run.now)


def test_a_producer_that_gets_nowhere_with_its_block_hangs_and_a_slow_one_does_not() -> None:
    run = Run()
    run.lease(0, 0, 1, "producer-0")
    run.lease(0, 1, 2, "producer-1")
    for samples in range(1, 5):  # 90 s a sample
        _beat(run, run.now + 90.0, producer_1=samples)
    assert run.watch.hung(run.gate, run.now) == {
        "producer-0": "it has made no progress with step 0 block 0 for 5 min 58 s"
    }


def test_a_producer_without_work_does_not_hang() -> None:
    run = Run()
    _beat(run, 1000.0)
    assert run.watch.hung(run.gate, run.now) == {}


def test_ranks_hang_inside_a_step_but_not_inside_the_first() -> None:
    run = Run()
    run.all_verified(0)
    assert run.gate.go() is not None
    _beat(run, 1000.0)
    assert run.watch.hung(run.gate, run.now) == {}
    run.finish(0, 0, 1)
    run.reach(1, 0, 1)
    run.all_verified(1)
    assert run.gate.go() is not None
    _beat(run, run.now + 310.0, consumer_0=1, consumer_1=1)
    assert set(run.watch.hung(run.gate, run.now)) == {"consumer-0", "consumer-1"}


def test_a_rank_that_evaluates_for_long_does_not_hang() -> None:
    run = Run()
    for step in range(2):
        run.all_verified(step)
        assert run.gate.go() is not None
        run.finish(step, 0, 1)
        run.reach(step + 1, 1)
        if step == 0:
            run.reach(step + 1, 0)
    _beat(run, run.now + 1000.0, consumer_0=2, consumer_1=2)
    assert run.watch.hung(run.gate, run.now) == {}


def test_after_a_rewind_ranks_load_again_and_owe_nothing() -> None:
    run = Run()
    run.all_verified(0)
    run.watch.heard(
        "launcher",
        m.Rewind(names=("consumer-0", "consumer-1"), step=0, quarantined={}, how="consumer-0 was killed by SIGKILL"),
        10.0,
    )
    run.gate.rewind(0)
    waited_for = run.watch.waited_for(run.gate, 20.0)
    assert waited_for.startswith("consumer-0 and consumer-1 to load and join, for 10 s now")
    assert run.watch.hung(run.gate, 10_000.0).keys() <= {"producer-0", "producer-1"}


def test_a_producer_that_does_not_end_is_not_waited_for() -> None:
    run = Run()
    for name in ("producer-0", "producer-1"):
        run.watch.heard("launcher", m.Gone(name=name, reaped=False, how="was killed by SIGKILL"), 10.0)
    assert "load" not in run.watch.waited_for(run.gate, 20.0)


def test_a_producer_of_another_host_is_waited_for_by_name_until_it_has_left() -> None:
    run = Run()
    for name in ("producer-0", "producer-1"):
        run.watch.heard(name, m.Want(kind="model"), run.now)
    assert run.watch.waited_for(run.gate, 1.0) == "a free slot of the ring for step 0"
    run.watch.joined("remote-a", 1.0)
    assert run.watch.waited_for(run.gate, 2.0) == "remote-a to ask for work"
    run.watch.heard("remote-a", m.Want(kind="model"), 2.0)
    run.lease(0, 0, 1, "remote-a")
    assert run.watch.waited_for(run.gate, 3.0) == "remote-a (leased step 0 block 0 3 s ago)"
    assert "remote-a has been silent for 15 s" in run.watch.waited_for(run.gate, 17.0)
    run.watch.left("remote-a")
    assert "remote-a" not in run.watch.waited_for(run.gate, 20.0)
