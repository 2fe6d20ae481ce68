"""Runs that fill a disk cache while they read it, in real processes: the losses of a streamed run, whatever happens."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from protocol.cache import Cache
from protocol.cache_verify import verify_shards

SPILL = ("--set", "cache.mode=spill")
EVALUATED = ("--set", "train.epochs=1")
EPOCH = (*EVALUATED, "--set", "data.eval=[]")
# At a small rate: other rounding of cached samples grows with every step.
LONG = ("--set", "train.epochs=40", "--set", "data.eval=[]", "--set", "train.lr=1e-5")


def samples_in(cached: Any) -> int:
    """How many samples are in the cache, each of them once and as its checksum says."""
    cache = Cache.open(cached.folder / "cache")
    assert verify_shards(cache.folder, cache.manifest, lambda done, total: None) == []
    assert not list(cache.folder.glob("*.part"))
    assert sum(len(index.samples) for index in cache.shards.values()) == len(cache.samples)
    return len(cache.samples)


def last(cached: Any, name: str) -> dict[str, Any]:
    row: dict[str, Any] = cached.rows(name, "stream")[-1]
    assert row["ring"]["lost"] == row["ring"]["spilling"] == 0
    return row


def events(cached: Any, name: str, what: str) -> list[str]:
    return [row["text"] for row in cached.rows(name, "event") if row["what"] == what]


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


def assert_alike(cached: Any, name: str, other: str, rel: float = 1e-5) -> None:
    """Every step once, of the same samples, and the same losses but for rounding: the rows of a batch round as the
    batch is made up, and another seed or epoch, or a part of a block, makes up others."""
    places = [
        [(row["step"], row["samples"], row["tokens"]) for row in cached.rows(each, "step")] for each in (name, other)
    ]
    assert places[0] == places[1] != []
    assert [loss for _, loss in cached.losses(name)] == pytest.approx(
        [loss for _, loss in cached.losses(other)], rel=rel
    )


def damage(folder: Path, samples: int) -> str:
    """Zeros in the features of some samples of the only shard; returns its name."""
    (path,) = folder.glob("shard-*.safetensors")
    index = json.loads(path.with_suffix(".json").read_bytes())
    with path.open("r+b") as file:
        for sample in index["samples"][:samples]:
            file.seek(sample[2])  # where its features begin
            file.write(bytes(64))
    return path.name


def test_k4_k2_spilling_runs_train_as_a_streamed_one_until_the_target_is_not_needed(
    cached: Any, as_json: Any, patch_children: Any, no_target: dict[str, str]
) -> None:
    """An empty cache and a budget that it exceeds; more room; everything there, the evaluation shard included: the same
    losses, bit for bit."""
    assert cached.run("streamed", *EVALUATED).returncode == 0
    first = cached.run("first", *EVALUATED, *SPILL, "--set", "cache.max_bytes=2150000")
    assert first.returncode == 0, first.stderr
    assert "cache: 0 of the 64 samples are in" in first.stdout
    full = "the cache takes nothing more, the run goes on: cache.max_bytes is used up"
    assert events(cached, "first", "cache full") == [full]
    assert full in first.stdout
    held = samples_in(cached)
    assert held == last(cached, "first")["cache"]["kept"]
    assert 0 < held < 64
    second = cached.run("second", *EVALUATED, *SPILL)
    assert second.returncode == 0, second.stderr
    assert f"cache: {held} of the 64 samples are in" in second.stdout
    state = last(cached, "second")
    assert min(state["filled"][name] for name in ("replay-0", "producer-0")) > 0
    # What a block finds of the slots taken it is not written, and counted: in the report, too.
    there = samples_in(cached)
    assert there + state["cache"]["passed_over"] >= 64
    report = (cached.runs / "second/report.md").read_text()
    assert f"- cache: {state['cache']['held']} of 64 samples held" in report
    if there < 64:
        as_json(cached.draftwire("cache", "build", str(cached.config), "--json"))
    patch_children(no_target)
    covered = cached.run("covered", *EVALUATED, *SPILL)
    assert covered.returncode == 0, covered.stderr
    assert "holds all 64 samples; no target is loaded" in covered.stdout
    assert last(cached, "covered")["filled"].keys() == {"replay-0"}
    assert len(cached.losses("streamed")) > 5
    accepted = [row["acceptance_mean"] for row in cached.rows("streamed", "eval")]
    for name in ("first", "second", "covered"):
        assert cached.losses(name) == cached.losses("streamed")
        assert [row["acceptance_mean"] for row in cached.rows(name, "eval")] == accepted != []


def test_k1_e1_half_a_block_may_come_from_the_cache_and_a_damaged_shard_costs_only_the_work(
    cached: Any, as_json: Any
) -> None:
    """A cache of 40 of 64 samples, some of them damaged, and a seed that cuts blocks otherwise. Later epochs use what
    the first has left."""
    short = ("cache", "build", str(cached.config), "--set", "data.max_samples=40", "--set", "data.eval=[]", "--json")
    assert as_json(cached.draftwire(*short))["computed"] == 40
    shard = damage(cached.folder / "cache", 5)
    other = ("--set", "train.epochs=3", "--set", "train.seed=5", "--set", "data.eval=[]")
    assert cached.run("streamed", *other).returncode == 0
    mixed = cached.run("mixed", *other, *SPILL)
    assert mixed.returncode == 0, mixed.stderr
    state = last(cached, "mixed")
    assert state["filled"]["replay-0"] > 0
    assert sum(state["filled"].values()) > len(cached.losses("mixed"))  # a step has one block here, and some two parts
    assert state["cache"]["damaged"] == 5
    assert state["cache"]["kept"] > 5
    assert state["quarantined"] == 0
    (said,) = events(cached, "mixed", "cache damaged")
    assert shard in said
    assert_alike(cached, "mixed", "streamed")
    assert samples_in(cached) + state["cache"]["passed_over"] >= 64  # the damaged ones are kept anew
    if state["cache"]["held"] == 64:
        assert len(events(cached, "mixed", "cache complete")) == 1


@pytest.mark.slow
def test_e1_damage_in_a_run_without_a_target_starts_it_again_with_one(cached: Any, as_json: Any) -> None:
    """In the middle of the run, after a checkpoint; no step is trained twice or left out."""
    as_json(cached.draftwire("cache", "build", str(cached.config), "--set", "data.eval=[]", "--json"))
    long = ("--set", "train.epochs=3", "--set", "data.eval=[]")
    assert cached.run("whole", *long, *SPILL).returncode == 0
    shard = damage(cached.folder / "cache", 2)
    run = cached.run("spoilt", *long, *SPILL)
    assert run.returncode == 0, run.stderr
    assert "holds all 64 samples; no target is loaded" in run.stdout
    assert "no target is loaded; the run starts again by itself from its next checkpoint" in run.stdout
    assert shard in events(cached, "spoilt", "cache damaged")[0]
    assert len(cached.rows("spoilt", "start")) == 2
    assert_alike(cached, "spoilt", "whole")
    assert last(cached, "spoilt")["quarantined"] == 0
    samples_in(cached)


MOVES = """
whole_job = make_job
def make_job(*arguments):
    job, notes = whole_job(*arguments)
    return msgspec.structs.replace(job, regroups=job.spills and bool(job.producers)), notes
"""


@pytest.mark.slow
def test_fp8_is_what_a_spilling_run_keeps_and_a_later_one_reads(cached: Any, as_json: Any) -> None:
    fp8 = ("--set", "cache.dtype=fp8")
    first = cached.run("first", *EPOCH, *SPILL, *fp8)
    assert first.returncode == 0, first.stderr
    assert 0 < samples_in(cached) <= 64
    as_json(cached.draftwire("cache", "build", str(cached.config), *fp8, "--json"))
    assert samples_in(cached) == 64
    assert cached.run("second", *EPOCH, *SPILL, *fp8).returncode == 0
    assert last(cached, "second")["filled"].keys() == {"replay-0"}
    assert_alike(cached, "second", "first", rel=0.02)


@pytest.mark.slow
def test_a_complete_cache_starts_the_run_again_without_producers(cached: Any, patch_children: Any) -> None:
    """As on a machine with several GPUs, of which this one has none."""
    long = (*LONG, "--set", "train.epochs=12")
    assert cached.run("streamed", *long).returncode == 0
    patch_children({"launch.start": MOVES})
    run = cached.run("moved", *long, *SPILL)
    assert run.returncode == 0, run.stderr
    assert "nothing needs the target; the run starts again by itself from its next checkpoint" in run.stdout
    assert "holds all 64 samples; no target is loaded" in run.stdout
    assert len(cached.rows("moved", "start")) == 2
    assert cached.rows("moved", "end")[-1]["state"] == "done"
    assert last(cached, "moved")["filled"].keys() == {"replay-0"}
    assert_alike(cached, "moved", "streamed", rel=1e-4)


@pytest.mark.slow
def test_two_producers_and_two_ranks_fill_and_read_one_cache(cached: Any) -> None:
    two = (*EPOCH, "--set", "gpus.split=2:2")
    assert cached.run("streamed", *two).returncode == 0
    for name in ("first", "second"):
        run = cached.run(name, *two, *SPILL)
        assert run.returncode == 0, run.stderr
        assert cached.losses(name) == cached.losses("streamed")
        last(cached, name)
    assert last(cached, "second")["filled"]["replay-0"] > 0
    other = cached.run("other", "--resume", "--set", "train.epochs=2", "--set", "data.eval=[]", *SPILL)
    assert other.returncode == 0, other.stderr
    assert samples_in(cached) + last(cached, "other")["cache"]["passed_over"] >= 64


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("way", ["shm", "zmq"])
def test_kills_of_everybody_leave_a_whole_cache_and_the_losses_of_an_undisturbed_run(cached: Any, way: str) -> None:
    """K1: a rewind passes samples twice, and nothing is written twice."""
    assert cached.run("quiet", *LONG).returncode == 0
    started = cached.start("killed", *LONG, *SPILL, "--set", f"ring.transport={way}")
    for step, child in ((3, "replay"), (12, "producer-0"), (30, "replay"), (70, "consumer-0"), (140, "replay")):
        cached.wait_for_step("killed", step)
        os.kill(pid_of(cached, "killed", child), signal.SIGKILL)
    assert started.wait(240) == 0, (cached.folder / "killed.out").read_text()
    state = last(cached, "killed")
    assert state["ring"]["free"] == state["ring_slots"]
    assert state["quarantined"] == 0
    assert_alike(cached, "killed", "quiet", rel=1e-4)
    assert samples_in(cached) == 64


@pytest.mark.slow
@pytest.mark.parametrize("where", ["write", "sync"])
def test_k2_a_disk_that_fills_up_costs_what_would_have_been_kept(
    cached: Any, as_json: Any, patch_children: Any, where: str
) -> None:
    call = {"write": "pwrite", "sync": "fsync"}[where]
    code = f"""
def full(*arguments):
    raise OSError(28, "No space left on device")
class Full:
    def __getattr__(self, name, real=os):
        return full if name == "{call}" else getattr(real, name)
os = Full()
"""
    assert cached.run("streamed", *EPOCH).returncode == 0
    as_json(cached.draftwire("cache", "build", str(cached.config), "--set", "data.max_samples=10", "--json"))
    before = samples_in(cached)
    patch_children({"protocol.direct": code})
    run = cached.run("full", *EPOCH, *SPILL)
    patch_children({})
    assert run.returncode == 0, run.stderr
    assert ["disk is full" in text for text in events(cached, "full", "cache full")] == [True]
    assert samples_in(cached) == before
    assert_alike(cached, "full", "streamed")


REFUSED = """
import sys
if "producer.replay" in sys.orig_argv:
    def in_use(*arguments, **named):
        raise RequestError("the cache is in use")
"""


@pytest.mark.slow
def test_a_process_of_the_cache_that_cannot_be_started_again_costs_only_the_cache(
    cached: Any, patch_children: Any
) -> None:
    assert cached.run("streamed", *EPOCH).returncode == 0
    patch_children({"protocol.cache": REFUSED})
    run = cached.run("crippled", *EPOCH, *SPILL)
    assert run.returncode == 0, run.stderr
    assert len(events(cached, "crippled", "cache lost")) == 1
    assert cached.losses("crippled") == cached.losses("streamed")
