"""A drafter that starts from the target's last layers: what is written, what is read, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from consumer.config import DrafterConfig
from consumer.drafter import Drafter, initialise
from consumer.shape import resolve_shape
from consumer.target_init import copy_target_layers
from producer.config import TargetConfig
from producer.drafter_init import init_fingerprint, plain_norm_weight, write_drafter_init
from producer.target import Target, load_target
from producer.target_io import is_current
from protocol.errors import RequestError

FP32 = TargetConfig(dtype="float32")
SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def saved(config: Any, folder: Path) -> Target:
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter))
    model.save_pretrained(folder)
    return load_target(folder, FP32, "cpu")


def config_of(kind: str, **changes: Any) -> Any:
    return getattr(transformers, kind)(**{**SIZES, **changes})


def drafter_for(target: Target, layers: int = 2) -> Drafter:
    config = DrafterConfig(layers=layers, taps=(0, 2), init="target")
    drafter = Drafter(resolve_shape(config, target.facts, [390]))
    initialise(drafter, 7)
    return drafter


@pytest.mark.parametrize(("kind", "has_head_norms"), [("LlamaConfig", False), ("Qwen3Config", True)])
def test_layers_are_the_target_s_last_bit_for_bit(tmp_path: Path, kind: str, has_head_norms: bool) -> None:
    target = saved(config_of(kind), tmp_path / "m")
    path = tmp_path / "drafter_init.safetensors"
    write_drafter_init(path, target, 2, "w")
    drafter = drafter_for(target)
    before = {name: value.clone() for name, value in drafter.named_parameters()}
    copy_target_layers(drafter, path)
    theirs = dict(target.model.model.named_parameters())
    for name, value in drafter.named_parameters():
        if name == "norm.weight":
            assert torch.equal(value, before[name])
        if not name.startswith("layers."):
            continue
        _, place, rest = name.split(".", 2)
        if rest.startswith(("self_attn.q_norm", "self_attn.k_norm")) and not has_head_norms:
            assert torch.equal(value, torch.ones(8))
        else:
            assert torch.equal(value, theirs[f"layers.{int(place) + 2}.{rest}"]), name
            assert not torch.equal(value, before[name])
    # The context starts as the states that the first copied layer itself would read: tap 0, normed as there.
    states = torch.randn(5, 64)
    context = drafter.hidden_norm(drafter.fc(states))
    assert torch.allclose(context, target.model.model.layers[2].input_layernorm(states[:, :32]), atol=1e-6)
    assert [entry.name for entry in tmp_path.iterdir() if "part" in entry.name] == []
    assert is_current(path, init_fingerprint("w", 2))
    assert not is_current(path, init_fingerprint("w", 3))
    assert not is_current(path, init_fingerprint("v", 2))


def test_a_norm_that_adds_one_becomes_a_plain_weight(tmp_path: Path) -> None:
    target = saved(config_of("GemmaConfig"), tmp_path / "m")
    write_drafter_init(tmp_path / "i.safetensors", target, 1, "w")
    stored = load_file(tmp_path / "i.safetensors")
    layer = target.model.model.layers[3]
    assert torch.equal(stored["layers.0.input_layernorm.weight"], 1.0 + layer.input_layernorm.weight)
    # The drafter's norm then does what the target's does.
    drafter = drafter_for(target, 1)
    copy_target_layers(drafter, tmp_path / "i.safetensors")
    x = torch.randn(3, 32)
    ours: Any = drafter.layers[0]
    torch.testing.assert_close(ours.input_layernorm(x), layer.input_layernorm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_keep_their_bits(dtype: torch.dtype) -> None:
    norm: Any = transformers.models.llama.modeling_llama.LlamaRMSNorm(8).to(dtype)
    norm.weight.data.copy_(torch.tensor([-3.0, 0.0, 0.01, 0.5, 1.0, 2.0, 30.0, 0.3]))
    assert torch.equal(plain_norm_weight(norm, "here"), norm.weight)


def test_a_norm_that_subtracts_the_mean_is_refused() -> None:
    with pytest.raises(RequestError, match="here is a LayerNorm, which is no RMS norm"):
        plain_norm_weight(torch.nn.LayerNorm(8), "here")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            lambda: config_of("Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
            r"layer 2 of m lacks mlp\.gate_proj\.weight.*it has .*mlp\.experts",
        ),
        (
            lambda: config_of(
                "Qwen3_5TextConfig",
                layer_types=["full_attention", "full_attention", "full_attention", "linear_attention"],
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
            ),
            r"layer 2 of m: self_attn\.q_proj\.weight is \[64, 32\], not \[32, 32\]",
        ),
        (
            lambda: config_of(
                "Qwen3_5TextConfig",
                layer_types=["full_attention", "full_attention", "linear_attention", "full_attention"],
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
            ),
            r"layer 2 of m lacks self_attn\.q_proj\.weight.*it has .*linear_attn\.",
        ),
        (lambda: config_of("Gemma3TextConfig"), r"layer 2 of m also has pre_feedforward_layernorm\.weight"),
    ],
    ids=["moe", "gated-attention", "linear-attention", "sandwich-norms"],
)
def test_other_layers_are_refused_and_named(tmp_path: Path, config: Callable[[], Any], said: str) -> None:
    target = saved(config(), tmp_path / "m")
    with pytest.raises(RequestError, match=said):
        write_drafter_init(tmp_path / "i.safetensors", target, 2, "w")
    assert not (tmp_path / "i.safetensors").exists()


def test_biases_are_left_out_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    write_drafter_init(tmp_path / "i.safetensors", saved(config_of("Qwen2Config"), tmp_path / "m"), 1, "w", said.append)
    assert "self_attn.q_proj.bias" in said[0]
    assert not any(name.endswith("bias") for name in load_file(tmp_path / "i.safetensors"))


@pytest.mark.parametrize("damage", ["absent", "cut", "one less", "other size"])
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, damage: str) -> None:
    target = saved(config_of("LlamaConfig"), tmp_path / "m")
    path = tmp_path / "drafter_init.safetensors"
    write_drafter_init(path, target, 2, "w")
    weights = load_file(path)
    if damage == "absent":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:500])
    else:
        lost = weights.pop("layers.1.mlp.up_proj.weight")
        save_file(weights if damage == "one less" else weights | {"layers.1.mlp.up_proj.weight": lost[:8]}, path)
    with pytest.raises(RequestError, match=r"drafter_init\.safetensors"):
        copy_target_layers(drafter_for(target), path)
