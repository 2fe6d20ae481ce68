"""The progress line: everything that is known, and nothing that is not."""

from __future__ import annotations

from typing import Any

from launch.progress import progress_line

RING = {"free": 1, "reserved": 0, "leased": 2, "ready": 3, "delivered": 1, "spilling": 0, "lost": 0}
STATE: dict[str, Any] = {
    "step": 12,
    "steps": 340,
    "loss": 2.34567,
    "accuracy": [0.512, 0.3, 0.2, 0.1, 0.05],
    "acceptance": 2.345,
    "producer_tokens_per_s": 1234.56,
    "consumer_tokens_per_s": 987.6,
    "producer_wait_share": 0.251,
    "consumer_wait_share": 0.034,
    "ring": RING,
    "ring_slots": 7,
    "cache": None,
    "quarantined": 0,
    "skipped": 0,
    "restarts": 0,
    "checkpoints_failed": 0,
    "eta_s": 185.0,
    "producer_mfu": None,
    "consumer_mfu": None,
    "blocks_produced": 26,
    "blocks_trained": 24,
    "waiting": None,
}


def test_a_running_state() -> None:
    assert progress_line(STATE) == (
        "step 12/340 | loss 2.346 | accuracy 0.51 0.30 0.20 0.10 | acceptance 2.35 | "
        "produced 26 blocks, 1235 tok/s | trained 24 blocks, 988 tok/s | ring 4 ready + 2 filling of 7 | "
        "waits: producer 25% consumer 3% | left 3 min 05 s"
    )


def test_a_run_that_fills_a_cache_says_how_far_that_is() -> None:
    cache = {"samples": 64, "held": 40, "kept": 20, "passed_over": 0, "damaged": 0, "full": False}
    cache |= {"replayed_tokens": 12345}
    assert "| cache 40 of 64 samples held, 12,345 tokens read, 20 samples kept | left" in progress_line(
        STATE | {"cache": cache}
    )
    troubled = cache | {"passed_over": 3, "damaged": 2, "full": True}
    assert "20 samples kept, nothing more is, 3 passed over, 2 damaged |" in progress_line(STATE | {"cache": troubled})


def test_before_the_first_step() -> None:
    early = STATE | {"step": 0, "loss": None, "accuracy": [], "acceptance": None, "eta_s": None}
    line = progress_line(early)
    assert line.startswith("step 0/340 | produced 26 blocks, 1235 tok/s")
    assert line.endswith("left: not known yet")
    assert "loss" not in line
    assert "acceptance" not in line


def test_trouble_is_said_only_when_there_is_some() -> None:
    line = progress_line(STATE | {"restarts": 2, "quarantined": 5})
    assert "| restarts 2 | quarantined 5 | left" in line
    assert "quarantined" not in progress_line(STATE)
    assert "restarts" not in progress_line(STATE)


def test_utilisation_is_shown_where_it_is_known() -> None:
    line = progress_line(STATE | {"producer_mfu": 0.616, "consumer_mfu": 0.704})
    assert "1235 tok/s (MFU 62%) | trained 24 blocks, 988 tok/s (MFU 70%) |" in line
    assert "MFU" not in progress_line(STATE)


def test_who_is_waited_for() -> None:
    line = progress_line(STATE | {"waiting": "consumer-1 to verify step 3 block 1, delivered 9 s ago"})
    assert "| waiting for consumer-1 to verify step 3 block 1, delivered 9 s ago | left" in line


def test_it_is_one_line_whatever_the_numbers() -> None:
    assert "\n" not in progress_line(STATE | {"loss": float("nan"), "eta_s": 0.0})
