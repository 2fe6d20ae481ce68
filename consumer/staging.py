"""Host memory that a checkpoint is copied into, allocated and touched once, before the first step.

A snapshot stops the step loop for as long as its copy takes. Into fresh memory that is the time of the page faults, ten
copies' worth; into pinned memory that is there already, it is one transfer over the link: 21 GB of a drafter with
1.73 billion parameters in 0.4 s.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from consumer.state import MASTER, MOMENTS
from protocol.pinning import pin

_FLOAT_BYTES = 4
# A tensor begins on a cache line.
_ALIGN_FLOATS = 16


class Staging:
    """Room for one snapshot of a drafter whose parameters have these `shapes` and live on `device`. `memory`, fp32, is
    all of it."""

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        self._device = device
        sizes = {f"{MASTER}{name}": shape for name, shape in shapes.items()}
        sizes |= {
            f"{moment}.{name}": torch.Size() if moment == "step" else shape
            for moment in MOMENTS
            for name, shape in shapes.items()
        }
        starts, total = {}, 0
        for name, shape in sizes.items():
            starts[name] = total
            total += -(-math.prod(shape) // _ALIGN_FLOATS) * _ALIGN_FLOATS
        self.memory = _touched(total)
        if device.type == "cuda":
            _pin(self.memory, device)
        self._room = {
            name: self.memory[starts[name] : starts[name] + math.prod(shape)].view(shape)
            for name, shape in sizes.items()
        }

    def capture(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies `live_state` in and returns the copies: views of this memory, which the next capture overwrites. Work
        that the device still has to do is waited for, so that they are of the step boundary."""
        copies = {name: self._room[name].copy_(tensor, non_blocking=True) for name, tensor in state.items()}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copies


def _touched(count: int) -> Tensor:
    """fp32 `[count]` of private memory, in huge pages where there are some, every page of it there."""
    memory = mmap.mmap(-1, max(count, 1) * _FLOAT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    floats = np.frombuffer(memory, np.float32)
    floats.fill(0.0)
    return torch.from_numpy(floats)


def _pin(memory: Tensor, device: torch.device) -> None:
    """As it is: PyTorch's own pinned memory is rounded up to a power of two."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pin(cudart, memory.data_ptr(), memory.nbytes, "memory for checkpoints", lambda: torch.zeros(1, device=device))
