"""What a run says of its split, from made-up rates whose answer is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launch.advice import Advisor, Done
from launch.flops import Costs
from launch.tally import Tally
from protocol import messages as m
from protocol.plan import Plan

PARAMS = {"batch_tokens": 8400, "microbatch_tokens": 10, "microbatch_draft_tokens": 1000, "anchors": 2}


@pytest.fixture
def advisor(make_job: Any) -> Any:
    """Builds one for P:C GPUs; every step has 840 equal samples, one a block."""

    def build(producers: int, consumers: int, **changes: Any) -> Advisor:
        devices = tuple(f"cuda:{index}" for index in range(producers + consumers))
        placed = {"producers": devices[:producers], "consumers": devices[producers:]} | changes.pop("placed", {})
        job = make_job(PARAMS | {"consumers": consumers}, **placed, **changes)
        samples = np.full(8400, 10), np.full(8400, 2)
        return Advisor(job, Plan(*samples, job.plan, "d"))

    return build


def done(producers: int, consumers: int, p: float, c: float, seconds: float = 100.0) -> Done:
    """What a run has done in which a producer makes `p` tokens/s and a rank trains `c`."""
    both = min(producers * p, consumers * c)
    tokens = round(both * seconds)
    return Done(tokens, tokens / p, 200, tokens, seconds, seconds * (1 - both / (consumers * c)))


@pytest.mark.parametrize(
    ("split", "p", "c", "short", "best", "rate"),
    [
        ((4, 4), 1000, 600, "consumers", (3, 5), 3000),
        ((4, 4), 600, 1000, "producers", (5, 3), 3000),
        ((1, 2), 1000, 2000, "producers", (2, 1), 2000),
        ((2, 1), 2000, 1000, "consumers", (1, 2), 2000),
        ((3, 5), 1000, 600, None, (3, 5), 3000),
        ((1, 1), 500, 1000, "producers", (1, 1), 500),
    ],
)
def test_the_short_side_and_the_better_split_are_named(
    advisor: Any, split: tuple[int, int], p: float, c: float, short: str | None, best: tuple[int, int], rate: float
) -> None:
    found = advisor(*split).advise(done(*split, p, c))
    assert found["short"] == short
    assert (found["producers_alone"], found["consumers_alone"]) == pytest.approx((split[0] * p, split[1] * c))
    assert found["best"] == {"producers": best[0], "consumers": best[1], "tokens_per_s": pytest.approx(rate)}


def test_the_text_says_by_how_much_and_what_a_split_would_do(advisor: Any) -> None:
    assert advisor(4, 4).advise(done(4, 4, 1000, 600))["text"] == (
        "the consumers are short by 40%: alone they reach 2,400 tokens/s, the producers 4,000; "
        "3:5 would reach 1.25 times as much"
    )
    assert advisor(3, 5).advise(done(3, 5, 1000, 600))["text"] == (
        "both sides are as fast as each other: alone 3,000 and 3,000 tokens/s; "
        "no other split of these 8 GPUs would gain 5%"
    )


def test_producers_of_two_gpus_are_moved_whole(advisor: Any) -> None:
    """One producer on two GPUs makes 1,000, a rank trains 300: 2:6 has 1,000 of 1,800, 4:4 has 1,200 of 2,000."""
    found = advisor(2, 6, tensor_parallel=2).advise(done(1, 6, 1000, 300))
    assert (found["short"], found["best"]["producers"]) == ("producers", 4)
    assert found["best"]["tokens_per_s"] == pytest.approx(1200)


def test_nothing_is_said_too_early_or_of_shared_gpus(advisor: Any) -> None:
    assert advisor(1, 1).advise(Done(0, 0.0, 0, 0, 0.0, 0.0)) is None
    assert advisor(1, 1).advise(done(1, 1, 10, 20)._replace(steps=19)) is None
    assert advisor(1, 1).advise(done(1, 1, 10, 20, seconds=19.0)) is None
    shared = {"producers": ("cuda:0",), "consumers": ("cuda:0",)}
    assert advisor(1, 1, placed=shared).advise(done(1, 1, 10, 20)) is None
    on_cpus = {"producers": ("cpu",), "consumers": ("cpu",)}
    assert "of these 2 processes" in advisor(1, 1, placed=on_cpus).advise(done(1, 1, 10, 20))["text"]


def test_the_figures_are_those_that_the_tally_has(make_job: Any) -> None:
    balance: Any = SimpleNamespace(note=lambda row: None, rewind=lambda: None, state=dict)
    tally = Tally(make_job(), Costs(), balance)
    row = {"loss": 1.0, "accuracy": [], "step_s": 2.0, "wait_s": 0.5, "tokens": 100, "anchors": 4, "skipped": False}
    for number in (1, 2):
        tally.note(m.Report(kind="step", row=row | {"step": number}), 2.0 * number)
    assert tally.trained == (2, 200, 4.0, 1.0)
    assert Done(1000, 2.5, *tally.trained).waited_s == 1.0


def test_nothing_is_said_where_all_comes_from_a_cache(advisor: Any) -> None:
    assert advisor(0, 2).advise(done(1, 2, 1000.0, 600.0)) is None
