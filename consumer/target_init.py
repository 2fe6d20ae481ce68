"""A drafter whose layers start as the target's last ones, out of `drafter_init.safetensors`.

The file comes from a producer-side step, under z-lab's tensor names; trainers never load the target.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from consumer.drafter import Drafter
from consumer.zlab import check_tensors, tensor_shapes
from protocol.errors import RequestError

# What a drafter has and a target may lack keeps the value that `initialise` gave it.
_KEPT = (".q_norm.weight", ".k_norm.weight")


def copy_target_layers(drafter: Drafter, path: Path) -> None:
    """Copies the tensors of `path` over an initialised drafter's layers; the rest of it stays as it is.

    Raises RequestError naming the file when it cannot be read or holds other tensors than this drafter's layers.
    """
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path}: not a readable drafter_init file: {error}") from error
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    expected = tensor_shapes(drafter.shape)
    kept = {name for name in expected if not name.startswith("layers.") or name.endswith(_KEPT)} - found.keys()
    check_tensors(str(path), found | {name: expected[name] for name in kept}, drafter.shape)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name in weights and name.startswith("layers."):
                parameter.copy_(weights[name])
