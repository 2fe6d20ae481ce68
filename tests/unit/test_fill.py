"""What a producer writes into a slot: the features of each sample alone, and no row more than it has tokens.

Case E3 of the public failure reports.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from producer.config import TargetConfig
from producer.fill import fill
from producer.stage import HostStage
from producer.taps import Taps
from producer.target import load_target
from protocol.block import block_table, checksum, table_bytes, views
from protocol.messages import Lease

LENGTHS = (40, 7, 64, 1, 23)
TAPS = (0, 2)


@pytest.fixture
def target(make_folder: Any) -> Any:
    return load_target(make_folder("qwen3"), TargetConfig(dtype="float32"), "cpu")


def make_lease(positions: tuple[int, ...]) -> tuple[Lease, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(6, 380, length, dtype=np.int32) for length in LENGTHS]
    lease = Lease(
        step=3,
        index=1,
        kind="model",
        attempt=5,
        slot=0,
        samples=(11, 12, 13, 14, 15),
        lengths=LENGTHS,
        positions=positions,
        token_ids=np.concatenate(rows).astype("<i4").tobytes(),
        loss_mask=np.ones(sum(LENGTHS), np.uint8).tobytes(),
    )
    return lease, rows


def alone(target: Any, row: np.ndarray) -> np.ndarray:
    """transformers' own hidden states of one sample, without batch, padding, hooks or ring."""
    with torch.inference_mode():
        states = target.model(torch.from_numpy(row[None].astype(np.int64)), output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1).numpy()


def test_arrived_features_are_those_of_each_sample_alone(target: Any, make_job: Any) -> None:
    """E3: rows of 1, 7 and 64 tokens beside others; what is sent has as many rows as the sample has tokens."""
    lease, rows = make_lease(tuple(range(len(LENGTHS))))
    width = len(TAPS) * 32
    table = block_table(sum(LENGTHS), len(LENGTHS), width, "float32")
    slot = bytearray(table_bytes(table) + 4096)
    slot[-4096:] = b"\xa5" * 4096
    with Taps(target.layers, TAPS) as taps:
        filled, halved = fill(target, taps, lease, memoryview(slot), make_job(width=width, taps=TAPS), HostStage())
        total, _ = filled.wait()
    assert halved == 0
    arrived = views(memoryview(slot), table)
    assert arrived["features"].shape == (sum(LENGTHS), width)  # rows are tokens: padding has nowhere to go
    assert total == checksum(arrived["features"])
    offsets = arrived["offsets"]
    for at, row in enumerate(rows):
        got, want = arrived["features"][offsets[at] : offsets[at + 1]], alone(target, row)
        assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)
    assert arrived["token_ids"].tobytes() == lease.token_ids
    assert tuple(arrived["samples"]) == lease.samples
    assert bytes(slot[-4096:]) == b"\xa5" * 4096  # nothing behind the block was touched


def test_two_parts_filled_apart_make_the_whole_block(target: Any, make_job: Any) -> None:
    width = len(TAPS) * 32
    job = make_job(width=width, taps=TAPS)
    table = block_table(sum(LENGTHS), len(LENGTHS), width, "float32")
    whole, parts = bytearray(table_bytes(table)), bytearray(table_bytes(table))
    with Taps(target.layers, TAPS) as taps:
        fill(target, taps, make_lease((0, 1, 2, 3, 4))[0], memoryview(whole), job, HostStage())
        sums = [
            fill(target, taps, make_lease(part)[0], memoryview(parts), job, HostStage())[0].wait()[0]
            for part in ((1, 3), (0, 2, 4))
        ]
    first, second = views(memoryview(whole), table)["features"], views(memoryview(parts), table)["features"]
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-4)
    assert sum(sums) % 2**64 == checksum(second)
