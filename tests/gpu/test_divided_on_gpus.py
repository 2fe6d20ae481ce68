"""A target divided over two GPUs by NCCL, with a follower in a process of its own, against the same one on one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from producer.config import TargetConfig
from producer.forward import features_of
from producer.generate import greedy_answers
from producer.ranks import loaded
from producer.taps import Taps
from producer.target_io import write_target_io

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_two_gpus_compute_what_one_does(
    make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what the group sets is for this test
    folder = make_folder(kind, initializer_range=0.2)
    samples = [np.arange(length, dtype=np.int32) for length in (64, 60, 23, 7, 1)]
    features, answers, ends = [], [], []
    # Not the first two in order: a rank must take the device that it was given.
    for devices in (["cuda:1"], ["cuda:1", "cuda:0"]):
        config = TargetConfig(dtype="float32", tensor_parallel=len(devices))
        out = np.empty((155, 128), np.float32)
        with loaded(folder, config, devices, tmp_path / "ranks.log") as target, Taps(target.layers, range(4)) as taps:
            assert target.device == torch.device(devices[0])
            features_of(target, taps, samples, out)
            answers.append(greedy_answers(target, samples, max_new_tokens=6, stop_ids=frozenset({3})))
            write_target_io(tmp_path / "io.safetensors", target, "weights")
        features.append(out)
        ends.append((tmp_path / "io.safetensors").stat().st_size)
    assert np.abs(features[1] - features[0]).max() < 1e-4 * np.abs(features[0]).max()
    assert answers[1] == answers[0]
    assert ends[1] == ends[0]
