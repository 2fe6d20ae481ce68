"""A parameter of the target as its checkpoint has it, whether one rank holds it or several hold a part each."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from producer.mirror import Whole
from producer.target import Target


def whole(target: Target, parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter of `target`, on its device; of a divided one every rank gathers the parts."""
    if not isinstance(parameter, DTensor):
        return parameter
    name = next(name for name, tensor in target.model.named_parameters() if tensor is parameter)
    target.mirror.tell(Whole(name))
    return whole_parameter(target, name)


def whole_parameter(target: Target, name: str) -> torch.Tensor:
    """The parameter `name` of the model, gathered; all ranks call it together."""
    parameter: torch.Tensor = target.model.get_parameter(name)
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
