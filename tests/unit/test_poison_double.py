"""Case E1 of the public failure reports: a producer's double writes into the ring, and a consumer's feed reads it."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from consumer.feed import DeviceBlock, Feed
from protocol import messages as m
from protocol.arena import Arena, create_arena
from protocol.block import block_table, checksum, table_bytes, views

SAMPLES, LENGTHS, TAPS, HIDDEN = (41, 7), (5, 4), 2, 4
TABLE = block_table(sum(LENGTHS), len(SAMPLES), TAPS * HIDDEN, "bfloat16")


class Double:
    """What stands for a producer and for the coordinator: `deliver` announces what is in slot 0."""

    def __init__(self, arena: Arena) -> None:
        self.inbox: queue.Queue[m.Message] = queue.Queue()
        self.answers: queue.Queue[m.Message] = queue.Queue()
        self.arena = arena
        peer: Any = SimpleNamespace(inbox=self.inbox, send=self.answers.put)
        self.feed = Feed(peer, arena, torch.device("cpu"), TAPS)
        assert isinstance(self.answers.get(timeout=10), m.Credit)

    def deliver(self, features: torch.Tensor) -> m.Message:
        """Sends bf16 features `[9, taps * hidden]` as step 0, and returns the first answer."""
        self.arena.sign(0, 1)
        tensors = views(self.arena.slot(0), TABLE)
        tensors["token_ids"][:] = np.arange(sum(LENGTHS))
        tensors["loss_mask"][:] = 1
        tensors["offsets"][:] = np.concatenate(([0], np.cumsum(LENGTHS)))
        tensors["samples"][:] = SAMPLES
        tensors["features"][:] = features.view(torch.uint16).numpy()
        self.arena.sign(0, 1)
        announced = m.Deliver(
            step=0, index=0, micro_step=0, micro_steps=1, epoch=0, attempt=1, slot=0, table=TABLE, samples=SAMPLES,
            writers=(1,), checksum=checksum(tensors["features"]),
        )  # fmt: skip
        self.inbox.put(announced)
        return self.answers.get(timeout=10)

    def train(self) -> DeviceBlock:
        self.inbox.put(m.Go(step=0, micro_step=0, stop=False, finish=False, trained_s=0.0, cooldown_step=-1))
        block = self.feed.next(0, 0)
        assert block is not None
        return block


@pytest.fixture
def double() -> Iterator[Double]:
    fd = create_arena(1, table_bytes(TABLE), 1 << 30)
    made = Double(Arena(fd, 1, table_bytes(TABLE)))
    yield made
    made.inbox.put(m.Stop(reason="the end"))
    os.close(fd)


def sound() -> torch.Tensor:
    return torch.randn(sum(LENGTHS), TAPS * HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()


def zeros(rows: torch.Tensor) -> None:
    rows[:, :HIDDEN] = 0


def one_nan(rows: torch.Tensor) -> None:
    rows[1, 2] = torch.nan


def one_infinity(rows: torch.Tensor) -> None:
    rows[3, 0] = torch.inf


def one_row_repeated(rows: torch.Tensor) -> None:
    rows[:] = rows[0].clone()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (zeros, "tap 0 is all zero"),
        (one_nan, "tap 0 is not finite"),
        (one_infinity, "tap 0 is not finite"),
        (one_row_repeated, "tap 0 is one row repeated"),
    ],
)
def test_unsound_states_are_refused_with_the_sample_s_id(
    double: Double, damage: Callable[[torch.Tensor], None], problem: str
) -> None:
    """E1: the coordinator knows who filled the block and gets sample and reason; a sound retry is trained."""
    spoiled = sound()
    damage(spoiled[: LENGTHS[0]])
    answer = double.deliver(spoiled)
    assert isinstance(answer, m.Bad)
    assert answer.samples == (41,)
    assert answer.reason == f"sample 41: {problem}"
    assert isinstance(double.answers.get(timeout=10), m.Credit)
    assert isinstance(double.deliver(sound()), m.Verified)
    assert torch.equal(double.train().features, sound())


def test_70000_arrives_as_sent(double: Double) -> None:
    """E1: in bf16 from end to end. On a way through fp16 it would be infinite, and a NaN's bits would not survive."""
    states = sound()
    states[2, 5] = 70_000
    assert isinstance(double.deliver(states), m.Verified)
    features = double.train().features
    assert features.dtype == torch.bfloat16
    assert float(features[2, 5]) == 70_144.0  # the nearest bf16
    assert torch.equal(features.view(torch.int16), states.view(torch.int16))
