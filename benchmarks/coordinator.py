"""What the coordinator costs against its budget: its decisions and messages alone, then the process as it runs.

    python benchmarks/coordinator.py [--blocks 2000] [--rates 100 1000] [--seconds 8] [--json]

Simulated peers ask, fill, take, verify and release. "Alone", without sockets, they do so as fast as they are answered:
counted are decoding, deciding and encoding, with messages as they are on the wire. "Live", a coordinator process serves
peers of this process over its socket, four producers, one consumer and the launcher, at a set rate: counted is all
that the coordinator's process uses, heartbeats, metrics and snapshots included. The references are the aim of 3 % of a
core at 100 blocks a second, which is 300 microseconds a block, and 1,000 blocks a second within one core.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import zmq
from jobs import BLOCKS_PER_STEP, SAMPLES_PER_BLOCK, TOKENS, cpu_s, plain_job, plan_params
from numpy.typing import NDArray
from report import publish, row

from launch.conductor import Conductor
from launch.pace import Pace
from protocol import messages as m
from protocol import sockets
from protocol.codec import Envelope, decode, encode
from protocol.dataset import write_dataset
from protocol.job import TOKEN_VARIABLE, write_job
from protocol.plan import Plan
from protocol.supervise import Child

BUDGET_US = 300.0
PRODUCERS = tuple(f"producer-{index}" for index in range(4))
CONSUMER, LAUNCHER = "consumer-0", "launcher"
WARM_UP_S = 2.0
HEARTBEAT_S = 2.0
DEADLINE_S = 60.0
GRACE_S = 10.0
EPOCH_BLOCKS = 800
BUSY_STEPS = 10  # as in consumer/worker.py


class Corpus:
    def __init__(self, samples: int) -> None:
        self.lengths = np.full(samples, TOKENS)
        self._row = np.arange(TOKENS, dtype=np.int32)
        self._mask = np.ones(TOKENS, np.uint8)

    def tokens(self, index: int) -> NDArray[np.int32]:
        return self._row

    def mask(self, index: int) -> NDArray[np.uint8]:
        return self._mask


def greetings() -> list[m.Message]:
    """What peers say once they have joined: a consumer holds two blocks, a producer fills one and asks for the next."""
    return [m.Credit(blocks=2), m.Reached(step=0)]


def answers(message: m.Message) -> list[m.Message]:
    """What an honest peer sends back."""
    match message:
        case m.Lease(step=step, index=index, kind=kind, attempt=attempt):
            ready = m.Ready(
                step=step, index=index, kind=kind, attempt=attempt, checksum=0, busy_s=0.0, halved=0, figures=()
            )
            return [ready, m.Want(kind="model")]
        case m.Deliver(step=step, index=index, attempt=attempt):
            key = {"step": step, "index": index, "attempt": attempt}
            return [m.Verified(**key), m.Release(**key)]
        case m.Go(step=step, micro_step=micro_step):
            trained: list[m.Message] = [m.Credit(blocks=1)]
            if micro_step + 1 == BLOCKS_PER_STEP:
                trained += [m.Reached(step=step + 1), m.Report(kind="step", row=step_row(step + 1))]
                if (step + 1) % BUSY_STEPS == 0:
                    memory = {"gpu_memory_bytes": 1 << 30, "rss_bytes": 1 << 30}
                    own = {"rank": 0, "step": step + 1, "busy_s": [0.1] * BUSY_STEPS} | memory
                    trained.append(m.Report(kind="rank", row=own))
            return trained
    return []


def step_row(step: int) -> dict[str, object]:
    """A row of metrics as rank 0 reports it after a step."""
    tokens = BLOCKS_PER_STEP * SAMPLES_PER_BLOCK * TOKENS
    figures = {"loss": 3.141592, "lr": 6e-4, "grad_norm": 1.234567, "step_s": 0.123456, "wait_s": 0.012345}
    counts = {"samples": BLOCKS_PER_STEP * SAMPLES_PER_BLOCK, "tokens": tokens, "anchors": 512, "skipped": False}
    trained = {"samples_trained": step * counts["samples"], "tokens_trained": step * tokens}
    return {"step": step, "epoch": 0, "accuracy": [0.123456] * 15} | figures | counts | trained


def alone_us(blocks: int) -> float:
    """CPU microseconds a block of decoding, deciding and encoding, in this process."""
    samples = blocks * SAMPLES_PER_BLOCK
    job = plain_job(producers=("cpu",) * len(PRODUCERS), plan=plan_params())
    plan = Plan(np.full(samples, TOKENS), np.full(samples, TOKENS - 1), job.plan, "corpus")
    conductor = Conductor(job, plan, Corpus(samples), Pace(job, plan.total_steps))
    envelope = Envelope("benchmark", 0)
    identity = {"pid": 1, "host": "", "token": "", "schema": "", "versions": {}}
    conductor.joined(m.Hello(role="consumer", name=CONSUMER, rank=0, **identity))
    wire: deque[tuple[str, m.Message]] = deque((CONSUMER, greeting) for greeting in greetings())
    for rank, name in enumerate(PRODUCERS):
        conductor.joined(m.Hello(role="producer", name=name, rank=rank, **identity))
        wire.append((name, m.Want(kind="model")))
    spent_s = 0.0
    while wire:
        name, message = wire.popleft()
        frame = encode(message, envelope)
        started = time.process_time()
        conductor.handle(name, decode(frame)[1])
        pending, conductor.out = conductor.out, []
        frames = [(to, encode(answer, envelope)) for to, answer in pending]
        spent_s += time.process_time() - started
        for to, frame in frames:
            wire.extend((to, answer) for answer in answers(decode(frame)[1]))
        conductor.rows.clear()
    if not conductor.ledger.finished:
        raise SystemExit("the conductor stopped before the last block")
    return spent_s * 1e6 / blocks


class Peers:
    """Every peer of a run, each with its own socket; what follows a GO waits for its time."""

    def __init__(self, address: str, run_id: str, token: str, context: zmq.Context, stack: ExitStack) -> None:
        self.trained = 0
        self._envelope = Envelope(run_id, 0)
        self._poller = zmq.Poller()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._later: deque[list[m.Message]] = deque()  # for each GO
        self._beat = 0.0
        for name in (LAUNCHER, CONSUMER, *PRODUCERS):
            self._dealers[name] = stack.enter_context(sockets.dealer(context, address))
            self._poller.register(self._dealers[name], zmq.POLLIN)
            role, _, rank = name.partition("-")
            identity = {"pid": 1, "host": "", "token": token, "schema": "", "versions": {}}
            self.send(name, m.Hello(role=role, name=name, rank=int(rank or 0), **identity))
        for name in (CONSUMER, *PRODUCERS):
            for greeting in greetings() if name == CONSUMER else [m.Want(kind="model")]:
                self.send(name, greeting)

    def send(self, name: str, message: m.Message) -> None:
        dealer = self._dealers[name]
        if not dealer.poll(DEADLINE_S * 1000, zmq.POLLOUT):
            raise SystemExit("the coordinator cannot be reached")
        dealer.send(encode(message, self._envelope))

    def train(self, blocks: int, rate: float) -> None:
        """Until so many more blocks are trained, one each 1 / rate seconds where the coordinator keeps up."""
        started, first, last = time.monotonic(), self.trained, self.trained + blocks
        while True:
            now = time.monotonic()
            if now > started + blocks / rate + DEADLINE_S:
                raise SystemExit("the coordinator does not go on")
            while self._later and self.trained < last and now >= started + (self.trained + 1 - first) / rate:
                for message in self._later.popleft():
                    self.send(CONSUMER, message)
                self.trained += 1
            if self.trained == last:
                return
            ready = dict(self._poller.poll(1 if self._later else 50))
            for name, dealer in self._dealers.items():
                if dealer in ready:
                    self._hear(name, dealer)
            if now - self._beat > HEARTBEAT_S:
                self._beat = now
                for name in self._dealers:
                    self.send(name, m.Heartbeat(progress=0))

    def _hear(self, name: str, dealer: zmq.Socket[bytes]) -> None:
        while dealer.poll(0):
            message = decode(dealer.recv())[1]
            if isinstance(message, m.Reject | m.Stop | m.Error):
                raise SystemExit(f"the coordinator says {message}")
            if isinstance(message, m.Go):
                self._later.append(answers(message))
                continue
            for answer in answers(message):
                self.send(name, answer)


def live(rate: float, seconds: float) -> tuple[float, float]:
    """Blocks a second that were trained, and the coordinator process' CPU microseconds for each."""
    warm_up, blocks = (BLOCKS_PER_STEP * round(spell * rate / BLOCKS_PER_STEP) for spell in (WARM_UP_S, seconds))
    run_id, token = secrets.token_hex(8), secrets.token_hex(32)
    tokens, mask = np.arange(TOKENS, dtype=np.int32), np.ones(TOKENS, np.uint8)
    with (
        tempfile.TemporaryDirectory(prefix="draftwire-bench-") as folder,
        zmq.Context() as context,
        ExitStack() as stack,
    ):
        run_dir = Path(folder)
        corpus = ((tokens, mask) for _ in range(EPOCH_BLOCKS * SAMPLES_PER_BLOCK))
        write_dataset(run_dir / "data", corpus, {"fingerprint": "corpus"})
        plan = plan_params(
            epochs=1 + (warm_up + blocks) // EPOCH_BLOCKS, max_steps=(warm_up + blocks) // BLOCKS_PER_STEP
        )
        job = plain_job(
            run_id=run_id,
            address=sockets.endpoint(run_id),
            dataset_dir=str(run_dir / "data"),
            producers=("cpu",) * len(PRODUCERS),
            plan=plan,
        )
        write_job(run_dir, job)
        environment = {"OMP_NUM_THREADS": "1", TOKEN_VARIABLE: token}
        child = Child("coordinator", "launch.coordinator", [folder], run_dir / "coordinator.log", environment)
        stack.callback(child.end, GRACE_S)
        peers = Peers(job.address, run_id, token, context, stack)
        peers.train(warm_up, rate)
        started, before_s = time.monotonic(), cpu_s(child.pid)
        peers.train(blocks, rate)
        wall_s, spent_s = time.monotonic() - started, cpu_s(child.pid) - before_s
        peers.send(LAUNCHER, m.Order(order="done"))
        if child.wait(GRACE_S) != 0:
            raise SystemExit(child.obituary())
    return blocks / wall_s, spent_s * 1e6 / blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--rates", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    us = alone_us(arguments.blocks)
    rows = [row("alone: CPU a block", us, "us", BUDGET_US)]
    for rate in arguments.rates:
        reached, us = live(rate, arguments.seconds)
        name = f"live, {rate:,} blocks/s asked"
        rows += [
            row(f"{name}: rate", reached, "blocks/s", rate),
            row(f"{name}: CPU a block", us, "us", BUDGET_US),
            row(f"{name}: share of a core", us * reached / 1e6, "share", BUDGET_US * 100 / 1e6 if rate <= 100 else 1.0),
        ]
    publish(rows, arguments.json)


if __name__ == "__main__":
    main()
