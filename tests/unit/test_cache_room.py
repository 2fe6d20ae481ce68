"""How much of an epoch fits into a cache, and what that saves."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from launch import cache_room
from launch.cache_room import cache_of, room_of, row_bytes_of
from launch.config import load_config
from launch.plan_table import _cache
from protocol.cache import Cache, Manifest
from protocol.shard_writer import ShardWriter

ROW_BYTES = row_bytes_of(16, "bfloat16", 0)
Disk = namedtuple("Disk", "total used free")


class Data:
    """Ten samples of a hundred tokens."""

    lengths = np.full(10, 100)

    def __len__(self) -> int:
        return 10

    def tokens(self, index: int) -> Any:
        return np.full(100, index, np.int32)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = tmp_path / "c.toml"
    path.write_text(f'[target]\nmodel = "m"\n[data]\ntrain = [{{path = "x"}}]\n[cache]\ndir = "{tmp_path}/a/cache"\n')

    def make(free: int = 1 << 40, total: int = 1 << 40, budget: str = "", held: int = 0) -> Any:
        monkeypatch.setattr(shutil, "disk_usage", lambda where: Disk(total, 0, free))
        config = load_config(path, [f"cache.max_bytes={budget}"] if budget else [])
        cache = None
        if held:
            cache = Cache.create(config.cache.folder, Manifest(1, 16, "bfloat16", {"taps": "[0]"}))
            writer = ShardWriter(cache)
            for at in range(held):
                writer.add(Data().tokens(at), np.ones(100, np.uint8), np.zeros((100, 16), np.uint16))
            writer.close()
            cache = Cache.open(config.cache.folder)
        return room_of(config, ROW_BYTES, 10, 1000, cache, Data())  # type: ignore[arg-type]

    return make


def test_a_disk_with_room_takes_a_whole_epoch(room: Any) -> None:
    found = room()
    assert (found.held, found.samples, found.epoch_bytes, found.share) == (0, 10, 37_000, 1.0)


def test_the_budget_and_the_disk_s_reserve_bound_what_fits(room: Any) -> None:
    assert room(budget="9250").share == pytest.approx(0.25)
    assert room(free=(1 << 20) + 18_500, total=50 << 20).share == pytest.approx(0.5)  # 2 % of it stay free
    assert room(free=100, total=50 << 20).share == 0.0


def test_what_is_there_counts_and_uses_the_budget(room: Any) -> None:
    found = room(held=4, budget="1")
    assert (found.held, found.held_bytes, found.room_bytes) == (4, 4 * 3700, 0)
    assert found.share == pytest.approx(0.4)
    text = str(found)
    assert text.startswith("4 of the 10 samples are in ")
    assert "it holds 40% of an epoch of 37 kB, and later ones need 60% of the target's work" in text


def test_a_cache_of_other_features_is_none_of_a_plan_s(room: Any, tmp_path: Path) -> None:
    room(held=1)
    folder = tmp_path / "a" / "cache"
    assert cache_of(folder, 16, "bfloat16", (0,)) is not None
    assert cache_of(folder, 16, "bfloat16", (1,)) is None
    assert cache_of(folder, 32, "bfloat16", (0,)) is None
    assert cache_of(tmp_path / "nowhere", 16, "bfloat16", (0,)) is None


def test_the_bill_says_what_it_saves(room: Any) -> None:
    found = room(budget="9250")
    bill = {**msgspec.to_builtins(found), "share": found.share}
    assert (
        "25% of an epoch of 37 kB; each later epoch saves so much of the target's work, about 2 h 30 min of"
        in _cache(bill | {"saved_hours": 2.5})
    )
    assert _cache(bill | {"saved_hours": None}).endswith("of the target's work")


def test_a_folder_that_is_not_there_yet_has_its_parent_s_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(cache_room.shutil, "disk_usage", seen.append)
    cache_room.disk_of(tmp_path / "a" / "b")
    assert seen == [tmp_path]
