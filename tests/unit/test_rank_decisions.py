"""What a rank decides at its start: by job.json and the configuration, never by what it happens to see on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from consumer.beginning import begin
from consumer.checkpoint import Snapshot, write_checkpoint
from consumer.evaluator import held_out_rows
from consumer.worker import Rank
from protocol.dataset import write_dataset
from protocol.errors import RequestError, RunError
from protocol.job import write_job


@pytest.fixture
def make_rank(tmp_path: Path, make_drafter: Callable[..., Any]) -> Callable[..., Any]:
    """What a rank begins with: a run folder with this [data] eval, a fresh drafter, a job."""

    def make(held_out: bool = True, checkpoint: str | None = None) -> Any:
        sections = {"data": {"eval": [{"path": "e.jsonl"}] if held_out else [], "train": []}, "drafter": {}}
        (tmp_path / "config.resolved.json").write_text(json.dumps(sections))
        return tmp_path, SimpleNamespace(checkpoint=checkpoint), make_drafter(seed=3), None, None, 7

    return make


def test_an_evaluation_shard_that_went_missing_is_an_error_and_not_a_run_without_evaluation(
    make_rank: Callable[..., Any],
) -> None:
    """M3: the configuration says that there is one."""
    with pytest.raises(RequestError, match=r"eval\.safetensors"):
        held_out_rows(make_rank()[0], 0)


@pytest.mark.parametrize(("rank", "held_out"), [(1, True), (0, False)])
def test_an_evaluation_shard_is_read_by_the_first_rank_of_a_run_that_evaluates(
    make_rank: Callable[..., Any], tmp_path: Path, rank: int, held_out: bool
) -> None:
    """M3: one that lies there decides nothing."""
    (tmp_path / "eval.safetensors").write_bytes(b"left by an earlier configuration")
    assert held_out_rows(make_rank(held_out)[0], rank) is None


def test_a_checkpoint_that_the_job_does_not_name_is_not_started_from(
    make_rank: Callable[..., Any],
    make_snapshot: Callable[..., Snapshot],
    make_drafter: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """M3: the launcher chose; what a rank finds beside it changes nothing."""
    write_checkpoint(tmp_path / "checkpoints", make_snapshot(4))
    rank = make_rank()
    assert begin(*rank) == (None, 0.0)
    for ours, fresh in zip(rank[2].parameters(), make_drafter(seed=7).parameters(), strict=True):
        assert torch.equal(ours, fresh)


def test_a_checkpoint_that_the_job_names_and_a_rank_does_not_see_is_an_error(
    make_rank: Callable[..., Any], make_snapshot: Callable[..., Snapshot], tmp_path: Path
) -> None:
    """M3: not a fresh start, nor the newest that it does see."""
    write_checkpoint(tmp_path / "checkpoints", make_snapshot(2))
    named = tmp_path / "checkpoints/step-000004"
    with pytest.raises(RequestError, match="step-000004"):
        begin(*make_rank(checkpoint=str(named)))


def test_a_rank_that_sees_other_data_than_the_run_was_planned_with_does_not_start(
    make_job: Callable[..., Any], tmp_path: Path
) -> None:
    """M3: it would take another number of steps than its peers, and leave them in a reduction."""
    samples = [(np.arange(6, dtype=np.int32), np.ones(6, np.uint8)) for _ in range(4)]
    write_dataset(tmp_path / "data", samples, {"fingerprint": "f"})
    (tmp_path / "config.resolved.json").write_text(json.dumps({"train": {}, "eval": {}}))
    write_job(tmp_path, make_job(dataset_dir=str(tmp_path / "data"), plan_hash="of other data"))
    with pytest.raises(RunError, match="holds another dataset"):
        Rank(tmp_path, 0, -1)
