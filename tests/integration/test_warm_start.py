"""Fine-tuning: a run that starts from an exported drafter begins where that one was."""

from __future__ import annotations

import json

import pytest

# Measured are the weights as they are served, so an export that holds just those is measured alike.
SERVED = ("--set", 'train.precision="bf16-master32"', "--set", "eval.every=0")


@pytest.mark.timeout(240)
def test_a_run_from_an_export_begins_at_the_acceptance_that_the_export_had(workspace):
    """R3: in either format, with nothing of [drafter] repeated; what is taken over is said."""
    answers = workspace.folder / "answers.jsonl"
    made = workspace.draftwire("generate", str(workspace.config), str(answers), "--max-new-tokens", "12")
    assert made.returncode == 0, made.stderr
    # Else there is nothing to learn for the target's own answers.
    data = ("--set", f'data.train=[{{path="{answers}"}}]', "--set", "train.anchors=32", "--set", "train.lr=3e-3")
    trained = workspace.run("trained", *SERVED, *data, "--set", "train.max_steps=80")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    last = workspace.rows("trained", "eval")[-1]
    assert last["acceptance_mean"] > workspace.rows("trained", "eval")[0]["acceptance_mean"]
    other = workspace.folder / "speculators"
    assert workspace.draftwire("export", "trained", str(other), "--format", "speculators").returncode == 0
    text = workspace.config.read_text()
    start, end = text.index("[drafter]"), text.index("[train]")
    workspace.config.write_text(text[:start] + text[end:])
    for name, folder in (("zlab", workspace.runs / "trained/export"), ("spec", other)):
        init = ("--set", f"drafter.init_from={folder}")
        tuned = workspace.run(name, *SERVED, *data, *init, "--set", "train.max_steps=2")
        assert tuned.returncode == 0, tuned.stdout + tuned.stderr
        assert "drafter.block_size = 4, from init_from" in tuned.stdout
        assert 'drafter.layer_types = ["sliding_attention", "full_attention"], from init_from' in tuned.stdout
        first = workspace.rows(name, "eval")[0]
        for key in ("acceptance_mean", "acceptance_per_position", "tokens"):
            assert first[key] == pytest.approx(last[key], abs=1e-4)
        (told,) = [row for row in workspace.rows(name, "event") if row["what"] == "init_from"]
        assert told["acceptance_mean"] == first["acceptance_mean"]
        assert f"{first['acceptance_mean']:.3f} before the first step" in tuned.stdout
        resolved = json.loads((workspace.runs / name / "config.resolved.json").read_bytes())
        assert resolved["drafter"]["sliding_window"] == 8
    refused = workspace.run("wide", *data, *init, "--set", "drafter.block_size=8")
    assert refused.returncode == 2
    assert "drafter.block_size is 8, and the drafter in" in refused.stderr
    # It goes on from its own checkpoint, whatever became of the folder.
    other.rename(workspace.folder / "gone")
    again = workspace.run("spec", *SERVED, *data, *init, "--set", "train.max_steps=3", "--resume")
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.slow
def test_a_warm_start_that_is_worth_nothing_is_called_so(workspace):
    """R3: weights that learned another model's answers stand for those of another target."""
    made = workspace.run("other", *SERVED, "--set", "train.max_steps=50")
    assert made.returncode == 0, made.stdout + made.stderr
    told = workspace.run(
        "tuned", *SERVED, "--set", f"drafter.init_from={workspace.runs}/other/export", "--set", "train.max_steps=1"
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "WARNING, hardly any draft is accepted" in told.stdout
