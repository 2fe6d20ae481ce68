"""The throughput of GPU splits from measured parts: exact where the answer is known, monotone, only what fits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.measurements import Measurements, ProducerRate, Reduction, Room, TrainerRate, Work
from launch.pipeline import makespan_s
from launch.split_model import Model, Split
from launch.splits import lacking, modes, ranked, table
from launch.tune_table import advice
from protocol.errors import RequestError
from protocol.packing import BlockSpec

TOKENS, DRAFTS = 100, 50
COST = TOKENS + 12 * DRAFTS


def measured(p: float, c: float, *, samples: int = 840, steps: int = 4, **changes: Any) -> Measurements:
    """`p` and `c` tokens/s of one producer and one rank; each step has equal samples, one a block."""
    work = {
        "steps": [[(TOKENS, DRAFTS)] * samples] * steps,
        "tokens_per_epoch": 1_000_000,
        "epochs": 3,
        "microbatch_tokens": TOKENS,
        "microbatch_draft_tokens": 1000,
        "anchors": 8,
        "bytes_per_token": 1000,
        **changes.pop("work", {}),
    }
    room = {"gpu_bytes": 10**12, "host_bytes": 10**12, "slot_bytes": 10**6, **changes.pop("room", {})}
    return Measurements(
        producers=changes.pop("producers", [ProducerRate(tokens_per_s=p)]),
        trainer=changes.pop("trainer", TrainerRate(cost_s=TOKENS / c / COST)),
        reductions=changes.pop("reductions", []),
        work=Work(**work),
        room=Room(**room),
    )


@pytest.mark.parametrize(
    ("p", "c", "gpus", "expected", "rate"),
    [
        (1000, 2000, 3, (2, 1), 2000),
        (2000, 1000, 3, (1, 2), 2000),
        (1000, 600, 8, (3, 5), 3000),
        (600, 1000, 8, (5, 3), 3000),
        (1000, 1000, 8, (4, 4), 4000),
        (1000, 600, 64, (24, 40), 24000),
    ],
)
def test_the_known_best_split_is_found_and_its_rate_is_exact(
    p: float, c: float, gpus: int, expected: tuple[int, int], rate: float
) -> None:
    row = ranked(table(measured(p, c), gpus))[0]
    assert (row.split.producers, row.split.consumers, row.split.shared) == (*expected, False)
    assert row.tokens_per_s == pytest.approx(rate, rel=1e-9)
    assert row.low < rate < row.high


def test_both_roles_on_one_gpu_take_turns() -> None:
    (row,) = table(measured(3000, 6000), 1)
    assert row.split == Split(1, 1, 1, shared=True)
    assert (row.tokens_per_s, row.limited_by) == (pytest.approx(2000), "sharing")


def test_sharing_several_gpus_is_offered_and_not_recommended() -> None:
    """Producing is ten times slower: with two GPUs 1:1 wastes most of one, which turns on both would not."""
    found = measured(100, 1000)
    own, shared = ranked(table(found, 2))
    assert (own.split, shared.split.shared) == (Split(1, 1), True)
    assert shared.tokens_per_s == pytest.approx(2 / (1 / 100 + 1 / 1000))
    assert any("both roles on every GPU" in line for line in advice(found, [own, shared]))


def test_each_row_says_what_limits_it() -> None:
    rows = {row.split: row.limited_by for row in table(measured(1000, 600), 8) if not row.split.shared}
    assert rows[Split(2, 6)] == "producers"
    assert rows[Split(5, 3)] == "trainers"


def test_steps_of_few_samples_do_not_divide() -> None:
    """Five equal samples on four ranks: one rank has two of them, so that 1.25 blocks of four take two blocks' time."""
    found = measured(10**6, 1000, samples=5)
    assert Model(found).trainers(4) == pytest.approx(2500)
    assert Model(found).trainers(5) == pytest.approx(5000)
    assert Model(found).trainers(8) == pytest.approx(5000)
    assert {row.split.consumers: row.limited_by for row in table(found, 9)}[8] == "ranks"


def test_a_fixed_time_a_step_is_what_more_ranks_do_not_shorten() -> None:
    trainer = TrainerRate(cost_s=0.0, block_s=1.0, finish_s=2.0)
    found = measured(10**6, 1, samples=4, trainer=trainer)
    assert Model(found).trainers(1) == pytest.approx(4 * TOKENS / 6)
    assert Model(found).trainers(4) == pytest.approx(4 * TOKENS / 3)


def test_the_reduction_counts_and_follows_from_what_one_of_two_ranks_took() -> None:
    reductions = [Reduction(ranks=2, seconds=1.0)]
    found = measured(10**6, 1000, samples=8, reductions=reductions)
    model = Model(found)
    assert (model.reduction_s(1), model.reduction_s(2), model.reduction_s(4)) == (0.0, 1.0, pytest.approx(1.5))
    assert model.trainers(4) == pytest.approx(800 / (0.2 + 1.5))
    assert {row.split.consumers: row.limited_by for row in table(found, 5)}[4] == "all-reduce"


def test_a_link_caps_both_sides() -> None:
    row = next(row for row in table(measured(1000, 600, room={"link_bytes_per_s": 200_000.0}), 2) if row.split[1] == 1)
    assert (row.tokens_per_s, row.limited_by) == (200, "link")


def test_a_short_ring_costs_throughput_where_blocks_are_uneven_and_a_longer_one_does_not() -> None:
    """Steps of a heavy and a light block in turn: with few slots the producers rest while a heavy one trains."""
    heavy, light = [(1000, 2000)] * 12, [(1000, 1)] * 12
    bounds = {"microbatch_tokens": 1000, "microbatch_draft_tokens": 2000, "steps": [heavy, light] * 8}
    trainer = TrainerRate(cost_s=1 / (26_006 / 2))  # 0.5 blocks/s, one block/s produced: balanced on average
    rates = []
    for slots in (3, 60):
        room = {"ring_bytes": slots * 1_052_672, "slot_bytes": 1_048_576 - 4096}
        rows = table(measured(1000, 1, trainer=trainer, work=bounds, room=room), 2)
        rates.append(next(row for row in rows if not row.split.shared))
    assert rates[0].limited_by == "ring"
    assert rates[0].tokens_per_s < 0.9 * rates[1].tokens_per_s
    assert rates[1].limited_by != "ring"


def test_two_gpus_a_producer_leave_whole_producers_only() -> None:
    producers = [ProducerRate(tensor_parallel=2, tokens_per_s=1000)]
    rows = table(measured(0, 1000, producers=producers), 5)
    assert [(row.split.producers, row.split.consumers) for row in rows] == [(2, 3), (4, 1)]
    with pytest.raises(RequestError, match="takes 2 GPUs"):
        table(measured(0, 1000, producers=producers), 2)


def test_what_does_not_fit_is_last_and_says_why() -> None:
    trainer = TrainerRate(cost_s=1e-3, need_bytes=8 * 10**9)
    producers = [ProducerRate(tokens_per_s=1000, need_bytes=8 * 10**9)]
    found = measured(0, 1, trainer=trainer, producers=producers, room={"gpu_bytes": 12 * 10**9})
    rows = table(found, 2)
    shared = next(row for row in rows if row.split.shared)
    assert (shared.tokens_per_s, shared.limited_by) == (0, "memory")
    assert "12 GB are free" in shared.lacking
    assert [row.split.shared for row in ranked(rows)] == [False]


def test_epochs_from_the_cache_let_the_producers_gpus_train() -> None:
    """Producing is ten times slower than training. Streaming wants 7:1; where the same ranks read the later epochs,
    5:3 is better; where all eight train then, it is 7:1 again."""
    disk = {"disk_bytes": 10**10, "disk_write_bytes_per_s": 1e9, "disk_read_bytes_per_s": 1e9}
    found = measured(100, 1000, room=disk)
    by_name = {mode.name: mode for mode in modes(found, 8, table(found, 8))}
    assert by_name["off"].hours == pytest.approx(3e6 / 700 / 3600)
    assert by_name["spill"].hours == pytest.approx((1e6 / 500 + 2e6 / 3000) / 3600)
    assert by_name["spill, then only"].hours == pytest.approx((1e6 / 700 + 2e6 / 8000) / 3600)
    assert [mode.split for mode in by_name.values()] == [Split(7, 1), Split(5, 3), Split(7, 1)]


def test_a_cache_that_the_disk_does_not_hold_is_no_mode() -> None:
    disk = {"disk_bytes": 10**6, "disk_write_bytes_per_s": 1e9, "disk_read_bytes_per_s": 1e9}
    found = measured(100, 1000, room=disk)
    off, spill, then = modes(found, 8, table(found, 8))
    assert off.hours is not None
    assert (spill.hours, then.hours) == (None, None)
    assert "1 GB" in spill.lacking


def test_without_a_ring_a_pipeline_takes_the_slower_sides_time() -> None:
    steps = [[BlockSpec(step, 0, 0, 0, (step,), 10, 1)] for step in range(50)]
    # Two slots filled before, the others in turn with training.
    assert makespan_s(steps, 1, lambda _: 1.0, 0.5, 1, lambda _: 0.1, 4) == pytest.approx(75)
    assert makespan_s(steps, 1, lambda _: 0.1, 0.0, 1, lambda _: 1.0, 2) == pytest.approx(48.1)


sizes = st.tuples(st.integers(1, 60), st.integers(0, 40))
any_measurements = st.builds(
    lambda steps, p, c, block_s, finish_s, reduce_s, needs, gpu, host, spread: Measurements(
        producers=[ProducerRate(tokens_per_s=p, need_bytes=needs[0], spread=spread)],
        trainer=TrainerRate(cost_s=c, block_s=block_s, finish_s=finish_s, need_bytes=needs[1]),
        reductions=[Reduction(ranks=2, seconds=reduce_s)],
        work=Work(
            steps=steps,
            tokens_per_epoch=10_000,
            epochs=2,
            microbatch_tokens=60,
            microbatch_draft_tokens=40,
            anchors=4,
            bytes_per_token=100,
        ),
        room=Room(gpu_bytes=gpu, host_bytes=host, slot_bytes=6000),
    ),
    st.lists(st.lists(sizes, min_size=1, max_size=6), min_size=1, max_size=4),
    st.floats(1, 1e4),
    st.floats(1e-6, 1e-2),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
    st.tuples(st.integers(0, 3 * 10**9), st.integers(0, 3 * 10**9)),
    st.integers(10**9, 8 * 10**9),
    st.integers(10**4, 10**6),
    st.floats(0, 0.99),
)


@given(any_measurements, st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_nothing_is_recommended_that_does_not_fit(found: Measurements, gpus: int) -> None:
    rows = table(found, gpus)
    for row in ranked(rows):
        assert not lacking(found, row.split)
        assert 0 < row.low <= row.tokens_per_s <= row.high
        assert row.tokens_per_s <= min(row.producers_alone, row.trainers_alone) * (1 + 1e-9)
        assert row.slots >= row.split.producers + row.split.consumers + 1
    assert all(row.tokens_per_s == 0 for row in rows if row.lacking)


@given(any_measurements, st.integers(2, 6), st.floats(1, 5), st.floats(1, 5))
@settings(max_examples=60, deadline=None)
def test_what_gets_faster_makes_no_split_slower(found: Measurements, gpus: int, produce: float, train: float) -> None:
    replace = msgspec.structs.replace
    trainer = found.trainer
    faster = replace(
        found,
        producers=[replace(rate, tokens_per_s=rate.tokens_per_s * produce) for rate in found.producers],
        trainer=replace(trainer, cost_s=trainer.cost_s / train, block_s=trainer.block_s / train),
    )
    for before, after in zip(table(found, gpus), table(faster, gpus), strict=True):
        assert after.tokens_per_s >= before.tokens_per_s * (1 - 1e-9)


@given(any_measurements, st.integers(2, 6), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_a_larger_ring_makes_no_split_slower(found: Measurements, gpus: int, more: int) -> None:
    model = Model(found)
    for producers in range(1, gpus):
        split = Split(producers, gpus - producers)
        longer = model.rates(split, gpus + 1 + more).tokens_per_s
        assert longer >= model.rates(split, gpus + 1).tokens_per_s * (1 - 1e-9)
