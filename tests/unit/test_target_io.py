"""Loading the target and handing its embedding and head on: case E6 of the public failure reports."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from consumer.target_ends import read_target_ends
from producer.config import TargetConfig
from producer.target import Target, load_target, stop_ids
from producer.target_io import embedding_scale, is_current, write_target_io
from protocol.errors import RequestError

FP32 = TargetConfig(dtype="float32")


def stored(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors, json.loads(metadata["config"]), metadata


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {"max_shard_size": "40KB"}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_5_multimodal", {}),
    ],
    ids=["untied_sharded", "untied_single_file", "tied", "nested"],
)
def test_the_drafter_s_head_is_the_model_s_own_bit_for_bit(
    tmp_path: Path, make_folder: Callable[..., Path], make_model: Callable[..., Any], kind: str, options: dict[str, Any]
) -> None:
    """E6: the head that a rank reads, against the one that was saved. The fifth checkpoint, with a tensor of an unknown
    name, is refused below."""
    write_target_io(tmp_path / "io.safetensors", load_target(make_folder(kind, **options), FP32, "cpu"), "f")
    ends = read_target_ends(tmp_path / "io.safetensors", torch.device("cpu"))
    saved = make_model(kind, **{key: value for key, value in options.items() if key != "max_shard_size"})
    assert torch.equal(ends.head, saved.get_output_embeddings().weight)
    assert torch.equal(ends.embedding, saved.get_input_embeddings().weight)
    assert (ends.head.data_ptr() == ends.embedding.data_ptr()) == bool(options.get("tie_word_embeddings"))


@pytest.mark.parametrize(
    "options",
    [{}, {"max_shard_size": "40KB"}, {"tie_word_embeddings": True}],
    ids=["untied", "sharded", "tied"],
)
def test_head_is_the_model_s_own_bit_for_bit(
    tmp_path: Path, make_folder: Callable[..., Path], make_model: Callable[..., Any], options: dict[str, Any]
) -> None:
    target = load_target(make_folder("qwen3", **options), FP32, "cpu")
    write_target_io(tmp_path / "io.safetensors", target, "f1")
    tensors, config, metadata = stored(tmp_path / "io.safetensors")
    tied = bool(options.get("tie_word_embeddings"))
    assert set(tensors) == ({"embed_tokens"} if tied else {"embed_tokens", "lm_head"})
    assert (metadata["tied"], metadata["fingerprint"]) == ("true" if tied else "false", "f1")
    head = tensors["embed_tokens" if tied else "lm_head"]
    hidden = torch.randn(5, 32)
    assert torch.equal(hidden @ head.T, target.model.lm_head(hidden))
    changes = {key: value for key, value in options.items() if key != "max_shard_size"}
    assert torch.equal(tensors["embed_tokens"], make_model("qwen3", **changes).model.embed_tokens.weight)
    assert {key: config[key] for key in ("hidden_size", "num_layers", "vocab_size", "dtype")} == {
        "hidden_size": 32,
        "num_layers": 4,
        "vocab_size": 400,
        "dtype": "float32",
    }
    assert config["input_embedding_scale"] == 1.0
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_nested_text_model(tmp_path: Path, make_folder: Callable[..., Path], make_model: Callable[..., Any]) -> None:
    target = load_target(make_folder("qwen3_5_multimodal"), FP32, "cpu")
    assert len(target.layers) == 4
    write_target_io(tmp_path / "io.safetensors", target, "f")
    tensors, _, _ = stored(tmp_path / "io.safetensors")
    model = make_model("qwen3_5_multimodal")
    assert torch.equal(tensors["embed_tokens"], model.model.language_model.embed_tokens.weight)
    assert torch.equal(tensors["lm_head"], model.lm_head.weight)


@pytest.mark.parametrize("lost", ["lm_head.weight", "model.embed_tokens.weight"])
def test_checkpoint_without_a_tensor_is_refused_not_random(make_folder: Callable[..., Path], lost: str) -> None:
    """E6: an embedding or head under an unknown name is named as the tensor without a place."""
    folder = make_folder()
    tensors = load_file(folder / "model.safetensors")
    tensors["renamed.weight"] = tensors.pop(lost)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match=rf"lacks {lost}.*renamed\.weight"):
        load_target(folder, FP32, "cpu")


def test_unknown_architecture_is_one_line(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "notyet"}))
    with pytest.raises(RequestError, match="transformers cannot load it"):
        load_target(folder, FP32, "cpu")


@pytest.mark.parametrize(("kind", "scale"), [("llama", 1.0), ("gemma3", math.sqrt(32))])
def test_embedding_scale_is_measured(make_folder: Callable[..., Path], kind: str, scale: float) -> None:
    target = load_target(make_folder(kind), FP32, "cpu")
    assert embedding_scale(target, target.embedding.weight) == pytest.approx(scale, rel=1e-6)


def test_embedding_scale_in_bfloat16_is_what_the_model_multiplies_by(make_folder: Callable[..., Path]) -> None:
    target = load_target(make_folder("gemma3"), TargetConfig(dtype="bfloat16"), "cpu")
    assert embedding_scale(target, target.embedding.weight) == float(torch.tensor(math.sqrt(32), dtype=torch.bfloat16))


def test_head_with_bias_is_refused(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    target: Target = load_target(make_folder(), FP32, "cpu")
    target.head.bias = torch.nn.Parameter(torch.zeros(400))  # type: ignore[assignment]
    with pytest.raises(RequestError, match="bias"):
        write_target_io(tmp_path / "io.safetensors", target, "f")


def test_is_current(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    path = tmp_path / "io.safetensors"
    assert not is_current(path, "f")
    write_target_io(path, load_target(make_folder(), FP32, "cpu"), "f")
    assert is_current(path, "f")
    assert not is_current(path, "g")
    path.write_bytes(path.read_bytes()[:100])
    assert not is_current(path, "f")


def test_stop_ids(make_folder: Callable[..., Path], make_tokenizer: Callable[..., Any]) -> None:
    folder = make_folder()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert stop_ids(load_target(folder, FP32, "cpu"), make_tokenizer()) == {3, 7, 9}
