"""Training state <-> named tensors: fp32 masters, both AdamW moments and the step counters of a drafter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from consumer.drafter import Drafter

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MASTER = "master."  # begins the names of the fp32 weights


def capture_weights(drafter: Drafter) -> dict[str, Tensor]:
    """The weights as they are served, on the host, in the compute dtype."""
    return {
        name: parameter.detach().to("cpu", drafter.compute_dtype, copy=True)
        for name, parameter in drafter.named_parameters()
    }


def capture_state(drafter: Drafter, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy on the host of everything that the next step depends on."""
    state: dict[str, Tensor] = {}
    for name, parameter in drafter.named_parameters():
        state[f"{MASTER}{name}"] = parameter.detach().to("cpu", copy=True)
        for moment in _MOMENTS:
            if parameter in optimiser.state:
                state[f"{moment}.{name}"] = optimiser.state[parameter][moment].detach().to("cpu", copy=True)
    return state


def restore_state(drafter: Drafter, optimiser: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Puts back what `capture_state` took; dtypes are those that were saved."""
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(state[f"{MASTER}{name}"])
            if f"step.{name}" in state:
                optimiser.state[parameter] = {
                    # AdamW keeps its counter as an fp32 tensor beside the moments when fused.
                    moment: state[f"{moment}.{name}"].to(parameter.device, copy=True)
                    for moment in _MOMENTS
                }
