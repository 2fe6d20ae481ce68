"""A consumer whose device has no room for a block: the run ends at once, and with smaller blocks it goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

# In consumer/trainer.py: blocks of more tokens than this do not fit, from the thirtieth on.
TRAINER = """
_micro_step, _blocks = Trainer.micro_step, []

def micro_step(self, block):
    _blocks.append(block)
    if len(_blocks) > 30 and len(block.token_ids) > 90:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return _micro_step(self, block)

Trainer.micro_step = micro_step
"""


@pytest.mark.timeout(240)
def test_it_is_not_tried_again_and_resumed_with_the_keys_that_were_named(workspace: Any, patch_children: Any) -> None:
    """N6."""
    patch_children({"consumer.trainer": TRAINER})
    settings = ("--set", "data.eval=[]", "--set", "train.epochs=4")
    failed = workspace.run("short", *settings)
    assert failed.returncode == 1
    assert "out of memory with blocks of up to 160 tokens" in failed.stderr
    for key in ("train.microbatch_tokens (now 160)", "train.microbatch_draft_tokens", "train.anchors (now 8)"):
        assert key in failed.stderr
    assert [row for row in workspace.rows("short", "event") if row["what"] in ("rewind", "gone")] == []
    cursor = json.loads((workspace.runs / "short/checkpoints/latest/cursor.json").read_text())
    assert (cursor["next_step"], cursor["microbatch_tokens"]) == (20, 160)
    resumed = workspace.run("short", "--resume", *settings, "--set", "train.microbatch_tokens=80")
    assert resumed.returncode == 0, resumed.stderr
    assert "the same steps in other blocks" in resumed.stdout
    assert len({step for step, _ in workspace.losses("short")}) == workspace.losses("short")[-1][0]
