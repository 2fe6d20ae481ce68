"""Every bit arrives: each dtype, its special values and its edge shapes over each payload transport, and a ring that
outlives its readers."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from consumer.feed import DeviceBlock, Feed
from launch.doors import Doors
from launch.ingest import Ingest
from producer.outlet import ArenaOutlet, ChunkOutlet
from protocol import messages as m
from protocol import sockets
from protocol.arena import Arena, create_arena
from protocol.block import CARRIERS, block_table, checksum, table_bytes, views
from protocol.peer import hello

SLOTS, SLOT_BYTES = 2, 1 << 20
WORDS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32, "int64": np.uint64}
# Quiet and signalling NaNs with payloads of both signs, -0, infinity, the largest finite value, the least denormal.
SPECIAL = {
    "bfloat16": [0x7FC1, 0xFFA5, 0x7F81, 0x8000, 0xFF80, 0x7F7F, 0x0001, 0x3F80],
    "float16": [0x7E01, 0xFE55, 0x7C01, 0x8000, 0xFC00, 0x7BFF, 0x0001, 0x3C00],
    "float32": [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0xFF800000, 0x7F7FFFFF, 0x00000001, 0x3F800000],
    "int64": [2**63, 2**63 - 1, 2**64 - 1, 0, 1, 2**53 + 1, 2**32, 2**31],
}
FINITE = slice(5, 8)


def special(dtype: str) -> np.ndarray:
    return np.array(SPECIAL[dtype], WORDS[dtype]).view(CARRIERS[dtype])


class Line:
    """Stands in for a Peer."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[m.AnyMessage] = queue.Queue()
        self.said: queue.Queue[m.Message] = queue.Queue()
        self.send = self.said.put
        self.arrived_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.progress = 0

    def tell(self, message: m.AnyMessage) -> None:
        self.inbox.put(message)
        os.eventfd_write(self.arrived_fd, 1)


class Way:
    """A ring and one way into it. `cross` writes a block at one end; `arena` is another mapping, at the other."""

    def __init__(self, transport: str, job: Any) -> None:
        self._ring_fd = create_arena(SLOTS, SLOT_BYTES, 1 << 30)
        self.arena = Arena(self._ring_fd, SLOTS, SLOT_BYTES)
        self.attempt = 0
        self._line, self._ingest_line = Line(), Line()
        self._thread: threading.Thread | None = None
        self._outlet: Any
        if transport == "shm":
            self._outlet = ArenaOutlet(Arena(self._ring_fd, SLOTS, SLOT_BYTES), self._line)  # type: ignore[arg-type]
            return
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = sockets.router(self._context, job.payload_address, sockets.PAYLOAD)
        ingest = Ingest(job, "token", Doors(self._router), self.arena, self._ingest_line)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=ingest.run, daemon=True)
        self._thread.start()
        greeting = hello("producer", "producer-0", 0, "token", job.schema)
        self._outlet = ChunkOutlet(job.payload_address, job.run_id, greeting, SLOT_BYTES, self._line)  # type: ignore[arg-type]

    def cross(self, table: Any, tensors: dict[str, np.ndarray], slot: int = 0) -> int:
        """Returns the checksum of the features."""
        self.attempt += 1
        same = {"step": 0, "index": 0, "kind": "model", "attempt": self.attempt}
        empty = {"samples": (), "lengths": (), "positions": (), "token_ids": b"", "loss_mask": b""}
        lease = m.Lease(**same, slot=slot, **empty)
        nbytes = table_bytes(table)
        self._ingest_line.tell(m.Expect(holder="producer-0", attempt=self.attempt, slot=slot, nbytes=nbytes))
        room = views(self._outlet.room(lease), table)
        for name, tensor in tensors.items():
            room[name][...] = tensor
        total = checksum(room["features"])
        ready = m.Ready(**same, checksum=total, busy_s=0.0, halved=0, figures=())
        self._outlet.commit(lease, [(0, nbytes)], ready)
        assert self._line.said.get(timeout=20) == ready
        return total

    def end(self) -> None:
        self._outlet.close()
        if self._thread is not None:
            self._ingest_line.tell(m.Stop(reason="done"))
            self._thread.join(10)
            assert not self._thread.is_alive()
            self._router.close()
            self._context.term()
        for fd in (self._ring_fd, self._line.arrived_fd, self._ingest_line.arrived_fd):
            os.close(fd)


@pytest.fixture(params=["shm", "zmq"])
def way(request: Any, make_job: Callable[..., Any]) -> Iterator[Way]:
    address = sockets.payload_endpoint(f"bits-{time.monotonic_ns()}")
    made = Way(request.param, make_job(payload_address=address, transport=request.param))
    yield made
    made.end()


@pytest.mark.parametrize("dtype", SPECIAL)
def test_special_values_and_edge_shapes_arrive_bit_for_bit(way: Way, dtype: str) -> None:
    """B7: NaN payloads, -0, the largest finite value; no token, one token; a transposed source."""
    values = special(dtype)
    sources = [
        values.reshape(8, 1),
        values.reshape(1, 8),
        values.reshape(2, 4).T,
        values[::2].reshape(1, 4),
        values[:0],
    ]
    for source in sources:
        tokens, width = source.shape if source.ndim == 2 else (0, 4)
        table = block_table(tokens, min(tokens, 1), width, dtype)
        # Elsewhere in the slot lies what an earlier block left.
        way.arena.slot(0)[:] = b"\xa5" * SLOT_BYTES
        way.cross(table, {"features": source.reshape(tokens, width)})
        arrived = views(way.arena.slot(0), table)["features"]
        assert (arrived.dtype, arrived.shape) == (CARRIERS[dtype], (tokens, width))
        assert arrived.tobytes() == np.ascontiguousarray(source).tobytes()
        assert bytes(way.arena.slot(0)[table_bytes(table) :]) == b"\xa5" * (SLOT_BYTES - table_bytes(table))


def feed(way: Way, table: Any, samples: tuple[int, ...], total: int) -> DeviceBlock | m.Bad:
    """What a consumer's feed makes of the block in slot 0: the block, or why it does not want it."""
    sent: list[m.Message] = []
    peer: Any = SimpleNamespace(inbox=queue.Queue(), send=sent.append)
    same = {"step": 0, "index": 0, "attempt": 1, "micro_step": 0, "micro_steps": 1, "epoch": 0}
    peer.inbox.put(m.Deliver(**same, slot=0, table=table, samples=samples, writers=(way.attempt,), checksum=total))
    peer.inbox.put(m.Go(step=0, micro_step=0, stop=False, finish=False, trained_s=0.0, cooldown_step=-1))
    peer.inbox.put(m.Stop(reason="the end"))
    one = Feed(peer, way.arena, torch.device("cpu"), 1)
    one._thread.join(10)
    if refused := [message for message in sent if isinstance(message, m.Bad)]:
        return refused[0]
    block = one.next(0, 0)
    assert block is not None
    return block


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_trained_on_has_the_producer_s_bits_and_dtype(way: Way, dtype: str) -> None:
    """B7, to the end of the way: finite values reach the trainer as they were; what is not finite never does."""
    values = special(dtype)
    finite = np.append(values[FINITE], values[3]).reshape(2, 2)  # -0 as well
    table = block_table(2, 1, 2, dtype)
    small = {
        "token_ids": np.array([2**31 - 1, -1], np.int32),
        "loss_mask": np.array([1, 255], np.uint8),
        "offsets": np.array([0, 2], np.int32),
        "samples": np.array([2**63 - 1]),
    }
    block = feed(way, table, (2**63 - 1,), way.cross(table, {"features": finite, **small}))
    assert isinstance(block, DeviceBlock)
    assert block.features.dtype == getattr(torch, dtype)
    assert block.features.view(torch.uint8).numpy().tobytes() == finite.tobytes()
    for name, expected in small.items():
        arrived = getattr(block, name)
        assert (arrived.dtype, arrived.tobytes()) == (expected.dtype, expected.tobytes())
    for word in values[[0, 1, 2, 4]]:
        poison = finite.copy()
        poison[1, 1] = word
        refused = feed(way, table, (2**63 - 1,), way.cross(table, {"features": poison, **small}))
        assert isinstance(refused, m.Bad)
        assert (refused.samples, refused.reason) == ((2**63 - 1,), f"sample {2**63 - 1}: tap 0 is not finite")


def test_what_is_trained_on_is_what_was_summed(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: whatever is written to the slot after the sum was taken does not reach the trainer unnoticed."""
    table = block_table(2, 1, 2, "float32")
    sent = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    small = {"token_ids": np.array([1, 2], np.int32), "offsets": np.array([0, 2], np.int32), "samples": np.array([7])}
    total = way.cross(table, {"features": sent, **small})

    def sum_then_write(features: np.ndarray) -> int:
        found = checksum(features)
        views(way.arena.slot(0), table)["features"][...] = [[5.0, 6.0], [7.0, 8.0]]
        return found

    monkeypatch.setattr("consumer.prefetch.checksum", sum_then_write)
    block = feed(way, table, (7,), total)
    assert isinstance(block, m.Bad) or block.features.tolist() == sent.tolist()


SMALL = {"token_ids": np.array([1, 2], np.int32), "offsets": np.array([0, 2], np.int32), "samples": np.array([7])}
FEATURES = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def write_over_the_end(way: Way) -> None:
    slot = way.arena.slot(0)
    start = np.frombuffer(slot, np.uint8).ctypes.data - np.frombuffer(way.arena._map, np.uint8).ctypes.data
    memoryview(way.arena._map)[start + len(slot) : start + len(slot) + 2] = b"\x7f\x80"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (write_over_the_end, "the canary behind slot 0 was overwritten"),
        (lambda way: way.arena.sign(0, way.attempt - 1), "slot 0 was written by attempt {stale}, not {attempt}"),
    ],
)
@pytest.mark.parametrize("when", ["before", "while it is copied"])
def test_an_overrun_and_a_late_writer_are_bad_and_a_retry_heals(
    way: Way, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Way], None], reason: str, when: str
) -> None:
    table = block_table(2, 1, 2, "float32")
    for attempt in (1, 2):  # the second finds what was done to the first
        total = way.cross(table, {"features": FEATURES, **SMALL})
        assert isinstance(feed(way, table, (7,), total), DeviceBlock)
        with monkeypatch.context() as patch:
            if when == "before":
                damage(way)
            else:
                patch.setattr("consumer.prefetch.checksum", lambda features: (damage(way), checksum(features))[1])
            refused = feed(way, table, (7,), total)
        assert isinstance(refused, m.Bad)
        assert refused.reason == reason.format(stale=attempt - 1, attempt=attempt)
        assert refused.samples == ()  # nobody knows which


# --- readers that come and go ----------------------------------------------------------------------------------------

READER = """
import sys
from protocol.arena import Arena
slot = Arena(int(sys.argv[1]), 2, 1 << 20).slot(int(sys.argv[2]))
assert set(slot) == {int(sys.argv[2]) + 1}, set(slot)
print("read", flush=True)
sys.stdin.read()
"""


def test_a_reader_s_end_takes_nothing_away_from_the_others() -> None:
    """B3: one reader ends normally, another is killed, a third attaches later, then the owner goes; nobody warns."""
    ring_fd = create_arena(SLOTS, SLOT_BYTES, 1 << 30)
    owner = Arena(ring_fd, SLOTS, SLOT_BYTES)
    for slot in range(SLOTS):
        owner.slot(slot)[:] = bytes([slot + 1]) * SLOT_BYTES

    def start(slot: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-X", "dev", "-W", "error", "-c", READER, str(ring_fd), str(slot)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, pass_fds=[ring_fd], text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    def read_and_end(reader: subprocess.Popen[str]) -> None:
        assert reader.communicate(timeout=20) == ("read\n", "")
        assert reader.returncode == 0

    first, killed = start(0), start(1)
    read_and_end(first)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "read\n"
    killed.kill()
    assert killed.communicate(timeout=20) == ("", "")
    read_and_end(start(1))
    last = start(0)
    assert last.stdout is not None
    assert last.stdout.readline() == "read\n"
    assert bytes(owner.slot(0)) == b"\x01" * SLOT_BYTES
    os.close(ring_fd)
    del owner
    assert last.communicate(timeout=20) == ("", "")
    assert last.returncode == 0
    assert not list(Path("/dev/shm").glob("*draftwire-ring*"))
