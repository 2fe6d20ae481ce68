"""The drafter's arithmetic between its attentions, compiled for a GPU.

Any number of rows is one graph: attention, whose kernel is compiled for one shape, is not in it. Layers share the code.
"""

from __future__ import annotations

import torch
from torch import nn

from consumer.drafter import Drafter

# Each function, with rows of context and of draft slots, with and without gradient, is a graph of its own.
GRAPHS = 64


def compile_drafter(drafter: Drafter) -> None:
    """From now on everything but attention, rotation and embedding runs compiled."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    _compile(drafter, "fuse")
    _compile(drafter.norm, "forward")
    for layer in drafter.stack():
        _compile(layer, "enter")
        _compile(layer, "leave")
        _compile(layer.self_attn, "keys_values")


def _compile(module: nn.Module, name: str) -> None:
    setattr(module, name, torch.compile(getattr(module, name), dynamic=True))
