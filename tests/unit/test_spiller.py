"""The writer beside a replay: what it answers, what becomes of a disk that is full, and of samples seen twice."""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.quantise import quantise_rows
from producer.replay import read_features
from producer.spiller import Spiller
from protocol import messages as m
from protocol.arena import Arena, create_arena
from protocol.block import block_table, table_bytes, views
from protocol.cache import Cache, Manifest
from protocol.shard_writer import ShardWriter
from protocol.shards import FP8, sample_key

WIDTH, LENGTH = 8, 5
TABLE = block_table(2 * LENGTH, 2, WIDTH, "bfloat16")


class Peer:
    """What is said to the coordinator."""

    progress = 0

    def __init__(self) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.said: queue.Queue[m.Spilled] = queue.Queue()
        self.send = self.said.put

    def answers(self, count: int) -> list[tuple[int, tuple[int, ...], str]]:
        taken = [self.said.get(timeout=20) for _ in range(count)]
        return [(each.attempt, each.durable, each.problem) for each in taken]


class Desk:
    """A ring of four slots, an empty cache and a spiller at work."""

    def __init__(self, folder: Path, max_bytes: int | None = None, fp8: bool = False) -> None:
        self.fd = create_arena(4, table_bytes(TABLE), 1 << 30)
        self.arena, self.peer, self.folder = Arena(self.fd, 4, table_bytes(TABLE)), Peer(), folder
        form = Manifest(1, WIDTH, FP8, {}, 2) if fp8 else Manifest(1, WIDTH, "bfloat16", {})
        self.cache = Cache.create(folder, form)
        writer, quantise = ShardWriter(self.cache, max_bytes), quantise_rows if fp8 else None
        self.spiller = Spiller(self.cache, writer, self.arena, self.peer, quantise)  # type: ignore[arg-type]

    def put(self, slot: int, samples: tuple[int, int], contents: tuple[int, int] | None = None) -> m.Spill:
        """A block of two samples, of which those of equal content are alike."""
        tensors = views(self.arena.slot(slot), TABLE)
        ids = np.repeat(np.array(contents or samples, np.int32), LENGTH)
        tensors["token_ids"][:], tensors["loss_mask"][:] = ids, 1
        tensors["offsets"][:], tensors["samples"][:] = [0, LENGTH, 2 * LENGTH], samples
        tensors["features"][:] = ids[:, None]
        return m.Spill(attempt=100 + slot, slot=slot, table=TABLE, samples=samples)

    def close(self) -> None:
        self.spiller.close()
        self.cache.close()
        os.close(self.fd)


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    desks: list[Desk] = []

    def make(**changes: Any) -> Desk:
        desks.append(Desk(tmp_path / "cache", **changes))
        return desks[-1]

    yield make
    for each in desks:
        each.close()


def test_samples_may_be_replayed_once_their_shard_is_whole(desk: Callable[..., Desk]) -> None:
    work = desk()
    for slot, samples in enumerate([(1, 2), (3, 4)]):
        work.spiller.write(work.put(slot, samples))
    assert work.peer.answers(2) == [(100, (), ""), (101, (), "")]
    work.spiller.write(m.Flush())
    assert work.peer.answers(1) == [(0, (1, 2, 3, 4), "")]
    found = np.zeros((LENGTH, WIDTH), np.uint16)
    work.cache.read_into(sample_key(np.full(LENGTH, 3, np.int32)), found)
    assert (found == 3).all()


def test_what_passes_twice_is_written_once_and_what_is_alike_is_known_by_every_name(desk: Callable[..., Desk]) -> None:
    work = desk()
    for slot in (0, 1):  # a rewind passes samples twice
        work.spiller.write(work.put(slot, (1, 2)))
    work.spiller.write(work.put(2, (7, 8), contents=(1, 9)))
    work.spiller.write(m.Flush())
    assert work.peer.answers(4)[-1] == (0, (1, 7, 2, 8), "")
    assert len(work.cache.samples) == 3
    work.spiller.write(work.put(3, (11, 2), contents=(9, 2)))  # they lie in a whole shard: known at once
    assert work.peer.answers(1) == [(103, (11, 2), "")]
    assert len(list(work.folder.glob("shard-*.safetensors"))) == 1


def test_a_used_budget_ends_the_keeping_and_every_order_is_answered(desk: Callable[..., Desk]) -> None:
    work = desk(max_bytes=1000)
    for slot, samples in enumerate([(1, 2), (3, 4)]):
        work.spiller.write(work.put(slot, samples))
    used = "cache.max_bytes is used up"
    assert work.peer.answers(2) == [(100, (), used), (101, (), used)]
    assert not list(work.folder.glob("shard-*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_k2_a_disk_that_is_full_or_fails_is_survived(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    work = desk()
    work.spiller.write(work.put(0, (1, 2)))
    work.spiller.write(m.Flush())
    work.peer.answers(2)

    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    work.spiller.write(work.put(1, (3, 4)))
    work.spiller.write(m.Flush())
    work.spiller.write(work.put(2, (5, 6)))
    answers = work.peer.answers(3)
    assert [attempt for attempt, _, _ in answers] == [101, 0, 102]
    assert [os.strerror(number) in problem for _, _, problem in answers] == [False, True, True]
    monkeypatch.undo()
    assert len(Cache.open(work.folder).samples) == 2
    assert not list(work.folder.glob("*.part"))


def test_a_defect_of_the_writer_ends_the_process_and_is_not_lost_in_its_thread(desk: Callable[..., Desk]) -> None:
    """K2: an error in a background thread."""
    work = desk()
    work.spiller.write(m.Spill(attempt=9, slot=7, table=TABLE, samples=(1, 2)))  # there is no such slot
    stop = work.peer.inbox.get(timeout=20)
    assert isinstance(stop, m.Stop)
    assert "a block could not be kept: slot 7 of 4" in stop.reason


def test_a_damaged_sample_is_struck_out_and_kept_anew(desk: Callable[..., Desk]) -> None:
    work = desk()
    work.spiller.write(work.put(0, (1, 2)))
    work.spiller.write(m.Flush())
    work.peer.answers(2)
    damaged = sample_key(np.full(LENGTH, 1, np.int32))
    (shard,) = work.folder.glob("shard-*.safetensors")
    content = shard.read_bytes()
    work.spiller.rewrite(damaged)
    work.cache.strike({damaged})
    assert damaged not in Cache.open(work.folder).samples
    assert shard.read_bytes() == content  # nothing is deleted
    work.spiller.write(work.put(1, (1, 2)))
    work.spiller.write(m.Flush())
    assert work.peer.answers(2) == [(101, (2,), ""), (0, (1,), "")]
    assert len(Cache.open(work.folder).samples) == 2


def test_a_cache_of_fp8_gets_quantised_features_with_their_scales(desk: Callable[..., Desk]) -> None:
    work = desk(fp8=True)
    order = work.put(0, (7, 8))
    features = views(work.arena.slot(0), TABLE)["features"]
    numbers = np.linspace(-3, 1000, features.size, dtype=np.float32).reshape(features.shape)
    features[:] = numbers.view(np.uint32) >> 16  # bfloat16
    work.spiller.write(order)
    work.spiller.write(m.Flush())
    assert work.peer.answers(2) == [(100, (), ""), (0, (7, 8), "")]
    kept = np.empty((LENGTH, WIDTH), np.uint16)
    for place, sample in enumerate((7, 8)):
        read_features(work.cache, sample_key(np.full(LENGTH, sample, np.int32)), kept, "bfloat16")
        found = (kept.astype(np.uint32) << 16).view(np.float32)
        assert found == pytest.approx(numbers[place * LENGTH :][:LENGTH], rel=0.08, abs=0.02)
