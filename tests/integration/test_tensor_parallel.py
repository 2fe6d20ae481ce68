"""Runs whose producer is several processes: one of them killed, all of them killed, and what cannot be divided.

What the ranks compute is tests/integration/test_divided_targets.py's.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="torch would divide over the GPUs"
)

STEPS = ("--set", "train.max_steps=60")
DIVIDED = (*STEPS, "--set", "target.tensor_parallel=2", "--set", 'gpus.split="2:1"')


def wait_for_follower(workspace, other_than: int) -> int:
    deadline = time.monotonic() + 60
    while not (found := [pid for pid in workspace.followers() if pid != other_than]):
        assert time.monotonic() < deadline, "no follower was started"
        time.sleep(0.02)
    return found[0]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_that_are_killed_come_again_and_the_run_may_go_on_with_another_number(workspace):
    calm = workspace.run("calm", *DIVIDED)
    assert calm.returncode == 0, calm.stdout + calm.stderr
    assert "producers on cpu with cpu" in calm.stdout
    expected = workspace.losses("calm")
    assert len(expected) == 60

    started = workspace.start("killed", *DIVIDED)
    workspace.wait_for_step("killed", 5)
    (follower,) = workspace.followers()
    os.kill(follower, signal.SIGKILL)
    second = wait_for_follower(workspace, other_than=follower)
    workspace.wait_for_step("killed", 25)
    os.kill(workspace.pid_of("killed", "producer-0"), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while second in workspace.followers():
        assert time.monotonic() < deadline, "a follower outlives the rank that started it"
        time.sleep(0.02)
    workspace.wait_for_step("killed", 40)
    started.send_signal(signal.SIGINT)
    assert started.wait(60) == 75
    said = (workspace.folder / "killed.out").read_text()
    assert "producer-0 ended with code 1: a rank of the target is gone: producer-0.1 was killed by SIGKILL" in said
    assert "producer-0 was killed by SIGKILL" in said
    assert workspace.followers() == []
    found = workspace.losses("killed")
    assert found == expected[: len(found)]

    resumed = workspace.run("killed", "--resume", *STEPS)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "killed had another target.tensor_parallel: 2 -> 1" in resumed.stdout
    assert "self-check passed" in resumed.stdout  # of the target as it runs from here on
    assert "evaluation answers" not in resumed.stdout
    assert workspace.losses("killed") == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in expected]


UNLOADABLE = """
import sys
whole = load_target

def load_target(folder, config, device):
    if "follower" in sys.argv[0]:
        raise RequestError("no room here")
    return whole(folder, config, device)
"""


def test_a_rank_that_cannot_load_ends_the_set_up_with_its_reason(workspace, patch_children):
    patch_children({"producer.target": UNLOADABLE})
    refused = workspace.run("unloadable", *DIVIDED)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "a rank of the target is gone: setup.1 ended with code 2: no room here" in refused.stderr
    assert workspace.followers() == []


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (0, "target.tensor_parallel = 0: use at least 1"),
        (3, "target.tensor_parallel = 3 does not divide the target's num_attention_heads = 4; use one of 1, 2"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_once(workspace, ranks, problem):
    refused = workspace.run("odd", "--set", f"target.tensor_parallel={ranks}", "--set", 'gpus.split="3:1"')
    assert refused.returncode == 2
    assert problem in refused.stderr
