"""Runs that fill a disk cache while they read it, in real processes: the losses of a streamed run, whatever happens."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SPILL = ("--set", "cache.mode=spill")
EPOCHS = ("--set", "train.epochs=3", "--set", "data.eval=[]")
LONG = ("--set", "train.epochs=40", "--set", "data.eval=[]")


def cache_of(cached: Any, as_json: Any) -> dict[str, Any]:
    """What is in the cache, every checksum compared."""
    found: dict[str, Any] = as_json(cached.draftwire("cache", "verify", str(cached.folder / "cache"), "--json"))
    assert found["damaged"] == []
    assert not list((cached.folder / "cache").glob("*.part"))
    return found


def last(cached: Any, name: str) -> dict[str, Any]:
    row: dict[str, Any] = cached.rows(name, "stream")[-1]
    assert row["ring"]["lost"] == row["ring"]["spilling"] == 0
    return row


def events(cached: Any, name: str, what: str) -> list[str]:
    return [row["text"] for row in cached.rows(name, "event") if row["what"] == what]


def kill(cached: Any, name: str, child: str) -> None:
    os.kill(pid_of(cached, name, child), signal.SIGKILL)


def pid_of(cached: Any, name: str, child: str) -> int:
    if child != "replay":
        pid: int = cached.pid_of(name, child)
        return pid
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "producer.replay" in line and f"{cached.runs}/{name}" in line:
            return int(path.name)
    raise AssertionError(f"no replay of {name}")


def test_k4_a_spilling_run_trains_as_a_streamed_one_and_the_next_needs_no_target(
    cached: Any, as_json: Any, patch_children: Any, no_target: dict[str, str]
) -> None:
    """Later epochs use what the first has left; with everything there nobody loads a target, the set-up included."""
    assert cached.run("streamed", *EPOCHS).returncode == 0
    first = cached.run("first", *EPOCHS, *SPILL)
    assert first.returncode == 0, first.stderr
    assert "cache: 0 of the 64 samples are in" in first.stdout
    state = last(cached, "first")
    assert state["filled"]["replay-0"] > 0
    assert state["cache"]["replayed_tokens"] > 0
    there = cache_of(cached, as_json)["samples"]
    # What is missing was passed over each time: at most a quarter of the slots wait for the disk.
    assert there + state["cache"]["passed_over"] >= 64
    assert state["cache"]["kept"] <= there
    assert "cache: " in as_text(cached, "first")
    if there < 64:
        as_json(cached.draftwire("cache", "build", str(cached.config), "--set", "data.eval=[]", "--json"))
    patch_children(no_target)
    covered = cached.run("covered", *EPOCHS, *SPILL)
    assert covered.returncode == 0, covered.stderr
    assert "holds all 64 samples; no target is loaded" in covered.stdout
    assert last(cached, "covered")["filled"].keys() == {"replay-0"}
    for name in ("first", "covered"):
        assert cached.losses(name) == cached.losses("streamed")
    assert len(cached.losses("streamed")) > 15


def as_text(cached: Any, name: str) -> str:
    return (cached.runs / name / "report.md").read_text()


def test_k1_half_a_block_may_come_from_the_cache_and_a_damaged_shard_costs_only_the_work(
    cached: Any, as_json: Any
) -> None:
    """A cache of 40 of 64 samples, of which some are damaged, and a seed that cuts blocks otherwise."""
    short = ("cache", "build", str(cached.config), "--set", "data.max_samples=40", "--set", "data.eval=[]", "--json")
    assert as_json(cached.draftwire(*short))["computed"] == 40
    (shard,) = (cached.folder / "cache").glob("shard-*.safetensors")
    content = np.fromfile(shard, np.uint8)
    content[-200_000:-150_000] = 0
    shard.write_bytes(content.tobytes())
    other = (*EPOCHS, "--set", "train.seed=5")
    assert cached.run("streamed", *other).returncode == 0
    mixed = cached.run("mixed", *other, *SPILL)
    assert mixed.returncode == 0, mixed.stderr
    state = last(cached, "mixed")
    parts = sum(state["filled"].values())
    assert parts > len(cached.losses("mixed"))  # more parts than blocks: one step has one block here
    assert state["filled"]["replay-0"] > 0
    assert state["cache"]["damaged"] > 0
    assert state["quarantined"] == 0
    (said,) = events(cached, "mixed", "cache damaged")
    assert shard.name in said
    # What a batch holds rounds its rows, and another seed makes other batches.
    streamed = cached.losses("streamed")
    assert cached.losses("mixed") == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in streamed]
    assert cache_of(cached, as_json)["samples"] >= 40  # what was damaged is kept anew
