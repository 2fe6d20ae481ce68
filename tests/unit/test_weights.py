"""The size of weights that are not there is that of weights that are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from producer.config import TargetConfig
from producer.locate import locate_target, weight_size
from producer.towers import left_out
from producer.weights import counted_parameters, has_weights
from protocol.errors import RequestError

FOLDER = Path(__file__).parents[1] / "fixtures" / "qwen3.6-27b"


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "qwen3_5_multimodal", "qwen3_moe", "gpt_oss"])
def test_counted_is_what_the_files_hold(make_folder: Callable[..., Path], kind: str) -> None:
    folder = make_folder(kind)
    stored, _ = weight_size(folder, left_out(folder))
    assert has_weights(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert not has_weights(folder)
    assert counted_parameters(folder) == (stored, "shapes")


def test_a_27b_target_is_counted_without_its_weights() -> None:
    parameters, basis = counted_parameters(FOLDER)
    assert (round(parameters / 1e9, 1), basis) == (26.9, "shapes")


def test_a_family_that_nobody_knows_is_estimated_as_dense(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_folder("llama")
    stored, _ = weight_size(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "unheard_of"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    parameters, basis = counted_parameters(tmp_path)
    assert basis == "estimate"
    assert parameters == pytest.approx(stored, rel=0.02)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": 4}))
    assert counted_parameters(tmp_path)[0] > 2 * parameters


def test_a_shard_that_is_missing_is_noticed(make_folder: Callable[..., Path]) -> None:
    folder = make_folder("llama", max_shard_size="50KB")
    assert has_weights(folder)
    next(folder.glob("*.safetensors")).unlink()
    assert not has_weights(folder)


def test_a_quantised_config_is_counted_as_if_it_were_not(make_folder: Callable[..., Path]) -> None:
    folder = make_folder("llama")
    stored, _ = weight_size(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    assert counted_parameters(folder) == (stored, "shapes")


def test_a_folder_with_a_config_alone_is_a_target_for_planning_only() -> None:
    target = TargetConfig(model=str(FOLDER))
    assert locate_target(target, with_weights=False) == FOLDER
    with pytest.raises(RequestError, match="safetensors weights; convert"):
        locate_target(target)
