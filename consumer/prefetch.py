"""The features of a block on their way from a ring slot to the device, summed as they arrive.

A CPU copies them out of the slot. A GPU fetches them itself, on a stream of its own, while the block before is trained
on: nothing on the host touches the payload, and only the thread that asked waits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.arena import Arena
from protocol.block import checksum
from protocol.pinning import pinned


class Prefetch(Protocol):
    """`bring` returns a copy of a block's `features`, `[T, taps x hidden]` in a slot, on the device, and its
    `protocol.block.checksum`. `here`: work on it belongs inside. `hand_over`: the training stream uses it from now on.
    """

    def here(self) -> AbstractContextManager[Any]: ...

    def bring(self, features: NDArray[Any], dtype: torch.dtype) -> tuple[Tensor, int]: ...

    def hand_over(self, features: Tensor) -> None: ...


class HostPrefetch:
    """For a CPU."""

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def bring(self, features: NDArray[Any], dtype: torch.dtype) -> tuple[Tensor, int]:
        # Summed after it was copied: what is trained on is what was summed, whoever might still write to the slot.
        copy = features.copy()
        return torch.from_numpy(copy).view(dtype), checksum(copy)

    def hand_over(self, features: Tensor) -> None: ...


class DevicePrefetch:
    """For a GPU; from pinned memory copies run beside the arithmetic, from any other they are as right, and slower."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def here(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def bring(self, features: NDArray[Any], dtype: torch.dtype) -> tuple[Tensor, int]:
        on_device = torch.from_numpy(features).view(dtype).to(self._device, non_blocking=True)
        return on_device, int(_sum_of_words(on_device)) % 2**64  # waits for this stream alone

    def hand_over(self, features: Tensor) -> None:
        features.record_stream(torch.cuda.current_stream(self._device))


def prefetch_to(device: torch.device) -> Prefetch:
    return DevicePrefetch(device) if device.type == "cuda" else HostPrefetch()


def pinned_ring(arena: Arena, device: torch.device) -> AbstractContextManager[None]:
    """While open, the GPU copies out of the ring by itself. Nothing on a CPU."""
    if device.type == "cpu":
        return nullcontext()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return pinned(cudart, *arena.location, "the ring", lambda: torch.zeros(1, device=device))


def _sum_of_words(features: Tensor) -> Tensor:
    """protocol.block.checksum on the device, int64 []: its bits are those of the unsigned sum."""
    flat = features.reshape(-1)
    if features.shape[1] * features.element_size() % 8 == 0:
        return flat.view(torch.int64).sum()
    return (flat.view(torch.int16).to(torch.int64) & 0xFFFF).sum()
