"""A drafter whose layers start as the target's last ones, out of `drafter_init.safetensors`.

The file comes from a producer-side step, under z-lab's tensor names; trainers never load the target.

The copied layers expect keys and values made from the target's own hidden states, so the context starts as just that:
`fc` passes the tap nearest below the first copied layer through, and `hidden_norm` is that layer's input norm.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from consumer.drafter import Drafter
from consumer.zlab import check_tensors, tensor_shapes
from protocol.errors import RequestError

# What a drafter has and a target may lack keeps the value that `initialise` gave it.
_KEPT = (".q_norm.weight", ".k_norm.weight")


def copy_target_layers(drafter: Drafter, path: Path) -> None:
    """Copies the tensors of `path` over an initialised drafter's layers, and sets `fc` and `hidden_norm` to match them;
    the final norm stays as it is.

    Raises RequestError naming the file when it cannot be read or holds other tensors than this drafter's layers.
    """
    try:
        weights = load_file(path)
        with safe_open(path, framework="pt") as file:
            first_layer = int((file.metadata() or {})["first_layer"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RequestError(f"{path}: not a readable drafter_init file: {error}") from error
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    expected = tensor_shapes(drafter.shape)
    kept = {name for name in expected if not name.startswith("layers.") or name.endswith(_KEPT)} - found.keys()
    check_tensors(str(path), found | {name: expected[name] for name in kept}, drafter.shape)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name in weights and name.startswith("layers."):
                parameter.copy_(weights[name])
        _pass_through(drafter, first_layer)


def _pass_through(drafter: Drafter, first_layer: int) -> None:
    taps, hidden = drafter.shape.target_layer_ids, drafter.shape.hidden_size
    below = [place for place, tap in enumerate(taps) if tap < first_layer] or range(len(taps))
    nearest = max(below, key=lambda place: taps[place])
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, nearest * hidden : (nearest + 1) * hidden] = torch.eye(hidden)
    drafter.hidden_norm.weight.copy_(drafter.get_parameter("layers.0.input_layernorm.weight"))
