"""The way out of a producer: where a leased block is written, and how it gets into the ring.

With shared memory a block is written where it stays, and READY can follow at once. Over ZeroMQ (protocol/chunks.py) it
is written into a buffer of this process; a thread sends it on while the next one is computed, and says READY when the
last byte lies in the ring.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import xxhash
import zmq
from msgspec import Struct

from protocol import sockets
from protocol.arena import Arena
from protocol.chunks import pieces
from protocol.codec import Envelope, decode, encode
from protocol.errors import ProtocolError, RunError
from protocol.line import Line
from protocol.messages import AnyMessage, Chunk, ChunkAck, Hello, Lease, Nack, Ready, Reject, Stop, Welcome
from protocol.peer import JOIN_S, Peer

# One buffer is sent while the other is filled.
BUFFERS = 2
TURN_MS = 100
# Ingest may be paused for minutes and go on; that its process has died is for the launcher to see.
PATIENCE_S = 300.0


class Outlet(Protocol):
    """`room` is where to write a leased block, as soon as there is some, or None once `wanted` says no; `commit` lets
    it go, and READY is said when it lies in the ring."""

    def room(self, lease: Lease, wanted: Callable[[], bool] = ...) -> memoryview | None: ...

    def commit(self, lease: Lease, ranges: Iterable[tuple[int, int]], ready: Ready) -> None: ...

    def abandon(self, lease: Lease) -> None: ...

    def close(self) -> None: ...


class ArenaOutlet:
    """Straight into the ring, which this process maps."""

    def __init__(self, arena: Arena, peer: Peer) -> None:
        self._arena, self._peer = arena, peer

    def room(self, lease: Lease, wanted: Callable[[], bool] = lambda: True) -> memoryview:
        self._arena.sign(lease.slot, lease.attempt)
        return self._arena.slot(lease.slot)

    def commit(self, lease: Lease, ranges: Iterable[tuple[int, int]], ready: Ready) -> None:
        self._arena.sign(lease.slot, lease.attempt)
        self._peer.send(ready)

    def abandon(self, lease: Lease) -> None:
        """Nothing to give back: the slot is the coordinator's."""

    def close(self) -> None:
        """Nothing to close."""


class Shipment(Struct, frozen=True):
    """A filled buffer, what of it to send, and what to say when it has arrived."""

    buffer: memoryview
    ranges: tuple[tuple[int, int], ...]
    lease: Lease
    ready: Ready


class _Refused(Exception):
    """Ingest takes no more of this block."""


class ChunkOutlet:
    """Through ingest, in chunks. Ready when ingest has answered, so that no credit is sent to nobody; raises
    RunError when it does not. Once the connection has failed `room` raises it too, and `peer`'s inbox gets a STOP.
    `server_key`: ingest's CURVE key, over TCP."""

    def __init__(
        self, address: str, run: str, greeting: Hello, slot_bytes: int, peer: Peer, server_key: str = ""
    ) -> None:
        self._peer = peer
        self._envelope = Envelope(run, 0)
        self._free: queue.Queue[memoryview | None] = queue.Queue()
        for _ in range(BUFFERS):
            self._free.put(memoryview(bytearray(slot_bytes)))
        self._room: dict[int, memoryview] = {}
        self._shipments: queue.Queue[Shipment | None] = queue.Queue()
        self._acks: dict[int, ChunkAck] = {}  # the newest of each attempt; credit for the next block comes early
        self._joined, self._closing = threading.Event(), threading.Event()
        self._failure = ""
        arguments = (address, server_key, greeting)
        self._thread = threading.Thread(target=self._run, args=arguments, name="outlet", daemon=True)
        self._thread.start()
        self._joined.wait()  # ends with the thread at the latest, whose every wait has a deadline
        if self._failure:
            raise RunError(self._failure)

    def room(self, lease: Lease, wanted: Callable[[], bool] = lambda: True) -> memoryview | None:
        while wanted():
            with contextlib.suppress(queue.Empty):
                buffer = self._free.get(timeout=TURN_MS / 1000)
                if buffer is None:
                    raise RunError(self._failure)
                self._room[lease.attempt] = buffer
                return buffer
        return None

    def commit(self, lease: Lease, ranges: Iterable[tuple[int, int]], ready: Ready) -> None:
        self._shipments.put(Shipment(self._room.pop(lease.attempt), tuple(ranges), lease, ready))

    def abandon(self, lease: Lease) -> None:
        if (buffer := self._room.pop(lease.attempt, None)) is not None:
            self._free.put(buffer)

    def close(self) -> None:
        """Ends the thread; what has not arrived by now does not arrive."""
        self._closing.set()
        self._shipments.put(None)
        self._thread.join(timeout=10)

    # --- the thread that owns the socket ---

    def _run(self, address: str, server_key: str, greeting: Hello) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        line = Line(context, address, sockets.PAYLOAD, server_key)
        try:
            self._await_room(line, JOIN_S)
            line.dealer.send(encode(greeting, self._envelope))
            answer = self._hear(line, JOIN_S)
            if not isinstance(answer, Welcome):
                raise ProtocolError(answer.reason if isinstance(answer, Reject) else f"unexpected {answer}")
            self._joined.set()
            while (shipment := self._shipments.get()) is not None:
                self._peer.send(self._ship(line, shipment))
                self._free.put(shipment.buffer)
        except (zmq.ZMQError, ProtocolError, RunError) as error:
            if not self._closing.is_set():
                self._failure = f"payload could not be sent: {error}"
                self._peer.inbox.put(Stop(reason=self._failure))
                self._free.put(None)
        finally:
            self._joined.set()
            line.close()
            context.term()

    def _ship(self, line: Line, shipment: Shipment) -> Ready | Nack:
        """Sends one block within its credit; READY once all of it lies in the ring, NACK when ingest refuses it."""
        attempt, sent = shipment.ready.attempt, 0
        try:
            for piece in pieces(shipment.ranges):
                while sent + piece.nbytes > self._ack(attempt).limit:
                    self._take_ack(line)
                payload = shipment.buffer[piece.start : piece.stop]
                checksum = xxhash.xxh3_64_intdigest(payload)
                chunk = Chunk(attempt=attempt, offset=piece.start, checksum=checksum, last=piece.last)
                self._await_room(line, PATIENCE_S)
                line.dealer.send(encode(chunk, self._envelope), zmq.SNDMORE | zmq.NOBLOCK)
                # The buffer is not touched before ingest has acknowledged all of it, so libzmq may read it in place.
                line.dealer.send(payload, zmq.NOBLOCK, copy=False)
                sent += piece.nbytes
            while self._ack(attempt).received < sent:
                self._take_ack(line)
        except _Refused as refused:
            return nack(shipment.lease, str(refused), retryable=True)
        finally:
            self._acks = {later: ack for later, ack in self._acks.items() if later > attempt}
        return shipment.ready

    def _ack(self, attempt: int) -> ChunkAck:
        ack = self._acks.get(attempt) or ChunkAck(attempt=attempt, received=0, limit=0, problem="")
        if ack.problem:
            raise _Refused(ack.problem)
        return ack

    def _take_ack(self, line: Line) -> None:
        message = self._hear(line, PATIENCE_S)
        if isinstance(message, Reject):
            raise ProtocolError(f"refused: {message.reason}")
        if isinstance(message, ChunkAck):
            self._acks[message.attempt] = message

    def _hear(self, line: Line, patience_s: float) -> AnyMessage:
        self._await(line.ready_to_receive, patience_s, "said")
        return decode(line.dealer.recv())[1]

    def _await_room(self, line: Line, patience_s: float) -> None:
        """Until a message can be sent: a plain send would not notice that this outlet is to close."""
        self._await(line.ready_to_send, patience_s, "taken")

    def _await(self, ready: Callable[[int], bool], patience_s: float, done: str) -> None:
        # Turns are counted, not the clock: a pause of this process is not ingest's silence.
        for _ in range(int(patience_s * 1000 / TURN_MS)):
            if self._closing.is_set():
                raise RunError("this outlet is closed")
            if ready(TURN_MS):
                return
        raise RunError(f"ingest has {done} nothing for {patience_s:.0f} s")


def nack(lease: Lease, reason: str, retryable: bool, samples: tuple[int, ...] = ()) -> Nack:
    """The answer to a lease that cannot be filled."""
    return Nack(
        step=lease.step,
        index=lease.index,
        kind=lease.kind,
        attempt=lease.attempt,
        reason=reason,
        retryable=retryable,
        samples=samples,
    )
