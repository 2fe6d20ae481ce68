"""What a person sees of one run from outside: the first minute, a stalled producer, status and stop by every name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest


@pytest.mark.timeout(240)
def test_one_run_watched_from_its_first_second_to_its_end(workspace: Any) -> None:
    nothing = workspace.draftwire("status")
    assert nothing.returncode == 2
    assert "no run in runs/ yet: `draftwire run CONFIG` starts one" in nothing.stderr

    began = time.monotonic()
    started = workspace.start("watched", "--set", "train.epochs=2000", "--set", "eval.every=0")
    said = workspace.folder / "watched.out"
    _wait_for("run watched: producers on cpu; consumers on cpu", said, 10)
    early = workspace.draftwire("status", "watched")
    assert early.stdout.startswith("watched: running, being prepared"), early.stdout + early.stderr
    assert workspace.draftwire("stop", "watched").returncode == 0
    assert started.wait(20) == 130
    assert "interrupted before there was a checkpoint" in said.read_text()
    ended = workspace.draftwire("status", "watched").stdout
    assert ended.startswith("watched: interrupted (while it was being prepared)"), ended

    began = time.monotonic()
    started = workspace.start("watched", "--set", "train.epochs=2000", "--set", "eval.every=0")  # nothing to resume
    workspace.wait_for_step("watched", 5)
    _wait_for("step 0/", said, 1)  # the first progress line came while processes loaded, or with the first step
    assert time.monotonic() - began < 60
    for name in ("watched", "latest", "runs/watched", str(workspace.runs / "watched")):
        assert workspace.draftwire("status", name).stdout.startswith("watched: running\nstep "), name
    wrong = workspace.draftwire("status", "wached")
    assert wrong.returncode == 2
    assert "did you mean watched?" in wrong.stderr

    producer = workspace.pid_of("watched", "producer-0")
    os.kill(producer, signal.SIGSTOP)
    try:
        _wait_for("producer-0 has been silent for ", said, 40)
    finally:
        os.kill(producer, signal.SIGCONT)
    line = next(line for line in said.read_text().splitlines() if "producer-0 has been silent for " in line)
    assert "waiting for producer-0 " in line  # it holds a lease, or was stopped between two
    assert all(part in line for part in ("| produced ", " blocks, ", "| trained ", "| ring ", "| waits: ", "| left "))

    stopped = workspace.draftwire("stop", "latest")
    assert stopped.returncode == 0, stopped.stderr
    assert started.wait(30) == 75
    watched = workspace.draftwire("status", "watched", "--watch")  # of a run that has ended: once
    assert watched.stdout.count("watched: interrupted") == 1
    report = (workspace.runs / "watched/report.md").read_text()
    assert report.startswith("# watched: interrupted")
    for part in ("- versions: draftwire ", "- machine: ", "- command: `draftwire run ", "- held out: `"):
        assert part in report, part


def _wait_for(words: str, said: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while words not in said.read_text():
        assert time.monotonic() < deadline, f"no {words!r} within {timeout_s} s in: {said.read_text()}"
        time.sleep(0.1)
