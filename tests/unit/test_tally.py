"""The snapshot's figures: rates over a window, utilisation where it is known, counts of trouble."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launch.flops import Costs
from launch.tally import RATE_WINDOW_S, Tally
from protocol import messages as m

SHAPE: dict[str, Any] = {
    "hidden_size": 8,
    "target_layer_ids": (0,),
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
    "block_size": 2,
    "vocab_size": 10,
    "layer_types": ("full_attention",),
    "sliding_window": None,
}
KNOWN = Costs(target_flop_per_token=1e9, producer_peak=1e13, consumer_peak=1e6, shape=SHAPE, anchor_context=3.0)


def conductor(
    produced_tokens: int = 0,
    busy_s: float = 0.0,
    remotes: tuple[str, ...] = (),
    left_s: float | None = None,
    cache: Any = None,
) -> Any:
    ledger = SimpleNamespace(counts={"ready": 1}, quarantined={})
    return SimpleNamespace(
        ledger=ledger,
        produced_tokens=produced_tokens,
        busy_s=busy_s,
        streamed_bytes=0,
        numerics_changed=0,
        filled={},
        replayed_tokens=7,
        spilling=SimpleNamespace(state=lambda: cache),
        remotes=list(remotes),
        pace=SimpleNamespace(last_step=10, left_s=left_s),
    )


def tally_of(job: Any, costs: Costs) -> Tally:
    return Tally(job, costs, SimpleNamespace(note=lambda row: None, rewind=lambda: None, state=dict))  # type: ignore[arg-type]


def step(number: int, tokens: int = 100, **changes: Any) -> m.Report:
    row = {"step": number, "loss": 1.0, "accuracy": [0.5], "step_s": 2.0, "wait_s": 0.5, "tokens": tokens, "anchors": 4}
    return m.Report(kind="step", row=row | {"skipped": False} | changes)


def test_rates_and_utilisation_are_means_over_the_window(make_job: Any) -> None:
    tally = tally_of(make_job(), KNOWN)
    assert tally.state(conductor(), 0.0)["producer_tokens_per_s"] == 0
    for number in range(1, 5):
        tally.note(step(number), 2.0 * number)
    found = tally.state(conductor(5000), 10.0)
    assert (found["producer_tokens_per_s"], found["consumer_tokens_per_s"]) == (500.0, 40.0)
    assert found["producer_mfu"] == pytest.approx(500 * 1e9 / 1e13)
    assert found["consumer_mfu"] == pytest.approx(4 * KNOWN.step_flop(100, 4) / 10 / 1e6)
    assert (found["step"], found["steps"], found["eta_s"]) == (4, 10, 12.0)
    assert found["consumer_wait_share"] == 0.25
    later = tally.state(conductor(5000), 11.0 + RATE_WINDOW_S)
    assert (later["producer_mfu"], later["consumer_mfu"], later["step"]) == (0.0, 0.0, 4)  # nothing since


@pytest.mark.parametrize("changes", [{"skipped": True, "loss": float("nan")}, {"anchors": 0, "loss": 0.0}])
def test_a_step_that_taught_nothing_is_counted_and_its_figures_are_not_shown(
    make_job: Any, changes: dict[str, Any]
) -> None:
    """N2: what is not finite does not reach the live view."""
    tally = tally_of(make_job(), KNOWN)
    tally.note(step(1, loss=2.5), 1.0)
    tally.note(step(2, accuracy=[0.9], **changes), 2.0)
    found = tally.state(conductor(), 3.0)
    assert (found["step"], found["loss"], found["accuracy"]) == (2, 2.5, [0.5])
    assert found["skipped"] == changes.get("skipped", False)


def test_the_time_left_is_that_of_the_hours_if_they_end_first(make_job: Any) -> None:
    tally = tally_of(make_job(), KNOWN)
    assert tally.state(conductor(left_s=90.0), 0.0)["eta_s"] == 90.0
    tally.note(step(4), 1.0)
    assert tally.state(conductor(left_s=90.0), 2.0)["eta_s"] == 12.0
    assert tally.state(conductor(left_s=7.0), 3.0)["eta_s"] == 7.0


def test_utilisation_that_is_not_known_is_none(make_job: Any) -> None:
    tally = tally_of(make_job(), Costs())
    tally.state(conductor(), 0.0)
    tally.note(step(1), 1.0)
    found = tally.state(conductor(500), 1.0)
    assert (found["producer_mfu"], found["consumer_mfu"]) == (None, None)
    assert found["consumer_tokens_per_s"] == 100.0


def test_restarts_and_failed_checkpoints_are_counted(make_job: Any) -> None:
    tally = tally_of(make_job(), Costs())
    for what in ("gone", "stall", "checkpoint failed", "gone", "checkpoint"):
        tally.event({"what": what, "text": ""})
    found = tally.state(conductor(), 1.0)
    assert (found["restarts"], found["checkpoints_failed"]) == (2, 1)


def test_producers_of_other_hosts_count_for_as_long_as_they_are_there(make_job: Any) -> None:
    tally = tally_of(make_job(), KNOWN)
    tally.note(m.Want(kind="model"), 0.0)
    assert tally.state(conductor(busy_s=5.0), 10.0)["producer_wait_share"] == 0.5  # of the one that is local
    found = tally.state(conductor(1000, 20.0, ("remote-a", "remote-b")), 20.0)
    assert found["producer_wait_share"] == 0.5  # 10 s alone, 10 s of three
    assert found["remote_producers"] == ["remote-a", "remote-b"]
    assert found["producer_mfu"] is None  # nobody knows what their devices could do
    assert tally.state(conductor(1000, 20.0), 30.0)["producer_wait_share"] == pytest.approx(0.6)
