"""Cursors survive JSON, and say whether and how a plan can go on from them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.cursor import Cursor, cursor_at, decode_cursor, encode_cursor, fit
from protocol.errors import RequestError
from protocol.plan import Plan, PlanParams

PARAMS = PlanParams(
    seed=1,
    epochs=2,
    batch_tokens=16,
    anchors=4,
    block_size=2,
    microbatch_tokens=16,
    microbatch_draft_tokens=64,
    consumers=2,
)


def plan(fingerprint: str = "data", **changes: Any) -> Plan:
    lengths = np.arange(1, 13)
    return Plan(lengths, lengths // 2, msgspec.structs.replace(PARAMS, **changes), fingerprint)


def cursor(of: Plan, next_step: int) -> Cursor:
    return cursor_at(of, next_step, {7: "not finite", 3: "zero"}, 40, 300)


@pytest.mark.parametrize("next_step", [0, 1, plan().locate(plan().total_steps - 1)[1], plan().total_steps])
def test_a_cursor_survives_json_and_resumes_exactly(next_step: int) -> None:
    data = encode_cursor(cursor(plan(), next_step))
    back = decode_cursor(data, "cursor.json")
    assert back == cursor(plan(), next_step)
    assert back.quarantined_samples == {3: "zero", 7: "not finite"}
    assert fit(back, plan()).verdict == "exact"


def test_epochs_of_boundaries() -> None:
    one = plan()
    first_of_second = next(step for step in range(one.total_steps) if one.locate(step) == (1, 0))
    epochs = [cursor(one, step).epoch for step in (0, first_of_second - 1, first_of_second, one.total_steps)]
    assert epochs == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "changes", [{"consumers": 3}, {"anchors": 3}, {"microbatch_tokens": 12}, {"microbatch_draft_tokens": 20}]
)
def test_other_blocks_of_the_same_steps_are_allowed_and_said(changes: dict[str, Any]) -> None:
    assert fit(cursor(plan(), 2), plan(**changes)).verdict == "repartitioned"


@pytest.mark.parametrize("changes", [{"seed": 2}, {"batch_tokens": 17}])
def test_other_steps_are_refused(changes: dict[str, Any]) -> None:
    answer = fit(cursor(plan(), 2), plan(**changes))
    assert answer.verdict == "refused"
    assert "train.batch_tokens" in answer.reason


def test_another_dataset_is_refused() -> None:
    assert fit(cursor(plan(), 2), plan("other")).verdict == "refused"


def test_a_longer_run_goes_on_exactly_and_a_shorter_one_is_refused() -> None:
    short = plan(max_steps=3)
    assert fit(cursor(short, 3), plan()).verdict == "exact"
    assert fit(cursor(short, 3), plan(max_steps=3)).verdict == "exact"
    answer = fit(cursor(plan(), 5), short)
    assert answer.verdict == "refused"
    assert "train.max_steps" in answer.reason
    assert fit(cursor(plan(), plan().total_steps), plan(epochs=3)).verdict == "exact"


@pytest.mark.parametrize("change", [{"epoch": 1}, {"quarantined": {"12": "no such sample"}}])
def test_a_cursor_that_contradicts_its_plan_is_refused(change: dict[str, Any]) -> None:
    assert fit(msgspec.structs.replace(cursor(plan(), 1), **change), plan()).verdict == "refused"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        encode_cursor(cursor(plan(), 1))[:-9],
        encode_cursor(cursor(plan(), 1)).replace(b'"3"', b'"x"'),
        encode_cursor(cursor(plan(), 1)).replace(b'"3"', b'"-3"'),
        encode_cursor(cursor(plan(), 1)).replace(b'"next_step": 1', b'"next_step": -1'),
        encode_cursor(cursor(plan(), 1)).replace(b'"epoch"', b'"epok"'),
    ],
)
def test_what_is_no_cursor_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(RequestError, match=r"step-1/cursor\.json"):
        decode_cursor(data, "step-1/cursor.json")
