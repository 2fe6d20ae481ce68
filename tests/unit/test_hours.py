"""Hours from a table of cards, and the cards by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumer.config import DrafterConfig
from consumer.shape import DrafterShape, resolve_shape
from launch.cards import card, larger_cards
from launch.corpus import Corpus, given
from launch.flops import peak
from launch.hours import (
    CONSUMER_SHARE,
    HYBRID_SHARE,
    MEASURED_PEAK_SHARE,
    PRODUCER_SHARE,
    by_split,
    forward_flop,
    hours,
)
from launch.machine import Gpu
from producer.locate import read_config, read_target_facts
from protocol.errors import RequestError

FOLDER = Path(__file__).parents[1] / "fixtures" / "qwen3.6-27b"
H200 = card("h200")
NAMES = [name for name, _ in larger_cards(0)]


@pytest.fixture
def shape() -> DrafterShape:
    return resolve_shape(DrafterConfig(), read_target_facts(FOLDER), range(248_320))


@pytest.mark.parametrize("name", NAMES)
def test_every_card_has_a_peak_and_its_memory(name: str) -> None:
    gpu = card(name)
    assert (peak(gpu.name) or 0) > 1e14
    assert gpu.free_bytes == gpu.total_bytes
    named = name.rpartition("-")[2]
    if named.isdecimal():
        assert 0.95 * int(named) < gpu.total_bytes / 1e9 < 1.1 * int(named)


def test_unknown_cards_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(RequestError, match=r"--gpu h100: did you mean h100-80 or h100-nvl-94\? known are .*rtx6000-96"):
        card("h100")


def test_larger_cards_come_in_order() -> None:
    found = larger_cards(card("h100-80").total_bytes)
    sizes = [gpu.total_bytes for _, gpu in found]
    assert sizes == sorted(sizes)
    assert {"a100-80", "h200"} <= {name for name, _ in found}
    assert "h100-80" not in {name for name, _ in found}


def test_a_dense_target_on_an_h200_goes_as_fast_as_measured() -> None:
    """Qwen3-8B on samples of 350 tokens: 42,200 tokens/s (docs/performance.md)."""
    facts = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
    }
    found = forward_flop(facts, {}, 33, 175)
    assert found is not None
    flop, share = found
    assert share == PRODUCER_SHARE
    rate = 989e12 * MEASURED_PEAK_SHARE * share / flop
    assert rate == pytest.approx(42_200, rel=0.12)


def test_a_hybrid_target_on_an_h200_goes_about_as_fast_as_measured() -> None:
    found = forward_flop(read_target_facts(FOLDER), read_config(FOLDER), 61, 175)
    assert found is not None
    assert found[1] == HYBRID_SHARE
    assert 989e12 * MEASURED_PEAK_SHARE * found[1] / found[0] == pytest.approx(9_100, rel=0.2)


def test_experts_are_not_guessed() -> None:
    facts = read_target_facts(FOLDER) | {"model_type": "qwen3_5_moe_text"}
    assert forward_flop(facts, read_config(FOLDER) | {"num_experts": 256}, 61, 175) is None


def test_the_slower_side_decides_and_a_shared_gpu_does_both(shape: DrafterShape) -> None:
    corpus, forward = given(1000, 335), (5e10, 0.8)
    own = hours(corpus, 2, forward, shape, 512, [H200] * 4, [H200] * 4, False)
    assert own is not None
    assert own.total == max(own.producer, own.consumer) > 0
    assert own.producer == pytest.approx(2 * 335_000 * 5e10 / (4 * 989e12 * MEASURED_PEAK_SHARE * 0.8) / 3600)
    shared = hours(corpus, 2, forward, shape, 512, [H200], [H200], True)
    assert shared is not None
    assert shared.total == pytest.approx(shared.producer + shared.consumer)
    assert shared.consumer == pytest.approx(4 * own.consumer)
    half = hours(corpus, 1, forward, shape, 512, [H200] * 4, [H200] * 4, False)
    assert half is not None
    assert half.total == pytest.approx(own.total / 2)


def test_fewer_anchors_train_faster(shape: DrafterShape) -> None:
    few = Corpus(basis="prepared", samples=1000, tokens=335_000, mean_square=335.0**2, eligible=300_000, anchors=64_000)
    sides = ([H200], [H200], False)
    some, all_ = (hours(corpus, 1, (5e10, 0.8), shape, 512, *sides) for corpus in (few, given(1000, 335)))
    assert some is not None
    assert all_ is not None
    assert some.consumer < all_.consumer / 3
    assert CONSUMER_SHARE < PRODUCER_SHARE


def test_an_unknown_card_or_target_gives_no_hours(shape: DrafterShape) -> None:
    unknown = Gpu("Another GPU", 1 << 40, 1 << 40)
    assert hours(given(10, 100), 1, (5e10, 0.8), shape, 512, [H200], [unknown], False) is None
    assert hours(given(10, 100), 1, None, shape, 512, [H200], [H200], False) is None
    assert hours(given(10, 100), 1, (5e10, 0.8), shape, 512, [], [], False) is None


def test_splits_come_quickest_first_and_short_samples_want_more_consumers(shape: DrafterShape) -> None:
    """The same eight GPUs: two of them produce for short chats, four for long thinking data."""
    facts, config = read_target_facts(FOLDER), read_config(FOLDER)
    for mean_tokens, best in ((335, "2:6"), (2500, "4:4")):
        corpus = given(100_000, mean_tokens)
        forward = forward_flop(facts, config, 61, corpus.mean_context)
        found = by_split(corpus, 6, forward, shape, 512, [H200] * 8, 1)
        assert sorted(split for split, _ in found) == [f"{count}:{8 - count}" for count in range(1, 8)]
        assert found[0][0] == best
        totals = [needed.total for _, needed in found]
        assert totals == sorted(totals)
        by_count = dict(found)
        assert by_count["4:4"] == hours(corpus, 6, forward, shape, 512, [H200] * 4, [H200] * 4, False)


def test_producers_of_two_gpus_come_in_pairs(shape: DrafterShape) -> None:
    found = by_split(given(1000, 335), 1, (5e10, 0.8), shape, 512, [H200] * 5, 2)
    assert sorted(split for split, _ in found) == ["2:3", "4:1"]
    assert by_split(given(1000, 335), 1, (5e10, 0.8), shape, 512, [H200], 1) == []
    assert by_split(given(1000, 335), 1, None, shape, 512, [H200] * 4, 1) == []
