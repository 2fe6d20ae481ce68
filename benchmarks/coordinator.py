"""What the coordinator costs: its decisions and its messages, without sockets, against its budget.

    python benchmarks/coordinator.py [--blocks 2000] [--json]

Simulated peers ask, fill, take, verify and release as fast as they are answered. Counted are the coordinator's
decoding, deciding and encoding, with messages as they are on the wire; the peers' own work is not. The reference is
the aim of 3 % of a core at 100 blocks a second, which is 300 microseconds a block, and a core in full at 1,000.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray
from report import publish, row

from launch.conductor import Conductor
from protocol import messages as m
from protocol.codec import Envelope, decode, encode
from protocol.job import Job
from protocol.plan import Plan, PlanParams

BUDGET_US = 300.0
TOKENS = 335  # a sample of the chat corpus that docs/design.md does its arithmetic with
SAMPLES_PER_BLOCK = 12


class Corpus:
    def __init__(self, samples: int) -> None:
        self.lengths = np.full(samples, TOKENS)
        self._row = np.arange(TOKENS, dtype=np.int32)
        self._mask = np.ones(TOKENS, np.uint8)

    def tokens(self, index: int) -> NDArray[np.int32]:
        return self._row

    def mask(self, index: int) -> NDArray[np.uint8]:
        return self._mask


def make_conductor(blocks: int) -> Conductor:
    samples = blocks * SAMPLES_PER_BLOCK
    params = PlanParams(
        seed=0,
        epochs=1,
        batch_tokens=4 * SAMPLES_PER_BLOCK * TOKENS,
        anchors=1,
        block_size=16,
        microbatch_tokens=SAMPLES_PER_BLOCK * TOKENS,
        microbatch_draft_tokens=1 << 20,
        consumers=1,
    )
    plan = Plan(np.full(samples, TOKENS), np.full(samples, TOKENS - 1), params, "corpus")
    job = Job(
        run_id="benchmark",
        incarnation=0,
        address="",
        target_dir="",
        dataset_dir="",
        taps=(0,),
        width=25600,
        dtype="bfloat16",
        slots=16,
        slot_bytes=1,
        schema="",
        shape={},
        plan=params,
        start_step=0,
        checkpoint=None,
        quarantined={},
        producers=("cpu",) * 4,
        consumers=("cpu",),
        quarantine_limit=0.0,
    )
    return Conductor(job, plan, Corpus(samples))


def answers(name: str, message: m.Message) -> list[tuple[str, m.Message]]:
    """What an honest peer sends back."""
    match message:
        case m.Lease(step=step, index=index, kind=kind, attempt=attempt):
            ready = m.Ready(step=step, index=index, kind=kind, attempt=attempt, checksum=0, busy_s=0.0, halved=0)
            return [(name, ready), (name, m.Want(kind="model"))]
        case m.Deliver(step=step, index=index, attempt=attempt):
            key = {"step": step, "index": index, "attempt": attempt}
            return [(name, m.Verified(**key)), (name, m.Release(**key))]
        case m.Go():
            return [(name, m.Credit(blocks=1))]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    conductor = make_conductor(arguments.blocks)
    envelope = Envelope("benchmark", 0)
    identity = {"pid": 1, "host": "", "token": "", "schema": "", "versions": {}}
    conductor.joined(m.Hello(role="consumer", name="consumer-0", rank=0, **identity))
    wire: list[tuple[str, m.Message]] = [("consumer-0", m.Credit(blocks=2))]
    for index in range(4):
        conductor.joined(m.Hello(role="producer", name=f"producer-{index}", rank=index, **identity))
        wire.append((f"producer-{index}", m.Want(kind="model")))
    spent_s = 0.0
    while wire:
        name, message = wire.pop(0)
        frame = encode(message, envelope)
        started = time.process_time()
        conductor.handle(name, decode(frame)[1])
        pending, conductor.out = conductor.out, []
        frames = [(to, encode(answer, envelope)) for to, answer in pending]
        spent_s += time.process_time() - started
        for to, frame in frames:
            wire += answers(to, decode(frame)[1])
        conductor.rows.clear()
    assert conductor.ledger.finished
    per_block_us = spent_s * 1e6 / arguments.blocks
    publish(
        [
            row("CPU a block", per_block_us, "us", BUDGET_US),
            row("core at 100 blocks/s", per_block_us / 1e4, "share", BUDGET_US / 1e4),
            row("core at 1,000 blocks/s", per_block_us / 1e3, "share", 1.0),
        ],
        arguments.json,
    )


if __name__ == "__main__":
    main()
