"""How evenly ranks share a step: the slowest over the mean, planned and measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from launch.balance import Balance, imbalance, planned_imbalance
from protocol.plan import Plan


@pytest.fixture
def plan(make_job: Callable[..., Any]) -> Plan:
    params = make_job(plan={"consumers": 2, "batch_tokens": 40, "epochs": 9}).plan
    return Plan(np.array([10, 10, 20]), np.array([0, 0, 0]), params, "data")


def row(rank: int, step: int, *busy_s: float) -> dict[str, Any]:
    return {"rank": rank, "step": step, "busy_s": list(busy_s), "gpu_memory_bytes": 10 + rank, "rss_bytes": 20 + rank}


def test_the_largest_share_over_the_mean() -> None:
    assert imbalance([3.0, 1.0]) == 1.5
    assert imbalance([2.0, 2.0, 2.0]) == 1.0
    assert imbalance([0.0, 0.0]) == imbalance([5.0]) == 1.0


def test_what_the_plan_makes_of_it(plan: Plan) -> None:
    # 10 + 10 and 20 tokens, without any anchor.
    assert planned_imbalance(plan, 0) == 1.0
    skewed = Plan(np.array([10, 30]), np.array([0, 0]), plan.params, "data")
    assert planned_imbalance(skewed, 0) == 1.5


def test_a_step_counts_when_every_rank_has_spoken(plan: Plan) -> None:
    balance = Balance(plan, 2)
    assert (balance.state()["imbalance"], balance.state()["rss_bytes"]) == (None, [None, None])
    balance.note(row(0, 1, 3.0))
    assert balance.state()["imbalance"] is None
    balance.note(row(0, 3, 1.0, 2.0))  # a rank ahead, of two steps at once
    balance.note(row(1, 1, 1.0))
    assert balance.state() == {
        "imbalance": 1.5,
        "imbalance_planned": 1.0,
        "gpu_memory_bytes": [10, 11],
        "rss_bytes": [20, 21],
    }
    balance.note(row(1, 2, 1.0))
    assert balance.state()["imbalance"] == 1.25
    balance.note(row(1, 3, 6.0))
    assert balance.state()["imbalance"] == (1.5 + 1.0 + 1.5) / 3


def test_a_rewind_forgets_half_a_step(plan: Plan) -> None:
    balance = Balance(plan, 2)
    balance.note(row(0, 1, 9.0))
    balance.rewind()
    balance.note(row(1, 1, 1.0))
    assert balance.state()["imbalance"] is None
    balance.note(row(0, 1, 1.0))
    assert balance.state()["imbalance"] == 1.0
