"""Which GPUs and which arithmetic a run has, looked up from its job, its target's config.json and nvidia-smi."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launch import utilisation
from launch.flops import Costs, target_flop
from launch.machine import Gpu
from launch.utilisation import run_costs
from producer.locate import read_target_facts

TARGET = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 100,
}
DATASET: Any = SimpleNamespace(lengths=np.array([10, 30]), eligible=np.array([4, 20]))


@pytest.fixture
def job_of(tmp_path: Path, make_job: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the job of a run on two H200s and an unknown card, in `tmp_path`."""
    gpus = [Gpu("NVIDIA H200", 0, 0), Gpu("NVIDIA H200", 0, 0), Gpu("Some Card", 0, 0)]
    monkeypatch.setattr(utilisation, "visible_gpus", lambda: gpus)
    (tmp_path / "config.json").write_text(json.dumps(TARGET))

    def make(precision: str = "auto", **changes: Any) -> Any:
        (tmp_path / "config.resolved.json").write_text(json.dumps({"train": {"precision": precision}}))
        fields = {
            "target_dir": str(tmp_path),
            "dtype": "bfloat16",
            "shape": {"target_layer_ids": [1, 3]},
            "producers": ("cuda:0",),
            "consumers": ("cuda:1",),
        }
        return make_job(**(fields | changes))

    return make


def test_both_sides_are_known(job_of: Any, tmp_path: Path) -> None:
    found = run_costs(job_of(), tmp_path, DATASET)
    assert (found.producer_peak, found.consumer_peak) == (989e12, 989e12)
    assert found.target_flop_per_token == target_flop(read_target_facts(tmp_path), 3, (100 + 900) / 40 / 2)
    assert found.anchor_context == (10 * 4 + 30 * 4) / 8 / 2  # four anchors a sample at most


@pytest.mark.parametrize(
    ("changes", "producer", "consumer"),
    [
        ({"dtype": "float32"}, None, 989e12),
        ({"precision": "fp32"}, 989e12, None),
        ({"producers": ("cuda:0", "cuda:1"), "consumers": ("cuda:2",)}, 2 * 989e12, None),
        ({"consumers": ("cpu",)}, 989e12, None),
    ],
)
def test_a_side_that_is_not_known(job_of: Any, tmp_path: Path, changes: Any, producer: Any, consumer: Any) -> None:
    found = run_costs(job_of(**changes), tmp_path, DATASET)
    assert (found.producer_peak, found.consumer_peak) == (producer, consumer)


def test_on_a_cpu_nothing_is_looked_up(make_job: Any, tmp_path: Path) -> None:
    assert run_costs(make_job(), tmp_path / "nothing", DATASET) == Costs()
