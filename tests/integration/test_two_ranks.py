"""Two consumers train what one would have trained: the same steps, reduced once, rounding apart."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

STEPS = 20


@pytest.mark.timeout(200)
def test_two_consumers_over_zeromq_agree_with_one_over_shared_memory(workspace):
    arguments = ("--set", f"train.max_steps={STEPS}", "--set", "train.batch_tokens=320", "--set", "train.epochs=40")
    assert workspace.run("one", *arguments).returncode == 0
    both = workspace.run("both", *arguments, "--set", 'gpus.split="2:2"', "--set", 'ring.transport="zmq"')
    assert both.returncode == 0, both.stdout + both.stderr
    alone, shared = workspace.losses("one"), workspace.losses("both")
    assert [step for step, _ in alone] == [step for step, _ in shared] == list(range(1, STEPS + 1))
    for (_, loss), (_, other) in zip(alone, shared, strict=True):
        assert other == pytest.approx(loss, rel=1e-4)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("samples", [1, *(pytest.param(samples, marks=pytest.mark.slow) for samples in (2, 3, 7, 101))])
def test_however_many_samples_two_ranks_share_they_end(workspace, make_chats, samples):
    # Short last steps, micro-steps that one rank has no block for, and more samples than a step takes.
    train = make_chats(samples, "few.jsonl", first=500)
    finished = workspace.run(
        "few",
        *("--set", f'data.train=[{{path="{train}"}}]', "--set", "data.eval=[]", "--set", "train.epochs=2"),
        *("--set", 'gpus.split="1:2"'),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert workspace.rows("few", "step")[-1]["samples_trained"] == 2 * samples


@pytest.mark.timeout(200)
def test_samples_filtered_late_leave_empty_blocks_and_both_ranks_end(workspace, make_chats):
    """The target gives NaN for two of three conversations: they are found on the consumers only."""
    train = make_chats(1, "few.jsonl", first=500)
    with train.open("a") as file:
        for row in range(2):
            turns = [{"role": "user", "content": f"~{row}"}, {"role": "assistant", "content": f"hello {row}"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    target = workspace.folder / "target"
    poisoned = PreTrainedTokenizerFast.from_pretrained(target).convert_tokens_to_ids("~")
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][poisoned] = float("nan")
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    finished = workspace.run(
        "filtered",
        *("--set", f'data.train=[{{path="{train}"}}]', "--set", "data.eval=[]", "--set", "train.epochs=4"),
        *("--set", "train.quarantine_limit=0.7", "--set", 'gpus.split="2:2"', "--set", 'ring.transport="zmq"'),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "quarantined samples 2" in finished.stdout
    assert workspace.rows("filtered", "step")[-1]["samples_trained"] == 4
    (said,) = {row["text"].partition(": ")[2] for row in workspace.rows("filtered", "event") if row["what"] == "bad"}
    assert "is not finite" in said


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_one_held_out_row_is_enough_for_two_consumers(workspace):
    turns = [{"role": "user", "content": "unlike all others"}, {"role": "assistant", "content": "so is this answer"}]
    (workspace.folder / "held_out.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    finished = workspace.run("single", "--set", "train.max_steps=4", "--set", 'gpus.split="1:2"')
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert [row["prompts"] for row in workspace.rows("single", "eval")] == [1, 1]
