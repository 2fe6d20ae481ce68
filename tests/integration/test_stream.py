"""The stream without models: a real coordinator, ring, ingest, peers and feeds; only the forward pass is stood in for,
by rows that say which step, sample and token they belong to. Over shared memory and over ZeroMQ alike."""

from __future__ import annotations

import inspect
import itertools
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from consumer.bounds import DEPTH
from consumer.feed import DeviceBlock, Feed
from launch import coordinator, ingest
from launch.metrics import of_kind, read_rows
from producer import worker
from producer.outlet import ArenaOutlet, ChunkOutlet
from producer.stage import Done, HostStage
from protocol import messages as m
from protocol import peer as peer_module
from protocol import sockets
from protocol.arena import Arena, create_arena
from protocol.block import block_table, checksum, table_bytes, views
from protocol.codec import Envelope, encode
from protocol.dataset import TokenDataset, write_dataset
from protocol.job import TOKEN_VARIABLE, Job, write_job
from protocol.peer import Peer, hello
from protocol.plan import Plan

TOKEN, SCHEMA = "5ec2e7", "schema"
DEADLINE_S = 40.0
TRANSPORTS = ["shm", "zmq"]
MIB = 1 << 20


def pattern(step: int, sample: int, tokens: int) -> Any:
    """What a sample's feature rows hold in every column: exact in float32 and different for each step and sample."""
    return np.float32(4096 * ((37 * step + sample) % 4000) + 1) + np.arange(tokens, dtype=np.float32)


def write_block(lease: Any, room: memoryview, width: int, pause_s: float = 0.0) -> int:
    """Fills a leased block as a producer does, resting between samples; returns the features' checksum."""
    tensors = views(room, block_table(sum(lease.lengths), len(lease.samples), width, "float32"))
    offsets = np.cumsum([0, *lease.lengths])
    for at, sample in enumerate(lease.samples):
        tensors["features"][offsets[at] : offsets[at + 1]] = pattern(lease.step, sample, lease.lengths[at])[:, None]
        time.sleep(pause_s)
    tensors["token_ids"][:] = np.frombuffer(lease.token_ids, "<i4")
    tensors["loss_mask"][:] = np.frombuffer(lease.loss_mask, np.uint8)
    tensors["offsets"][:] = offsets
    tensors["samples"][:] = lease.samples
    return checksum(tensors["features"])


class Station:
    """One start of a run, in threads. `trained` holds, by rank, (step, micro-step, samples) in the order of training;
    `filled` who filled which block, in the order of filling."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job
        self.plan = self._own_plan()
        self.trained: dict[int, list[tuple[int, int, tuple[int, ...]]]] = defaultdict(list)
        self.filled: list[str] = []
        self.producing: set[str] = set()
        self.held_bytes = self.most_held_bytes = 0
        self.fill_s = 0.0
        self.on_block: Callable[[DeviceBlock], None] = self.check
        self.before_step: Callable[[int, int], None] = lambda rank, step: None
        self._lock = threading.Lock()
        self._failures: queue.Queue[BaseException] = queue.Queue()
        self._threads: dict[str, threading.Thread] = {}
        self.ring_fd = create_arena(job.slots, job.slot_bytes, 1 << 40)
        self._start("coordinator", lambda: coordinator.main(folder))
        self.launcher = Peer(job.address, job.run_id, self.greeting("launcher"))

    def greeting(self, name: str) -> m.Hello:
        role, _, index = name.partition("-")
        return hello(role, name, int(index or 0), TOKEN, SCHEMA)

    def start_ingest(self) -> None:
        if self.job.transport == "zmq":
            self._start("ingest", lambda: ingest.main(self.folder, self.ring_fd))

    def start_producer(self, index: int) -> None:
        self._start(f"producer-{index}", lambda: self._produce(f"producer-{index}"))

    def start_consumer(self, rank: int) -> None:
        self._start(f"consumer-{rank}", lambda: self._consume(rank))

    def wait_for(self, reached: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s
        while not reached():
            if not self._failures.empty():
                raise self._failures.get()
            assert time.monotonic() < deadline, f"filled {len(self.filled)}, trained {dict(self.trained)}"
            time.sleep(0.005)

    def finish(self) -> None:
        """To the end of the plan: every block was trained once, in order, by its rank, and none was found bad."""
        ranks = range(len(self.job.consumers))
        self.wait_for(lambda: not any(self._threads[f"consumer-{rank}"].is_alive() for rank in ranks))
        for rank in ranks:
            assert self.trained[rank] == [
                (block.step, block.micro_step, block.samples)
                for step in range(self.plan.total_steps)
                for block in self.plan.blocks(step)
                if block.rank == rank
            ]
        wrong = [row for row in self.rows("event") if row["what"] in ("bad", "quarantine", "ignored")]
        assert wrong == []

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return of_kind(read_rows(self.folder / "metrics.jsonl"), kind)

    def end(self) -> None:
        # A short run may be over before a producer has found ingest; until then it would not hear that it is.
        self.wait_for(lambda: self.producing == {name for name in self._threads if name.startswith("producer")}, 10)
        self.launcher.send(m.Order(order="done"))
        for name, thread in self._threads.items():
            thread.join(10)
            assert not thread.is_alive(), name
        self.launcher.close()
        os.close(self.ring_fd)
        if not self._failures.empty():
            raise self._failures.get()

    def check(self, block: DeviceBlock) -> None:
        """Every row is the one that belongs there."""
        features = block.features.numpy()
        for at, sample in enumerate(block.samples.tolist()):
            rows = features[block.offsets[at] : block.offsets[at + 1]]
            assert (rows == pattern(block.step, sample, len(rows))[:, None]).all(), (block.step, sample)

    def fill(self, holder: str, taps: None, lease: m.Lease, room: memoryview, job: Job, *_: Any) -> tuple[Done, int]:
        """Stands in for producer.fill.fill."""
        with self._lock:
            self.filled.append(holder)
            self.held_bytes += sum(lease.lengths) * job.width * 4
            self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
        time.sleep(self.fill_s)
        return Done(write_block(lease, room, job.width), 0.0), 0

    # --- the threads ---

    def _own_plan(self) -> Plan:
        """A plan is cut as it is asked, for one thread."""
        dataset = TokenDataset.open(Path(self.job.dataset_dir))
        return Plan(dataset.lengths, dataset.eligible, self.job.plan, dataset.fingerprint)

    def _start(self, name: str, body: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                body()
            except BaseException as error:
                self._failures.put(error)

        self._threads[name] = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads[name].start()

    def _produce(self, name: str) -> None:
        job, greeting = self.job, self.greeting(name)
        peer = Peer(job.address, job.run_id, greeting)
        outlet: Any
        if job.transport == "shm":
            outlet = ArenaOutlet(Arena(self.ring_fd, job.slots, job.slot_bytes), peer)
        else:
            outlet = ChunkOutlet(job.payload_address, job.run_id, greeting, job.slot_bytes, peer)
        self.producing.add(name)
        reason = worker.Producer(job, name, None, peer, outlet, HostStage()).run()  # type: ignore[arg-type]
        outlet.close()
        peer.close()
        assert reason == "done", reason

    def _consume(self, rank: int) -> None:
        plan = self._own_plan()
        peer = Peer(self.job.address, self.job.run_id, self.greeting(f"consumer-{rank}"))
        arena = Arena(self.ring_fd, self.job.slots, self.job.slot_bytes)
        feed = Feed(peer, arena, torch.device("cpu"), 1)
        for step in range(plan.total_steps):
            self.before_step(rank, step)
            peer.send(m.Reached(step=step))
            for micro_step in range(plan.micro_steps(step)):
                block = feed.next(step, micro_step)
                assert block is not None
                self.on_block(block)
                with self._lock:
                    self.held_bytes -= block.features.nbytes
                self.trained[rank].append((step, micro_step, tuple(block.samples.tolist())))
        peer.close()


@pytest.fixture
def make_station(
    tmp_path: Path, make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Station]]:
    """Builds a station over samples of these lengths, one epoch of steps of `batch_tokens` tokens."""
    stations: list[Station] = []

    def make(lengths: list[int], transport: str, width: int = 8, consumers: int = 1, **changes: Any) -> Station:
        folder = tmp_path / f"run-{len(stations)}"
        folder.mkdir()
        samples = [(np.arange(length, dtype=np.int32), np.ones(length, np.uint8)) for length in lengths]
        write_dataset(folder / "data", samples, {"fingerprint": "f"})
        batch_tokens = changes.pop("batch_tokens", max(lengths) * consumers)
        block_tokens = max(lengths)
        run_id = f"stream-{time.monotonic_ns()}"
        job = make_job(
            plan={
                "epochs": changes.pop("epochs", 1),
                "batch_tokens": batch_tokens,
                "microbatch_tokens": block_tokens,
                "microbatch_draft_tokens": 1 << 20,
                "consumers": consumers,
            },
            run_id=run_id,
            address=sockets.endpoint(run_id),
            transport=transport,
            payload_address=sockets.payload_endpoint(run_id),
            dataset_dir=str(folder / "data"),
            schema=SCHEMA,
            width=width,
            slot_bytes=table_bytes(block_table(block_tokens, block_tokens // 2, width, "float32")),
            consumers=("cpu",) * consumers,
            **changes,
        )
        write_job(folder, job)
        stations.append(Station(folder, job))
        monkeypatch.setattr(worker, "fill", stations[-1].fill)
        return stations[-1]

    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    yield make
    for station in stations:
        station.end()


# --- memory ----------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kept_metadata_keeps_no_payload_and_memory_stays_flat(
    make_station: Callable[..., Station], transport: str, open_fds: Callable[[], int]
) -> None:
    """B1, and B4's constant number of handles: with three fields of every block kept, 680 MiB go through after a
    warm-up and memory grows by under 16 MiB. (A plateau: the allocator's own wobble is half of that.)"""
    station = make_station([512] * 30, transport, width=1024, epochs=14)
    kept: list[tuple[Any, ...]] = []
    resident: list[int] = []
    handles: list[int] = []

    def keep(block: DeviceBlock) -> None:
        kept.append((block.samples, block.offsets, block.token_ids))
        resident.append(resident_bytes())
        if len(kept) in (80, 250, 420):
            handles.append(open_fds())

    station.on_block = keep
    station.start_ingest()
    station.start_producer(0)
    station.start_consumer(0)
    station.finish()
    # The least of twenty, since a block more or less is on its way at each moment.
    assert min(resident[400:]) - min(resident[60:80]) < 16 * MIB, resident
    assert handles[0] == handles[1] == handles[2]
    # Nor are they views of a slot that has held other blocks since.
    for (samples, offsets, token_ids), (_, _, planned) in zip(kept, station.trained[0], strict=True):
        assert (tuple(samples.tolist()), offsets.tolist()) == (planned, [0, 512])
        assert (token_ids == np.arange(512)).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_trainer_pauses_the_producers_within_the_ring_and_they_resume_at_once(
    make_station: Callable[..., Station], transport: str
) -> None:
    """H1: samples of 8 and 1,024 tokens mixed, two producers, a ring of four slots of 1 MiB, a trainer that stands
    still and goes on."""
    lengths = [8 if sample % 3 else 1024 for sample in range(60)]
    station = make_station(lengths, transport, width=256, slots=4, producers=("cpu", "cpu"))
    going = threading.Event()
    station.before_step = lambda rank, step: step == 3 and not going.wait(DEADLINE_S)  # type: ignore[assignment]
    station.start_ingest()
    for index in range(2):
        station.start_producer(index)
    station.start_consumer(0)
    trained = 3
    station.wait_for(lambda: len(station.filled) == trained + station.job.slots + DEPTH)
    time.sleep(0.3)
    before = resident_bytes()
    time.sleep(0.5)
    assert len(station.filled) == trained + station.job.slots + DEPTH  # full: the producers wait
    assert resident_bytes() - before < MIB
    started = time.monotonic()
    going.set()
    station.wait_for(lambda: len(station.filled) > trained + station.job.slots + DEPTH)
    assert time.monotonic() - started < 2
    station.finish()
    # The ring, and on the trainer's device what it may hold ahead.
    assert station.most_held_bytes <= (station.job.slots + DEPTH) * station.job.slot_bytes
    assert {"producer-0", "producer-1"} == set(station.filled)


# --- torn reads ------------------------------------------------------------------------------------------------------

WRITER = """
import os, random, sys, time
from pathlib import Path
from typing import Any
import numpy as np
from producer.assignments import Assignments
from producer.outlet import ArenaOutlet, ChunkOutlet
from protocol.arena import Arena
from protocol.block import block_table, checksum, table_bytes, views
from protocol.job import read_job, run_token
from protocol.messages import Ready, Stop, Want
from protocol.peer import Peer, hello

{pattern}
{write_block}
job, index, ring_fd = read_job(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
greeting = hello("producer", f"producer-{{index}}", index, run_token(), job.schema)
peer = Peer(job.address, job.run_id, greeting)
if job.transport == "shm":
    outlet = ArenaOutlet(Arena(ring_fd, job.slots, job.slot_bytes), peer)
else:
    outlet = ChunkOutlet(job.payload_address, job.run_id, greeting, job.slot_bytes, peer)
assignments, draw = Assignments(peer.inbox), random.Random(index)
peer.send(Want(kind="model"))
while not isinstance(lease := assignments.next(), Stop):
    total = write_block(lease, outlet.room(lease), job.width, draw.uniform(0, 0.003))
    time.sleep(draw.uniform(0, 0.003))
    same = {{"step": lease.step, "index": lease.index, "kind": lease.kind, "attempt": lease.attempt}}
    whole = table_bytes(block_table(sum(lease.lengths), len(lease.samples), job.width, "float32"))
    outlet.commit(lease, [(0, whole)], Ready(**same, checksum=total, busy_s=0.0, halved=0, figures=()))
    peer.send(Want(kind="model"))
outlet.close()
peer.close()
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_block_is_torn_repeated_or_missing_while_a_writer_is_stopped_and_continued(
    make_station: Callable[..., Station], transport: str, slots: int
) -> None:
    """B2: two writer processes and two readers share 1, 2 or 3 slots; every row says where it belongs."""
    lengths = [16 + sample % 17 for sample in range(160)]
    station = make_station(
        lengths, transport, width=512, consumers=2, slots=slots, producers=("cpu", "cpu"), batch_tokens=64
    )
    draw = random.Random(slots)
    station.before_step = lambda rank, step: time.sleep(draw.uniform(0, 0.004))
    station.start_ingest()
    script = WRITER.format(pattern=inspect.getsource(pattern), write_block=inspect.getsource(write_block))
    writers = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", script, str(station.folder), str(index), str(station.ring_fd)],
            pass_fds=[station.ring_fd],
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for rank in range(2):
            station.start_consumer(rank)
        for stop_at in (5, 15, 25):
            station.wait_for(lambda at=stop_at: len(station.trained[0]) >= at)  # type: ignore[misc]
            writers[0].send_signal(signal.SIGSTOP)
            time.sleep(0.15)
            writers[0].send_signal(signal.SIGCONT)
        station.finish()
        station.launcher.send(m.Order(order="done"))
        for writer in writers:
            assert writer.communicate(timeout=20)[1] == ""
            assert writer.returncode == 0
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


# --- start order -----------------------------------------------------------------------------------------------------

ORDERS = list(itertools.permutations(["ingest", "producers", "consumers"]))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_nothing_depends_on_the_order_of_starting(make_station: Callable[..., Station], order: list[str]) -> None:
    """B8: whoever comes first waits for the others, and each sample is trained once."""
    station = make_station([8, 12] * 10, "zmq", consumers=2, producers=("cpu", "cpu"))
    for who in order:
        if who == "ingest":
            station.start_ingest()
        for index in range(2):
            if who == "producers":
                station.start_producer(index)
            elif who == "consumers":
                station.start_consumer(index)
        time.sleep(0.1)
    station.finish()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_comes_late_finds_its_blocks_and_nobody_goes_ahead(
    make_station: Callable[..., Station], transport: str
) -> None:
    """B8: ranks are fixed, so what is there for the second one waits for it in the ring."""
    station = make_station([8, 12] * 10, transport, consumers=2)
    station.start_ingest()
    station.start_producer(0)
    station.start_consumer(0)
    station.wait_for(lambda: len(station.filled) >= station.job.slots)
    time.sleep(0.7)
    assert station.trained[0] == []
    station.start_consumer(1)
    station.finish()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_producer_that_comes_late_shares_the_work_within_a_few_blocks(
    make_station: Callable[..., Station], transport: str
) -> None:
    """B8: no queue of work lies with whoever was first."""
    station = make_station([64] * 40, transport, producers=("cpu", "cpu"))
    station.fill_s = 0.02
    station.start_ingest()
    station.start_producer(0)
    station.start_consumer(0)
    station.wait_for(lambda: len(station.filled) >= 8)
    assert set(station.filled) == {"producer-0"}
    station.start_producer(1)
    station.wait_for(lambda: "producer-1" in station.filled)
    station.finish()
    first = station.filled.index("producer-1")
    assert first <= 16
    shared = station.filled[first : first + 12]
    assert min(shared.count(name) for name in ("producer-0", "producer-1")) >= 4, station.filled


# --- last words ------------------------------------------------------------------------------------------------------


def test_a_megabyte_said_at_the_end_is_kept(make_station: Callable[..., Station]) -> None:
    """H2: a worker that reports a MiB and closes at once ends in seconds, and the report is written down."""
    station = make_station([8], "shm", consumers=1)
    peer = Peer(station.job.address, station.job.run_id, station.greeting("consumer-0"))
    started = time.monotonic()
    for number in range(4):
        peer.send(m.Report(kind="event", row={"what": "farewell", "text": f"{number}" * MIB}))
    peer.close()
    assert time.monotonic() - started < 5
    station.wait_for(lambda: len(station.rows("event")) >= 4)
    assert [row["text"] for row in station.rows("event")] == [f"{number}" * MIB for number in range(4)]


def test_closing_towards_a_coordinator_that_takes_nothing_more_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """H2: more than any buffer on the way holds, and nobody reads."""
    monkeypatch.setattr(peer_module, "DRAIN_MS", 300)
    address = sockets.endpoint(f"deaf-{time.monotonic_ns()}")
    one_message = sockets.Limits(1, sockets.CONTROL.frame_bytes)
    with zmq.Context() as context, sockets.router(context, address, one_message) as router:
        joining = queue.SimpleQueue[Peer]()
        thread = threading.Thread(target=lambda: joining.put(Peer(address, "r", hello("consumer", "c", 0, "t", "s"))))
        thread.start()
        identity, _ = router.recv_multipart()
        welcome = m.Welcome(slots=1, slot_bytes=64, heartbeat_s=1.0)
        router.send_multipart([identity, encode(welcome, Envelope("r", 0))])
        peer = joining.get(timeout=10)
        for _ in range(64):
            peer.send(m.Report(kind="event", row={"what": "farewell", "text": "x" * MIB}))
        started = time.monotonic()
        peer.close()
        assert 0.25 < time.monotonic() - started < 5
        assert not peer._thread.is_alive()


FLOOD = """
import sys
from pathlib import Path
from protocol.job import read_job, run_token
from protocol.messages import Report
from protocol.peer import Peer, hello
job = read_job(Path(sys.argv[1]))
peer = Peer(job.address, job.run_id, hello("producer", "producer-1", 1, run_token(), job.schema))
for number in range(12):
    peer.send(Report(kind="event", row={"what": "never", "text": "x" * (8 << 20)}))
print("sending", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_half_a_message_of_a_killed_peer_holds_nobody_up(make_station: Callable[..., Station], transport: str) -> None:
    """H2: killed while 96 MiB are on their way to the coordinator; the run ends as if it had not been there."""
    station = make_station([8, 12] * 10, transport, producers=("cpu", "cpu"))
    flood = subprocess.Popen(
        [sys.executable, "-P", "-c", FLOOD, str(station.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with flood:
        assert flood.stdout is not None
        assert flood.stdout.readline() == b"sending\n"
        flood.kill()
    started = time.monotonic()
    station.launcher.send(m.Gone(name="producer-1", reaped=True, how="was killed by SIGKILL"))
    station.wait_for(lambda: "gone" in [row["what"] for row in station.rows("event")])
    station.start_ingest()
    for index in range(2):
        station.start_producer(index)
    station.start_consumer(0)
    station.wait_for(lambda: not station._threads["consumer-0"].is_alive())
    assert time.monotonic() - started < 15
    assert sorted(sample for _, _, samples in station.trained[0] for sample in samples) == list(range(20))
