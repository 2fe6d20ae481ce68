"""What must be the same on a GPU: golden training steps, and the features that arrive in host memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from consumer.golden import recompute
from producer.config import TargetConfig
from producer.forward import features_of
from producer.taps import Taps
from producer.target import load_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GOLDENS = sorted((Path(__file__).parent.parent / "golden").glob("*.safetensors"))


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_golden_steps(path):
    errors = recompute(path, "cuda")
    assert max(errors.output, errors.loss, errors.grad) <= 1e-4


def test_features_equal_those_of_the_cpu(make_folder):
    folder = make_folder("llama")
    samples = [np.arange(6, 6 + length, dtype=np.int32) for length in (3, 40, 7)]
    arrived = []
    for device in ("cpu", "cuda"):
        target = load_target(folder, TargetConfig(dtype="float32"), device)
        out = np.zeros((50, 64), np.float32)
        with Taps(target.layers, (0, 2)) as taps:
            features_of(target, taps, samples, out)
        arrived.append(out)
    assert np.linalg.norm(arrived[0] - arrived[1]) <= 1e-4 * np.linalg.norm(arrived[0])
