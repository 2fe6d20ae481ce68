"""Training state <-> named tensors: fp32 masters, both AdamW moments and the step counters of a drafter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from consumer.drafter import Drafter

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MASTER = "master."  # begins the names of the fp32 weights


def capture_weights(drafter: Drafter) -> dict[str, Tensor]:
    """The weights as they are served, on the host, in the compute dtype."""
    return {
        name: parameter.detach().to("cpu", drafter.compute_dtype, copy=True)
        for name, parameter in drafter.named_parameters()
    }


def served_weights(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What `capture_weights` took of the drafter that `state` was taken of, in its compute dtype, bit for bit. In fp32
    these are the masters themselves."""
    masters = ((name, tensor) for name, tensor in state.items() if name.startswith(MASTER))
    return {name.removeprefix(MASTER): tensor.to("cpu", dtype) for name, tensor in masters}


def live_state(drafter: Drafter, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that the next step depends on: the tensors themselves, on their device, not copies. Moments are there
    from the first step on."""
    state: dict[str, Tensor] = {}
    for name, parameter in drafter.named_parameters():
        state[f"{MASTER}{name}"] = parameter.detach()
        for moment in MOMENTS:
            if parameter in optimiser.state:
                state[f"{moment}.{name}"] = optimiser.state[parameter][moment].detach()
    return state


def restore_state(drafter: Drafter, optimiser: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Puts back what `live_state` named; dtypes are those that were saved."""
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(state[f"{MASTER}{name}"])
            if f"step.{name}" in state:
                optimiser.state[parameter] = {
                    # AdamW keeps its counter as an fp32 tensor beside the moments when fused.
                    moment: state[f"{moment}.{name}"].to(parameter.device, copy=True)
                    for moment in MOMENTS
                }
