"""`draftwire cache ls`, `verify` and `prune` on caches that are sound, damaged in every way, or shared with others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import cache_commands
from launch.cache_commands import list_cache, prune_cache, verify_cache
from launch.cli import main
from protocol.cache import Cache, Manifest, in_use
from protocol.errors import RequestError
from protocol.shard_writer import ShardWriter
from protocol.shards import FP8, Limits

MANIFEST = Manifest(1, 8, "float32", {"weights": "w"})


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """A cache of three shards of four samples, equal in size."""
    writer = ShardWriter(Cache.create(tmp_path, MANIFEST), limits=Limits(samples=4))
    draw = np.random.default_rng(0)
    for at in range(12):
        features = draw.standard_normal((5, 8), np.float32)
        writer.add(np.full(5, at, np.int32), np.ones(5, np.uint8), features)
    writer.close()
    return sorted(tmp_path.glob("*.safetensors"))


def damaged(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = verify_cache(folder, print)[0]["damaged"]
    return found


def test_ls_says_what_is_there(shards: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    main_exits(["cache", "ls", str(shards[0].parent), "--json"], 0)
    report = json.loads(capsys.readouterr().out)
    nbytes = sum(path.stat().st_size for path in shards)
    assert {key: report[key] for key in ("samples", "tokens", "bytes", "shards")} == {
        "samples": 12,
        "tokens": 60,
        "bytes": nbytes,
        "shards": 3,
    }
    assert report["fingerprints"] == [{"weights": "w"}]


def main_exits(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code


def truncate(shards: list[Path]) -> list[Path]:
    os.truncate(shards[1], shards[1].stat().st_size - 30)
    return shards[1:2]


def flip(shards: list[Path], at: int = 0) -> list[Path]:
    whole = bytearray(shards[2].read_bytes())
    index = Cache.open(shards[0].parent).shards[shards[2].name]
    place = (index.samples[1].features_at, index.samples[2].token_ids_at, index.samples[3].loss_mask_at, 20)[at]
    whole[place] ^= 1
    shards[2].write_bytes(whole)
    return shards[2:]


def zero(shards: list[Path]) -> list[Path]:
    shards[0].write_bytes(bytes(shards[0].stat().st_size))
    return shards[:1]


def swap(shards: list[Path]) -> list[Path]:
    first, second = shards[0].read_bytes(), shards[1].read_bytes()
    assert len(first) == len(second)
    shards[0].write_bytes(second)
    shards[1].write_bytes(first)
    return shards[:2]


def lose(shards: list[Path]) -> list[Path]:
    shards[0].unlink()
    return shards[:1]


def rename_in_index(shards: list[Path]) -> list[Path]:
    path = shards[2].with_suffix(".json")
    key = Cache.open(shards[0].parent).shards[shards[2].name].samples[2].key
    path.write_text(path.read_text().replace(key, "0" * len(key)))
    return shards[2:]


def spoil_index(shards: list[Path]) -> list[Path]:
    shards[0].with_suffix(".json").write_bytes(b"{")
    return shards[:1]


@pytest.mark.parametrize(
    "harm",
    [
        truncate,
        flip,
        lambda shards: flip(shards, 1),
        lambda shards: flip(shards, 2),
        lambda shards: flip(shards, 3),
        zero,
        swap,
        lose,
        spoil_index,
        rename_in_index,
    ],
    ids=["truncated", "feature", "token", "mask", "header", "zeroed", "swapped", "lost", "index", "key"],
)
def test_verify_finds_every_damage_and_only_that(shards: list[Path], harm: Callable[[list[Path]], list[Path]]) -> None:
    folder = shards[0].parent
    assert damaged(folder) == []
    harmed = harm(shards)
    found = damaged(folder)
    assert {each["shard"] for each in found} == {path.name for path in harmed}
    assert all(each["problem"] for each in found)


def test_verify_finds_a_flipped_scale(tmp_path: Path) -> None:
    writer = ShardWriter(Cache.create(tmp_path, Manifest(1, 8, FP8, {}, scales=2)))
    for at in range(3):
        ids, mask = np.full(5, at, np.int32), np.ones(5, np.uint8)
        writer.add(ids, mask, np.full((5, 8), at, np.uint8), np.ones((5, 2), np.float32))
    writer.close()
    assert damaged(tmp_path) == []
    (path,) = tmp_path.glob("*.safetensors")
    sample = Cache.open(tmp_path).shards[path.name].samples[1]
    whole = bytearray(path.read_bytes())
    whole[sample.scales_at + 39] ^= 1
    path.write_bytes(whole)
    (found,) = damaged(tmp_path)
    assert found == {"shard": path.name, "sample": sample.key, "problem": "features differ from the checksum"}


def test_verify_says_how_far_it_is(
    shards: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_commands, "SAY_EVERY_S", 0.0)
    main_exits(["cache", "verify", str(shards[0].parent), "--json"], 0)
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"{done} of 3 shards read" for done in (1, 2, 3)]
    assert json.loads(said.out)["damaged"] == []


def test_verify_names_the_sample_and_exits_with_1(shards: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    main_exits(["cache", "verify", str(shards[0].parent)], 0)
    assert "every checksum agrees" in capsys.readouterr().out
    key = Cache.open(shards[0].parent).shards[shards[2].name].samples[1].key
    flip(shards)
    main_exits(["cache", "verify", str(shards[0].parent), "--json"], 1)
    (found,) = json.loads(capsys.readouterr().out)["damaged"]
    assert found == {"shard": shards[2].name, "sample": key, "problem": "features differ from the checksum"}


def test_prune_deletes_the_longest_unused_shards_only_and_logs_them(shards: list[Path]) -> None:
    """K3: foreign files stay, and so does what another run has used since."""
    folder = shards[0].parent
    foreign = [folder / "notes.txt", folder / "shard-mine.safetensors", folder / "target_io.safetensors"]
    for path in foreign:
        path.write_text("not ours")
    for age_s, path in zip((300, 900, 60), shards, strict=True):
        os.utime(path.with_suffix(".json"), (time.time() - age_s,) * 2)
    Cache.open(folder).touch({shards[0].name})
    most = 2 * shards[0].stat().st_size
    report, _ = prune_cache(folder, most, None, print)
    assert report["removed"] == [shards[1].name]
    assert (report["samples"], report["shards"]) == (8, 2)
    report, _ = prune_cache(folder, None, 30.0, print)
    assert report["removed"] == [shards[2].name]
    assert shards[0].exists()
    assert all(path.read_text() == "not ours" for path in foreign)
    log = (folder / "pruned.log").read_text()
    assert shards[1].name in log
    assert shards[2].name in log
    assert shards[0].name not in log


def test_prune_waits_for_nobody_and_wants_a_limit(shards: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = shards[0].parent
    with in_use(folder), pytest.raises(RequestError, match="in use"):
        prune_cache(folder, 0, None, print)
    main_exits(["cache", "prune", str(folder)], 2)
    assert "--max-bytes" in capsys.readouterr().err
    assert list_cache(folder)[0]["shards"] == 3
