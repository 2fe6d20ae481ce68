"""What must be the same on a GPU: golden training steps, and the features that arrive in host memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from consumer.golden import recompute
from producer.compiled import compile_and_warm_up
from producer.config import TargetConfig
from producer.fill import fill
from producer.forward import features_of
from producer.lease_layout import lease_table
from producer.selfcheck import self_check
from producer.stage import DeviceStage, HostStage, pinned_arena
from producer.taps import Taps
from producer.target import load_target
from protocol.arena import Arena, create_arena
from protocol.block import checksum, views
from protocol.messages import Lease

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


def make_lease(lengths: tuple[int, ...], positions: tuple[int, ...], slot: int, seed: int) -> Lease:
    tokens = np.random.default_rng(seed).integers(0, 400, sum(lengths)).astype("<i4")
    samples = tuple(range(len(lengths)))
    return Lease(
        step=0, index=slot, kind="model", attempt=slot + 1, slot=slot, samples=samples, lengths=lengths,
        positions=positions, token_ids=tokens.tobytes(), loss_mask=bytes(len(tokens)),
    )  # fmt: skip


@pytest.mark.parametrize("positions", [(0, 1, 2), (0, 2)], ids=["whole", "part"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_copied_by_the_gpu_are_those_of_the_cpu_and_add_up(make_folder, make_job, positions, dtype):
    """Two under way at once, in turn over two buffers, into a pinned ring."""
    job = make_job(width=64, dtype=dtype, taps=(0, 2))
    fd = create_arena(6, 1 << 16, 1 << 30)
    arena = Arena(fd, 6, 1 << 16)
    os.close(fd)
    leases = [make_lease((40, 7, 23 + slot), positions, slot, slot) for slot in range(6)]
    folder = make_folder("llama")
    target = load_target(folder, TargetConfig(dtype=dtype), "cuda")
    stage = DeviceStage(target.device, 128, 64, target.dtype)
    with pinned_arena(arena, target.device), Taps(target.layers, job.taps) as taps:
        filled = [fill(target, taps, lease, arena.slot(lease.slot), job, stage)[0] for lease in leases]
        found = [block.wait() for block in filled]
    on_cpu = load_target(folder, TargetConfig(dtype=dtype), "cpu")
    for lease, (total, busy_s) in zip(leases, found, strict=True):
        expected = bytearray(1 << 16)
        with Taps(on_cpu.layers, job.taps) as taps:
            fill(on_cpu, taps, lease, memoryview(expected), job, HostStage())
        wanted, got = (
            views(memory, lease_table(lease, job)) for memory in (memoryview(expected), arena.slot(lease.slot))
        )
        ends = np.cumsum((0, *lease.lengths))
        rows = np.concatenate([np.arange(ends[at], ends[at + 1]) for at in positions])
        assert total == checksum(np.ascontiguousarray(got["features"][rows]))
        assert busy_s > 0
        a, b = (torch.from_numpy(each["features"][rows].copy()).view(target.dtype).float() for each in (wanted, got))
        assert float((a - b).norm() / a.norm()) <= (1e-4 if dtype == "float32" else 2e-2)
        for name in ("token_ids", "loss_mask", "offsets", "samples"):
            np.testing.assert_array_equal(wanted[name], got[name])


@pytest.mark.timeout(600)
def test_compiled_layers_and_batches_without_a_mask_pass_the_self_check(make_folder):
    target = load_target(make_folder("qwen3"), TargetConfig(dtype="bfloat16"), "cuda")
    samples = [np.arange(6, 6 + length, dtype=np.int32) for length in (120, 65, 9, 2)]
    padding_mask, checks = self_check(target, (0, 2), samples, compiled=True)
    assert not padding_mask
    assert all(check.sound for check in checks)
    with Taps(target.layers, (0, 2)) as taps:
        compile_and_warm_up(replace(target, padding_mask=False), taps)
