"""metrics.jsonl: what counts of it, after restarts and torn writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch import metrics
from launch.metrics import append_row, of_kind, read_rows, to_json


def write(path: Path, *rows: tuple[str, dict[str, Any]]) -> None:
    for kind, row in rows:
        append_row(path, kind, row)


def test_a_row_is_one_line_with_kind_and_time(tmp_path: Path) -> None:
    append_row(tmp_path / "m", "event", {"what": "x", "text": "two\nlines \u2028 \u00e9"})
    (line,) = (tmp_path / "m").read_text().splitlines()
    row = json.loads(line)
    assert (row["kind"], row["text"]) == ("event", "two\nlines \u2028 \u00e9")
    assert row["time"] > 1.7e9
    assert read_rows(tmp_path / "m") == [row]


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "m") == []


def test_what_comes_again_supersedes_what_was(tmp_path: Path) -> None:
    write(
        tmp_path / "m",
        ("start", {"step": 0}),
        ("eval", {"step": 0, "of": "first"}),
        *(("step", {"step": step, "of": "first"}) for step in range(1, 6)),
        ("eval", {"step": 5, "of": "first"}),
        ("event", {"what": "gone", "text": ""}),
        ("start", {"step": 3}),
        *(("step", {"step": step, "of": "second"}) for step in range(4, 7)),
    )
    rows = read_rows(tmp_path / "m")
    assert [(row["step"], row["of"]) for row in of_kind(rows, "step")] == [
        (1, "first"),
        (2, "first"),
        (3, "first"),
        (4, "second"),
        (5, "second"),
        (6, "second"),
    ]
    assert [row["step"] for row in of_kind(rows, "eval")] == [0]
    assert len(of_kind(rows, "event")) == 1
    assert len(of_kind(rows, "start")) == 2


def test_a_start_from_zero_supersedes_everything_that_was_trained_or_measured(tmp_path: Path) -> None:
    write(tmp_path / "m", ("eval", {"step": 0}), ("step", {"step": 1}), ("start", {"step": 0}), ("eval", {"step": 0}))
    assert [row["kind"] for row in read_rows(tmp_path / "m")] == ["start", "eval"]


def test_what_is_no_number_becomes_null(tmp_path: Path) -> None:
    row = {"step": 1, "loss": float("nan"), "accuracy": [0.5, float("-inf")], "text": "NaN", "in": {"x": float("inf")}}
    write(tmp_path / "m", ("step", row))
    assert "NaN," not in (tmp_path / "m").read_text()
    (read,) = read_rows(tmp_path / "m")
    assert read | {"time": 0} == {
        "kind": "step",
        "time": 0,
        "step": 1,
        "loss": None,
        "accuracy": [0.5, None],
        "text": "NaN",
        "in": {"x": None},
    }
    assert to_json({"loss": float("nan")}) == '{"loss": null}'


@pytest.mark.parametrize("left", [1, 5, -1])
def test_a_torn_last_line_is_left_out(tmp_path: Path, left: int) -> None:
    write(tmp_path / "m", ("step", {"step": 1}), ("step", {"step": 2}))
    whole = (tmp_path / "m").read_bytes()
    cut = whole.index(b"\n") + 1
    (tmp_path / "m").write_bytes(whole[: cut + left] if left > 0 else whole[: left - 1])
    assert [row["step"] for row in read_rows(tmp_path / "m")] == [1]


def test_the_row_after_a_torn_line_counts(tmp_path: Path) -> None:
    write(tmp_path / "m", ("step", {"step": 1}), ("step", {"step": 2}))
    (tmp_path / "m").write_bytes((tmp_path / "m").read_bytes()[:-9])
    write(tmp_path / "m", ("start", {"step": 0}), ("step", {"step": 1}))
    assert [row["kind"] for row in read_rows(tmp_path / "m")] == ["start", "step"]


def test_a_full_disk_keeps_rows_waiting_and_writes_them_in_order_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, path = metrics.Journal(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    journal.write("step", {"step": 1})
    append, full = metrics.append_row, [True]

    def refuse(*row: object) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        append(*row)  # type: ignore[arg-type]

    monkeypatch.setattr(metrics, "append_row", refuse)
    journal.write("step", {"step": 2})
    journal.write("step", {"step": 3})
    assert [row["step"] for row in read_rows(path)] == [1]
    full[0] = False
    journal.write("step", {"step": 4})
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4]


def test_what_is_no_row_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'5\n[]\n{"step": 1}\n\xff\xfe\n{"kind": "step", "step": 1}\n')
    assert read_rows(path) == [{"kind": "step", "step": 1}]
