"""Model FLOPs: against sums done by hand and against torch's own counter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from launch.flops import costs_of, drafter_flop, peak, target_flop
from launch.machine import Gpu

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
}
DRAFTER: dict[str, Any] = {
    "hidden_size": 4096,
    "target_layer_ids": (1, 9, 17, 25, 33),
    "num_layers": 5,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "block_size": 16,
    "vocab_size": 151936,
    "layer_types": ("full_attention",) * 5,
    "sliding_window": None,
}
H200 = Gpu("NVIDIA H200", 0, 0)


def test_the_target_up_to_its_last_tap() -> None:
    whole = target_flop(QWEN3_8B, 35, 0)
    assert whole == pytest.approx(2 * 6.95e9, rel=1e-3)  # 6.95 B parameters in 36 layers
    assert target_flop(QWEN3_8B, 33, 0) == pytest.approx(whole * 34 / 36)
    assert target_flop(QWEN3_8B, 33, 500) == pytest.approx(whole * 34 / 36 + 4 * 32 * 128 * 500 * 34)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_text", "gpt2", ""])
def test_a_family_that_may_be_something_else_is_unknown(family: str) -> None:
    assert target_flop(QWEN3_8B | {"model_type": family}, 3, 10) is None


def test_the_drafter_s_step_is_the_one_that_was_summed_by_hand() -> None:
    """47 TFLOP for the layers and 19 for the head without slot 0; the rest is fusion, context and attention."""
    total = drafter_flop(DRAFTER, 3072, 512, 1536)
    layers, head = 6 * 5 * 193e6 * 512 * 16, 4 * 4096 * 151936 * 512 * 15
    assert layers == pytest.approx(47.4e12, rel=2e-3)
    assert head == pytest.approx(19.1e12, rel=2e-3)
    assert total == pytest.approx(layers + head + 1.03e12 + 0.77e12 + 3.13e12, rel=2e-3)


def test_torch_counts_the_same(make_drafter: Any) -> None:
    """The products of a forward and backward pass, without attention, whose reference implementation also computes
    what its mask hides."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from consumer.attention import Layout
    from consumer.loss import draft_loss

    drafter = make_drafter(layer_types=("full_attention",) * 2, sliding_window=None)
    shape = drafter.shape
    tokens, anchors = 12, 3
    layout = Layout(np.array([0, tokens]), np.zeros(anchors, np.int64), np.array([0, 0, 0]))
    embedded = torch.randn(anchors, shape.block_size, shape.hidden_size, requires_grad=True)
    positions = torch.arange(shape.block_size).expand(anchors, -1)
    supervised = torch.ones(anchors, shape.block_size, dtype=torch.bool)
    supervised[:, 0] = False
    with FlopCounterMode(display=False) as counter:
        context = drafter.context(torch.randn(tokens, 2 * shape.hidden_size), torch.arange(tokens))
        hidden = drafter(embedded, positions, context, layout)
        labels = torch.zeros(anchors, shape.block_size, dtype=torch.int64)
        (draft_loss(hidden, torch.randn(40, 16), labels, supervised).loss + sum(v.sum() for _, v in context)).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(flop for name, flop in counted.items() if str(name) in ("aten.mm", "aten.addmm"))
    fields = {name: getattr(shape, name) for name in shape.__struct_fields__}
    own_slots = 12 * 2 * 8 * shape.block_size * 2 * anchors * shape.block_size
    assert products == drafter_flop(fields, tokens, anchors, 0.0) - own_slots


def test_sliding_layers_see_no_more_than_their_window() -> None:
    sliding = DRAFTER | {"layer_types": ("sliding_attention",) * 5, "sliding_window": 100}
    saved = drafter_flop(DRAFTER, 3072, 512, 1536) - drafter_flop(sliding, 3072, 512, 1536)
    assert saved == pytest.approx(12 * 4096 * (1536 + 16 - 100) * 5 * 512 * 16)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_a_peak_is_known_or_not_guessed(name: str, tera: float | None) -> None:
    assert peak(name) == (None if tera is None else tera * 1e12)


def test_utilisation_is_of_all_gpus_of_a_side() -> None:
    lengths, anchors = np.array([100, 300]), np.array([10, 30])
    costs = costs_of(DRAFTER, QWEN3_8B, lengths, anchors, [H200, H200], [H200])
    per_token = target_flop(QWEN3_8B, 33, 125.0)  # (100 x 100 + 300 x 300) / 400 / 2
    assert per_token is not None
    assert costs.producer_mfu(50_000) == pytest.approx(50_000 * per_token / (2 * 989e12))
    assert costs.consumer_mfu(500e12) == pytest.approx(500 / 989)
    assert costs.step_flop(400, 40) == drafter_flop(DRAFTER, 400, 40, 125.0)


def test_what_is_not_known_is_not_claimed() -> None:
    lengths = np.array([100])
    costs = costs_of(DRAFTER, QWEN3_8B | {"model_type": "mamba"}, lengths, lengths, [H200], [None])
    assert costs.producer_mfu(1000) is None
    assert costs.consumer_mfu(1e12) is None
    assert costs_of(DRAFTER, QWEN3_8B, lengths, lengths, [H200, None], []).producer_peak is None
