"""A device that computes by itself says one step later what came of a step: nothing else may differ."""

from __future__ import annotations

import pytest

# What a GPU would answer.
LATER = "Pending.known = property(lambda self: False)"
SAME = ("step", "epoch", "loss", "accuracy", "lr", "grad_norm", "samples_trained", "tokens_trained", "skipped")


@pytest.mark.timeout(240)
def test_a_run_whose_outcomes_come_later_is_the_same(workspace, patch_children):
    common = ("--set", "train.epochs=3", "--set", "eval.every=10", "--set", "train.checkpoint_every=7")
    rows = {}
    for name, code in (("at_once", {}), ("later", {"consumer.outcome": LATER})):
        patch_children(code)
        if name == "later":  # in two starts, the first of which ends between two checkpoints
            began = workspace.run(name, *common, "--set", "train.max_steps=12")
            assert began.returncode == 0, began.stderr
        done = workspace.run(name, *common, *(["--resume"] if name == "later" else []))
        assert done.returncode == 0, done.stderr
        steps = {row["step"]: [row[key] for key in SAME] for row in workspace.rows(name, "step")}
        evals = {row["step"]: row["acceptance_mean"] for row in workspace.rows(name, "eval")}
        checkpoints = {row["step"] for row in workspace.rows(name, "event") if row["what"] == "checkpoint"}
        rows[name] = steps, evals, checkpoints
    steps, evals, checkpoints = rows["at_once"]
    assert list(rows["later"][0]) == list(steps) == list(range(1, len(steps) + 1))
    # Only the first start's schedule was that of a shorter run.
    assert [row[4] for row in rows["later"][0].values()][12:] == [row[4] for row in steps.values()][12:]
    assert [row[6:] for row in rows["later"][0].values()] == [row[6:] for row in steps.values()]
    assert set(evals) <= set(rows["later"][1])
    assert checkpoints <= rows["later"][2]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_losses_are_the_same_too(workspace, patch_children):
    common = ("--set", "train.epochs=2", "--set", "data.eval=[]", "--set", 'gpus.split="1:2"')
    found = []
    for name, code in (("at_once", {}), ("later", {"consumer.outcome": LATER})):
        patch_children(code)
        done = workspace.run(name, *common)
        assert done.returncode == 0, done.stderr
        found.append([[row[key] for key in SAME] for row in workspace.rows(name, "step")])
    assert found[0] == found[1]
