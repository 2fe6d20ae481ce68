"""Predicted against measured tokens/s of GPU splits, with real processes whose rates are known.

    python benchmarks/tune.py [--seconds 15] [--json]

Coordinator, ring, messages and plan are those of a run; producers and ranks are the doubles of tests/doubles, which
sleep for as long as their work would take: a producer by its tokens, a rank by the cost of its blocks. The reference is
what the model of `draftwire tune` (launch/split_model.py) says from these two rates alone; nothing is fitted. Samples
are of uneven length, so that ranks wait for the slowest.
"""

from __future__ import annotations

import argparse
import io
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from jobs import plain_job, plan_params
from report import publish, row
from rich.console import Console

from launch.live import Screen
from launch.measurements import Measurements, ProducerRate, Room, TrainerRate, Work
from launch.signals import Signals
from launch.split_model import Model, Split
from launch.tune_runs import run_for
from protocol.block import block_table, table_bytes
from protocol.dataset import TokenDataset, write_dataset
from protocol.plan import Plan
from protocol.ring import SLOTS_PER_PROCESS
from protocol.sockets import endpoint

DOUBLES = Path(__file__).resolve().parents[1] / "tests" / "doubles"
WIDTH, ANCHORS, BLOCK_SIZE = 8, 4, 4
BLOCK_TOKENS, STEP_TOKENS = 200, 3000
# tokens/s of a producer and of a rank, and the splits to run: the best one first.
CASES: list[tuple[float, float, list[tuple[int, int]]]] = [
    (1000.0, 2000.0, [(2, 1), (1, 2)]),
    (2000.0, 1000.0, [(1, 2), (2, 1)]),
    (1000.0, 600.0, [(3, 5), (4, 4), (2, 6)]),
]


def make_dataset(folder: Path) -> TokenDataset:
    """Samples of 8 to 90 tokens, every one of them supervised."""
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(3.3, 0.5, 20_000)), 8, 90).astype(int)
    samples = ((np.arange(length, dtype=np.int32), np.ones(length, np.uint8)) for length in lengths)
    return write_dataset(folder, samples, {"fingerprint": "made up"})


def plan_for(dataset: TokenDataset, ranks: int) -> Plan:
    params = plan_params(
        batch_tokens=STEP_TOKENS,
        anchors=ANCHORS,
        block_size=BLOCK_SIZE,
        microbatch_tokens=BLOCK_TOKENS,
        microbatch_draft_tokens=4 * BLOCK_TOKENS,
        consumers=ranks,
    )
    return Plan(dataset.lengths, dataset.eligible, params, dataset.fingerprint)


def known(dataset: TokenDataset, produced: float, trained: float) -> Measurements:
    """Measurements in which a producer makes `produced` tokens/s and one rank trains `trained`."""
    plan = plan_for(dataset, 1)
    work = Work(
        steps=[plan.sizes(step) for step in range(48)],
        tokens_per_epoch=int(dataset.lengths.sum()),
        epochs=1,
        microbatch_tokens=BLOCK_TOKENS,
        microbatch_draft_tokens=4 * BLOCK_TOKENS,
        anchors=ANCHORS,
        bytes_per_token=4 * WIDTH,
    )
    room = Room(gpu_bytes=1 << 40, host_bytes=1 << 40, slot_bytes=1 << 20)
    rate = ProducerRate(tokens_per_s=produced)
    unit = Measurements(producers=[rate], trainer=TrainerRate(cost_s=1.0), work=work, room=room)
    cost_s = Model(unit).trainers(1) / trained
    return Measurements(producers=[rate], trainer=TrainerRate(cost_s=cost_s), work=work, room=room)


def run_split(dataset: TokenDataset, folder: Path, split: tuple[int, int], seconds: float) -> float:
    """Tokens/s of a real run of the doubles."""
    folder.mkdir()
    plan = plan_for(dataset, split[1])
    run_id = f"tune-{secrets.token_hex(4)}"
    job = plain_job(
        run_id=run_id,
        address=endpoint(run_id),
        dataset_dir=str(folder.parent / "dataset"),
        width=WIDTH,
        dtype="float32",
        slots=SLOTS_PER_PROCESS * sum(split),
        slot_bytes=table_bytes(block_table(BLOCK_TOKENS, BLOCK_TOKENS // 2, WIDTH, "float32")),
        plan=plan.params,
        plan_hash=plan.hash,
        producers=("cpu",) * split[0],
        consumers=("cpu",) * split[1],
    )
    modules = {"producer": "fake_producer", "consumer": "fake_trainer"}
    quiet = Screen(Console(file=io.StringIO()))
    return run_for(job, folder, seconds, "a split", Signals(), quiet, modules).tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(DOUBLES), os.environ.get("PYTHONPATH", "")])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = make_dataset(Path(folder) / "dataset")
        for produced, trained, splits in CASES:
            measured = known(dataset, produced, trained)
            os.environ["FAKE_TOKENS_PER_S"] = str(produced)
            os.environ["FAKE_COST_S"] = str(measured.trainer.cost_s)
            for split in splits:
                slots = SLOTS_PER_PROCESS * sum(split)
                predicted = Model(measured).rates(Split(*split), slots)
                name = f"{split[0]}:{split[1]}, producer {produced:.0f}, rank {trained:.0f} ({predicted.limited_by})"
                reached = run_split(dataset, Path(folder) / f"run-{len(rows)}", split, arguments.seconds)
                rows.append(row(name, reached, "tokens/s", predicted.tokens_per_s))
    publish(rows, arguments.json)


if __name__ == "__main__":
    main()
