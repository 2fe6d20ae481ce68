"""The live view: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import itertools

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
    "advice": None,
    "cache": None,
    "ring": {"free": 1, "reserved": 1, "leased": 2, "ready": 3, "delivered": 1, "spilling": 0, "lost": 0},
    "ring_slots": 8,
    "remote_producers": ["remote-far-7-ab"],
    "bytes_streamed": 1_381_487_646,
    "quarantined": 0,
    "skipped": 0,
    "restarts": 2,
    "checkpoints_failed": 0,
    "numerics_changed": 0,
    "eta_s": 245.0,
    "producer_mfu": None,
    "consumer_mfu": 0.714,
    "blocks_produced": 1234,
    "blocks_trained": 1230,
    "waiting": None,
    "stall": None,
}

ADVICE = {"short": "consumers", "best": {"producers": 3}, "text": "the consumers are short by 20%"}


def rendered(state) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(live.view(state))
    return console.file.getvalue()


def test_the_table_shows_both_sides_the_ring_and_the_learning():
    text = rendered(STATE | {"advice": ADVICE})
    for part in (
        "120 of 480, 4 min 05 s left",
        "1,234 tokens/s, waiting 26%, 1,234 blocks produced",
        "640 tokens/s, MFU 71%, waiting 0%, 1,230 blocks trained",
        "[####++..] 4 ready, 2 being filled, 8 slots",
        "the consumers are short by 20%",
        "5.432",
        "0.40 0.20",
        "1.552",
        "0.38 0.10",
        "1.381 GB",
        "2 restarts",
        "remote-far-7-ab",
    ):
        assert part in text, part
    assert "quarantined" not in text
    assert "waiting   " not in text


def test_a_wait_has_a_row():
    text = rendered(STATE | {"waiting": "producer-0 (leased step 12 block 0 31 s ago)"})
    assert "waiting            for producer-0 (leased step 12 block 0 31 s ago)" in text


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
    assert len(lines) == 4  # three of progress, unbroken, the first at once, and what was said
    assert all(line.startswith("step 120/480 | loss 5.432") for line in lines[:3])
    assert lines[3] == "a [bold] line, as it is"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch):
    """(screen, clock, what it has said): `clock[0]` is the time."""
    clock = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with live.Screen(Console(file=out, width=40, soft_wrap=True, highlight=False)) as screen:
        yield screen, clock, lambda: out.getvalue().splitlines()


def test_a_stall_is_said_at_once_and_each_line_once(lines):
    screen, clock, said = lines
    screen.show(STATE)
    for stall in ("no progress for 30 s", "no progress for 30 s", "no progress for 60 s", None, "no progress for 30 s"):
        clock[0] += 0.5
        screen.show(STATE | {"stall": stall})
    assert said()[1:] == ["no progress for 30 s", "no progress for 60 s", "no progress for 30 s"]


def test_what_a_split_would_do_is_said_once_and_again_when_it_changes(lines):
    screen, clock, said = lines
    for advice in (
        None,
        ADVICE,
        ADVICE | {"text": "the consumers are short by 21%"},
        ADVICE | {"best": {"producers": 2}},
    ):
        clock[0] += 1
        screen.show(STATE | {"advice": advice})
    assert said()[1:] == ["split: the consumers are short by 20%"] * 2


def test_whatever_happens_no_30_s_go_by_without_a_line(lines):
    """A set-up that says something after 45 s, then training without a word of its own."""
    screen, clock, said = lines
    times = []
    for second in range(0, 200):
        clock[0] = 100.0 + second
        before = len(said())
        if second == 45:
            screen.say("800 rows: 800 kept")
        if second < 120:
            screen.still("loading the target", 100.0)
        else:
            screen.show(STATE | {"step": 0, "loss": None})
        times += [second] * (len(said()) > before)
    assert times[0] <= 20
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 20
    assert said()[0] == "still at it after 20 s: loading the target"
    assert "still at it after 1 min 05 s: loading the target" in said()


def test_on_a_terminal_the_table_is_redrawn_and_lines_stay():
    out = io.StringIO()
    with live.Screen(Console(file=out, width=80, force_terminal=True)) as screen:
        screen.show(STATE)
        screen.say("producer-0 is gone")
        screen.show(STATE | {"step": 121})
    text = out.getvalue()
    assert "producer-0 is gone" in text
    assert "121 of 480" in text


def test_the_last_word_stands_below_no_table():
    out = io.StringIO()
    with live.Screen(Console(file=out, width=80, force_terminal=True)) as screen:
        screen.show(STATE)
        screen.settle()
        screen.say("mine: done")
    assert out.getvalue().rstrip().endswith("mine: done")
    assert "120 of 480" in out.getvalue()


def test_a_reader_that_went_away_does_not_end_the_run():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    for console in (Console(file=Closed(), force_terminal=True), Console(file=Closed())):
        with live.Screen(console) as screen:
            screen.say("nobody hears this")
            screen.show(STATE)
            screen.say("nor this")
