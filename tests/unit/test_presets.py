"""Presets reproduce the three published configurations key by key (reference section 2.2)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from consumer.presets import PRESETS
from consumer.shape import resolve_shape
from consumer.zlab import config_json, tensor_shapes
from launch.config import load_config
from protocol.errors import RequestError

QWEN_27B: dict[str, Any] = {
    "num_layers": 64,
    "hidden_size": 5120,
    "vocab_size": 248320,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 17408,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "bos_token_id": None,
    "eos_token_id": 248044,
    "pad_token_id": 248044,
}
QWEN_8B = QWEN_27B | {
    "num_layers": 36,
    "hidden_size": 4096,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
    "pad_token_id": 151643,
}
COMMON = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_window_layers": 5,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SIZES_27B = {
    "num_target_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "vocab_size": 248320,
    "eos_token_id": 248044,
    "pad_token_id": 248044,
    "bos_token_id": None,
}
ALL_FULL = {"layer_types": ["full_attention"] * 5, "sliding_window": None, "use_sliding_window": False}
PUBLISHED: dict[str, tuple[dict[str, Any], list[int], int, dict[str, Any]]] = {
    "qwen3.6-27b": (
        QWEN_27B,
        [1, 16, 31, 46, 61],
        248070,
        SIZES_27B
        | {
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
            "sliding_window": 2048,
            "use_sliding_window": True,
        },
    ),
    "qwen3.5-27b": (QWEN_27B, [1, 16, 31, 46, 61], 248070, SIZES_27B | ALL_FULL),
    "qwen3-8b": (
        QWEN_8B,
        [1, 9, 17, 25, 33],
        151669,
        ALL_FULL
        | {
            "num_target_layers": 36,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "rope_theta": 1e6,
            "max_position_embeddings": 40960,
            "vocab_size": 151936,
        },
    ),
}


def config_with(folder: Path, drafter: str) -> Any:
    path = folder / "c.toml"
    path.write_text(f'[target]\nmodel = "embedded"\n[data]\ntrain = [{{ path = "t.jsonl" }}]\n[drafter]\n{drafter}\n')
    return load_config(path, ()).drafter


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_the_published_configuration(name: str, tmp_path: Path) -> None:
    target, taps, mask, keys = PUBLISHED[name]
    shape = resolve_shape(config_with(tmp_path, f'preset = "{name}"'), target, range(target["vocab_size"]))
    found = config_json(shape)
    assert found["dflash_config"]["target_layer_ids"] == taps
    assert found["dflash_config"]["mask_token_id"] == mask
    expected = COMMON | keys
    assert {key: found[key] for key in expected} == expected


def test_the_drafter_of_qwen3_6_27b_has_58_tensors_and_1_73_billion_parameters(tmp_path: Path) -> None:
    shape = resolve_shape(config_with(tmp_path, 'preset = "qwen3.6-27b"'), QWEN_27B, range(248320))
    sizes = tensor_shapes(shape)
    assert (len(sizes), sum(map(math.prod, sizes.values()))) == (58, 1_730_213_120)


def test_keys_beside_a_preset_have_the_last_word(tmp_path: Path) -> None:
    found = config_with(tmp_path, 'preset = "qwen3-8b"\nblock_size = 8\nmask_token = "auto"')
    assert (found.block_size, found.mask_token, found.taps) == (8, "auto", (1, 9, 17, 25, 33))


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"drafter\.preset"):
        config_with(tmp_path, 'preset = "qwen3"')
