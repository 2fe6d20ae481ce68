"""Two consumers train what one would have trained: the same steps, reduced once, rounding apart."""

from __future__ import annotations

import pytest

STEPS = 20


@pytest.mark.timeout(200)
def test_two_consumers_agree_with_one_and_with_themselves_after_a_stop(workspace):
    arguments = ("--set", f"train.max_steps={STEPS}", "--set", "train.batch_tokens=320", "--set", "train.epochs=40")
    assert workspace.run("one", *arguments).returncode == 0
    both = workspace.run("both", *arguments, "--set", 'gpus.split="1:2"')
    assert both.returncode == 0, both.stdout + both.stderr
    alone, shared = workspace.losses("one"), workspace.losses("both")
    assert [step for step, _ in alone] == [step for step, _ in shared] == list(range(1, STEPS + 1))
    for (_, loss), (_, other) in zip(alone, shared, strict=True):
        assert other == pytest.approx(loss, rel=1e-4)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("samples", [1, 3])
def test_fewer_samples_than_two_ranks_can_share_still_end(workspace, samples):
    finished = workspace.run(
        "few", "--set", f"data.max_samples={samples}", "--set", "train.epochs=3", "--set", 'gpus.split="1:2"'
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert workspace.rows("few", "step")[-1]["samples_trained"] == 3 * samples
