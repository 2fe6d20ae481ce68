"""`draftwire run` from start to end, and what its folder answers afterwards."""

from __future__ import annotations

import json

import pytest

EVAL_KEYS = {
    "acceptance_mean",
    "acceptance_token_weighted",
    "acceptance_per_position",
    "interval",
    "prompts",
    "tokens",
    "lengths",
}


def test_a_run_trains_a_drafter_and_answers_for_it(workspace, as_json):
    finished = workspace.run("first")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    folder = workspace.runs / "first"

    status = as_json(workspace.draftwire("status", "first", "--json"))
    assert status["state"] == "done"  # which keys there are is tests/unit/test_summary.py's
    assert status["step"] == status["steps"] == len(workspace.losses("first"))
    assert status["samples_trained"] == 64 * 12
    assert status["restarts"] == status["quarantined"] == 0
    losses = [loss for _, loss in workspace.losses("first")]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])

    measured = as_json(workspace.draftwire("eval", "first", "--json"))
    assert set(measured) >= EVAL_KEYS
    assert measured["acceptance_mean"] == status["acceptance_after"]
    assert sum(map(sum, measured["lengths"])) == measured["tokens"]
    assert as_json(workspace.draftwire("eval", "first@best", "--json"))["acceptance_mean"] >= status["acceptance_after"]

    report = (folder / "report.md").read_text()
    assert f"{status['acceptance_after']:.3f}" in report
    assert (folder / "report/acceptance.svg").exists()

    exported = json.loads((folder / "export/config.json").read_text())
    assert exported["rope_theta"] == exported["rope_parameters"]["rope_theta"]
    # N5: the id that was said is the one that engines read, and no row of the data has it.
    assert f"mask token {exported['dflash_config']['mask_token_id']}\n" in finished.stdout
    assert "num_speculative_tokens" in (folder / "export/README.md").read_text()
    assert workspace.draftwire("export", "first@20", str(workspace.folder / "out")).returncode == 2  # pruned by now
    assert workspace.draftwire("export", "first", str(workspace.folder / "out")).returncode == 0
    assert (workspace.folder / "out/model.safetensors").exists()


@pytest.mark.slow
def test_a_finished_run_is_not_run_again(workspace):
    assert workspace.run("once", "--set", "train.max_steps=4").returncode == 0
    refused = workspace.run("once", "--set", "train.max_steps=4")
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    again = workspace.run("once", "--resume", "--set", "train.max_steps=4")
    assert again.returncode == 0
    assert "done already" in again.stdout
    assert len(workspace.losses("once")) == 4
