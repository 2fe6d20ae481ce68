"""The speculators format, both ways: the offset of layer ids, nested keys, borrowed tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from consumer.export import export, load_trained
from consumer.shape import DrafterShape
from consumer.speculators import shape_from_speculators, speculators_json
from consumer.state import capture_weights
from consumer.target_ends import TargetEnds
from launch.cli import main
from protocol.errors import RequestError

EMBEDDING, HEAD = (torch.randn(40, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
TARGET = {"num_layers": 6, "eos_token_id": 0, "pad_token_id": None, "bos_token_id": None, "input_embedding_scale": 1.0}
ENDS = TargetEnds(EMBEDDING, HEAD, TARGET, "f")
FACTS = {"target": "some/model", "target_from": "some/model"}
# As a training run of that project leaves it: a Qwen3 layer configuration nested, ids one higher, both vocabularies.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 4],
    "block_size": 8,
    "draft_vocab_size": 40,
    "mask_token_id": 39,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 2048,
        "max_position_embeddings": 4096,
        "vocab_size": 40,
    },
}


def changed(inner: dict[str, Any] | None = None, **outer: Any) -> dict[str, Any]:
    return PUBLISHED | outer | {"transformer_layer_config": PUBLISHED["transformer_layer_config"] | (inner or {})}


def test_a_published_configuration_is_read() -> None:
    shape = shape_from_speculators(PUBLISHED, TARGET)
    assert shape.target_layer_ids == (1, 3)  # theirs count what goes into a layer, ours what comes out of one
    assert (shape.block_size, shape.mask_token_id, shape.num_layers, shape.rope_theta) == (8, 39, 2, 1e6)
    assert (shape.layer_types, shape.sliding_window, shape.is_causal) == (("sliding_attention",) * 2, 2048, None)
    assert shape.num_target_layers == 6
    assert shape_from_speculators(changed(sliding_window_non_causal=True), TARGET).is_causal is False
    old_rope = changed({"rope_parameters": None, "rope_theta": 5e5})
    assert shape_from_speculators(old_rope, TARGET).rope_theta == 5e5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (changed(speculators_model_type="eagle3"), "eagle3"),
        (changed(draft_vocab_size=32), "draft_vocab_size is 32 and the target's is 40"),
        (changed(sample_from_anchor=True), "sample_from_anchor"),
        (changed(projector_type="domino"), "projector_type"),
        (changed({"attention_bias": True}), "attention_bias"),
        (changed({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}), "rope_parameters"),
        (changed(mask_token_id=None), "mask_token_id is missing"),
        (changed(aux_hidden_state_layer_ids=[0, 2]), "taps"),
        (changed(aux_hidden_state_layer_ids=[2, 7]), "taps"),
    ],
)
def test_what_this_drafter_does_not_have_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        shape_from_speculators(config, TARGET)


@pytest.mark.parametrize("changes", [{}, {"is_causal": False}, {"layer_types": ("full_attention",) * 2}])
def test_there_and_back_is_the_same_drafter(
    make_drafter: Callable[..., Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    window = (
        {} if "sliding_attention" in changes.get("layer_types", ("sliding_attention",)) else {"sliding_window": None}
    )
    drafter = make_drafter(3, "bfloat16", **changes, **window)
    weights = capture_weights(drafter)
    export(weights, drafter.shape, tmp_path / "out", FACTS, "speculators")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 4]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == drafter.shape.block_size - 1
    assert "speculators' format" in (tmp_path / "out/README.md").read_text()
    back, shape = load_trained(tmp_path / "out", ENDS)
    assert shape == drafter.shape
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    assert back.keys() == weights.keys()
    export(weights, drafter.shape, tmp_path / "out", FACTS, "speculators")  # over an earlier one


def test_copies_of_the_target_s_ends_are_dropped_and_others_refused(
    make_drafter: Callable[..., Any], tmp_path: Path
) -> None:
    drafter = make_drafter(3, "bfloat16")
    weights = capture_weights(drafter)
    export(weights, drafter.shape, tmp_path / "out", FACTS, "speculators")
    path = tmp_path / "out/model.safetensors"
    copies = {"embed_tokens.weight": EMBEDDING.bfloat16(), "lm_head.weight": HEAD.clone(), "d2t": torch.zeros(40)}
    save_file(load_file(path) | copies, path)
    assert load_trained(tmp_path / "out", ENDS)[0].keys() == weights.keys()
    with pytest.raises(RequestError, match=r"lm_head\.weight is not the target's own"):
        load_trained(tmp_path / "out", TargetEnds(EMBEDDING, HEAD + 1, TARGET, "f"))
    tensors = load_file(path)
    del tensors["fc.weight"]
    save_file(tensors | {"stranger": torch.zeros(1)}, path)
    with pytest.raises(RequestError, match=r"missing fc\.weight; unexpected stranger"):
        load_trained(tmp_path / "out", ENDS)


def test_a_tap_of_the_last_layer_cannot_be_said(make_drafter: Callable[..., Any]) -> None:
    shape: DrafterShape = msgspec.structs.replace(make_drafter().shape, target_layer_ids=(1, 5))
    with pytest.raises(RequestError, match="taps the target's last layer"):
        speculators_json(shape, "m")
    with pytest.raises(RequestError, match="causal"):
        speculators_json(msgspec.structs.replace(make_drafter().shape, is_causal=True), "m")


def test_another_format_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["export", "latest", "out", "--format", "gguf"])
    assert "--format gguf: write zlab or speculators" in capsys.readouterr().err
