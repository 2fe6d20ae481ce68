"""Steps are a pure function of dataset, seed, epoch and batch tokens; blocks fit their bounds and cost alike."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RequestError
from protocol.packing import DRAFT_TOKEN_COST, BlockSpec, Item, cut
from protocol.plan import Plan, PlanParams

PARAMS = PlanParams(
    seed=7,
    epochs=2,
    batch_tokens=20,
    anchors=3,
    block_size=4,
    microbatch_tokens=10,
    microbatch_draft_tokens=24,
    consumers=2,
)
LENGTHS = np.array([3, 9, 4, 7, 2, 8, 5, 6, 1, 10])
ELIGIBLE = np.array([1, 8, 2, 5, 0, 7, 3, 4, 0, 9])


def plan(lengths: Any = LENGTHS, eligible: Any = ELIGIBLE, fingerprint: str = "tiny", **changes: Any) -> Plan:
    return Plan(np.asarray(lengths), np.asarray(eligible), msgspec.structs.replace(PARAMS, **changes), fingerprint)


def steps(one: Plan) -> list[tuple[int, ...]]:
    return [one.samples(step) for step in range(one.total_steps)]


def test_a_tiny_plan_is_what_it_always_was() -> None:
    one = plan()
    assert steps(one) == [
        (8, 6, 7),
        (1, 9),
        (0, 3, 4, 2),
        (5,),
        (4, 7, 1),
        (2, 6, 0),
        (9, 8, 3),
        (5,),
    ]
    assert one.blocks(2) == [
        BlockSpec(step=2, index=0, rank=0, micro_step=0, samples=(3, 4), tokens=9, draft_tokens=12),
        BlockSpec(step=2, index=1, rank=1, micro_step=0, samples=(2, 0), tokens=7, draft_tokens=12),
    ]
    assert one.blocks(3)[1] == BlockSpec(3, 1, 1, 0, (), 0, 0)
    assert one.hash == "14a988b0fc6c06a7d37813ca8fa3b4e4"
    assert one.step_hash == "cfe80fdf51a5785856f904ebf4d5049f"


@pytest.mark.parametrize(
    "changes",
    [
        {"consumers": 5},
        {"anchors": 1},
        {"block_size": 2},
        {"microbatch_tokens": 100},
        {"microbatch_draft_tokens": 12},
        {"eligible": ELIGIBLE * 0},
    ],
)
def test_steps_do_not_depend_on_how_they_are_cut(changes: dict[str, Any]) -> None:
    """R2: other trainer counts train on the same samples in the same steps."""
    other = plan(**changes)
    assert steps(other) == steps(plan())
    assert other.step_hash == plan().step_hash
    assert other.hash != plan().hash


@pytest.mark.parametrize(
    "changes", [{"seed": 8}, {"batch_tokens": 21}, {"fingerprint": "other"}, {"lengths": LENGTHS[::-1]}]
)
def test_both_hashes_follow_what_defines_steps(changes: dict[str, Any]) -> None:
    other = plan(**changes)
    assert other.step_hash != plan().step_hash
    assert other.hash != plan().hash


def test_a_longer_run_has_the_same_hashes() -> None:
    assert (plan(epochs=9, max_steps=3).hash, plan(epochs=9).step_hash) == (plan().hash, plan().step_hash)


def test_epochs_differ_and_each_has_every_sample_once() -> None:
    """R2."""
    one = plan(epochs=4)
    epochs: dict[int, list[int]] = {}
    for step, samples in enumerate(steps(one)):
        epochs.setdefault(one.locate(step)[0], []).extend(samples)
    assert [sorted(order) for order in epochs.values()] == [list(range(10))] * 4
    assert len({tuple(order) for order in epochs.values()}) == 4


def test_steps_are_found_in_any_order_though_few_epochs_are_kept() -> None:
    forward = plan(epochs=6)
    backward = plan(epochs=6)
    expected = steps(forward)
    assert [backward.samples(step) for step in reversed(range(backward.total_steps))] == expected[::-1]


def test_max_steps_ends_the_plan_and_cuts_no_epoch_beyond() -> None:
    one = plan(epochs=10**9, max_steps=6)
    assert one.total_steps == 6
    assert steps(one) == steps(plan())[:6]
    with pytest.raises(IndexError, match="no step 6"):
        one.blocks(6)
    assert plan(max_steps=100).total_steps == plan().total_steps
    with pytest.raises(IndexError):
        plan().locate(-1)


def test_an_epoch_end_may_be_short_and_a_long_sample_has_its_own_step() -> None:
    one = plan([7] * 7, [1] * 7, batch_tokens=14, epochs=1)
    assert [len(samples) for samples in steps(one)] == [2, 2, 2, 1]
    assert [len(samples) for samples in steps(plan([9, 9, 9], [1, 1, 1], batch_tokens=8, epochs=1))] == [1, 1, 1]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 101])
def test_few_samples_on_two_ranks(count: int) -> None:
    one = plan([5] * count, [2] * count, epochs=1, batch_tokens=60)
    seen: list[int] = []
    for step in range(one.total_steps):
        blocks = one.blocks(step)
        assert len(blocks) == 2 * one.micro_steps(step)
        assert [(b.rank, b.micro_step, b.index) for b in blocks] == [(j % 2, j // 2, j) for j in range(len(blocks))]
        seen += [sample for block in blocks for sample in block.samples]
    assert sorted(seen) == list(range(count))


def test_more_ranks_than_samples_gives_empty_blocks_at_the_end() -> None:
    blocks = plan([5, 6], [2, 2], consumers=5, epochs=1).blocks(0)
    assert [len(block.samples) for block in blocks] == [1, 1, 0, 0, 0]
    assert blocks[4] == BlockSpec(0, 4, 4, 0, (), 0, 0)


def test_samples_lie_longest_first_then_by_id() -> None:
    one = plan([2, 4, 4, 3], [0] * 4, microbatch_tokens=20, consumers=1, epochs=1)
    assert one.blocks(0)[0].samples == (1, 2, 3, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"microbatch_tokens": 9}, ["sample 9", "10 tokens", "train.microbatch_tokens = 9", "data.max_length"]),
        ({"microbatch_draft_tokens": 11}, ["12 draft tokens", "train.microbatch_draft_tokens = 11", "train.anchors"]),
        ({"lengths": [], "eligible": []}, ["no sample", "data.train"]),
        ({"lengths": [1, 0], "eligible": [0, 0]}, ["sample 1 has 0 tokens"]),
        ({"eligible": [1]}, ["10 lengths", "1 anchor counts"]),
        ({"epochs": 0}, ["train.epochs is 0"]),
        ({"max_steps": 0}, ["train.max_steps is 0"]),
        ({"consumers": 0}, ["consumers is 0"]),
        ({"batch_tokens": -1}, ["train.batch_tokens is -1"]),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as refusal:
        plan(**changes)
    assert all(word in str(refusal.value) for word in words)


SIZES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 5), st.integers(60, 200), st.integers(40, 200))
def test_blocks_partition_a_step_inside_both_bounds(
    sizes: list[tuple[int, int]], consumers: int, max_tokens: int, max_draft_tokens: int
) -> None:
    items = [Item(sample, *size) for sample, size in enumerate(sizes)]
    blocks = cut(0, items, consumers, max_tokens, max_draft_tokens)
    assert len(blocks) % consumers == 0
    assert sorted(sample for block in blocks for sample in block.samples) == list(range(len(sizes)))
    for block in blocks:
        assert block.tokens == sum(sizes[sample][0] for sample in block.samples) <= max_tokens
        assert block.draft_tokens == sum(sizes[sample][1] for sample in block.samples) <= max_draft_tokens
    assert blocks == cut(0, items[::-1], consumers, max_tokens, max_draft_tokens)


@given(SIZES, st.integers(1, 5))
def test_blocks_cost_alike_where_the_bounds_leave_room(sizes: list[tuple[int, int]], consumers: int) -> None:
    """The bound of longest processing time first: no two blocks differ by more than the dearest sample."""
    items = [Item(sample, *size) for sample, size in enumerate(sizes)]
    blocks = cut(0, items, consumers, 10**6, 10**6)
    costs = [block.tokens + DRAFT_TOKEN_COST * block.draft_tokens for block in blocks]
    assert len(blocks) == consumers
    assert max(costs) - min(costs) <= max(item.cost for item in items)


def test_ranks_cost_alike_over_micro_steps() -> None:
    items = [Item(sample, 10 * (sample + 1), 0) for sample in range(8)]
    blocks = cut(0, items, 2, 80, 1)
    costs = [sum(block.tokens for block in blocks if block.rank == rank) for rank in range(2)]
    assert len(blocks) > 4
    assert abs(costs[0] - costs[1]) <= 10


@given(SIZES, st.integers(1, 300))
def test_a_step_is_full_unless_its_epoch_ends(sizes: list[tuple[int, int]], batch_tokens: int) -> None:
    lengths, eligible = zip(*sizes, strict=True)
    bounds: dict[str, Any] = {"microbatch_tokens": 60, "microbatch_draft_tokens": 160, "anchors": 40}
    one = plan(lengths, eligible, batch_tokens=batch_tokens, **bounds)
    for step in range(one.total_steps):
        tokens = sum(lengths[sample] for sample in one.samples(step))
        assert tokens <= batch_tokens or len(one.samples(step)) == 1
        if step + 1 < one.total_steps and one.locate(step + 1)[1] > 0:
            assert tokens + lengths[one.samples(step + 1)[0]] > batch_tokens
