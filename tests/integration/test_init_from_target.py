"""A run whose drafter starts from the target's last layers, and the request for one that cannot."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

NO_STEP = ("--set", "train.max_steps=2", "--set", "train.lr=1e-12", "--set", "eval.every=0")


def test_a_run_starts_from_the_target_s_last_layers(workspace):
    finished = workspace.run("warm", "--set", "drafter.init=target", *NO_STEP)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    drafter = load_file(workspace.runs / "warm/export/model.safetensors")
    target = load_file(workspace.folder / "target/model.safetensors")
    for place in (0, 1):
        for name in ("self_attn.k_proj", "mlp.down_proj"):
            ours, theirs = drafter[f"layers.{place}.{name}.weight"], target[f"model.layers.{place + 2}.{name}.weight"]
            torch.testing.assert_close(ours.float(), theirs.to(ours.dtype).float(), rtol=1e-2, atol=1e-6)
    # The checkpoint holds them now: a resumed run does not read the file.
    assert (workspace.runs / "warm/drafter_init.safetensors").is_file()


@pytest.mark.slow
def test_without_being_asked_nothing_is_written(workspace):
    assert workspace.run("cold", *NO_STEP).returncode == 0
    assert not (workspace.runs / "cold/drafter_init.safetensors").exists()


@pytest.mark.slow
def test_sizes_that_cannot_match_are_refused_before_anything_is_loaded(workspace):
    refused = workspace.run("never", "--set", "drafter.init=target", "--set", "drafter.mlp=32")
    assert refused.returncode == 2
    assert "drafter.mlp is 32, the target's 64" in refused.stderr
    assert not (workspace.runs / "never/log/setup.log").exists()
