"""`draftwire eval` on a checkpoint and its run folder alone: what does not belong together is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from consumer.checkpoint import Snapshot, write_checkpoint
from launch.checkpoint_commands import evaluate
from protocol.errors import RequestError


@pytest.fixture
def run_of(tmp_path: Path, make_snapshot: Callable[..., Snapshot]) -> Callable[..., Path]:
    """A run folder with a checkpoint, and a target_io file whose target differs from the drafter's by `changes`."""

    def make(**changes: int) -> Path:
        config: dict[str, Any] = {"num_layers": 6, "hidden_size": 16, "vocab_size": 40, **changes}
        write_checkpoint(tmp_path / "checkpoints", make_snapshot(10))
        (tmp_path / "config.resolved.json").write_text("{}")
        metadata = {"config": json.dumps(config), "fingerprint": "f", "tied": "true"}
        ends = {"embed_tokens": torch.zeros(config["vocab_size"], config["hidden_size"])}
        save_file(ends, tmp_path / "target_io.safetensors", metadata=metadata)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("key", "ours", "theirs"), [("num_layers", 6, 4), ("hidden_size", 16, 32), ("vocab_size", 40, 41)]
)
def test_a_drafter_beside_another_target_is_refused_with_both_values(
    run_of: Callable[..., Path], key: str, ours: int, theirs: int
) -> None:
    with pytest.raises(RequestError, match=f"another target: {key} {ours} against {theirs}"):
        evaluate(str(run_of(**{key: theirs})))


def test_a_drafter_beside_its_own_target_gets_as_far_as_the_prompts(run_of: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match=r"eval\.safetensors: not a readable eval shard"):
        evaluate(str(run_of()))
