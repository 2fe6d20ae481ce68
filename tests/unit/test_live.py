"""The live view: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from launch import live

STATE = {
    "step": 120,
    "steps": 480,
    "loss": 5.4321,
    "accuracy": [0.4, 0.2],
    "acceptance": 1.552,
    "acceptance_per_position": [0.38, 0.1],
    "producer_tokens_per_s": 1234.5,
    "consumer_tokens_per_s": 640.0,
    "producer_wait_share": 0.26,
    "consumer_wait_share": 0.0,
    "ring": {"free": 1, "reserved": 1, "leased": 2, "ready": 3, "delivered": 1, "spilling": 0, "lost": 0},
    "ring_slots": 8,
    "bytes_streamed": 1_381_487_646,
    "quarantined": 0,
    "restarts": 2,
    "checkpoints_failed": 0,
    "numerics_changed": 0,
    "eta_s": 245.0,
}


def rendered(state) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(live.view(state))
    return console.file.getvalue()


def test_the_table_shows_both_sides_the_ring_and_the_learning():
    text = rendered(STATE)
    for part in (
        "120 of 480, 4 min 05 s left",
        "1,234 tokens/s, waiting 26%",
        "640 tokens/s, waiting 0%",
        "[####++..] 4 ready, 2 being filled, 8 slots",
        "5.432",
        "0.40 0.20",
        "1.552",
        "0.38 0.10",
        "1.381 GB",
        "2 restarts",
    ):
        assert part in text, part
    assert "quarantined" not in text


def test_nothing_is_claimed_before_it_is_known():
    text = rendered(STATE | {"loss": None, "accuracy": [], "acceptance": None, "eta_s": None})
    assert "not known yet" in text
    assert "loss" not in text
    assert "acceptance" not in text


def test_elsewhere_than_on_a_terminal_lines_come_at_intervals(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with live.Screen(Console(file=out, width=40, soft_wrap=True, highlight=False)) as screen:
        for _ in range(25):
            now[0] += 1
            screen.show(STATE)
        screen.say("a [bold] line, as it is")
    lines = out.getvalue().splitlines()
    assert len(lines) == 3  # two of progress, unbroken, and what was said
    assert all(line.startswith("step 120/480 | loss 5.432") for line in lines[:2])
    assert lines[2] == "a [bold] line, as it is"


def test_on_a_terminal_the_table_is_redrawn_and_lines_stay():
    out = io.StringIO()
    with live.Screen(Console(file=out, width=80, force_terminal=True)) as screen:
        screen.show(STATE)
        screen.say("producer-0 is gone")
        screen.show(STATE | {"step": 121})
    text = out.getvalue()
    assert "producer-0 is gone" in text
    assert "121 of 480" in text


def test_a_reader_that_went_away_does_not_end_the_run():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    for console in (Console(file=Closed(), force_terminal=True), Console(file=Closed())):
        with live.Screen(console) as screen:
            screen.say("nobody hears this")
            screen.show(STATE)
            screen.say("nor this")
