"""A drafter that starts from trained weights has their shape; a key that says otherwise is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consumer.config import DrafterConfig
from consumer.inherit import FIELDS, inherit, trained_shape
from consumer.shape import DrafterShape, other_arithmetic, resolve_shape
from consumer.zlab import config_json
from protocol.errors import RequestError

TARGET: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 6,
    "vocab_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": [0, 3],
    "pad_token_id": None,
}


@pytest.fixture
def published(make_drafter: Callable[..., Any]) -> DrafterShape:
    """Another shape than `TARGET` would give, in every key."""
    shape: DrafterShape = make_drafter(mask_token_id=37, rms_norm_eps=1e-6).shape
    return shape


@pytest.fixture
def folder(tmp_path: Path, published: DrafterShape) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config_json(published)))
    return tmp_path


def test_everything_is_taken_over_and_said(published: DrafterShape, folder: Path) -> None:
    shape = trained_shape(folder, TARGET)
    assert shape == published
    config, lines = inherit(DrafterConfig(), shape, str(folder))
    assert lines == [
        "drafter.taps = [1, 3], from init_from",
        "drafter.layers = 2, from init_from",
        "drafter.block_size = 4, from init_from",
        "drafter.heads = 2, from init_from",
        "drafter.kv_heads = 1, from init_from",
        "drafter.head_dim = 8, from init_from",
        "drafter.mlp = 24, from init_from",
        "drafter.rope_theta = 10000.0, from init_from",
        "drafter.mask_token = 37, from init_from",
        'drafter.layer_types = ["sliding_attention", "full_attention"], from init_from',
        "drafter.sliding_window = 5, from init_from",
    ]
    resolved = resolve_shape(config, TARGET, range(40), shape)
    assert other_arithmetic(resolved, published) == []
    # What only names ends and limits is the target's.
    assert resolved.eos_token_ids == (0, 3)


def test_arithmetic_without_a_key_is_kept_too(published: DrafterShape, folder: Path) -> None:
    bidirectional = msgspec.structs.replace(published, is_causal=False)
    resolved = resolve_shape(inherit(DrafterConfig(), bidirectional, "x")[0], TARGET, range(40), bidirectional)
    assert (resolved.is_causal, resolved.rms_norm_eps) == (False, 1e-6)


def test_a_drafter_whose_layers_are_all_full_leaves_no_window(published: DrafterShape) -> None:
    full = msgspec.structs.replace(published, layer_types=("full_attention",) * 2, sliding_window=2048)
    config, lines = inherit(DrafterConfig(), full, "x")
    assert (config.layer_types, config.sliding_window) == (None, None)
    assert not any("layer_types" in line or "sliding_window" in line for line in lines)
    inherit(DrafterConfig(layers=2, layer_types=("full_attention",) * 2), full, "x")  # the same, written out


def test_the_same_value_written_out_is_no_conflict(published: DrafterShape) -> None:
    config, lines = inherit(DrafterConfig(mlp=24, taps=(1, 3)), published, "x")
    assert (config.mlp, config.taps) == (24, (1, 3))
    assert not any(line.startswith(("drafter.mlp", "drafter.taps")) for line in lines)


@pytest.mark.parametrize("key", FIELDS)
def test_another_value_is_refused_with_both(published: DrafterShape, key: str) -> None:
    other: dict[str, Any] = {
        "taps": (2, 4),
        "layer_types": ("full_attention", "sliding_attention"),
        "rope_theta": 77.0,
    }
    value = other.get(key, 77)
    theirs = json.dumps(getattr(published, FIELDS[key])).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(RequestError, match=rf"drafter\.{key} is .* the drafter in some/folder has {theirs}: remove"):
        inherit(DrafterConfig(**{key: value}), published, "some/folder")


@pytest.mark.parametrize(("key", "value"), [("num_layers", 4), ("hidden_size", 32), ("vocab_size", 41)])
def test_a_drafter_of_another_target_is_refused_with_both(folder: Path, key: str, value: int) -> None:
    with pytest.raises(RequestError, match=rf"another target: {key} {TARGET[key]} against {value}"):
        trained_shape(folder, TARGET | {key: value})


@pytest.mark.parametrize("content", [None, "no json", "{}", '{"speculators_model_type": "eagle3"}'])
def test_what_is_no_drafter_is_refused_by_its_folder(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RequestError, match=rf"drafter\.init_from: {tmp_path}"):
        trained_shape(tmp_path, TARGET)
