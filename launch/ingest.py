"""The ingest process: `python -P -m launch.ingest RUN_DIR RING_FD`, started by the launcher when payload travels over
ZeroMQ. It alone writes the ring for producers that do not map it.

A thin shell around `launch.intake`: ROUTERs for payload, and a line to the coordinator, which says whose bytes belong
where. Each chunk is received straight into its slot. One thread does all of it, so FENCED means that the last byte of
an earlier lease has been written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
from pathlib import Path

import xxhash
import zmq

from launch.admission import refusal, remote_refusal
from launch.doors import Doors, Seat, opened
from launch.intake import Intake
from protocol import sockets
from protocol.arena import Arena
from protocol.child import run_child
from protocol.codec import Envelope, decode, encode
from protocol.errors import ProtocolError, RunError
from protocol.job import INGEST, Job, read_job, run_token
from protocol.messages import Chunk, ChunkAck, Expect, Fence, Fenced, Hello, Message, Reject, Stop, Welcome
from protocol.peer import Peer, hello

POLL_MS = 1000
FRAMES_A_TURN = 64

log = logging.getLogger(__name__)


class Ingest:
    """Takes chunks through `doors` into `arena` as the coordinator, at the other end of `peer`, says."""

    def __init__(self, job: Job, token: str, doors: Doors, arena: Arena, peer: Peer) -> None:
        self._job, self._token, self._doors, self._arena, self._peer = job, token, doors, arena, peer
        self._doors.wake_for(peer.arrived_fd)
        self._intake = Intake()
        self._envelope = Envelope(job.run_id, job.incarnation)
        self._seats: dict[str, Seat] = {}
        self._names: dict[Seat, str] = {}

    def run(self) -> str:
        """Until the coordinator says STOP or is lost; returns the reason."""
        while True:
            self._doors.wait(POLL_MS)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._peer.arrived_fd)
            if (stop := self._read_orders()) is not None:
                return stop.reason
            for remote, router in self._doors.messages(FRAMES_A_TURN):
                self._receive(remote, router)

    def _read_orders(self) -> Stop | None:
        while True:
            try:
                message = self._peer.inbox.get_nowait()
            except queue.Empty:
                return None
            if isinstance(message, Stop):
                return message
            if isinstance(message, Expect):
                self._arena.sign(message.slot, message.attempt)
                self._send(message.holder, self._intake.expect(message))
            elif isinstance(message, Fence):
                self._intake.fence(message.holder)
                self._forget(message.holder)
                self._peer.send(Fenced(holder=message.holder))

    def _receive(self, remote: bool, router: zmq.Socket[bytes]) -> None:
        """One message: HELLO, or CHUNK and its bytes. Of anything else nothing comes."""
        seat = Seat(remote, router.recv())
        header = router.recv()
        try:
            envelope, message = decode(header)
        except ProtocolError as error:
            _drop_rest(router)
            self._send_to(seat, Reject(reason=str(error)))
            return
        name = self._names.get(seat)
        if isinstance(message, Chunk) and name is not None and router.rcvmore:
            self._take(name, message, router)
        _drop_rest(router)
        if isinstance(message, Hello):
            self._join(seat, message, envelope)

    def _take(self, name: str, chunk: Chunk, router: zmq.Socket[bytes]) -> None:
        place = self._intake.place(name, chunk)
        if place is None:
            return
        if isinstance(place, ChunkAck):
            self._send(name, place)
            return
        slot, start, end = place
        room = self._arena.slot(slot)[start:end]
        # A longer frame is cut off at the end of the room, and its true length returned.
        nbytes = router.recv_into(room)
        checksum = xxhash.xxh3_64_intdigest(room[:nbytes])
        self._peer.progress += 1
        if (ack := self._intake.arrived(chunk, nbytes, len(room), checksum)) is not None:
            if ack.problem:
                log.warning("%s: %s", name, ack.problem)
            self._send(name, ack)

    def _join(self, seat: Seat, greeting: Hello, envelope: Envelope) -> None:
        if seat.remote:
            reason = remote_refusal(self._job, self._doors.token, greeting, envelope)
            if reason is None and greeting.name in self._seats:
                # FENCE comes between two sessions, so this one is late: what it would send is long given up.
                reason = "a producer of this name sends its payload here already"
        else:
            reason = refusal(self._job, self._token, self._job.producer_names, greeting, envelope)
        if reason is not None:
            log.warning("refused %.120r (pid %s): %s", greeting.name, greeting.pid, reason)
            self._send_to(seat, Reject(reason=reason))
            return
        # A restarted producer takes its predecessor's place: what that one still sends is from nobody.
        self._forget(greeting.name)
        self._seats[greeting.name], self._names[seat] = seat, greeting.name
        log.info("%s sends its payload here (pid %s on %s)", greeting.name, greeting.pid, greeting.host)
        welcome = Welcome(slots=self._job.slots, slot_bytes=self._job.slot_bytes, heartbeat_s=0.0)
        self._send_to(seat, welcome)

    def _forget(self, name: str) -> None:
        if (seat := self._seats.pop(name, None)) is not None:
            self._names.pop(seat, None)

    def _send(self, name: str, message: Message) -> None:
        if (seat := self._seats.get(name)) is not None:
            self._send_to(seat, message)

    def _send_to(self, seat: Seat, message: Message) -> None:
        try:
            self._doors.send(seat, encode(message, self._envelope))
        except zmq.ZMQError as error:  # a dead producer, or one whose connection was cut: the coordinator hears of it
            log.warning("could not send %s: %s", type(message).__name__, error)


def _drop_rest(router: zmq.Socket[bytes]) -> None:
    while router.rcvmore:
        router.recv(copy=False)


def main(run_dir: Path, ring_fd: int) -> None:
    job = read_job(run_dir)
    arena = Arena(ring_fd, job.slots, job.slot_bytes)
    remote = job.hosts.payload_address if job.hosts is not None else None
    with (
        zmq.Context() as context,
        opened(context, job.payload_address, remote, (sockets.PAYLOAD, sockets.PAYLOAD)) as doors,
    ):
        # Bound before it joins: no producer is sent to an address where nobody listens.
        peer = Peer(job.address, job.run_id, hello(INGEST, INGEST, 0, run_token(), job.schema), job.hang_s)
        reason = Ingest(job, run_token(), doors, arena, peer).run()
        peer.close()
    if reason != "done":
        raise RunError(reason)


if __name__ == "__main__":
    run_child(INGEST, lambda: main(Path(sys.argv[1]), int(sys.argv[2])))
