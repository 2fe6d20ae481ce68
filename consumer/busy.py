"""What a rank's own work takes: seconds inside micro-steps, and memory at its highest."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Busy:
    """Times what runs inside `with busy:`. On a GPU it asks the device, so that nothing has to wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()
        if self._on_gpu:
            pair = _event(), _event()
            pair[0].record()
            self._events.append(pair)

    def __exit__(self, *_error: object) -> None:
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._began_s

    def take(self) -> float:
        """Seconds since the last call; work that a GPU has not ended yet is left for the next one."""
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            first, last = self._events.pop(0)
            self._seconds += first.elapsed_time(last) / 1000
        taken, self._seconds = self._seconds, 0.0
        return taken


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(the most that this process has held on its GPU at once, 0 on a CPU; what it holds of the host's memory now)."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return on_gpu, resident_pages * _PAGE_BYTES
