"""The weights of a target are counted as they are loaded: the parts of other modalities only where they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from producer.config import TargetConfig
from producer.locate import weight_size
from producer.target import load_target
from producer.towers import left_out


def loaded_bytes(folder: Path) -> int:
    model = load_target(folder, TargetConfig(dtype="float32"), "cpu").model
    return sum(parameter.nbytes for parameter in model.parameters())


def counted_bytes(folder: Path) -> int:
    return weight_size(folder, left_out(folder))[1]


def test_a_text_model_alone_is_counted_without_its_towers(make_folder: Callable[..., Path]) -> None:
    folder = make_folder("qwen3_5_multimodal")
    tensors = load_file(folder / "model.safetensors")
    assert any(".visual." in name for name in tensors)
    # What predicts several tokens at once is stored beside the model and not loaded either.
    save_file({**tensors, "mtp.fc.weight": torch.zeros(32, 64)}, folder / "model.safetensors", {"format": "pt"})
    assert counted_bytes(folder) == loaded_bytes(folder) < weight_size(folder)[1]


def test_a_whole_multimodal_model_is_counted_whole(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder("qwen3_5_multimodal")
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for known in (
        {**names, "qwen3_5": "Qwen3_5ForConditionalGeneration"},
        {name: value for name, value in names.items() if name != "qwen3_5"},
    ):
        monkeypatch.setattr(modeling_auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", known)
        assert counted_bytes(folder) == weight_size(folder)[1]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no causal LM of this configuration")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    assert loaded_bytes(folder) == weight_size(folder)[1]


def test_code_of_the_checkpoint_s_own_may_load_anything(make_folder: Callable[..., Path]) -> None:
    folder = make_folder("qwen3_5_multimodal")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "own.Model"}}))
    assert counted_bytes(folder) == weight_size(folder)[1]


def test_a_plain_target_has_none(make_folder: Callable[..., Path]) -> None:
    folder = make_folder("qwen3")
    assert counted_bytes(folder) == weight_size(folder)[1] == loaded_bytes(folder)
