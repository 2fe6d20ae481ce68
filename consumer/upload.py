"""Small arrays on their way to the device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """The host array or tensor on `device`; to a GPU the copy is only enqueued."""
    host = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
