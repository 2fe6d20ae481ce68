"""Checkpoints and the step loop: a slow disk stops nothing, no request is lost, and what is saved is of its step."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from consumer import saver as saver_module
from consumer.checkpoint import Snapshot, read_state, read_weights
from consumer.checkpointer import Checkpointer
from consumer.checkpoints import checkpoints, newest_good, read_cursor
from consumer.saver import Saver
from consumer.staging import Staging
from consumer.state import capture_weights, live_state, served_weights
from protocol.cursor import Cursor


class Loop:
    """A step loop around a real checkpointer. The disk is as fast as `disk` lets it be."""

    def __init__(self, folder: Path, drafter: Any, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.drafter = folder, drafter
        self.disk = threading.Event()
        self.disk.set()
        self.broken = False
        self.postponed: list[int] = []
        self.durable: list[tuple[int, float, float]] = []
        self.failed: list[str] = []
        self.masters: dict[int, dict[str, torch.Tensor]] = {}
        self.optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-2, fused=True)
        real = saver_module.write_checkpoint

        def write(where: Path, snapshot: Snapshot) -> Path:
            assert self.disk.wait(20)
            if self.broken:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(where, snapshot)

        monkeypatch.setattr(saver_module, "write_checkpoint", write)
        self.saver = Saver(folder, 9, lambda *cost: self.durable.append(cost), self.failed.append)
        self.checkpointer = Checkpointer(self.saver, drafter, self.optimiser, "t", every, -1, self.postponed.append)

    def train(self, step: int) -> Cursor:
        """One step; returns the cursor behind it."""
        for parameter in self.drafter.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + step % 3)
        self.optimiser.step()
        state = live_state(self.drafter, self.optimiser)
        self.masters[step] = {name: tensor.clone() for name, tensor in state.items()}
        return Cursor(epoch=0, next_step=step, plan_hash="p", step_hash="s", quarantined={})

    def run(self, steps: range) -> None:
        for step in steps:
            cursor = self.train(step)
            if self.checkpointer.due(step):
                self.checkpointer.scheduled(step, cursor, best=0.0)

    def saved(self) -> list[int]:
        """Steps on the disk; each holds the very bits of its boundary."""
        steps = []
        for path in checkpoints(self.folder):
            steps.append(read_cursor(path).next_step)
            state = read_state(path)
            expected = self.masters[steps[-1]]
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], expected[name]) for name in expected)
        return steps


@pytest.fixture
def loop(tmp_path: Path, make_drafter: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    one = Loop(tmp_path, make_drafter(1, "bfloat16"), 2, monkeypatch)
    yield one
    one.disk.set()


def test_a_slow_disk_stops_no_step_and_what_was_due_is_taken_at_the_next_free_boundary(loop: Loop) -> None:
    loop.disk.clear()
    loop.run(range(1, 10))  # would hang here if a step waited for the disk
    assert loop.postponed == [4]  # 6 and 8 are the same wait
    assert loop.saved() == []
    assert not loop.checkpointer.due(11)
    loop.disk.set()
    loop.saver._writing.result(20)  # type: ignore[union-attr]
    assert loop.saved() == [2]  # although seven steps were trained since it was taken
    loop.run(range(11, 13))  # 11 is nobody's schedule
    loop.saver.wait()
    assert loop.saved() in ([2, 11], [2, 11, 12])
    assert [step for step, _, _ in loop.durable][:2] == [2, 11]
    assert loop.failed == []


def test_a_fast_disk_postpones_nothing(loop: Loop) -> None:
    for step in range(1, 9):
        loop.run(range(step, step + 1))
        loop.saver.wait()
    assert loop.postponed == []
    assert loop.saved() == [2, 4, 6, 8]


@pytest.mark.parametrize("is_best", [True, False])
def test_the_best_the_last_and_a_stop_s_wait_for_the_writer_and_are_of_their_own_step(
    loop: Loop, is_best: bool
) -> None:
    loop.disk.clear()
    loop.run(range(1, 5))
    cursor = loop.train(5)
    measured = capture_weights(loop.drafter)
    taking = threading.Thread(target=loop.checkpointer.take, args=(5, cursor, 1.5, is_best))
    taking.start()
    taking.join(0.05)
    assert taking.is_alive()
    loop.disk.set()
    taking.join(20)
    loop.run(range(6, 7))
    loop.saver.wait()
    assert loop.saved()[:2] == [2, 5]  # what was postponed at 4 is in it
    assert loop.postponed == [4] or loop.postponed == [4, 6]
    if is_best:
        assert (loop.folder / "best").resolve().name == "step-000005"
        weights = read_weights(loop.folder / "best")[0]
        assert all(torch.equal(weights[name], measured[name]) for name in measured)
    stalls = {step: stall_s for step, stall_s, _ in loop.durable}
    assert stalls[5] >= 0.05  # the wait is counted


def test_a_full_disk_costs_its_own_checkpoint_only_and_is_said(loop: Loop) -> None:
    loop.run(range(1, 3))
    loop.saver.wait()
    loop.broken = True
    loop.run(range(3, 5))
    loop.saver.wait()
    assert loop.failed == ["checkpoint at step 4: [Errno 28] No space left on device"]
    assert newest_good(loop.folder)[0] == loop.folder / "step-000002"
    assert loop.saved() == [2]
    loop.broken = False
    loop.run(range(5, 7))
    loop.saver.wait()
    assert loop.saved() == [2, 6]
    assert loop.saver.last_error is None


def test_a_boundary_is_saved_once(loop: Loop) -> None:
    cursor = loop.train(4)
    loop.checkpointer.take(4, cursor, 0.0)
    loop.checkpointer.take(4, cursor, 0.0)
    loop.saver.wait()
    assert [step for step, _, _ in loop.durable] == [4]


# --- the memory that it is copied into -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_derived_from_the_masters_are_the_served_ones_bit_for_bit(
    make_drafter: Callable[..., Any], dtype: str
) -> None:
    """Halves that round to even, denormals and a value that overflows nothing: conversion is the same on both ways."""
    drafter = make_drafter(3, dtype)
    awkward = torch.tensor([0x3F808000, 0x3F818000, 0x00000001, 0x80000000, 0x7F7F0000, 0x3F807FFF], dtype=torch.int64)
    with torch.no_grad():
        drafter.fc.weight.view(-1)[:6] = awkward.to(torch.int32).view(torch.float32)
    expected = capture_weights(drafter)
    optimiser = torch.optim.AdamW(drafter.parameters())
    found = served_weights(live_state(drafter, optimiser), drafter.compute_dtype)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype == getattr(torch, dtype)
        assert torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))


def test_every_capture_goes_to_the_same_memory(make_drafter: Callable[..., Any]) -> None:
    drafter = make_drafter(1)
    optimiser = torch.optim.AdamW(drafter.parameters(), fused=True)
    shapes = {name: parameter.shape for name, parameter in drafter.named_parameters()}
    staging = Staging(shapes, torch.device("cpu"))
    before = staging.capture(live_state(drafter, optimiser))
    assert before.keys() == {f"master.{name}" for name in shapes}  # there are no moments before the first step
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    after = staging.capture(live_state(drafter, optimiser))
    assert len(after) == 4 * len(shapes)
    assert all(after[name].data_ptr() == before[name].data_ptr() for name in before)
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in after.values())
    assert all(start + nbytes <= then for (start, nbytes), (then, _) in pairwise(places))
    last = places[-1][0] + places[-1][1]
    assert last <= staging.memory.data_ptr() + staging.memory.nbytes
