"""What a training step needs on a GPU and on no other device: compiled arithmetic and one kernel for attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consumer.bounds import LEAST_HEAD_DIM
from consumer.drafter import Drafter

if TYPE_CHECKING:  # it brings the compiler along
    from consumer.flex import FlexMasks


def masks_for(drafter: Drafter, context_tokens: int, draft_tokens: int) -> FlexMasks | None:
    """Compiles `drafter` and returns the masks for blocks of at most so many tokens; None where it is not on a GPU, or
    where its heads are too narrow for the kernel: there everything stays as it is."""
    device = drafter.fc.weight.device
    if device.type != "cuda":
        return None
    from consumer.compiled import compile_drafter
    from consumer.flex import FlexMasks

    if drafter.shape.head_dim < LEAST_HEAD_DIM:
        return None
    compile_drafter(drafter)
    kinds = {(layer.self_attn.causal, layer.self_attn.window) for layer in drafter.stack()}
    return FlexMasks(kinds, drafter.shape.block_size, context_tokens, draft_tokens, device)
