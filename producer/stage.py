"""Where the features of a block are computed, and how they get into host memory.

On a CPU they are computed where they stay. On a GPU they are gathered in one of two buffers there, summed, and copied
by the GPU itself, on a stream of its own, while the next block is computed into the other buffer: nothing waits for the
host, and the host waits for nothing but the end of a copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from producer.target import Target
from protocol.arena import Arena
from protocol.block import checksum
from protocol.pinning import pinned

# One is copied out while the other is filled.
BUFFERS = 2


class Filled(Protocol):
    """A block on its way to host memory."""

    def wait(self) -> tuple[int, float]:
        """(the 64-bit sum of the features, the seconds that they took), once their last byte is there."""
        ...


class Stage(Protocol):
    """`pieces` are views `[L_i, width]` of host memory, where the features go. `begin` returns a buffer `[sum L_i,
    width]` on the target's device, `end` sends what it holds by then. `ahead`: blocks that may be under way at once."""

    ahead: int

    def begin(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def end(self, out: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Filled: ...


class Done:
    """All there already."""

    def __init__(self, checksum: int, busy_s: float) -> None:
        self._answer = checksum, busy_s

    def wait(self) -> tuple[int, float]:
        return self._answer


class HostStage:
    """For a target on the CPU."""

    ahead = 1

    def __init__(self) -> None:
        self._started = 0.0

    def begin(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        self._started = time.monotonic()
        return pieces[0] if len(pieces) == 1 else pieces[0].new_empty((sum(map(len, pieces)), pieces[0].shape[1]))

    def end(self, out: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Filled:
        if len(pieces) > 1:
            for piece, rows in zip(pieces, torch.split(out, [len(piece) for piece in pieces]), strict=True):
                piece.copy_(rows)
        words = out.view(torch.uint16) if out.dtype == torch.bfloat16 else out
        return Done(checksum(words.numpy()), time.monotonic() - self._started)


def make_stage(target: Target, slot_bytes: int, width: int) -> Stage:
    """The stage of a target whose blocks fit into `slot_bytes`, with features `width` wide."""
    if target.device.type == "cpu":
        return HostStage()
    return DeviceStage(target.device, slot_bytes // (width * target.dtype.itemsize), width, target.dtype)


def pinned_arena(arena: Arena, device: torch.device) -> AbstractContextManager[None]:
    """While open, the GPU copies into the ring by itself. Nothing on a CPU."""
    if device.type == "cpu":
        return nullcontext()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return pinned(cudart, *arena.location, "the ring", lambda: torch.zeros(1, device=device))


class Copying:
    """Being computed and copied by a GPU."""

    def __init__(self, started: torch.cuda.Event, computed: torch.cuda.Event, copied: torch.cuda.Event) -> None:
        self._started, self._computed, self.copied = started, computed, copied
        self.total = torch.empty(1, dtype=torch.int64, pin_memory=True)

    def wait(self) -> tuple[int, float]:
        self.copied.synchronize()
        return int(self.total) % 2**64, self._started.elapsed_time(self._computed) / 1000


class DeviceStage:
    """For a target on the GPU `device`: blocks of at most `tokens` tokens and features `width` wide. Into pinned memory
    copies run beside the arithmetic; into any other they are as right, and slower."""

    ahead = BUFFERS

    def __init__(self, device: torch.device, tokens: int, width: int, dtype: torch.dtype) -> None:
        self._device = device
        self._buffers = [torch.empty((tokens, width), dtype=dtype, device=device) for _ in range(BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._turn = 0
        self._started = _timed_event()

    def begin(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        self._turn = (self._turn + 1) % BUFFERS
        if (copied := self._copied[self._turn]) is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)
        self._started = _timed_event()
        self._started.record()
        return self._buffers[self._turn][: sum(map(len, pieces))]

    def end(self, out: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Filled:
        total = _sum_of_words(out)
        computed, copied = _timed_event(), _timed_event()
        computed.record()
        filled = Copying(self._started, computed, copied)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(computed)
            for piece, rows in zip(pieces, torch.split(out, [len(piece) for piece in pieces]), strict=True):
                piece.copy_(rows, non_blocking=True)
            filled.total.copy_(total, non_blocking=True)
            total.record_stream(self._copies)
            copied.record()
        self._copied[self._turn] = copied
        return filled


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _sum_of_words(features: torch.Tensor) -> torch.Tensor:
    """protocol.block.checksum on the device, int64 `[1]`: its bits are those of the unsigned sum."""
    flat = features.reshape(-1)
    if features.shape[1] * features.element_size() % 8 == 0:
        return flat.view(torch.int64).sum(dim=0, keepdim=True)
    return (flat.view(torch.int16).to(torch.int64) & 0xFFFF).sum(dim=0, keepdim=True)
