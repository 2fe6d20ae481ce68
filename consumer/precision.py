"""What the drafter's products are computed in."""

from __future__ import annotations

import torch

from protocol.cpu import cpu_has_bfloat16


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """bf16 where the machine multiplies it in hardware, unless the config says otherwise."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" or cpu_has_bfloat16() else torch.float32
    return torch.float32 if precision == "fp32" else torch.bfloat16
