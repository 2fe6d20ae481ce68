"""Runs that end other than with their plan: on time, after a cool-down, over too many skipped steps."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
import torch
from safetensors.torch import load_file

from protocol.pace import cooldown_end

# Of the second of two ranks, so that the first learns of it by the reduction alone. Steps count from 0 here.
POISON = """
import os

_micro_step = Trainer.micro_step

def micro_step(self, block):
    poisoned = os.environ.get("RANK") == "1"
    if poisoned and block.step == 39:
        block.features[:] = float("nan")
    _micro_step(self, block)
    if poisoned and block.step == 29:
        next(weight for weight in self.drafter.parameters() if weight.grad is not None).grad.view(-1)[0] = float("inf")

Trainer.micro_step = micro_step
"""
LONG = ("--set", "train.epochs=2000", "--set", "eval.every=0", "--set", "train.checkpoint_every=100000")


def not_finite(path) -> list[str]:
    return [name for name, tensor in load_file(path).items() if not torch.isfinite(tensor).all()]


@pytest.mark.timeout(200)
def test_a_gradient_and_a_loss_that_are_not_finite_cost_two_steps(workspace, patch_children, as_json):
    """N2: skipped on both ranks, weights stay finite, samples are written down, nothing of them enters an average. Over
    the limit the run ends with its last good checkpoint, and goes on from there once the cause is gone."""
    patch_children({"consumer.trainer": POISON})
    two = ("--set", 'gpus.split="1:2"', "--set", "train.max_steps=60", "--set", "train.batch_tokens=320")
    two = (*two, "--set", "train.epochs=40", "--set", "train.checkpoint_every=10", "--set", "eval.every=0")
    finished = workspace.run("poisoned", *two)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = workspace.rows("poisoned", "step")
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert [row["step"] for row in rows if row["skipped"]] == [30, 40]
    assert [row["step"] for row in rows if row["loss"] is None] == [40]
    assert rows[29]["grad_norm"] is None
    events = [row for row in workspace.rows("poisoned", "event") if row["what"] == "skipped"]
    assert [event["step"] for event in events] == [30, 40]
    assert [len(set(event["sample_ids"])) for event in events] == [rows[29]["samples"], rows[39]["samples"]]
    status = as_json(workspace.draftwire("status", "poisoned", "--json"))
    assert (status["skipped"], status["step"], status["samples_trained"]) == (2, 60, rows[-1]["samples_trained"])
    newest = workspace.rows("poisoned", "stream")[-1]
    assert (newest["skipped"], newest["loss"]) == (2, rows[-1]["loss"])
    assert newest["imbalance"] >= 1.0 <= newest["imbalance_planned"]
    assert len(newest["rss_bytes"]) == 2
    folder = workspace.runs / "poisoned"
    for path in (folder / "checkpoints/latest/state.safetensors", folder / "export/model.safetensors"):
        assert not_finite(path) == []

    strict = (*two, "--set", "train.skip_limit=0.01")
    failed = workspace.run("strict", *strict)
    assert failed.returncode == 1
    assert re.search(r"consumer-\d .*2 of the newest 100 steps .*train\.skip_limit = 0\.01", failed.stderr, re.DOTALL)
    assert [row["step"] for row in workspace.rows("strict", "event") if row["what"] == "skipped"] == [30, 40]
    latest = (workspace.runs / "strict/checkpoints/latest").resolve()
    assert latest.name == "step-000030"
    assert not_finite(latest / "state.safetensors") == []
    patch_children({})
    assert workspace.run("strict", *strict, "--resume").returncode == 0
    assert not any(row["skipped"] for row in workspace.rows("strict", "step")[30:])


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_hours_end_a_run_as_done_and_more_hours_go_on_with_it(workspace, as_json):
    for_seconds = lambda seconds: (*LONG, "--set", f"train.max_hours={seconds / 3600}")  # noqa: E731
    finished = workspace.run("timed", *for_seconds(4))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    status = as_json(workspace.draftwire("status", "timed", "--json"))
    assert status["state"] == "done"
    assert "train.max_hours are over" in status["reason"]
    assert 0 < status["step"] == status["export_step"] < status["steps"]
    assert status["acceptance_after"] is not None
    cursor = json.loads((workspace.runs / "timed/checkpoints/latest/cursor.json").read_bytes())
    assert cursor["next_step"] == status["step"]
    assert 4.0 <= cursor["trained_s"] < 8.0  # with the last evaluation
    rates = [row["lr"] for row in workspace.rows("timed", "step")]
    assert rates[-1] < 0.2 * max(rates)  # the cosine has come nearly to its end, of 20,000 steps

    again = workspace.run("timed", *for_seconds(4), "--resume")
    assert again.returncode == 0
    assert "over already" in again.stdout
    more = workspace.run("timed", *for_seconds(12), "--resume")
    assert more.returncode == 0, more.stdout + more.stderr
    steps = [row["step"] for row in workspace.rows("timed", "step")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > status["step"]


@pytest.mark.timeout(200)
def test_a_cool_down_outlives_a_kill_and_ends_the_run_as_done(workspace, as_json):
    arguments = (*LONG, "--set", 'train.schedule="wsd"', "--set", "train.warmup=0.0", "--set", 'gpus.split="1:2"')
    running = workspace.start("cooled", *arguments)
    workspace.wait_for_step("cooled", 120)
    said = workspace.draftwire("cooldown", "cooled")
    assert said.returncode == 0, said.stderr
    start, end = map(int, re.findall(r"(?:step|after step) (\d+)", said.stdout))
    assert end == cooldown_end(start, 10**6)
    workspace.wait_for_step("cooled", start + 3)
    saved = workspace.runs / f"cooled/checkpoints/step-{start:06d}"
    while not saved.exists():  # the weights before the rate fell, and the order
        assert running.poll() is None
    os.kill(running.pid, signal.SIGKILL)
    running.wait()

    resumed = workspace.run("cooled", *arguments, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    rows = workspace.rows("cooled", "step")
    assert [row["step"] for row in rows] == list(range(1, end + 1))
    rates = {row["step"] - 1: row["lr"] for row in rows}
    assert rates[start] == rates[0] == 1e-2
    steps = end - start
    for step in range(start, end):
        assert rates[step] == pytest.approx(1e-2 * (0.1 + 0.9 * (end - step) / steps))
    status = as_json(workspace.draftwire("status", "cooled", "--json"))
    assert (status["state"], status["step"], status["export_step"]) == ("done", end, end)
    assert "the cool-down is over" in status["reason"]
    assert workspace.draftwire("cooldown", "cooled").returncode == 2
    again = workspace.run("cooled", *arguments, "--resume")
    assert (again.returncode, "the cool-down is over already" in again.stdout) == (0, True)
