"""A rank's own work: time inside micro-steps and nothing else, memory that is there."""

from __future__ import annotations

import mmap
import time

import torch

from consumer.busy import Busy, memory_bytes


def test_only_what_runs_inside_counts_and_only_once() -> None:
    busy = Busy(torch.device("cpu"))
    for _ in range(2):
        with busy:
            time.sleep(0.02)
        time.sleep(0.05)
    assert 0.04 <= busy.take() < 0.09
    assert busy.take() == 0.0


def test_memory_grows_with_what_is_held() -> None:
    on_gpu, before = memory_bytes(torch.device("cpu"))
    with mmap.mmap(-1, 32 << 20) as held:  # pages of its own, whatever the process has freed before
        held.write(bytes(32 << 20))
        after = memory_bytes(torch.device("cpu"))[1]
    assert on_gpu == 0
    assert after - before >= 24 << 20
