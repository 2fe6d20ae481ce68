"""Loggers beside a real run: one that works gets its curves, one that fails costs an event, none is refused."""

from __future__ import annotations

import json
import os

import pytest

# Writes down what it is given, in place of sending it anywhere.
WANDB = """
import json, os

def _note(what):
    with open(os.environ["NOTED"], "a") as file:
        file.write(json.dumps(what) + "\\n")

class Run:
    def log(self, values):
        _note(values)

    def finish(self):
        _note("finish")

def init(**settings):
    _note({"project": settings["project"], "resume": settings["resume"], "lr": settings["config"]["train"]["lr"]})
    return Run()
"""


@pytest.mark.timeout(120)
def test_a_run_is_logged_and_a_logger_that_cannot_begin_costs_an_event(workspace, monkeypatch):
    packages = workspace.folder / "packages"
    (packages / "tensorboard").mkdir(parents=True)
    (packages / "tensorboard/__init__.py").write_text("raise RuntimeError('built for another Python')")
    (packages / "wandb.py").write_text(WANDB)
    arguments = ("--set", "log.tensorboard=true", "--set", 'log.wandb="drafts"', "--set", "train.max_steps=6")
    missing = workspace.run("logged", *arguments)
    assert missing.returncode == 2
    assert "log.tensorboard needs the package tensorboard: pip install 'draftwire[tensorboard]'" in missing.stderr

    monkeypatch.setenv("PYTHONPATH", f"{packages}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("NOTED", str(workspace.folder / "noted"))
    finished = workspace.run("logged", *arguments)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (event,) = [row for row in workspace.rows("logged", "event") if row["what"] == "logger"]
    assert event["text"] == "tensorboard is off: RuntimeError: built for another Python"
    first, *curves, last = map(json.loads, (workspace.folder / "noted").read_text().splitlines())
    assert (first, last) == ({"project": "drafts", "resume": "allow", "lr": 1e-2}, "finish")
    losses = [(values["step"], values["step/loss"]) for values in curves if "step/loss" in values]
    assert losses == workspace.losses("logged")
    assert [values["step"] for values in curves if "eval/acceptance_mean" in values] == [0, 6]
