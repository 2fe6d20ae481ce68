"""The ingest process: `python -P -m launch.ingest RUN_DIR RING_FD`, started by the launcher when payload travels over
ZeroMQ. It alone writes the ring for producers that do not map it.

A thin shell around `launch.intake`: one ROUTER for payload, and a line to the coordinator, which says whose bytes
belong where. Each chunk is received straight into its slot.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
from pathlib import Path

import xxhash
import zmq

from launch.admission import refusal
from launch.intake import Intake
from protocol import sockets
from protocol.arena import Arena
from protocol.child import run_child
from protocol.codec import Envelope, decode, encode
from protocol.errors import ProtocolError, RunError
from protocol.job import INGEST, Job, read_job, run_token
from protocol.messages import Chunk, ChunkAck, Expect, Hello, Message, Reject, Stop, Welcome
from protocol.peer import Peer, hello

POLL_MS = 1000
FRAMES_A_TURN = 64

log = logging.getLogger(__name__)


class Ingest:
    """Takes chunks from `router` into `arena` as the coordinator, at the other end of `peer`, says."""

    def __init__(self, job: Job, token: str, router: zmq.Socket[bytes], arena: Arena, peer: Peer) -> None:
        self._job, self._token, self._router, self._arena, self._peer = job, token, router, arena, peer
        self._intake = Intake()
        self._envelope = Envelope(job.run_id, job.incarnation)
        self._identities: dict[str, bytes] = {}
        self._names: dict[bytes, str] = {}

    def run(self) -> str:
        """Until the coordinator says STOP or is lost; returns the reason."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._peer.arrived_fd, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(POLL_MS))
            if self._peer.arrived_fd in ready:
                os.eventfd_read(self._peer.arrived_fd)
                if (stop := self._read_orders()) is not None:
                    return stop.reason
            for _ in range(FRAMES_A_TURN):
                if not self._router.poll(0):
                    break
                self._receive()

    def _read_orders(self) -> Stop | None:
        while True:
            try:
                message = self._peer.inbox.get_nowait()
            except queue.Empty:
                return None
            if isinstance(message, Stop):
                return message
            if isinstance(message, Expect):
                self._arena.begin(message.slot, message.attempt)
                self._send(message.holder, self._intake.expect(message))

    def _receive(self) -> None:
        """One message: HELLO, or CHUNK and its bytes. Of anything else nothing comes."""
        identity = self._router.recv()
        header = self._router.recv()
        try:
            envelope, message = decode(header)
        except ProtocolError as error:
            self._drop_rest()
            self._send_to(identity, Reject(reason=str(error)))
            return
        name = self._names.get(identity)
        if isinstance(message, Chunk) and name is not None and self._router.rcvmore:
            self._take(name, message)
        self._drop_rest()
        if isinstance(message, Hello):
            self._join(identity, message, envelope)

    def _take(self, name: str, chunk: Chunk) -> None:
        place = self._intake.place(name, chunk)
        if place is None:
            return
        if isinstance(place, ChunkAck):
            self._send(name, place)
            return
        slot, start, end = place
        room = self._arena.slot(slot)[start:end]
        # A longer frame is cut off at the end of the room, and its true length returned.
        nbytes = self._router.recv_into(room)
        checksum = xxhash.xxh3_64_intdigest(room[:nbytes])
        self._peer.progress += 1
        if (ack := self._intake.arrived(chunk, nbytes, len(room), checksum)) is not None:
            if ack.problem:
                log.warning("%s: %s", name, ack.problem)
            self._send(name, ack)

    def _drop_rest(self) -> None:
        while self._router.rcvmore:
            self._router.recv(copy=False)

    def _join(self, identity: bytes, greeting: Hello, envelope: Envelope) -> None:
        reason = refusal(self._job, self._token, self._job.producer_names, greeting, envelope)
        if reason is not None:
            log.warning("refused %r (pid %s): %s", greeting.name, greeting.pid, reason)
            self._send_to(identity, Reject(reason=reason))
            return
        # A restarted producer takes its predecessor's place: what that one still sends is from nobody.
        self._names.pop(self._identities.get(greeting.name, b""), None)
        self._identities[greeting.name], self._names[identity] = identity, greeting.name
        log.info("%s sends its payload here (pid %s on %s)", greeting.name, greeting.pid, greeting.host)
        welcome = Welcome(slots=self._job.slots, slot_bytes=self._job.slot_bytes, heartbeat_s=0.0)
        self._send_to(identity, welcome)

    def _send(self, name: str, message: Message) -> None:
        if (identity := self._identities.get(name)) is not None:
            self._send_to(identity, message)

    def _send_to(self, identity: bytes, message: Message) -> None:
        try:
            self._router.send_multipart([identity, encode(message, self._envelope)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # a dead producer: the launcher reaps it
            log.warning("could not send %s: %s", type(message).__name__, error)


def main(run_dir: Path, ring_fd: int) -> None:
    job = read_job(run_dir)
    arena = Arena(ring_fd, job.slots, job.slot_bytes)
    with (
        zmq.Context() as context,
        sockets.router(context, job.payload_address, sockets.PAYLOAD) as router,
    ):
        # Bound before it joins: no producer is sent to an address where nobody listens.
        peer = Peer(job.address, job.run_id, hello(INGEST, INGEST, 0, run_token(), job.schema), job.hang_s)
        reason = Ingest(job, run_token(), router, arena, peer).run()
        peer.close()
    if reason != "done":
        raise RunError(reason)


if __name__ == "__main__":
    run_child(INGEST, lambda: main(Path(sys.argv[1]), int(sys.argv[2])))
