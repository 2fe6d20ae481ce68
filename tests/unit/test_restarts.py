"""When a child is started again: for ever while the run gets on, a few times when it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.awake import AwakeClock
from launch.restarts import RESTARTS, Restarts


def test_a_crash_loop_ends_after_longer_and_longer_pauses() -> None:
    restarts = Restarts()
    assert [restarts.died("producer-0", 7, 0) for _ in range(5)] == [0.0, 1.0, 3.0, None, None]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=50))
def test_who_dies_now_and_then_is_started_again_at_once(advances: list[int]) -> None:
    restarts, step = Restarts(), 0
    for advance in advances:
        step += advance
        assert restarts.died("producer-0", step, step) == 0.0


def test_who_never_does_anything_waits_longer_each_time_while_others_get_on() -> None:
    restarts = Restarts()
    pauses = [restarts.died("producer-1", step, 5) for step in range(10)]
    assert pauses == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 60.0, 60.0, 60.0, 60.0]
    assert restarts.died("producer-1", 10, 6) == 0.0


def test_going_back_to_a_checkpoint_and_on_to_the_same_step_is_no_progress() -> None:
    restarts = Restarts()
    answers = [restarts.died("consumers", step, step) for step in (50, 45, 50, 48)]
    assert answers == [0.0, 1.0, 3.0, None]
    assert Restarts().died("consumers", 0, 0) == 0.0


def test_each_child_is_counted_by_itself() -> None:
    restarts = Restarts()
    for _ in range(RESTARTS):
        restarts.died("producer-0", 0, 0)
    assert restarts.died("producer-1", 0, 0) == 0.0


def test_the_awake_clock_stands_still_in_a_pause() -> None:
    now = iter([100.0, 100.2, 100.4, 900.0, 900.5])
    clock = AwakeClock(lambda: next(now))
    assert [clock() for _ in range(4)] == pytest.approx([0.2, 0.4, 1.4, 1.9])
