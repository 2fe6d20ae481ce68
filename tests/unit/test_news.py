"""What a person is told of snapshots: everything once, whenever snapshots come."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launch.news import News


def snapshot(lines: list[str], kept: int = 10, problem: str | None = None) -> dict[str, Any]:
    return {"news_count": len(lines), "news": lines[-kept:], "checkpoint_problem": problem}


@given(st.lists(st.integers(0, 10), max_size=8))
def test_every_line_comes_once_and_in_order(sizes: list[int]) -> None:
    news, lines, told = News(), [], []
    for size in sizes:
        lines += [f"line {len(lines) + place}" for place in range(size)]
        told += news.of(snapshot(lines))
    assert told == lines


def test_of_more_than_are_kept_the_newest_are_told() -> None:
    news = News()
    assert news.of(snapshot([str(line) for line in range(25)])) == [str(line) for line in range(15, 25)]
    assert news.of(snapshot([str(line) for line in range(25)])) == []


def test_a_checkpoint_that_was_not_saved_is_told_when_its_reason_is_new() -> None:
    news = News()
    (line,) = news.of(snapshot([], problem="the disk is full"))
    assert line.startswith("not saved: the disk is full; the run goes on")
    assert news.of(snapshot([], problem="the disk is full")) == []
