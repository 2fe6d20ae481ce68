"""`draftwire tune` with real processes: both sides measured alone, kept, replayed, and a split tried."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from typing import Any

import msgspec
import pytest

from launch.live import Screen
from launch.measurements import read_measurements
from launch.signals import Signals
from launch.tune_runs import train_alone
from protocol.job import read_job

SHORT = ("--seconds", "1.5")


class Calm(Signals):
    """Nobody wants anything to end."""

    def __init__(self) -> None:
        self.wishes, self.cooldown = 0, False


def test_both_sides_are_measured_kept_and_a_split_is_tried(workspace: Any) -> None:
    done = workspace.draftwire("tune", str(workspace.config), *SHORT, "--verify", "2", "--json")
    assert done.returncode == 0, done.stderr
    tuned: dict[str, Any] = json.loads(done.stdout)
    assert (tuned["best"]["producers"], tuned["best"]["consumers"]) == (1, 1)
    assert tuned["best"]["tokens_per_s"] == pytest.approx(
        min(tuned["best"]["producers_alone"], tuned["best"]["trainers_alone"]), rel=0.2
    )
    (verified,) = tuned["verified"]
    assert verified["predicted"] == tuned["best"]["tokens_per_s"]
    # Both sides share two processors with whatever else runs here: that they ran is what can be held to.
    assert 0.1 < verified["measured"] / verified["predicted"] < 10
    (path,) = (workspace.runs / "tune").glob("measured-*.json")
    measured = read_measurements(path)
    assert measured.producers[0].tokens_per_s > 0
    assert measured.trainer.cost_s + measured.trainer.block_s > 0
    assert measured.work.epochs == 12
    assert "one producer alone: " in done.stderr
    assert "the disk of cache writes " in done.stderr
    assert measured.room.disk_write_bytes_per_s > 1e6 < measured.room.disk_read_bytes_per_s
    spill = next(mode for mode in tuned["modes"] if mode["mode"] == "spill")
    assert spill["hours"] > 0
    again = workspace.draftwire("tune", str(workspace.config), "--gpus", "8")
    assert "measured before" in again.stderr
    assert "one rank alone" not in again.stderr
    assert any(line.startswith("best: ") for line in again.stdout.splitlines())
    replayed = workspace.draftwire("tune", "--from", str(path), "--gpus", "8", "--json")
    assert json.loads(replayed.stdout)["config"] == tuned["config"]

    # With several GPUs `tune` also times the reduction of that many ranks; here of two on the CPU.
    run_dir = workspace.runs / "tune" / workspace.config.stem
    job = msgspec.structs.replace(read_job(run_dir), consumers=("cpu", "cpu"))
    found = train_alone(job, run_dir, 2, 0.0, Calm(), Screen())
    assert found["ranks"] == 2
    assert all(0 < seconds < 60 for seconds in found["reductions_s"])


def test_an_interrupt_ends_it_at_once_and_leaves_nothing(workspace: Any) -> None:
    command = workspace.command("tune", str(workspace.config), "--seconds", "60")
    process = subprocess.Popen(command, cwd=workspace.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log = workspace.runs / "tune" / "config" / "log" / "producer-0.log"
    deadline = time.monotonic() + 60
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"interrupted" in said
    assert b"Traceback" not in said
    assert not list((workspace.runs / "tune").glob("measured-*.json"))
