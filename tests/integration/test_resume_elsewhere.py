"""A run goes on with other producers and consumers: what is left of its epochs is what it would have been."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import pytest

# Every sample that is trained on, by step.
RECORD = """
import os

_micro_step = Trainer.micro_step

def micro_step(self, block):
    with open(os.environ["TRAINED"], "a") as file:
        file.write("".join(f"{block.epoch} {block.step} {sample}\\n" for sample in block.samples))
    _micro_step(self, block)

Trainer.micro_step = micro_step
"""


def read(path: Path) -> dict[int, dict[int, list[int]]]:
    """Epoch -> step -> samples, in ascending order."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in path.read_text().splitlines():
        epoch, step, sample = map(int, line.split())
        found[epoch][step].append(sample)
    return {epoch: {step: sorted(samples) for step, samples in steps.items()} for epoch, steps in found.items()}


@pytest.mark.timeout(240)
def test_other_counts_train_on_exactly_what_is_left(workspace, patch_children, monkeypatch):
    """R2: 64 samples, two epochs, saved with 2 + 2 in the middle of the first; resumed with 1 + 1 and with 3 + 1."""
    patch_children({"consumer.trainer": RECORD})
    common = ("--set", "train.epochs=2", "--set", "data.eval=[]", "--set", "train.checkpoint_every=1000")
    monkeypatch.setenv("TRAINED", str(workspace.folder / "before"))
    began = workspace.run("narrow", *common, "--set", "train.max_steps=5", "--set", 'gpus.split="2:2"')
    assert began.returncode == 0, began.stdout + began.stderr
    before = read(workspace.folder / "before")
    assert list(before) == [0]
    shutil.copytree(workspace.runs / "narrow", workspace.runs / "wide", symlinks=True)

    left = {}
    for name, split in (("narrow", "1:1"), ("wide", "3:1")):
        monkeypatch.setenv("TRAINED", str(workspace.folder / name))
        resumed = workspace.run(name, *common, "--resume", "--set", f'gpus.split="{split}"')
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert "other consumers" in resumed.stdout
        left[name] = read(workspace.folder / name)
    assert left["narrow"] == left["wide"]
    assert min(left["wide"][0]) == 5
    epochs = [[*before[0].values(), *left["wide"][0].values()], list(left["wide"][1].values())]
    assert [sorted(sample for step in steps for sample in step) for steps in epochs] == [list(range(64))] * 2
    assert epochs[0] != epochs[1]  # another order, so other steps
    assert workspace.rows("wide", "step")[-1]["samples_trained"] == 128
