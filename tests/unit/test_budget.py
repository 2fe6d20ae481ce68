"""Byte budgets: what each role needs, how a shared GPU is divided, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.budget import (
    CONTEXT_BYTES,
    Block,
    Budgets,
    Need,
    checkpoint_bytes,
    consumer_need,
    divide,
    occupied,
    producer_need,
)
from launch.config import load_config
from launch.machine import Gpu
from launch.placement import Placement
from launch.start import outline
from protocol.errors import RequestError
from protocol.units import show_bytes

GIB = 1 << 30
SHARED = Placement(("cuda:0",), ("cuda:0",))
OWN = Placement(("cuda:0",), ("cuda:1",))
amounts = st.integers(0, 200 * GIB)
needs = st.builds(Need, st.integers(1, 100 * GIB), st.integers(0, 100 * GIB))


def gpu(free: int, total: int = 200 * GIB) -> Gpu:
    return Gpu("NVIDIA H200", total, free)


@given(amounts, needs, needs)
def test_a_shared_gpu_gives_each_its_need_and_never_more_than_there_is(free: int, producer: Need, consumer: Need):
    room = free - 2 * CONTEXT_BYTES
    if producer.total + consumer.total > room:
        with pytest.raises(RequestError, match=r"^gpus: cuda:0 \(NVIDIA H200\): "):
            divide(SHARED, [gpu(free)], producer, consumer)
        return
    budgets = divide(SHARED, [gpu(free)], producer, consumer)
    assert budgets.producer >= producer.total
    assert budgets.consumer >= consumer.total
    assert budgets.producer + budgets.consumer == room
    # In proportion, to a byte.
    assert abs(budgets.producer * (producer.total + consumer.total) - room * producer.total) <= 400 * GIB


@given(st.lists(amounts, min_size=1, max_size=4), needs, needs)
def test_budgets_hold_on_every_device_that_is_shared(free: list[int], producer: Need, consumer: Need) -> None:
    devices = tuple(f"cuda:{index}" for index in range(len(free)))
    try:
        budgets = divide(Placement(devices, devices), [gpu(each) for each in free], producer, consumer)
    except RequestError:
        assert min(free) < producer.total + consumer.total + 2 * CONTEXT_BYTES
        return
    assert budgets.producer >= producer.total
    assert budgets.consumer >= consumer.total
    assert budgets.producer + budgets.consumer <= min(free) - 2 * CONTEXT_BYTES


@given(amounts, amounts, needs, needs)
def test_a_device_of_its_own_is_not_capped_and_refused_only_when_it_must_fail(
    first: int, second: int, producer: Need, consumer: Need
) -> None:
    fits = producer.held <= first - CONTEXT_BYTES and consumer.held <= second - CONTEXT_BYTES
    try:
        assert divide(OWN, [gpu(first), gpu(second)], producer, consumer) == Budgets(0, 0)
    except RequestError:
        assert not fits
    else:
        assert fits


def test_cpus_have_no_budget() -> None:
    assert divide(Placement(("cpu",), ("cpu",)), [], Need(1 << 60, 0), Need(1 << 60, 0)) == Budgets(0, 0)


def test_the_refusal_names_all_that_one_needs_to_know() -> None:
    with pytest.raises(RequestError) as refused:
        divide(SHARED, [gpu(30 * GIB)], Need(16 * GIB, 2 * GIB), Need(20 * GIB, 5 * GIB))
    text = str(refused.value)
    for part in (
        "cuda:0 (NVIDIA H200)",
        "19.33 GB for the producer",
        "26.84 GB for the consumer",
        "32.21 GB that are free",
        "other processes have 182.5 GB of its 214.7 GB",
        "free it",
        "train.microbatch_draft_tokens",
        "gpus.split",
    ):
        assert part in text


def test_a_gpu_of_our_own_that_is_too_small_is_not_blamed_on_others() -> None:
    with pytest.raises(RequestError) as refused:
        divide(OWN, [gpu(199 * GIB), gpu(23 * GIB, 24 * GIB)], Need(GIB, 0), Need(24 * GIB, 0))
    assert "cuda:1" in str(refused.value)
    assert "25.77 GB for the consumer" in str(refused.value)
    assert "other processes" not in str(refused.value)
    assert "gpus.split" not in str(refused.value)


def test_occupied_gpus_are_named_once() -> None:
    assert occupied(SHARED, [gpu(150 * GIB)]) == [
        "cuda:0 is not all ours: other processes have 53.69 GB of its 214.7 GB"
    ]
    assert occupied(SHARED, [gpu(199 * GIB)]) == []
    assert occupied(Placement(("cpu",), ("cpu",)), []) == []


def test_a_start_learns_its_budgets_and_needs(make_folder, tmp_path: Path) -> None:
    config_path = tmp_path / "c.toml"
    taps = "taps = [0, 2]"
    config_path.write_text(f'[target]\nmodel = "target"\n[data]\ntrain = [{{path = "x"}}]\n[drafter]\n{taps}\n')
    config, folder = load_config(config_path, ()), make_folder()
    found = outline(config, folder, SHARED, [gpu(150 * GIB)], 64 * GIB)
    assert found.budgets.producer >= found.producer_need.total > 0
    assert found.budgets.consumer >= found.consumer_need.total > 0
    assert found.budgets.producer + found.budgets.consumer == 148 * GIB
    occupation, budgets = found.notes
    assert occupation.startswith("cuda:0 is not all ours")
    assert budgets.startswith("GPU memory, shared: ")
    with pytest.raises(RequestError, match="cuda:0"):
        outline(config, folder, SHARED, [gpu(2 * GIB)], 64 * GIB)
    alone = outline(config, folder, OWN, [gpu(199 * GIB)] * 2, 64 * GIB)
    assert (alone.budgets, alone.notes) == (Budgets(0, 0), [])


def test_a_checkpoint_s_host_memory_is_part_of_the_plan(make_folder, make_drafter, tmp_path: Path) -> None:
    drafter = make_drafter()
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    assert checkpoint_bytes(drafter.shape, 4) == 12 * parameters
    assert checkpoint_bytes(drafter.shape, 2) == 14 * parameters
    config_path = tmp_path / "c.toml"
    config_path.write_text(
        '[target]\nmodel = "target"\n[data]\ntrain = [{path = "x"}]\n[drafter]\ntaps = [0, 2]\nmlp = 1000000\n'
    )
    config, folder = load_config(config_path, ()), make_folder()
    cpu = Placement(("cpu",), ("cpu",))
    found = outline(config, folder, cpu, [], 64 * GIB)
    assert found.checkpoint_bytes > 5 * 3 * 32 * 1_000_000 * 12
    tight = found.ring.total_bytes + found.checkpoint_bytes
    ring = load_config(config_path, (f"ring.bytes={found.ring.total_bytes}",))
    assert outline(ring, folder, cpu, [], tight).checkpoint_bytes == found.checkpoint_bytes
    with pytest.raises(RequestError) as refused:
        outline(ring, folder, cpu, [], tight - 1)
    said = str(refused.value)
    sizes = (found.ring.total_bytes, found.checkpoint_bytes, tight - 1, found.ring.total_bytes - 1)
    assert all(show_bytes(size) in said for size in sizes), said
    assert "ring.bytes" in said


# A target so large that no padding hides behind launches.
LARGE = {
    "hidden_size": 10,
    "intermediate_size": 30,
    "head_dim": 1 << 40,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def test_a_producer_holds_its_weights_and_works_on_its_block() -> None:
    need = producer_need(1000, LARGE, taps=5, width=2, block=Block(85, 0, 20))
    assert need.held == 1000
    # 100 padded rows of one layer and of the mask, then 85 rows of features in two buffers and of one tap.
    assert need.workspace == 100 * (10 * 28 + 4 * 30 * 2 + 20 * 3) + 85 * 11 * 10 * 2


def test_a_small_target_s_block_is_padded_more() -> None:
    small = {**LARGE, "head_dim": 8}
    need = producer_need(0, small, taps=5, width=2, block=Block(85, 0, 20))
    # 42 samples of two tokens beside one of 20.
    assert need.workspace == 840 * (10 * 28 + 4 * 30 * 2 + 20 * 3) + 85 * 11 * 10 * 2


def test_a_consumer_holds_16_bytes_a_parameter_and_the_ends_of_the_target(make_drafter) -> None:
    drafter = make_drafter()
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    ends = drafter.shape.vocab_size * drafter.shape.hidden_size
    block = Block(0, 0, 0)
    assert consumer_need(drafter.shape, True, 4, 4, block).held == 16 * parameters + 4 * ends
    assert consumer_need(drafter.shape, False, 4, 4, block).held == 16 * parameters + 8 * ends
    assert consumer_need(drafter.shape, False, 2, 2, block).held == 18 * parameters + 4 * ends
    assert consumer_need(drafter.shape, True, 4, 2, block).held == 18 * parameters + 6 * ends


@pytest.mark.parametrize("block", [Block(1, 1, 1), Block(4096, 8192, 3072), Block(1 << 16, 1 << 17, 4096)])
def test_larger_blocks_need_more(make_drafter, block: Block) -> None:
    shape = make_drafter().shape

    def both(block: Block) -> int:
        producer = producer_need(0, LARGE, taps=2, width=2, block=block)
        return producer.workspace + consumer_need(shape, True, 2, 2, block).workspace

    least = both(block)
    for field in block.__struct_fields__:
        assert both(msgspec.structs.replace(block, **{field: getattr(block, field) + 1})) > least
