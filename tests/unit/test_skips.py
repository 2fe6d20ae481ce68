"""Steps that are not finite: named with their samples, and the end of a run above a share of them."""

from __future__ import annotations

import pytest

from consumer.skips import WINDOW_STEPS, Skips, skipped_row
from protocol.errors import FinalError


def note_all(skips: Skips, steps: list[bool]) -> int:
    """How many steps it takes in before it ends the run."""
    for count, skipped in enumerate(steps):
        try:
            skips.note(skipped)
        except FinalError:
            return count + 1
    return 0


def test_one_early_skip_does_not_end_a_run() -> None:
    assert note_all(Skips(0.05), [True] + [False] * 500) == 0


def test_more_than_the_share_of_the_newest_steps_does() -> None:
    assert note_all(Skips(0.05), [False] * 1000 + [True] * 9) == 1006
    assert note_all(Skips(0.05), [True] * 9) == 6


def test_skips_far_apart_do_not_add_up() -> None:
    assert note_all(Skips(0.05), ([True] * 5 + [False] * WINDOW_STEPS) * 10) == 0


def test_a_limit_of_nothing_ends_at_the_first() -> None:
    assert note_all(Skips(0.0), [False, False, True]) == 3
    assert note_all(Skips(0.0), [False] * 300) == 0
    assert note_all(Skips(1.0), [True] * 300) == 0


def test_the_reason_names_the_key_and_the_numbers() -> None:
    with pytest.raises(FinalError, match=r"1 of the newest 100 steps .* train\.skip_limit = 0\."):
        Skips(0.0).note(True)


def test_a_skipped_step_names_its_samples() -> None:
    row = skipped_row(31, float("nan"), float("inf"), (7, 3))
    assert row["sample_ids"] == [7, 3]
    assert row["text"] == "step 31 changed no weight: loss nan, gradient norm inf; samples 7, 3"
    assert skipped_row(1, 0.0, 0.0, tuple(range(20)))["text"].endswith("samples 0, 1, 2, 3, 4, 5, 6, 7, ...")
