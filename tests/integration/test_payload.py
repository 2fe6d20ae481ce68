"""Payload over real sockets: a real ingest, a real outlet, and a stand-in for the coordinator."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
import zmq

from launch import ingest as ingest_module
from launch.doors import Doors
from launch.ingest import Ingest
from producer import outlet as outlet_module
from producer.outlet import ChunkOutlet
from protocol import messages as m
from protocol import sockets
from protocol.arena import Arena, create_arena
from protocol.chunks import CHUNK_BYTES, WINDOW_BYTES
from protocol.codec import Envelope, decode, encode
from protocol.errors import RunError
from protocol.peer import hello

TOKEN = "5ec2e7"
SLOTS, SLOT_BYTES = 3, WINDOW_BYTES + 2 * CHUNK_BYTES + 12345


class Line:
    """Stands in for a Peer: what the coordinator says goes in, what the process says comes out."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[m.AnyMessage] = queue.Queue()
        self.said: queue.Queue[m.Message] = queue.Queue()
        self.arrived_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.progress = 0

    def send(self, message: m.Message) -> None:
        self.said.put(message)

    def tell(self, message: m.AnyMessage) -> None:
        self.inbox.put(message)
        os.eventfd_write(self.arrived_fd, 1)


class Node:
    """An ingest process as a thread, with the ring it writes."""

    def __init__(self, job: Any, key: tuple[str, str] = ("", "")) -> None:
        self.job, self.line = job, Line()
        self.key, secret_key = key
        self._ring_fd = create_arena(SLOTS, SLOT_BYTES, 1 << 40)
        self.arena = Arena(self._ring_fd, SLOTS, SLOT_BYTES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = sockets.router(self._context, job.payload_address, sockets.PAYLOAD, secret_key)
        self.address = self._router.last_endpoint.decode().rstrip("\0")
        self.paused, self._go_on = threading.Event(), threading.Event()
        self.ingest = Ingest(job, TOKEN, Doors(self._router), self.arena, self.line)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self.ingest.run, daemon=True)
        self._thread.start()

    def outlet(self, name: str = "producer-0", token: str = TOKEN) -> tuple[ChunkOutlet, Line]:
        line = Line()
        greeting = hello("producer", name, 0, token, self.job.schema)
        outlet = ChunkOutlet(self.address, self.job.run_id, greeting, SLOT_BYTES, line, self.key)  # type: ignore[arg-type]
        return outlet, line

    def end(self) -> None:
        self.line.tell(m.Stop(reason="done"))
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._router.close()
        self._context.term()
        os.close(self._ring_fd)
        os.close(self.line.arrived_fd)


@pytest.fixture(params=["ipc", "tcp", "curve"])
def node(request: Any, make_job: Callable[..., Any]) -> Iterator[Node]:
    address = "tcp://127.0.0.1:*" if request.param != "ipc" else sockets.payload_endpoint(f"test-{time.monotonic_ns()}")
    key = tuple(half.decode() for half in zmq.curve_keypair()) if request.param == "curve" else ("", "")
    one = Node(make_job(payload_address=address, transport="zmq", slots=SLOTS, producers=("cpu", "cpu")), key)
    yield one
    one.end()


def lease(attempt: int, slot: int) -> m.Lease:
    return m.Lease(
        step=1,
        index=attempt,
        kind="model",
        attempt=attempt,
        slot=slot,
        samples=(),
        lengths=(),
        positions=(),
        token_ids=b"",
        loss_mask=b"",
    )


def ready(attempt: int) -> m.Ready:
    return m.Ready(step=1, index=attempt, kind="model", attempt=attempt, checksum=0, busy_s=0.0, halved=0, figures=())


def expect(attempt: int, slot: int, nbytes: int = SLOT_BYTES, holder: str = "producer-0") -> m.Expect:
    return m.Expect(holder=holder, attempt=attempt, slot=slot, nbytes=nbytes)


def fill(room: memoryview, seed: int) -> bytes:
    data = np.random.default_rng(seed).integers(0, 256, len(room), dtype=np.uint8).tobytes()
    room[:] = data
    return data


def test_blocks_arrive_bit_for_bit_while_the_next_is_filled(node: Node) -> None:
    outlet, line = node.outlet()
    # All credit is given before the first byte is sent, as when leases are granted ahead of the work.
    for attempt in range(1, 4):
        node.line.tell(expect(attempt, attempt % SLOTS))
    sent = {}
    for attempt in range(1, 4):
        held = lease(attempt, attempt % SLOTS)
        sent[attempt] = fill(outlet.room(held), attempt)
        outlet.commit(held, [(0, SLOT_BYTES)], ready(attempt))
    for attempt in range(1, 4):
        assert line.said.get(timeout=20) == ready(attempt)
        assert node.arena.slot(attempt % SLOTS) == sent[attempt]
    assert node.ingest._intake.stale == 0
    outlet.close()


def test_only_the_written_ranges_are_placed(node: Node) -> None:
    outlet, line = node.outlet()
    node.arena.slot(0)[:] = b"\x11" * SLOT_BYTES
    node.line.tell(expect(1, 0))
    held = lease(1, 0)
    outlet.room(held)[:] = b"\x22" * SLOT_BYTES
    ranges = [(0, 10), (CHUNK_BYTES - 5, 2 * CHUNK_BYTES + 7), (SLOT_BYTES - 1, SLOT_BYTES)]
    outlet.commit(held, ranges, ready(1))
    assert line.said.get(timeout=20) == ready(1)
    expected = np.full(SLOT_BYTES, 0x11, np.uint8)
    for start, stop in ranges:
        expected[start:stop] = 0x22
    assert node.arena.slot(0) == expected.tobytes()
    outlet.close()


def test_a_slow_ring_holds_the_sender_at_its_credit(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    held_back = threading.Event()
    taken = [0]
    receive = Ingest._take

    def take(self: Ingest, name: str, chunk: m.Chunk, router: zmq.Socket[bytes]) -> None:
        held_back.wait(20)
        taken[0] += 1
        receive(self, name, chunk, router)

    monkeypatch.setattr(Ingest, "_take", take)
    sent = [0]
    original = outlet_module.encode

    def count(message: m.Message, envelope: Envelope) -> bytes:
        sent[0] += isinstance(message, m.Chunk)
        return original(message, envelope)

    monkeypatch.setattr(outlet_module, "encode", count)
    outlet, line = node.outlet()
    node.line.tell(expect(1, 0))
    held = lease(1, 0)
    data = fill(outlet.room(held), 0)
    outlet.commit(held, [(0, SLOT_BYTES)], ready(1))
    deadline = time.monotonic() + 10
    while sent[0] < WINDOW_BYTES // CHUNK_BYTES and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert sent[0] == WINDOW_BYTES // CHUNK_BYTES  # a whole window is under way, and not a chunk more
    assert taken[0] == 0
    assert line.said.empty()
    held_back.set()
    assert line.said.get(timeout=20) == ready(1)
    assert node.arena.slot(0) == data
    outlet.close()


def test_a_damaged_chunk_is_a_failed_try_and_the_next_attempt_arrives(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlet, line = node.outlet()
    good = xxhash.xxh3_64_intdigest
    wrong = [False]

    class Hash:
        @staticmethod
        def xxh3_64_intdigest(data: memoryview) -> int:
            return good(data) ^ wrong[0]

    monkeypatch.setattr(ingest_module, "xxhash", Hash)
    for attempt, damaged in ((1, True), (2, False)):
        wrong[0] = damaged
        node.line.tell(expect(attempt, 0))
        held = lease(attempt, 0)
        data = fill(outlet.room(held), attempt)
        outlet.commit(held, [(0, SLOT_BYTES)], ready(attempt))
        said = line.said.get(timeout=20)
        if damaged:
            assert isinstance(said, m.Nack)
            assert (said.attempt, said.retryable) == (1, True)
            assert "damaged" in said.reason
        else:
            assert said == ready(2)
    assert node.arena.slot(0) == data
    outlet.close()


def test_a_dead_producer_s_last_chunks_do_not_reach_the_slot_s_next_block(node: Node) -> None:
    with zmq.Context() as context, sockets.dealer(context, node.address, sockets.PAYLOAD, node.key) as old:
        envelope = Envelope(node.job.run_id, 0)
        old.send(encode(hello("producer", "producer-0", 0, TOKEN, node.job.schema), envelope))
        assert isinstance(decode(old.recv())[1], m.Welcome)
        node.line.tell(expect(1, 0))
        assert decode(old.recv())[1] == m.ChunkAck(attempt=1, received=0, limit=WINDOW_BYTES, problem="")
        outlet, line = node.outlet("producer-1")
        node.line.tell(expect(2, 0, holder="producer-1"))
        held = lease(2, 0)
        data = fill(outlet.room(held), 2)
        outlet.commit(held, [(0, SLOT_BYTES)], ready(2))
        assert line.said.get(timeout=20) == ready(2)
        for attempt in (1, 2):  # late, and of another's attempt
            payload = b"\xff" * 100
            chunk = m.Chunk(attempt=attempt, offset=0, checksum=xxhash.xxh3_64_intdigest(payload), last=False)
            old.send_multipart([encode(chunk, envelope), payload])
        deadline = time.monotonic() + 10
        while node.ingest._intake.stale < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert node.ingest._intake.stale == 2
        assert node.arena.slot(0) == data
        outlet.close()


def test_what_was_fenced_is_written_no_more_although_nobody_else_is_expected_there(node: Node) -> None:
    """The next writer of the slot may map the ring, and then ingest hears nothing of it."""
    with zmq.Context() as context, sockets.dealer(context, node.address, sockets.PAYLOAD, node.key) as old:
        envelope = Envelope(node.job.run_id, 0)
        greeting = encode(hello("producer", "producer-0", 0, TOKEN, node.job.schema), envelope)
        payload = b"\xff" * 100
        checksum = xxhash.xxh3_64_intdigest(payload)
        chunks = [m.Chunk(attempt=1, offset=offset, checksum=checksum, last=False) for offset in (0, 100, 200)]
        old.send(greeting)
        assert isinstance(decode(old.recv())[1], m.Welcome)
        node.line.tell(expect(1, 0))
        assert isinstance(decode(old.recv())[1], m.ChunkAck)
        old.send_multipart([encode(chunks[0], envelope), payload])
        deadline = time.monotonic() + 10
        while node.arena.slot(0)[99] != 0xFF and time.monotonic() < deadline:
            time.sleep(0.01)
        node.line.tell(m.Fence(holder="producer-0"))
        assert node.line.said.get(timeout=10) == m.Fenced(holder="producer-0")
        node.arena.slot(0)[:300] = b"\x11" * 300  # by whoever has it now
        old.send_multipart([encode(chunks[1], envelope), payload])
        old.send(greeting)  # not even when it joins again
        assert isinstance(decode(old.recv())[1], m.Welcome)
        old.send_multipart([encode(chunks[2], envelope), payload])
        while node.ingest._intake.stale < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert node.ingest._intake.stale == 1
        assert node.arena.slot(0)[:300] == b"\x11" * 300


def test_a_restarted_producer_takes_its_predecessor_s_place(node: Node) -> None:
    first, _ = node.outlet()
    second, line = node.outlet()
    node.line.tell(expect(7, 1))
    held = lease(7, 1)
    data = fill(second.room(held), 7)
    second.commit(held, [(0, SLOT_BYTES)], ready(7))
    assert line.said.get(timeout=20) == ready(7)
    assert node.arena.slot(1) == data
    first.close()
    second.close()


def test_a_wrong_token_is_refused_with_the_reason(node: Node) -> None:
    with pytest.raises(RunError, match="the run token is wrong"):
        node.outlet(token="guess")


def test_garbage_and_strangers_change_nothing(node: Node) -> None:
    with zmq.Context() as context, sockets.dealer(context, node.address, sockets.CONTROL, node.key) as stranger:
        envelope = Envelope(node.job.run_id, 0)
        node.line.tell(expect(1, 0))
        chunk = encode(m.Chunk(attempt=1, offset=0, checksum=0, last=True), envelope)
        before = bytes(node.arena.slot(0)[:64])
        stranger.send_multipart([chunk, b"\xff" * 64])  # never said HELLO
        stranger.send_multipart([b"\x00", b"x", b"y"])
        assert isinstance(decode(stranger.recv())[1], m.Reject)
        stranger.send(chunk)  # without bytes
        assert bytes(node.arena.slot(0)[:64]) == before
    outlet, line = node.outlet()
    held = lease(2, 1)
    node.line.tell(expect(2, 1))
    data = fill(outlet.room(held), 2)
    outlet.commit(held, [(0, SLOT_BYTES)], ready(2))
    assert line.said.get(timeout=20) == ready(2)
    assert node.arena.slot(1) == data
    outlet.close()


def test_an_ingest_that_says_nothing_ends_the_outlet_with_a_reason(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet_module, "PATIENCE_S", 0.5)
    outlet, line = node.outlet()
    held = lease(1, 0)  # nobody told ingest to expect it
    fill(outlet.room(held), 1)
    outlet.commit(held, [(0, SLOT_BYTES)], ready(1))
    stop = line.inbox.get(timeout=10)
    assert isinstance(stop, m.Stop)
    assert "ingest has said nothing" in stop.reason
    outlet.room(lease(2, 1))
    with pytest.raises(RunError, match="ingest has said nothing"):
        outlet.room(lease(3, 2))
    outlet.close()


def test_closing_gives_every_descriptor_back(node: Node, open_fds: Callable[[], int]) -> None:
    node.outlet()[0].close()
    before = open_fds()
    for _ in range(3):
        outlet, line = node.outlet()
        outlet.close()
        os.close(line.arrived_fd)
    deadline = time.monotonic() + 5
    while open_fds() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_fds() <= before
