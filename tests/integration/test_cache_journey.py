"""The cache journey in real processes: build, train from it without a target, resume a build, refuse what cannot be."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ONE_EPOCH = ("--set", "train.epochs=1")


@pytest.fixture
def cached(workspace: Any) -> Any:
    """The workspace with [cache] in its config."""
    with workspace.config.open("a") as file:
        file.write(f'[cache]\ndir = "{workspace.folder / "cache"}"\n')
    return workspace


NO_TARGET = """
def refuse(*arguments, **named):
    raise AssertionError("a target was loaded")
load_target = refuse
"""


def test_training_from_the_cache_equals_streaming_bit_for_bit_and_loads_no_target(
    cached: Any, as_json: Any, patch_children: Any
) -> None:
    """K4: the losses, the acceptance and the exported drafter are those of the streamed run."""
    assert cached.run("streamed", *ONE_EPOCH).returncode == 0
    report = as_json(cached.draftwire("cache", "build", str(cached.config), "--json"))
    assert (report["computed"], report["already"], report["samples"]) == (64, 0, 64)
    # The estimate, made before anything was computed, is the true size within 5 %, headers aside.
    heads = sum(json.loads(path.read_bytes())["header_bytes"] for path in Path(report["folder"]).glob("shard-*.json"))
    assert report["bytes"] - heads == pytest.approx(report["needed_bytes"], rel=0.05)
    patch_children({"producer.target": NO_TARGET})
    only = cached.run("replayed", *ONE_EPOCH, "--set", "cache.mode=only")
    assert only.returncode == 0, only.stderr
    assert "64 of the 64 samples are in" in only.stdout
    assert len(cached.losses("streamed")) > 5
    assert cached.losses("replayed") == cached.losses("streamed")
    exports = [cached.runs / name / "export/model.safetensors" for name in ("streamed", "replayed")]
    assert exports[0].read_bytes() == exports[1].read_bytes()
    accepted = [[row["acceptance_mean"] for row in cached.rows(name, "eval")] for name in ("streamed", "replayed")]
    assert accepted[0] == accepted[1] != []
    assert not list((cached.runs / "replayed/log").glob("producer-*"))


def test_a_build_computes_only_what_is_missing(cached: Any, as_json: Any) -> None:
    """K1: 40 rows, then all 64, then once more: 40, 24 and 0 samples go through the target."""
    build = ("cache", "build", str(cached.config), "--json")
    assert as_json(cached.draftwire(*build, "--set", "data.max_samples=40"))["computed"] == 40
    before = {path: path.read_bytes() for path in (cached.folder / "cache").glob("shard-*")}
    short = cached.run("short", *ONE_EPOCH, "--set", "cache.mode=only")
    assert short.returncode == 2
    assert "cache: 40 of the 64 samples are in" in short.stdout
    assert "cache build" in short.stderr
    more = as_json(cached.draftwire(*build))
    assert (more["computed"], more["already"]) == (24, 40)
    again = as_json(cached.draftwire(*build))
    assert (again["computed"], again["already"]) == (0, 64)
    assert {path: path.read_bytes() for path in before} == before
    # Another seed, batch and number of anchors train from the same cache.
    other = ("--set", "train.seed=7", "--set", "train.batch_tokens=320", "--set", "train.anchors=4")
    assert cached.run("other", "--set", "train.epochs=2", *other, "--set", "cache.mode=only").returncode == 0


@pytest.mark.slow
def test_a_full_budget_ends_a_build_and_more_room_goes_on(cached: Any, as_json: Any) -> None:
    """K2: no partial shard is left, code 1 says what to do, and nothing is computed twice."""
    build = ("cache", "build", str(cached.config))
    full = cached.draftwire(*build, "--set", "cache.max_bytes=2200000")
    assert full.returncode == 1
    assert "cache.max_bytes is used up" in full.stderr
    assert not list((cached.folder / "cache").glob("*.part"))
    there = as_json(cached.draftwire("cache", "verify", str(cached.folder / "cache"), "--json"))
    assert 0 < there["samples"] < 64
    assert there["damaged"] == []
    short = cached.run("short", "--set", "cache.mode=only")
    assert short.returncode == 2
    assert f"holds {there['samples']} of the 64 samples" in short.stderr
    assert f"{64 - there['samples']} are missing" in short.stderr
    rest = as_json(cached.draftwire(*build, "--json"))
    assert (rest["already"], rest["computed"]) == (there["samples"], 64 - there["samples"])


def test_other_features_and_damaged_ones_are_refused(cached: Any) -> None:
    """E1, K4: by the name of what differs, and by the name of the shard."""
    build = ("cache", "build", str(cached.config))
    assert cached.draftwire(*build).returncode == 0
    other = cached.run("other", "--set", "cache.mode=only", "--set", "drafter.taps=[0, 2]")
    assert other.returncode == 2
    assert "was made with taps" in other.stderr
    (shard,) = (cached.folder / "cache").glob("shard-*.safetensors")
    content = np.fromfile(shard, np.uint8)
    content[-100_000:-50_000] = 0
    shard.write_bytes(content.tobytes())
    spoilt = cached.run("spoilt", "--set", "cache.mode=only")
    assert spoilt.returncode == 1
    assert shard.name in spoilt.stderr
    assert "cache verify" in spoilt.stderr
    assert cached.rows("spoilt", "quarantine") == []
    assert cached.draftwire("cache", "verify", str(cached.folder / "cache")).returncode == 1


def test_a_spilling_run_trains_as_a_streaming_one_and_fills_the_cache(cached: Any, as_json: Any) -> None:
    """K4: first epoch, a second run from a partly filled cache, and one from the cache alone: the same losses."""
    assert cached.run("streamed", *ONE_EPOCH).returncode == 0
    folder = cached.folder / "cache"
    spill = (*ONE_EPOCH, "--set", "cache.mode=spill")
    first = cached.run("first", *spill, "--set", "cache.max_bytes=2200000")
    assert first.returncode == 0, first.stderr
    assert "cache: 0 of the 64 samples" in first.stdout
    assert [row["text"] for row in cached.rows("first", "event") if row["what"] == "cache full"]
    partly = as_json(cached.draftwire("cache", "verify", str(folder), "--json"))
    assert 0 < partly["samples"] < 64
    second = cached.run("second", *spill)
    assert second.returncode == 0, second.stderr
    assert f"cache: {partly['samples']} of the 64 samples" in second.stdout
    filled = cached.rows("second", "stream")[-1]["filled"]
    assert filled["replay-0"] > 0
    assert filled["producer-0"] > 0
    # Blocks that found a quarter of the slots taken were passed over, and counted.
    state = cached.rows("second", "stream")[-1]
    whole = as_json(cached.draftwire("cache", "verify", str(folder), "--json"))
    assert whole["samples"] + state["spill_passed_over"] >= 64
    as_json(cached.draftwire("cache", "build", str(cached.config), "--json"))
    assert cached.run("only", *ONE_EPOCH, "--set", "cache.mode=only").returncode == 0
    for name in ("first", "second", "only"):
        assert cached.losses(name) == cached.losses("streamed")


def test_later_epochs_use_what_the_first_has_left_and_half_a_block_may_come_from_there(
    cached: Any, as_json: Any
) -> None:
    """Two-part fills: a cache of 40 of 64 samples, whose blocks another seed has cut otherwise."""
    short = ("cache", "build", str(cached.config), "--set", "data.max_samples=40", "--json")
    assert as_json(cached.draftwire(*short))["computed"] == 40
    run = cached.run("mixed", "--set", "train.epochs=4", "--set", "train.seed=5", "--set", "cache.mode=spill")
    assert run.returncode == 0, run.stderr
    state = cached.rows("mixed", "stream")[-1]
    assert state["filled"]["replay-0"] > 0
    assert state["filled"]["producer-0"] > 0
    # More parts than blocks were filled: some blocks came from both.
    plan = json.loads((cached.runs / "mixed/plan.json").read_bytes())
    assert plan["samples"] == 64
    assert sum(state["filled"].values()) > state["blocks_produced"] or state["spilled"] > 0
    assert state["quarantined"] == 0
    assert as_json(cached.draftwire("cache", "ls", str(cached.folder / "cache"), "--json"))["samples"] == 64


def test_a_damaged_shard_costs_a_spilling_run_nothing_but_the_work(cached: Any, as_json: Any) -> None:
    assert as_json(cached.draftwire("cache", "build", str(cached.config), "--json"))["samples"] == 64
    (shard,) = (cached.folder / "cache").glob("shard-*.safetensors")
    content = np.fromfile(shard, np.uint8)
    content[-200_000:-150_000] = 0
    shard.write_bytes(content.tobytes())
    run = cached.run("spoilt", *ONE_EPOCH, "--set", "cache.mode=spill")
    assert run.returncode == 0, run.stderr
    events = [row["text"] for row in cached.rows("spoilt", "event") if row["what"] == "cache damaged"]
    assert events
    assert shard.name in events[0]
    state = cached.rows("spoilt", "stream")[-1]
    assert state["quarantined"] == 0
    assert state["filled"]["producer-0"] > 0


def test_the_process_of_the_cache_may_be_killed(cached: Any) -> None:
    """What it was writing is gone, its slots are not, and the run goes on with another."""
    started = cached.start("killed", "--set", "train.epochs=60", "--set", "cache.mode=spill")
    cached.wait_for_step("killed", 5)
    (pid,) = [pid for pid, line in processes() if "producer.replay" in line and "killed" in line]
    os.kill(pid, signal.SIGKILL)
    assert started.wait(150) == 0
    ring = cached.rows("killed", "stream")[-1]["ring"]
    assert (ring["lost"], ring["spilling"]) == (0, 0)
    assert cached.draftwire("cache", "verify", str(cached.folder / "cache")).returncode == 0


def processes() -> list[tuple[int, str]]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
    return found
