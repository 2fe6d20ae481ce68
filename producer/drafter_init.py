"""Writes `drafter_init.safetensors`: the target's last decoder layers, for a drafter that starts from them.

Tensors carry the names of a drafter checkpoint: `layers.i.self_attn.{q,k,v,o}_proj.weight`, `q_norm` and `k_norm` where
the target has them, `input_layernorm`, `post_attention_layernorm`, `mlp.{gate,up,down}_proj`; i counts from 0, the
first of the copied layers. Linear weights are the target's own, in its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from producer.target import Target
from producer.target_io import save_atomically
from producer.whole import whole
from protocol.errors import RequestError

_FORMAT = 1
_OPTIONAL = ("self_attn.q_norm", "self_attn.k_norm")
# bf16 rounds a norm's output by up to 0.4 %.
_NORM_TOLERANCE = 0.02
_REMEDY = 'this drafter cannot start from it: write drafter.init = "random"'


def init_fingerprint(weights: str, count: int) -> str:
    """Names the content of the file: the target's weights and how many layers of it."""
    return f"{weights}-last{count}-v{_FORMAT}"


def write_drafter_init(
    path: Path, target: Target, count: int, weights: str, say: Callable[[str], None] | None = None
) -> None:
    """Writes the last `count` layers in one rename. Raises RequestError, naming the layer and what it is made of, for
    a target whose layers are not pre-norm attention and a gated MLP of the sizes that its config states."""
    first = len(target.layers) - count
    tensors: dict[str, torch.Tensor] = {}
    biases: set[str] = set()
    for place in range(count):
        layer = target.layers[first + place]
        biases |= {name for name, _ in layer.named_parameters() if name.endswith(".bias")}
        found = _layer_weights(layer, first + place, target)
        tensors |= {f"layers.{place}.{name}": weight for name, weight in found.items()}
    if biases and say is not None:
        say(f"the drafter has no biases, so it starts without the target's {', '.join(sorted(biases))}")
    metadata = {"fingerprint": init_fingerprint(weights, count), "first_layer": str(first)}
    save_atomically(path, tensors, metadata)


def _layer_weights(layer: nn.Module, index: int, target: Target) -> dict[str, torch.Tensor]:
    sizes = _sizes(target)
    named = {name: weight for name, weight in layer.named_parameters() if not name.endswith(".bias")}
    absent = [name for name in sizes if name not in named and name.rpartition(".")[0] not in _OPTIONAL]
    extra = [name for name in named if name not in sizes]
    if absent or extra:
        there = sorted({".".join(name.split(".")[:2]) for name in named})
        lacks = f"lacks {', '.join(absent)}" if absent else f"also has {', '.join(extra)}"
        raise RequestError(f"layer {index} of {target.facts['model']} {lacks} (it has {', '.join(there)}): {_REMEDY}")
    for name, weight in named.items():
        if tuple(weight.shape) != sizes[name]:
            raise RequestError(
                f"layer {index} of {target.facts['model']}: {name} is {list(weight.shape)}, not {list(sizes[name])}: "
                f"{_REMEDY}"
            )
    weights = {}
    for name, weight in named.items():
        module = name.rpartition(".")[0]
        plain = (
            plain_norm_weight(layer.get_submodule(module), f"layer {index}: {module}") if weight.ndim == 1 else weight
        )
        weights[name] = whole(target, plain).detach().cpu().contiguous()
    return weights


def plain_norm_weight(norm: nn.Module, where: str) -> torch.Tensor:
    """The factor `[size]` by which an RMS norm multiplies its normalised input: its weight, or 1 + its weight.

    Which of them is measured on an input of ones, whose normalised form is ones. Raises RequestError led by `where`
    for a norm that does neither (one that subtracts a mean, say).
    """
    weight: torch.Tensor = norm.weight.detach()  # type: ignore[operator]
    with torch.inference_mode():
        output = norm(torch.ones_like(weight)[None])[0].float()
    best, error = weight, float("inf")
    # 1 + weight is kept in fp32: bf16 has too few digits for it.
    for candidate in (weight, 1.0 + weight.float()):
        off = float(((output - candidate.float()).abs() / candidate.float().abs().clamp(min=1.0)).max())
        if off < error:
            best, error = candidate, off
    if error > _NORM_TOLERANCE:
        raise RequestError(f"{where} is a {type(norm).__name__}, which is no RMS norm: {_REMEDY}")
    return best


def _sizes(target: Target) -> dict[str, tuple[int, ...]]:
    """Name -> size of every tensor that a drafter's layer has, at the sizes of this target."""
    facts = target.facts
    hidden, mlp, dim = (int(facts[key]) for key in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = int(facts["num_attention_heads"]) * dim, int(facts["num_key_value_heads"]) * dim
    sizes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    return {f"{name}.weight": size for name, size in sizes.items()}
