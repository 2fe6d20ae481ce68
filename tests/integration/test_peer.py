"""Peers and the coordinator over real ZeroMQ sockets: joining, refusals, silence, last words, nothing left open."""

from __future__ import annotations

import functools
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgpack
import msgspec
import numpy as np
import pytest
import zmq

from consumer.shape import resolve_shape
from launch import coordinator, start
from launch.budget import Budgets, Need
from launch.config import Config
from launch.metrics import of_kind, read_rows
from launch.partition import Partition
from launch.placement import Placement
from launch.stall import Watch
from protocol import messages as m
from protocol import peer as peer_module
from protocol import sockets
from protocol.codec import Envelope, decode, encode
from protocol.dataset import write_dataset
from protocol.errors import ProtocolError, RunError
from protocol.job import TOKEN_VARIABLE, Job, write_job
from protocol.peer import Peer, hello
from protocol.ring import RingSize

TOKEN, SCHEMA = "5ec2e7", "schema"
WELCOME = m.Welcome(slots=2, slot_bytes=64, heartbeat_s=0.05)


class Router(threading.Thread):
    """A stand-in for the coordinator: answers each HELLO with `answer` and keeps what else it hears, in order."""

    def __init__(self, answer: m.Message | bytes) -> None:
        super().__init__(daemon=True)
        self.heard: list[m.AnyMessage] = []
        self.address = sockets.endpoint(f"test-{time.monotonic_ns()}")
        self._answer, self._ending = answer, threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = sockets.router(self._context, self.address)
        self.start()

    def run(self) -> None:
        heard_s = time.monotonic()
        while not self._ending.is_set() or time.monotonic() - heard_s < 0.15:
            if not self._router.poll(5):
                continue
            identity, frame = self._router.recv_multipart()
            envelope, message = decode(frame)
            heard_s = heard_s if isinstance(message, m.Heartbeat) else time.monotonic()
            if isinstance(message, m.Hello):
                answer = self._answer if isinstance(self._answer, bytes) else encode(self._answer, envelope)
                self._router.send_multipart([identity, answer])
            elif not isinstance(message, m.Heartbeat):
                self.heard.append(message)
        self._router.close()
        self._context.term()

    def end(self) -> None:
        self._ending.set()
        self.join(10)


@contextmanager
def routing(answer: m.Message | bytes) -> Iterator[Router]:
    router = Router(answer)
    try:
        yield router
    finally:
        router.end()


def greeting(name: str = "producer-0", **changes: object) -> m.Hello:
    fields = {"role": name.partition("-")[0], "name": name, "rank": 0, "token": TOKEN, "schema": SCHEMA}
    return hello(**(fields | changes))  # type: ignore[arg-type]


# --- Peer against a stand-in -----------------------------------------------------------------------------------------


def test_a_welcomed_peer_sends_in_order_and_close_loses_nothing() -> None:
    for _ in range(3):
        with routing(WELCOME) as router:
            peer = Peer(router.address, "r", greeting())
            assert peer.welcome == WELCOME
            for step in range(300):
                peer.send(m.Report(kind="step", row={"step": step, "padding": "x" * 2000}))
            peer.close()
        assert [message.row["step"] for message in router.heard] == list(range(300))  # type: ignore[union-attr]


def test_a_refused_peer_says_why() -> None:
    with (
        routing(m.Reject(reason="the run token is wrong")) as router,
        pytest.raises(ProtocolError, match="refused: the run token is wrong"),
    ):
        Peer(router.address, "r", greeting())


def test_an_answer_in_another_protocol_version_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "JOIN_S", 3.0)
    frame = msgpack.packb({"v": 99, "run": "r", "inc": 0, "t": "reject", "reason": "protocol version"})
    started = time.monotonic()
    with routing(frame) as router, pytest.raises(ProtocolError, match="99"):
        Peer(router.address, "r", greeting())
    assert time.monotonic() - started < 2


def test_nobody_there_is_an_error_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, open_fds: Callable[[], int]
) -> None:
    monkeypatch.setattr(peer_module, "JOIN_S", 0.2)
    before, started = open_fds(), time.monotonic()
    with pytest.raises(ProtocolError, match="no answer from the coordinator"):
        Peer(sockets.endpoint("nobody-is-here"), "r", greeting())
    assert time.monotonic() - started < 5
    assert open_fds() == before


def test_silence_ends_the_peer() -> None:
    with routing(WELCOME) as router:
        started = time.monotonic()
        peer = Peer(router.address, "r", greeting(), silence_s=0.4)
        last = peer.inbox.get(timeout=5)
        assert isinstance(last, m.Stop)
        assert "silent" in last.reason
        assert 0.3 < time.monotonic() - started < 3
        peer.close()


def test_a_pause_of_its_own_process_is_not_the_coordinator_s_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    jump_s = [0.0]
    monkeypatch.setattr(peer_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + jump_s[0]))
    with routing(WELCOME) as router:
        peer = Peer(router.address, "r", greeting(), silence_s=5)
        jump_s[0] = 1000.0  # as after SIGSTOP and SIGCONT
        with pytest.raises(queue.Empty):
            peer.inbox.get(timeout=0.5)
        peer.close()


def test_a_coordinator_that_dies_ends_the_peer() -> None:
    with routing(WELCOME) as router:
        peer = Peer(router.address, "r", greeting(), silence_s=0.4)
    peer.progress = 1  # heartbeats go on, into nothing
    assert isinstance(peer.inbox.get(timeout=5), m.Stop)
    peer.close()


def test_closing_gives_every_descriptor_back(open_fds: Callable[[], int]) -> None:
    with routing(WELCOME) as router:
        before = open_fds()
        for _ in range(3):
            Peer(router.address, "r", greeting()).close()
        deadline = time.monotonic() + 5
        # The router's ends of closed connections go a moment later.
        while open_fds() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert open_fds() == before


def test_a_closed_peer_takes_no_message_and_touches_no_descriptor(tmp_path: Path) -> None:
    with routing(WELCOME) as router:
        peer = Peer(router.address, "r", greeting())
        peer.close()
        number = peer._wake_fd
        taken = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)  # may well get the number that became free
        os.dup2(taken, number)
        try:
            with pytest.raises(RunError, match="closed"):
                peer.send(m.Want(kind="model"))
            peer.close()  # again is no error
            assert os.fstat(number).st_size == 0
        finally:
            for fd in {taken, number}:
                os.close(fd)
    assert router.heard == []


def test_an_address_is_bound_once_and_free_again_when_its_owner_is_gone() -> None:
    address = sockets.endpoint(f"twice-{time.monotonic_ns()}")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    first = sockets.router(context, address)
    with pytest.raises(zmq.ZMQError, match="in use"):
        sockets.router(context, address)
    first.close()
    deadline = time.monotonic() + 5
    while True:
        try:
            sockets.router(context, address).close()
            break
        except zmq.ZMQError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    context.destroy(linger=0)


FACTS = {
    "hidden_size": 16,
    "num_layers": 6,
    "vocab_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", ["n" * 200, "\u6f22" * 200, "a/b c@d:e", "x"])
def test_any_run_name_makes_an_address_that_works_and_is_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "target_fingerprint", lambda *_: "weights")
    samples = [(np.arange(6, dtype=np.int32), np.ones(6, np.uint8))]
    dataset = write_dataset(tmp_path / "data", samples, {"fingerprint": "f", "unused_special_ids": [39]})
    config = msgspec.convert({"run": {"name": name}, "target": {}, "data": {}}, Config)
    shape = resolve_shape(config.drafter, FACTS, [39])
    ring = RingSize(slots=3, slot_bytes=4096)
    place, none = Placement(("cpu",), ("cpu",)), Need(0, 0)
    known = (tmp_path, FACTS, shape, place, "float32", 48, Partition(4096, 8192), ring)
    found = start.Outline(*known, none, none, Budgets(), 0, [], None)
    plan = start.make_plan(config, found, dataset)
    jobs = [start.make_job(config, found, dataset, plan, None, True)[0] for _ in range(2)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    addresses = [address for job in jobs for address in (job.address, job.payload_address)]
    routers = [sockets.router(context, address) for address in addresses]  # two runs of one name do not meet
    for router in routers:
        router.close()
    context.term()


# --- the coordinator -------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: Callable[..., Job]) -> Path:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    samples = [(np.arange(6, dtype=np.int32), np.ones(6, np.uint8)) for _ in range(8)]
    write_dataset(tmp_path / "data", samples, {"fingerprint": "f"})
    run_id = f"run-{time.monotonic_ns()}"
    job = make_job(
        plan={"batch_tokens": 12, "microbatch_tokens": 12},
        run_id=run_id,
        address=sockets.endpoint(run_id),
        dataset_dir=str(tmp_path / "data"),
        schema=SCHEMA,
    )
    write_job(tmp_path, job)
    return tmp_path


@contextmanager
def coordinating(run_dir: Path) -> Iterator[Job]:
    """A coordinator in a thread, ended by a launcher's order; it must still be alive then."""
    job = coordinator.read_job(run_dir)
    failures: queue.Queue[BaseException] = queue.Queue()

    def body() -> None:
        try:
            coordinator.main(run_dir)
        except BaseException as error:
            failures.put(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield job
        launcher = Peer(job.address, job.run_id, greeting("launcher"))
        launcher.send(m.Order(order="done"))
        thread.join(10)
        launcher.close()
    finally:
        if not failures.empty():
            raise failures.get()
    assert not thread.is_alive()


def exchange(address: str, *frames: bytes, answers: int = 1) -> list[m.AnyMessage]:
    """Sends raw frames from a socket of its own and returns the first answers, heartbeats apart."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = sockets.dealer(context, address)
    heard: list[m.AnyMessage] = []
    try:
        for frame in frames:
            dealer.send(frame)
        while len(heard) < answers:
            assert dealer.poll(5000), f"only {heard}"
            _, message = decode(dealer.recv())
            if not isinstance(message, m.Heartbeat):
                heard.append(message)
    finally:
        dealer.close()
        context.term()
    return heard


def test_who_does_not_belong_is_told_why_and_the_run_goes_on(run_dir: Path) -> None:
    with coordinating(run_dir) as job:
        mine = Envelope(job.run_id, 0)
        version = msgpack.packb({"v": 99, "run": job.run_id, "inc": 0, "t": "hello"})
        cases = {
            "the run token is wrong": encode(greeting(token="guess"), mine),
            "run token": encode(greeting(token="gu\u00e9ss \u6f22"), mine),
            f"this is run {job.run_id}, not another": encode(greeting(), Envelope("another", 0)),
            "target, taps, dtype or plan differ": encode(greeting(schema="other"), mine),
            "protocol version 99, this side speaks": version,
            "not a msgpack map": b"\xc1",
        }
        for reason, frame in cases.items():
            (answer,) = exchange(job.address, frame)
            assert isinstance(answer, m.Reject)
            assert reason in answer.reason
        # The token comes first: who cannot prove it learns nothing else about the run.
        (answer,) = exchange(job.address, encode(greeting(token="guess", schema="other"), Envelope("another", 0)))
        assert answer == m.Reject(reason="the run token is wrong")
        peer = Peer(job.address, job.run_id, greeting())
        assert (peer.welcome.slots, peer.welcome.slot_bytes) == (4, 4096)
        peer.close()


def test_a_restarted_producer_waits_until_its_predecessor_is_known_to_be_gone(run_dir: Path) -> None:
    with coordinating(run_dir) as job:
        launcher = Peer(job.address, job.run_id, greeting("launcher"))
        first = Peer(job.address, job.run_id, greeting("producer-0"))
        second: queue.Queue[Peer] = queue.Queue()
        joining = threading.Thread(target=lambda: second.put(Peer(job.address, job.run_id, greeting("producer-0"))))
        joining.start()
        with pytest.raises(queue.Empty):
            second.get(timeout=0.3)
        launcher.send(m.Gone(name="producer-0", reaped=True, how="was killed by SIGKILL"))
        successor = second.get(timeout=5)
        joining.join(5)
        successor.send(m.Want(kind="model"))
        assert isinstance(successor.inbox.get(timeout=5), m.Lease)
        launcher.send(
            m.Gone(name="launcher", reaped=True, how="was killed by SIGKILL")
        )  # its place is taken by the one that ends the run
        for peer in (first, successor, launcher):
            peer.close()


def test_a_stranger_cannot_take_part_without_joining(run_dir: Path) -> None:
    with coordinating(run_dir) as job:
        mine = Envelope(job.run_id, 0)
        # Neither order is obeyed: the first answer is to the HELLO after them, and the run is still there.
        frames = (encode(m.Order(order="done"), mine), encode(m.Want(kind="model"), mine), encode(greeting(), mine))
        (answer,) = exchange(job.address, *frames)
        assert isinstance(answer, m.Welcome)


def test_a_message_of_several_parts_does_not_end_the_run(run_dir: Path) -> None:
    with coordinating(run_dir) as job:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = sockets.dealer(context, job.address)
        for parts in ([b"a", b"b"], [b"", b"", b""], [b""]):
            dealer.send_multipart(parts)
            assert dealer.poll(5000)
            assert isinstance(decode(dealer.recv())[1], m.Reject)
        dealer.close()
        context.term()


def test_a_producer_gets_work_and_its_answer_is_delivered(run_dir: Path) -> None:
    with coordinating(run_dir) as job:
        producer = Peer(job.address, job.run_id, greeting())
        consumer = Peer(job.address, job.run_id, greeting("consumer-0"))
        producer.send(m.Want(kind="model"))
        lease = producer.inbox.get(timeout=5)
        assert isinstance(lease, m.Lease)
        assert (lease.step, lease.index, lease.slot) == (0, 0, 0)
        assert np.frombuffer(lease.token_ids, "<i4").tolist() == list(range(6)) * len(lease.samples)
        producer.send(
            m.Ready(
                step=0,
                index=0,
                kind="model",
                attempt=lease.attempt,
                checksum=2**64 - 1,
                busy_s=0.1,
                halved=0,
                figures=(),
            )
        )
        consumer.send(m.Credit(blocks=1))
        said = [consumer.inbox.get(timeout=5) for _ in range(2)]
        assert said[0] == m.Quarantine(samples={})
        assert isinstance(said[1], m.Deliver)
        assert (said[1].slot, said[1].samples, said[1].checksum) == (0, lease.samples, 2**64 - 1)
        producer.close()
        consumer.close()


def test_a_stalled_producer_is_named_to_the_launcher_and_in_the_metrics(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "Watch", functools.partial(Watch, limit_s=0.5))
    monkeypatch.setattr(coordinator, "SNAPSHOT_S", 0.1)
    with coordinating(run_dir) as job:
        launcher = Peer(job.address, job.run_id, greeting("launcher"))
        consumer = Peer(job.address, job.run_id, greeting("consumer-0"))
        producer = Peer(job.address, job.run_id, greeting("producer-0"))
        consumer.send(m.Credit(blocks=2))
        consumer.send(m.Reached(step=0))
        producer.send(m.Want(kind="model"))
        while not isinstance(producer.inbox.get(timeout=5), m.Lease):
            pass  # and nothing comes of it
        stalls: list[str] = []
        deadline = time.monotonic() + 10
        while len(set(stalls)) < 2 and time.monotonic() < deadline:
            message = launcher.inbox.get(timeout=5)
            assert isinstance(message, m.Snapshot)
            stalls += [message.state["stall"]] * (message.state["stall"] is not None)
        for peer in (consumer, producer):
            peer.close()
        launcher.send(
            m.Gone(name="launcher", reaped=True, how="was killed by SIGKILL")
        )  # its place is taken by the one that ends the run
        launcher.close()
    waited_for = r"no progress for \d s: waiting for producer-0 \(leased step 0 block 0 \d s ago\)"
    expected = f"{waited_for}; 0 blocks produced, 0 ready, 0 trained"
    assert len(stalls) > 2
    assert all(re.fullmatch(expected, line) for line in stalls)
    rows = [row for row in of_kind(read_rows(run_dir / "metrics.jsonl"), "event") if row["what"] == "stall"]
    assert {row["text"] for row in rows} >= set(stalls)


def test_a_second_coordinator_of_the_same_run_is_refused(run_dir: Path) -> None:
    with coordinating(run_dir) as job:
        exchange(job.address, encode(greeting(), Envelope(job.run_id, 0)))  # it is up
        with pytest.raises(zmq.ZMQError, match="in use"):
            coordinator.main(run_dir)


def test_a_coordinator_leaves_no_descriptor(run_dir: Path, open_fds: Callable[[], int]) -> None:
    before = open_fds()
    with coordinating(run_dir) as job:
        peer = Peer(job.address, job.run_id, greeting())
        assert open_fds() > before
    peer.close()
    assert open_fds() == before
