"""Learning-rate schedules, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.config import TrainConfig
from consumer.schedule import learning_rate


def rates(total: int, **changes: object) -> list[float]:
    config = TrainConfig(**{"lr": 2.0, "warmup": 0.1} | changes)  # type: ignore[arg-type]
    return [learning_rate(step, total, config) for step in range(total)]


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
