"""When a run ends before its plan: hours, and a cool-down. The coordinator decides once, and every rank hears it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from launch.pace import Pace
from protocol.gate import VerifiedGate
from protocol.messages import Go


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Run:
    """A gate of one rank, whose steps have one micro-step, and its pace."""

    def __init__(self, job: Any, total_steps: int = 100) -> None:
        self.clock = Clock()
        self.pace = Pace(job, total_steps, self.clock)
        self.gate = VerifiedGate(1, total_steps, lambda step: 1, job.start_step)

    def go(self, ready: bool = True) -> Go | None:
        """The next GO, the rank being there with its block if `ready`."""
        if ready:
            step = self.gate.next[0]
            self.gate.verified(step, 0, 0)
            self.gate.reached(step, 0)
        return self.pace.go(self.gate)

    def steps(self, most: int = 1000, step_s: float = 10.0) -> list[Go]:
        """GO after GO until the run ends, `step_s` apart."""
        found = []
        while len(found) < most and (go := self.go()) is not None:
            found.append(go)
            self.clock.now_s += step_s
        return found

    def texts(self) -> list[str]:
        return [row["text"] for _, row in self.pace.rows]


@pytest.fixture
def run(make_job: Callable[..., Any]) -> Callable[..., Run]:
    return lambda total_steps=100, **changes: Run(make_job(**changes), total_steps)


def test_without_hours_a_run_ends_with_its_plan(run: Callable[..., Run]) -> None:
    one = run(total_steps=7)
    found = one.steps()
    assert [(go.step, go.stop, go.finish, go.cooldown_step) for go in found] == [
        (n, False, False, -1) for n in range(7)
    ]
    assert one.pace.left_s is None
    assert (one.pace.why_over(6), one.pace.why_over(7)) == (None, "all steps are done")
    assert one.texts() == []


def test_hours_end_the_run_at_the_first_boundary_at_which_they_are_over(run: Callable[..., Run]) -> None:
    one = run(max_s=45.0)
    one.clock.now_s += 500  # loading is no training
    found = one.steps()
    assert [go.step for go in found] == [0, 1, 2, 3, 4, 5]
    assert [go.trained_s for go in found] == [0, 10, 20, 30, 40, 50]
    assert [(go.stop, go.finish) for go in found] == [(False, False)] * 5 + [(True, True)]
    assert one.texts() == ["the 45 s of train.max_hours are over: the run ends after step 5"]
    assert one.gate.finished


def test_hours_of_earlier_starts_count(run: Callable[..., Run]) -> None:
    one = run(max_s=45.0, trained_s=30.0, start_step=3)
    assert one.pace.left_s == 15.0
    assert [(go.step, go.finish) for go in one.steps()] == [(3, False), (4, False), (5, True)]
    assert run(max_s=45.0, trained_s=45.0, start_step=3).pace.why_over(3) is not None


def test_waiting_counts_and_ends_the_run_without_any_block(run: Callable[..., Run]) -> None:
    one = run(max_s=45.0)
    assert one.go() is not None
    one.clock.now_s += 44
    assert one.go(ready=False) is None
    one.clock.now_s += 1
    last = one.go(ready=False)
    assert last is not None
    assert (last.step, last.stop, last.finish) == (1, True, True)


def test_a_stop_in_time_is_a_stop_and_later_hours_end_what_goes_on(run: Callable[..., Run]) -> None:
    one = run(max_s=45.0)
    one.steps(2)
    one.gate.order(["stop"])
    stopped = one.go()
    assert stopped is not None
    assert (stopped.stop, stopped.finish, stopped.trained_s) == (True, False, 20.0)


def test_a_cool_down_begins_at_the_next_step_and_ends_the_run(run: Callable[..., Run]) -> None:
    one = run()
    one.steps(40)
    one.gate.order(["cooldown"])
    found = one.steps()
    assert {go.cooldown_step for go in found} == {40}
    assert [go.step for go in found] == list(range(40, 51))
    assert [go.finish for go in found] == [False] * 10 + [True]
    assert one.texts() == [
        "the learning rate falls from step 40 on, and the run ends after step 50",
        "the cool-down is over: the run ends after step 50",
    ]


def test_a_cool_down_goes_on_after_a_resume_and_a_rewind(run: Callable[..., Run]) -> None:
    one = run(cooldown_step=40, start_step=45)
    assert [(go.step, go.cooldown_step) for go in one.steps()] == [(step, 40) for step in range(45, 51)]
    one.gate.rewind(38)  # before it began: the same steps come again
    assert [(go.step, go.cooldown_step, go.finish) for go in one.steps()][-1] == (50, 40, True)
    assert run(cooldown_step=40, start_step=50).pace.why_over(50) == "the cool-down is over"


def test_a_second_cool_down_and_one_that_would_end_no_sooner_change_nothing(run: Callable[..., Run]) -> None:
    one = run()
    one.steps(40)
    one.gate.order(["cooldown"])
    one.steps(3)
    one.gate.order(["cooldown"])
    assert {go.cooldown_step for go in one.steps()} == {40}
    late = run()
    late.steps(85)
    late.gate.order(["cooldown"])
    assert [(go.step, go.cooldown_step) for go in late.steps()] == [(step, -1) for step in range(85, 100)]
    assert late.texts() == ["no other cool-down: the run ends after step 100 as it is"]


def test_hours_end_a_cool_down_too(run: Callable[..., Run]) -> None:
    one = run(max_s=425.0)
    one.steps(40)
    one.gate.order(["cooldown"])
    assert [(go.step, go.finish) for go in one.steps()] == [(40, False), (41, False), (42, False), (43, True)]
