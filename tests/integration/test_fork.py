"""A fork: another run's weights, a plan of its own."""

from __future__ import annotations

import pytest


@pytest.mark.timeout(200)
def test_a_fork_starts_where_the_other_run_ended_and_says_what_differs(workspace):
    short = ("--set", "train.max_steps=20")
    assert workspace.run("trunk", *short).returncode == 0
    (before,) = [row for row in workspace.rows("trunk", "eval") if row["step"] == 20]

    forked = workspace.run("branch", "--fork", "trunk@20", *short, "--set", "train.lr=5e-3", "--set", "train.seed=3")
    assert forked.returncode == 0, forked.stdout + forked.stderr
    assert "trunk had another train.lr: 0.01 -> 0.005" in forked.stdout
    first = workspace.rows("branch", "eval")[0]
    assert first["step"] == 0
    assert first["acceptance_mean"] == before["acceptance_mean"]
    rows = workspace.rows("branch", "step")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[0]["loss"] < 0.98 * workspace.rows("trunk", "step")[0]["loss"]

    # The optimiser's second moments are those of the trunk's gradients, so the first steps differ.
    with_optimiser = ("--fork", "trunk", "--with-optimiser", *short, "--set", "train.lr=5e-3", "--set", "train.seed=3")
    assert workspace.run("grafted", *with_optimiser).returncode == 0
    other = workspace.rows("grafted", "step")
    assert other[0]["loss"] == rows[0]["loss"]
    assert other[1]["loss"] != rows[1]["loss"]


@pytest.mark.slow
def test_a_fork_that_does_not_fit_is_refused(workspace):
    assert workspace.run("trunk", "--set", "train.max_steps=2").returncode == 0
    narrow = workspace.run("narrow", "--fork", "trunk", "--set", "drafter.mlp=32")
    assert narrow.returncode != 0
    assert "drafter.mlp is 32, and the drafter in" in narrow.stderr
    assert workspace.run("absent", "--fork", "trunk@77").returncode == 2
    assert workspace.run("alone", "--with-optimiser").returncode == 2
