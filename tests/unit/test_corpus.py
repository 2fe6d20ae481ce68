"""Counted, told and estimated corpora, and what follows from their lengths alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import corpus
from launch.bill import about_steps, bill_of
from launch.corpus import Drawn, counted, estimated
from protocol.dataset import write_dataset
from protocol.errors import RequestError
from protocol.plan import Plan, PlanParams

rows = st.lists(st.lists(st.integers(2, 3000), max_size=3).map(tuple), min_size=1, max_size=60)


def drawn(lengths: tuple[int, ...]) -> Drawn:
    return Drawn(lengths, tuple(length // 2 for length in lengths))


@given(rows, st.integers(1, 600))
def test_a_sample_of_all_rows_is_exact(lengths: list[tuple[int, ...]], anchors: int) -> None:
    flat = [length for row in lengths for length in row]
    if not flat:
        with pytest.raises(RequestError, match=f"none of {len(lengths)} rows"):
            estimated([drawn(row) for row in lengths], len(lengths), anchors)
        return
    found = estimated([drawn(row) for row in lengths], len(lengths), anchors)
    assert (found.samples, found.tokens) == (len(flat), sum(flat))
    assert found.samples_interval == (len(flat), len(flat))
    assert found.tokens_interval == (sum(flat), sum(flat))
    assert found.eligible == sum(length // 2 for length in flat)
    assert found.anchors == sum(min(length // 2, anchors) for length in flat)


def test_nineteen_intervals_of_twenty_hold_the_truth() -> None:
    random = np.random.default_rng(0)
    lengths = np.sort(random.lognormal(5, 1, 5000).astype(int) + 2)  # sorted: the first rows would say a tenth
    held = 0
    for _ in range(200):
        chosen = random.choice(lengths, 300, replace=False)
        found = estimated([drawn((int(length),)) for length in chosen], len(lengths), 512)
        assert found.tokens_interval is not None
        held += found.tokens_interval[0] <= lengths.sum() <= found.tokens_interval[1]
    assert 180 <= held <= 199


@given(rows.filter(any), st.integers(1, 100_000))
def test_what_was_drawn_is_there(lengths: list[tuple[int, ...]], more: int) -> None:
    found = estimated([drawn(row) for row in lengths], len(lengths) + more, 512)
    assert found.tokens_interval is not None
    low, high = found.tokens_interval
    assert sum(map(sum, lengths)) <= low <= high
    assert found.tokens <= high


def test_a_prepared_dataset_is_counted(tmp_path: Path) -> None:
    masks = [np.ones(length, np.uint8) for length in (5, 9, 2)]
    dataset = write_dataset(tmp_path / "d", [(mask.astype(np.int32), mask) for mask in masks], {"fingerprint": "f"})
    found = counted(dataset, anchors=4)
    assert (found.samples, found.tokens, found.eligible, found.anchors) == (3, 16, 13, 9)
    assert found.mean_square == pytest.approx((25 + 81 + 4) / 3)
    assert bill_of(found, 10, 2, 16, 1, None, 7).anchor_coverage == pytest.approx(9 / 13)


def test_bytes_are_those_of_the_tokens() -> None:
    """The bill that an often quoted estimate got wrong sixteenfold."""
    found = corpus.given(913_786, 335)
    bill = bill_of(found, 5 * 5120, 2, 16_384, 1, None, None)
    assert bill.bytes_per_token == 51_200
    assert bill.full_dump_bytes == bill.bytes_per_epoch == 913_786 * 335 * 51_200
    assert bill.full_dump_bytes == pytest.approx(15.7e12, rel=0.005)
    assert bill.bytes_per_sample == pytest.approx(17.15e6, rel=0.0005)
    assert bill.anchor_coverage is None


@pytest.mark.parametrize(("samples", "mean"), [(0, 10.0), (5, 1.0), (5, float("nan")), (5, float("inf"))])
def test_told_lengths_must_be_lengths(samples: int, mean: float) -> None:
    with pytest.raises(RequestError, match="--samples"):
        corpus.given(samples, mean)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(200, 2000), st.integers(8, 40))
def test_estimated_steps_are_near_those_of_a_plan(seed: int, samples: int, per_step: int) -> None:
    lengths = np.random.default_rng(seed).integers(2, 300, samples)
    batch = 300 * per_step // 2
    params = PlanParams(
        seed=0,
        epochs=3,
        batch_tokens=batch,
        anchors=1,
        block_size=2,
        microbatch_tokens=batch,
        microbatch_draft_tokens=batch,
        consumers=1,
    )
    plan = Plan(lengths, np.ones(samples, np.int64), params, "f")
    square = float((lengths.astype(float) ** 2).mean())
    known = corpus.Corpus(basis="prepared", samples=samples, tokens=int(lengths.sum()), mean_square=square)
    about = about_steps(known, batch, 3, None)
    assert about == pytest.approx(plan.total_steps, rel=0.1, abs=6)
    assert about_steps(known, batch, 3, 2) == min(2, about)


def test_a_batch_smaller_than_a_sample_takes_one_each() -> None:
    assert about_steps(corpus.given(100, 50), 10, 2, None) == 200
