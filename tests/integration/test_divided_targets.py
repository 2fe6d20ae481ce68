"""A target divided over two ranks against the same one whole: features, answers, and what is written of its weights.

Every kind of target whose plan divides its layers, by one second rank that loads them in turn. The ranks are processes
of their own (tests/doubles/divided_ranks.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

KINDS = [
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_multimodal",
]
PLAIN = ["llama", "qwen3"]  # of which a drafter can start
RANKS = Path(__file__).parents[1] / "doubles/divided_ranks.py"
DEADLINE_S = 150

pytestmark = pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="torch would divide over the GPUs"
)


def run_ranks(folder: Path, make_model: Callable[..., Any], kinds: Sequence[str], *how: str) -> Path:
    """The folder of what the ranks have found of `kinds`."""
    models, out, log_path = folder / "models", folder / "out", folder / "log"
    out.mkdir()
    for kind in kinds:
        make_model(kind, initializer_range=0.2).save_pretrained(models / kind)
    with log_path.open("wb") as log:
        command = [sys.executable, "-P", str(RANKS), str(models), str(out), *how]
        first = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        code = first.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if first.poll() != 0:
            os.killpg(first.pid, signal.SIGKILL)  # a rank waits for hours for another that has died
            first.wait()
    assert code == 0, f"code {code} after {sorted(path.name for path in out.glob('*.pt'))}:\n{log_path.read_text()}"
    return out


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any, make_model: Callable[..., Any]) -> Path:
    return run_ranks(tmp_path_factory.mktemp("divided"), make_model, KINDS)


def outcome(found: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    both = torch.load(found / f"{kind}.pt")
    return both["whole"], both["divided"]


def off(features: torch.Tensor, expected: torch.Tensor) -> float:
    return float((features - expected).abs().max() / expected.abs().max())


def contents(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def assert_same_files(path: Path, expected: Path) -> None:
    (facts, tensors), (expected_facts, expected_tensors) = contents(path), contents(expected)
    assert facts == expected_facts
    assert tensors.keys() == expected_tensors.keys()
    assert all(torch.equal(tensor, expected_tensors[name]) for name, tensor in tensors.items())


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_divided_target_is_the_whole_one(kind: str, found: Path) -> None:
    whole, divided = outcome(found, kind)
    assert divided["held"] < 0.6 * whole["held"]
    for features, expected in zip(divided["features"], whole["features"], strict=True):
        assert off(features, expected) < 1e-4
    assert divided["answers"] == whole["answers"]
    assert_same_files(found / f"{kind}-divided/target_io", found / f"{kind}-whole/target_io")
    assert divided["self_check"] == (False, [0, 3])


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", PLAIN)
def test_a_drafter_starts_from_the_same_layers(kind: str, found: Path) -> None:
    assert_same_files(found / f"{kind}-divided/drafter_init", found / f"{kind}-whole/drafter_init")


@pytest.mark.slow
def test_compiled_layers_divide_too(tmp_path: Path, make_model: Callable[..., Any]) -> None:
    whole, divided = outcome(run_ranks(tmp_path, make_model, ["qwen3"], "compile"), "qwen3")
    for features in divided["compiled"]:
        assert off(features, whole["features"][0]) < 1e-4
