"""Two real ranks over gloo: unequal shares of a step are the step of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

# Sums what each rank's samples give, through the trainer's own step: rank 0 has two samples in two micro-steps, rank 1
# one sample and an empty block. Alone, a process has all three. Writes weights, losses and counts.
SCRIPT = """
import sys
import numpy as np, torch
from safetensors.torch import save_file
from consumer.config import TrainConfig
from consumer.drafter import Drafter, initialise
from consumer.feed import DeviceBlock
from consumer.reduce import join_ranks, leave_ranks, sum_over_ranks
from consumer.shape import DrafterShape
from consumer.trainer import Trainer

rank, out = int(sys.argv[1]), sys.argv[2]
torch.use_deterministic_algorithms(True)
ranks = join_ranks(torch.device("cpu"))
shape = DrafterShape(
    hidden_size=16, target_layer_ids=(1, 3), num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    intermediate_size=24, block_size=4, rope_theta=1e4, rms_norm_eps=1e-6, vocab_size=40, mask_token_id=39,
    layer_types=("full_attention",) * 2, sliding_window=None, is_causal=None, num_target_layers=6,
    max_position_embeddings=64, eos_token_ids=(0,), pad_token_id=None, bos_token_id=None, input_embedding_scale=1.0,
)

def block(samples):
    lengths = [9 + 4 * sample for sample in samples]
    draws = [np.random.default_rng(sample) for sample in samples]
    tokens = [draw.integers(1, 39, length) for draw, length in zip(draws, lengths)]
    features = [draw.standard_normal((length, 32)) for draw, length in zip(draws, lengths)]
    return DeviceBlock(
        step=0, micro_step=0, micro_steps=1, epoch=0, samples=np.array(samples, np.int64),
        token_ids=np.concatenate([np.empty(0), *tokens]).astype(np.int32),
        loss_mask=np.ones(sum(lengths), np.uint8),
        offsets=np.cumsum([0, *lengths]).astype(np.int32),
        features=torch.from_numpy(np.concatenate([np.empty((0, 32)), *features])).float(),
    )

drafter = Drafter(shape)
initialise(drafter, 0)
ends = [torch.randn(40, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
trainer = Trainer(drafter, *ends, TrainConfig(anchors=4, lr=1e-3, warmup=0.0), total_steps=10)
shares = {(1, 0): [(0,), (1, 2)], (2, 0): [(0,), (1,)], (2, 1): [(2,), ()]}
losses, counts = [], []
for step in range(3):
    for samples in shares[ranks, rank]:
        trainer.micro_step(block(samples))
    if step == 1 and rank == ranks - 1:  # poison on one rank only
        next(drafter.parameters()).grad[0] = float("nan")
    result = trainer.finish_step(step).result()
    losses.append(result.loss)
    counts.append([result.anchors, result.samples, result.tokens, int(result.skipped)])
alone = [torch.full((3,), rank + 1.0), torch.full((2, 2), 10.0 * (rank + 1))]
totals = torch.tensor([rank + 0.5], dtype=torch.float64)
sum_over_ranks(alone, totals)
summed = {"sum.0": alone[0], "sum.1": alone[1], "totals": totals}
numbers = {"losses": torch.tensor(losses), "counts": torch.tensor(counts)}
save_file({name: value.detach().clone() for name, value in drafter.named_parameters()} | summed | numbers, out)
leave_ranks()
"""
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What one process ("alone") and two ranks ("0", "1") end with; they must be far from any collective time-out."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "script.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = time.monotonic()
    children = {
        "alone": start(folder, "alone", 0, {}),
        "0": start(folder, "0", 0, pair | {"RANK": "0"}),
        "1": start(folder, "1", 1, pair | {"RANK": "1"}),
    }
    try:
        for name, child in children.items():
            said, _ = child.communicate(timeout=max(1.0, DEADLINE_S - (time.monotonic() - started)))
            assert child.returncode == 0, f"{name}: {said}"
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    return {name: load_file(folder / f"{name}.safetensors") for name in children}


def start(folder: Path, name: str, rank: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", str(folder / "script.py"), str(rank), str(folder / f"{name}.safetensors")],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


Found = dict[str, dict[str, torch.Tensor]]


def test_two_ranks_with_unequal_shares_equal_one_process(found: Found) -> None:
    for name, expected in found["alone"].items():
        if not name.startswith(("sum.", "totals", "losses", "counts")):
            torch.testing.assert_close(found["0"][name], expected, rtol=0, atol=1e-6)
    sound = [0, 2]
    torch.testing.assert_close(found["0"]["losses"][sound], found["alone"]["losses"][sound], rtol=1e-6, atol=1e-6)


def test_both_ranks_end_with_the_same_bits(found: Found) -> None:
    assert found["0"].keys() == found["1"].keys()
    for name, value in found["0"].items():
        assert value.numpy().tobytes() == found["1"][name].numpy().tobytes(), name


def test_counts_are_those_of_the_whole_step_and_poison_on_one_rank_skips_it_on_all(found: Found) -> None:
    tokens = 9 + 13 + 17
    expected = [[12, 3, tokens, 0], [12, 3, tokens, 1], [12, 3, tokens, 0]]
    for name in ("alone", "0", "1"):
        assert found[name]["counts"].tolist() == expected


def test_sums_are_in_place_in_every_shape_and_a_single_rank_sums_nothing(found: Found) -> None:
    for name, first, second, total in (("alone", 1.0, 10.0, 0.5), ("0", 3.0, 30.0, 2.0), ("1", 3.0, 30.0, 2.0)):
        assert found[name]["sum.0"].tolist() == [first] * 3
        assert np.unique(found[name]["sum.1"].numpy()).tolist() == [second]
        assert found[name]["totals"].tolist() == [total]
