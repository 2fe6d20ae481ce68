"""Every ZeroMQ socket is made here, with its options in one place.

`linger=0`: an unsent message never holds up an exit. ROUTER_MANDATORY: a message to an unknown or full peer is an
error, not a silent drop. The high-water mark only has to exceed what credit and leases allow in flight; it bounds what
a peer that ignores both can make us hold.
"""

from __future__ import annotations

import os
import secrets

import zmq
from msgspec import Struct

from protocol.chunks import CHUNK_BYTES, WINDOW_BYTES
from protocol.codec import MAX_FRAME_BYTES

HIGH_WATER_MARK = 4096


class Limits(Struct, frozen=True):
    """Messages that wait on each side of one connection, and the bytes of the largest frame."""

    messages: int
    frame_bytes: int


CONTROL = Limits(HIGH_WATER_MARK, MAX_FRAME_BYTES)
PAYLOAD = Limits(2 * WINDOW_BYTES // CHUNK_BYTES, CHUNK_BYTES)


def endpoint(run_id: str) -> str:
    """An abstract Unix address for a run: no file to leave behind, no path to grow too long, and a second bind on a
    live one is refused by the kernel."""
    return f"ipc://@draftwire-{run_id}"


def payload_endpoint(run_id: str) -> str:
    """Where a run's ingest process takes payload on this node."""
    return f"{endpoint(run_id)}-payload"


def _options(socket: zmq.Socket[bytes], limits: Limits) -> zmq.Socket[bytes]:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = limits.messages
    socket.maxmsgsize = limits.frame_bytes
    return socket


def router(context: zmq.Context[zmq.Socket[bytes]], address: str, limits: Limits = CONTROL) -> zmq.Socket[bytes]:
    """The socket of the coordinator or of ingest, bound to `address`; raises zmq.ZMQError when the address is taken."""
    socket = _options(context.socket(zmq.ROUTER), limits)
    socket.router_mandatory = 1
    if address.startswith("ipc:"):  # an abstract address has no permissions; the kernel knows who connects
        socket.set(zmq.IPC_FILTER_UID, os.getuid())
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: str, limits: Limits = CONTROL) -> zmq.Socket[bytes]:
    """A peer's socket. Its identity is fresh for each process, so a restarted peer is never taken for the old one."""
    socket = _options(context.socket(zmq.DEALER), limits)
    socket.identity = f"{os.getpid()}-{secrets.token_hex(8)}".encode()
    socket.immediate = 1
    socket.connect(address)
    return socket
