"""How large blocks may be: what "auto" allows, which of it memory holds, and what a checkpoint was trained with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.config import TrainConfig
from launch.config import load_config
from launch.machine import Gpu
from launch.partition import MOST_STEPS, MOST_TOKENS, Partition, choose, kept, partitions
from launch.placement import Placement
from launch.sizes import sizes
from launch.start import Outline, outline, plan_params
from protocol.cursor import cursor_at, encode_cursor
from protocol.errors import RequestError
from protocol.plan import Plan
from protocol.units import show_bytes

GIB = 1 << 30
SHARED, OWN, CPU = (
    Placement(("cuda:0",), ("cuda:0",)),
    Placement(("cuda:0",), ("cuda:1",)),
    Placement(("cpu",) * 2, ("cpu",)),
)
AUTO = "auto"
trains = st.builds(
    TrainConfig,
    batch_tokens=st.integers(1, 1 << 20),
    anchors=st.integers(1, 4096),
    microbatch_tokens=st.just("auto") | st.integers(1 << 18, 1 << 48),
    microbatch_draft_tokens=st.just("auto") | st.integers(1, 1 << 48),
)
longests = st.integers(2, 1 << 18)
block_sizes = st.integers(2, 32)


def weighs(partition: Partition) -> int:
    return 5 * partition.tokens + 3 * partition.draft_tokens


def within(limit: int) -> Callable[[Partition], str]:
    return lambda partition: f"{weighs(partition)} > {limit}" if weighs(partition) > limit else ""


@given(trains, longests, block_sizes)
def test_the_list_begins_with_the_defaults_shrinks_and_ends_with_one_longest_sample(
    train: TrainConfig, longest: int, block_size: int
) -> None:
    found = partitions(train, longest, block_size)
    tokens = max(longest, min(train.batch_tokens, MOST_TOKENS))
    tokens = tokens if train.microbatch_tokens == "auto" else train.microbatch_tokens
    draft = max(train.anchors * block_size, 2 * tokens)
    assert found[0].tokens == tokens
    assert found[0].draft_tokens == (
        draft if train.microbatch_draft_tokens == "auto" else train.microbatch_draft_tokens
    )
    for larger, smaller in itertools.pairwise(found):
        assert smaller != larger
        assert smaller.tokens <= larger.tokens
        assert smaller.draft_tokens <= larger.draft_tokens
    if train.microbatch_tokens == "auto":
        assert found[-1].tokens == longest
    if train.microbatch_draft_tokens == "auto":
        assert found[-1].draft_tokens == min(train.anchors, longest - 1) * block_size
    assert len(found) <= MOST_STEPS + 3


@given(trains, longests, block_sizes, st.integers(0, 1 << 52))
def test_it_fits_whenever_one_does_and_nothing_larger_would(
    train: TrainConfig, longest: int, block_size: int, limit: int
) -> None:
    allowed = partitions(train, longest, block_size)
    chosen, said = choose(allowed, None, within(limit))
    fitting = [each for each in allowed if weighs(each) <= limit]
    if len(allowed) == 1:
        assert (chosen, said) == (allowed[0], "")
    elif not fitting:
        assert chosen == allowed[-1]
        assert f"{weighs(chosen)} > {limit}" in said
    else:
        assert chosen == max(fitting, key=weighs)
        assert (said == "") == (chosen == allowed[0])


@given(trains, longests, block_sizes, st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_more_memory_never_makes_smaller_blocks(
    train: TrainConfig, longest: int, block_size: int, limit: int, more: int
) -> None:
    allowed = partitions(train, longest, block_size)
    less, greater = (choose(allowed, None, within(each))[0] for each in (limit, limit + more))
    assert greater.tokens >= less.tokens
    assert greater.draft_tokens >= less.draft_tokens


def test_a_bound_below_one_longest_sample_is_refused() -> None:
    with pytest.raises(RequestError, match=r"train\.microbatch_tokens = 99 .*data\.max_length = 100"):
        partitions(TrainConfig(microbatch_tokens=99), 100, 16)


def test_numbers_of_the_configuration_stand_whatever_memory_there_is() -> None:
    train = TrainConfig(microbatch_tokens=9999, microbatch_draft_tokens=7)
    assert partitions(train, 100, 16) == [Partition(9999, 7)]
    assert kept(train, Partition(300, 900), Partition(9999, 7)) is None
    assert kept(TrainConfig(microbatch_tokens=300), Partition(300, 900), Partition(300, 7)) == Partition(300, 900)
    assert choose([Partition(9999, 7)], Partition(9999, 7), within(0)) == (Partition(9999, 7), "")


@given(longests, block_sizes, st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_a_checkpoint_s_partition_stays_while_it_fits(longest: int, block_size: int, then: int, now: int) -> None:
    train = TrainConfig()
    allowed = partitions(train, longest, block_size)
    before, _ = choose(allowed, None, within(then))
    earlier = kept(train, before, allowed[-1])
    assert earlier == before
    if weighs(before) > now and before != choose(allowed, None, within(now))[0]:
        with pytest.raises(RequestError, match=r"^train\.microbatch_tokens: .*train\.microbatch_draft_tokens = "):
            choose(allowed, earlier, within(now))
    else:
        assert choose(allowed, earlier, within(now))[0] == before


def test_other_samples_or_anchors_and_older_checkpoints_are_chosen_for_anew() -> None:
    train, smallest = TrainConfig(), Partition(300, 900)
    for recorded in (Partition(299, 5000), Partition(5000, 899), Partition(0, 0)):
        assert kept(train, recorded, smallest) is None


def gpu(free: int) -> Gpu:
    return Gpu("NVIDIA H200", 200 * GIB, free)


def start(
    make_folder: Callable[..., Path],
    tmp_path: Path,
    placement: Placement,
    gpu_bytes: int = 199 * GIB,
    free_bytes: int = 64 * GIB,
    checkpoint: Path | None = None,
    **train: int,
) -> Outline:
    """The outline of a run whose samples have 256 tokens at most."""
    config = tmp_path / "c.toml"
    config.write_text(
        '[target]\nmodel = "target"\n[data]\nmax_length = 256\ntrain = [{path = "x"}]\n'
        "[drafter]\ntaps = [0, 2]\nmlp = 100000\n[train]\nanchors = 128\n"
        + "".join(f"{key} = {value}\n" for key, value in train.items())
    )
    folder = tmp_path / "target"
    folder = folder if folder.exists() else make_folder()
    return outline(load_config(config), folder, placement, [gpu(gpu_bytes)] * 2, free_bytes, checkpoint)


@pytest.mark.parametrize("placement", [SHARED, OWN])
def test_blocks_shrink_until_both_roles_fit_their_devices(
    make_folder: Callable[..., Path], tmp_path: Path, placement: Placement
) -> None:
    whole = start(make_folder, tmp_path, placement)
    assert whole.partition == Partition(4096, 8192)
    roles = 2 if placement is SHARED else 1
    needed = whole.consumer_need.total + (whole.producer_need.total if roles == 2 else 0) + roles * GIB
    assert start(make_folder, tmp_path, placement, needed).partition == whole.partition
    less = start(make_folder, tmp_path, placement, needed - 1)
    assert less.partition == Partition(3840, 7680)
    assert any(f'"auto" means {less.partition}' in note and show_bytes(needed) in note for note in less.notes)
    assert less.consumer_need.total < whole.consumer_need.total
    assert plan_params(load_config(tmp_path / "c.toml"), less).microbatch_tokens == 3840


def test_what_no_partition_fits_is_refused_on_a_shared_gpu_and_said_elsewhere(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    held = start(make_folder, tmp_path, OWN).consumer_need.held
    least = start(make_folder, tmp_path, OWN, held + GIB)
    assert least.partition == Partition(256, 2048)
    assert any("memory may run short" in note and "train.microbatch_tokens = 256" in note for note in least.notes)
    with pytest.raises(RequestError) as refused:
        start(make_folder, tmp_path, SHARED, held + 2 * GIB)
    for part in (show_bytes(least.consumer_need.total), show_bytes(held + 2 * GIB), "data.max_length", "train.anchors"):
        assert part in str(refused.value)


def test_a_cpu_s_blocks_follow_from_free_memory_divided_among_the_processes(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    whole = start(make_folder, tmp_path, CPU)
    assert whole.partition == Partition(4096, 8192)
    needed = 2 * whole.producer_need.total + whole.consumer_need.total + whole.checkpoint_bytes + whole.ring.total_bytes
    assert start(make_folder, tmp_path, CPU, free_bytes=needed).partition == whole.partition
    less = start(make_folder, tmp_path, CPU, free_bytes=needed - 1)
    assert less.partition == Partition(3840, 7680)
    assert any(show_bytes(needed) in note for note in less.notes)


def test_more_memory_of_the_host_is_never_lacking(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    found = start(make_folder, tmp_path, CPU)
    config, replace = load_config(tmp_path / "c.toml"), msgspec.structs.replace
    known = (found.target_dir, found.facts, found.shape, found.dtype)

    @given(st.integers(0, 16 * GIB), st.integers(0, GIB), st.sampled_from([1, 300, 4096]), st.sampled_from([AUTO, GIB]))
    def check(free_bytes: int, more: int, tokens: int, ring: str | int) -> None:
        size = sizes(replace(config, ring=replace(config.ring, bytes=ring)), CPU, [], free_bytes, *known)
        partition = Partition(tokens, 2 * tokens)
        assert size.lacking(partition) or not replace(size, free_bytes=free_bytes + more).lacking(partition)

    check()


def checkpoint_of(found: Outline, tmp_path: Path) -> Path:
    lengths = np.array([256, 200, 64])
    plan = Plan(lengths, lengths // 2, plan_params(load_config(tmp_path / "c.toml"), found), "data")
    (tmp_path / "cursor.json").write_bytes(encode_cursor(cursor_at(plan, 1, {}, 0, 0)))
    return tmp_path


def test_a_resumed_run_keeps_its_partition_when_there_is_more_memory_and_is_refused_when_there_is_less(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    whole = start(make_folder, tmp_path, SHARED)
    needed = whole.consumer_need.total + whole.producer_need.total + 2 * GIB
    less = start(make_folder, tmp_path, SHARED, needed - 1)
    checkpoint = checkpoint_of(less, tmp_path)
    again = start(make_folder, tmp_path, SHARED, checkpoint=checkpoint)
    assert again.partition == less.partition != whole.partition
    assert any("stays what the checkpoint was trained with" in note for note in again.notes)
    with pytest.raises(RequestError) as refused:
        start(make_folder, tmp_path, SHARED, needed // 2, checkpoint=checkpoint)
    for part in (str(less.partition), show_bytes(needed // 2), "set train.microbatch_tokens = "):
        assert part in str(refused.value)
    asked = start(make_folder, tmp_path, SHARED, checkpoint=checkpoint, microbatch_tokens=512)
    assert asked.partition == Partition(512, 128 * 16)


def test_a_checkpoint_that_does_not_record_its_partition_goes_on_with_what_fits(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    whole = start(make_folder, tmp_path, OWN)
    checkpoint = checkpoint_of(whole, tmp_path)
    cursor = json.loads((checkpoint / "cursor.json").read_bytes())
    older = {name: value for name, value in cursor.items() if not name.startswith("microbatch")}
    (checkpoint / "cursor.json").write_text(json.dumps(older))
    assert start(make_folder, tmp_path, OWN, checkpoint=checkpoint).partition == whole.partition
