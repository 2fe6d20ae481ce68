"""A target divided over two ranks against the same one whole: features, answers, and what is written of its weights.

Every kind of target whose plan divides its layers, by one second rank that loads them in turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from producer.compiled import compile_target
from producer.config import TargetConfig
from producer.drafter_init import write_drafter_init
from producer.forward import features_of
from producer.generate import greedy_answers
from producer.group import join_group
from producer.mirror import Command, encode
from producer.selfcheck import self_check
from producer.taps import Taps
from producer.target import Target, load_target
from producer.target_io import write_target_io

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
LAYERS, HIDDEN = 4, 32
DEVICES = ("cpu", "cpu")
WHOLE, DIVIDED = TargetConfig(dtype="float32"), TargetConfig(dtype="float32", tensor_parallel=2)
SECOND_RANK = """
import os, sys
from pathlib import Path
from producer.config import TargetConfig
from producer.follower import follow
from producer.group import join_group
from producer.mirror import commands
from producer.target import load_target
join_group(1, ("cpu", "cpu"), int(sys.argv[1]))
while kind := os.read(int(sys.argv[2]), 1):
    folder, fd = sys.argv[3 + 2 * kind[0] :][:2]
    target = load_target(Path(folder), TargetConfig(dtype="float32", tensor_parallel=2), "cpu")
    follow(target, commands(os.fdopen(int(fd), "rb")))
"""

pytestmark = pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="torch would divide over the GPUs"
)


class Second:
    """Has the second rank run what this one runs."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def tell(self, command: Command) -> None:
        os.write(self._pipe, encode(command))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any, make_model: Callable[..., Any]) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, path in paths.items():
        make_model(kind, initializer_range=0.2).save_pretrained(path)
    return paths


@pytest.fixture(scope="module")
def loads(folders: dict[str, Path]) -> Iterator[Callable[[str], int]]:
    """Has the second rank load a kind and follow; returns the pipe that it reads until that is closed."""
    environment, store_fd = dict(os.environ), os.memfd_create("ranks")
    which_fd, say_fd = os.pipe()
    ends = {kind: os.pipe() for kind in KINDS}
    arguments = [text for kind in KINDS for text in (str(folders[kind]), str(ends[kind][0]))]
    second = subprocess.Popen(
        [sys.executable, "-P", "-c", SECOND_RANK, str(store_fd), str(which_fd), *arguments],
        pass_fds=[store_fd, which_fd, *(read_fd for read_fd, _ in ends.values())],
    )
    try:
        join_group(0, DEVICES, store_fd)

        def load(kind: str) -> int:
            os.write(say_fd, bytes([KINDS.index(kind)]))
            return ends[kind][1]

        yield load
        os.close(say_fd)
        dist.destroy_process_group()
        assert second.wait(30) == 0
    finally:
        second.kill()
        second.wait()
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        for fd in (store_fd, which_fd, *(read_fd for read_fd, _ in ends.values())):
            os.close(fd)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(kind: str, folders: dict[str, Path]) -> Target:
    return load_target(folders[kind], WHOLE, "cpu")


@pytest.fixture(scope="module")
def divided(kind: str, folders: dict[str, Path], loads: Callable[[str], int]) -> Iterator[Target]:
    pipe = loads(kind)
    yield replace(load_target(folders[kind], DIVIDED, "cpu"), mirror=Second(pipe))
    os.close(pipe)


def samples() -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 400, length).astype(np.int32) for length in (64, 60, 23, 7, 1)]


def features(target: Target, ids: tuple[int, ...]) -> torch.Tensor:
    out = np.empty((155, len(ids) * HIDDEN), np.float32)
    with Taps(target.layers, ids) as taps:
        assert features_of(target, taps, samples(), out) == 0
    return torch.from_numpy(out)


def contents(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def held(target: Target) -> int:
    """Numbers of the decoder layers that this rank holds."""
    parts = [getattr(weight, "_local_tensor", weight) for weight in target.layers.parameters()]
    return sum(part.numel() for part in parts)


def test_a_divided_target_is_the_whole_one(kind: str, whole: Target, divided: Target, tmp_path: Path) -> None:
    assert held(divided) < 0.6 * held(whole)
    for ids in (tuple(range(LAYERS)), (1,), (2, 0)):  # the last tap ends the pass, on both ranks
        expected = features(whole, ids)
        assert float((features(divided, ids) - expected).abs().max() / expected.abs().max()) < 1e-4

    prompts = [sample[:20] for sample in samples()]
    ends = {"max_new_tokens": 5, "stop_ids": frozenset({3, 399})}
    assert greedy_answers(divided, prompts, **ends) == greedy_answers(whole, prompts, **ends)

    for name, target in (("whole", whole), ("divided", divided)):
        write_target_io(tmp_path / name, target, "weights")
    (facts, tensors), (expected_facts, expected_tensors) = contents(tmp_path / "divided"), contents(tmp_path / "whole")
    assert facts == expected_facts
    assert tensors.keys() == expected_tensors.keys()
    assert all(torch.equal(tensor, expected_tensors[name]) for name, tensor in tensors.items())

    padding_mask, checks = self_check(divided, (0, 3), samples(), compiled=False)
    assert (padding_mask, [check.tap for check in checks]) == (False, [0, 3])


@pytest.mark.parametrize("kind", PLAIN, indirect=True, scope="module")
def test_a_drafter_starts_from_the_same_layers(whole: Target, divided: Target, tmp_path: Path) -> None:
    for name, target in (("whole", whole), ("divided", divided)):
        write_drafter_init(tmp_path / name, target, 2, "weights")
    expected, found = contents(tmp_path / "whole")[1], contents(tmp_path / "divided")[1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("kind", ["qwen3"], indirect=True, scope="module")
def test_compiled_layers_divide_too(whole: Target, divided: Target) -> None:
    expected = features(whole, (0, 3))
    compile_target(divided, LAYERS)  # last of all: they stay compiled
    for _ in range(2):
        assert float((features(divided, (0, 3)) - expected).abs().max() / expected.abs().max()) < 1e-4
