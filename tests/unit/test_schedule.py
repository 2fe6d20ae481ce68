"""Learning-rate schedules, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.config import TrainConfig
from consumer.schedule import STEADY, Pace, learning_rate
from protocol.pace import cooldown_end


def configured(**changes: object) -> TrainConfig:
    return TrainConfig(**{"lr": 2.0, "warmup": 0.1} | changes)  # type: ignore[arg-type]


def rates(total: int, pace: Pace = STEADY, **changes: object) -> list[float]:
    return [learning_rate(step, total, configured(**changes), pace) for step in range(total)]


def test_cosine_warms_up_linearly_and_falls_to_nothing() -> None:
    found = rates(100)
    assert found[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert found[10] == 2.0  # no jump where the cosine takes over
    assert found[55] == pytest.approx(1.0)  # half-way between 10 and 100
    assert found[32] == pytest.approx(1 + math.cos(math.pi * 22 / 90))
    assert 0 < found[-1] < 0.001


def test_wsd_stays_and_then_falls_to_a_tenth_over_the_last_fifth() -> None:
    found = rates(100, schedule="wsd")
    assert found[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert found[10:81] == [2.0] * 71
    assert found[90] == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    assert found[99] == pytest.approx(2 * (0.1 + 0.9 / 20))


def test_no_warm_up_starts_at_the_full_rate() -> None:
    assert rates(50, warmup=0.0)[0] == 2.0
    assert rates(50, warmup=0.0, schedule="wsd")[0] == 2.0


def test_any_warm_up_lasts_a_step_at_least() -> None:
    assert rates(10, warmup=0.001) == rates(10, warmup=0.1)


@given(st.integers(1, 300), st.floats(0, 0.99), st.sampled_from(["cosine", "wsd"]))
def test_a_rate_is_positive_bounded_and_rises_only_at_the_start(total: int, warmup: float, schedule: str) -> None:
    found = rates(total, warmup=warmup, schedule=schedule)
    assert all(0 < rate <= 2.0 for rate in found)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert found[top] == pytest.approx(2.0)


SCHEDULES = st.sampled_from(["cosine", "wsd"])


def test_a_cool_down_falls_to_a_tenth_over_a_fifth_of_the_steps_that_the_run_then_has() -> None:
    assert cooldown_end(80, 1000) == 100
    found = rates(1000, Pace(cooldown_step=80), warmup=0.0, schedule="wsd")
    assert found[:81] == [2.0] * 81
    assert found[90] == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    assert found[99] == pytest.approx(2 * (0.1 + 0.9 / 20))


@given(st.integers(0, 400), st.integers(1, 400))
def test_a_cool_down_lasts_a_step_at_least_and_no_longer_than_the_plan(step: int, total: int) -> None:
    end = cooldown_end(min(step, total - 1), total)
    assert min(step, total - 1) < end <= total


@given(st.integers(1, 300), st.floats(0, 0.5), SCHEDULES, st.data())
def test_a_cool_down_goes_on_where_the_schedule_stood_and_ends_at_its_floor(
    total: int, warmup: float, schedule: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, total - 1))
    end = cooldown_end(start, total)
    plain = rates(total, warmup=warmup, schedule=schedule)
    found = rates(total, Pace(cooldown_step=start), warmup=warmup, schedule=schedule)
    assert found[: start + 1] == plain[: start + 1]  # no jump at its first step
    assert all(0 < rate <= known for rate, known in zip(found[:end], plain[:end], strict=True))
    falling = found[start:end]
    if plain[start] == max(plain):  # else the warm-up goes on below it
        assert falling == sorted(falling, reverse=True)
    last = 0.1 + 0.9 / (end - start)
    assert found[end - 1] <= plain[start] * last + 1e-12
    if schedule == "wsd" and start < end <= 0.8 * total and plain[start] == 2.0:
        assert found[end - 1] == pytest.approx(2.0 * last)


@given(st.integers(1, 300), st.floats(0, 0.5), SCHEDULES, st.floats(0, 1))
def test_hours_bring_the_schedule_on_and_never_back(total: int, warmup: float, schedule: str, share: float) -> None:
    """It stands where the larger share puts it, the steps' or the hours'."""
    config = configured(warmup=warmup, schedule=schedule)
    for step in range(0, total, 7):
        found = learning_rate(step, total, config, Pace(share))
        assert 0 <= found <= 2.0
        if step >= share * total:
            assert found == learning_rate(step, total, config)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@given(share=st.floats(0, 1), later=st.floats(0, 0.01))
def test_a_moment_later_the_rate_is_nearly_the_same(schedule: str, share: float, later: float) -> None:
    config = configured(warmup=0.1, schedule=schedule)
    now, then = (learning_rate(0, 1000, config, Pace(each)) for each in (share, min(1.0, share + later)))
    assert abs(then - now) <= 2.0 * 10.1 * later + 0.005  # the warm-up, a tenth of the way, is the steepest part


@pytest.mark.parametrize(("schedule", "floor"), [("cosine", 0.0), ("wsd", 0.2)])
def test_the_rate_is_at_its_floor_when_the_hours_are_over(schedule: str, floor: float) -> None:
    for share in (1.0, 1.5):  # the last step may begin a moment too late
        assert learning_rate(3, 1000, configured(schedule=schedule), Pace(share)) == pytest.approx(floor, abs=1e-12)


def test_hours_shorten_a_warm_up_too() -> None:
    assert learning_rate(0, 1000, configured(), Pace(0.05)) == pytest.approx(2.0 * 51 / 100)
    assert learning_rate(0, 1000, configured(), Pace(0.1)) == 2.0
