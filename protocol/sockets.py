"""Every ZeroMQ socket is made here, with its options in one place.

Over TCP a connection may be cut without a word, so libzmq asks the other end every few seconds whether it is there.

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
# Over TCP: a ping this often, and a connection that answers none for so long is dropped.
PING_MS = 5_000
PING_TIMEOUT_MS = 20_000
# CURVE puts a frame into a box: 33 bytes more on the wire, where `maxmsgsize` counts.
BOX_BYTES = 64


class Limits(Struct, frozen=True):
    """Messages that wait on each side of one connection, and the bytes of the largest frame."""

    messages: int
    frame_bytes: int


CONTROL = Limits(HIGH_WATER_MARK, MAX_FRAME_BYTES)
PAYLOAD = Limits(2 * WINDOW_BYTES // CHUNK_BYTES, CHUNK_BYTES)
# What a producer of another host says is short; what it is told, a LEASE say, is not.
FROM_HOSTS = Limits(HIGH_WATER_MARK, 64 << 10)


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


def _over_tcp(socket: zmq.Socket[bytes], address: str) -> None:
    socket.heartbeat_ivl, socket.heartbeat_timeout = PING_MS, PING_TIMEOUT_MS
    socket.ipv6 = "[" in address


def router(
    context: zmq.Context[zmq.Socket[bytes]], address: str, limits: Limits = CONTROL, secret_key: str = ""
) -> zmq.Socket[bytes]:
    """The socket of the coordinator or of ingest, bound to `address`; raises zmq.ZMQError when the address is taken.
    With the secret half of a CURVE key only peers that know the other half get through, and all is encrypted."""
    socket = _options(context.socket(zmq.ROUTER), limits)
    socket.router_mandatory = 1
    if address.startswith("tcp:"):
        _over_tcp(socket, address)
    if secret_key:
        socket.curve_server, socket.curve_secretkey = True, secret_key.encode()
        socket.maxmsgsize = limits.frame_bytes + BOX_BYTES
    if address.startswith("ipc:"):  # an abstract address has no permissions; the kernel knows who connects
        socket.set(zmq.IPC_FILTER_UID, os.getuid())
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    limits: Limits = CONTROL,
    server_key: str = "",
    events: int = 0,
) -> zmq.Socket[bytes]:
    """A peer's socket. Its identity is fresh each time, so a restarted peer is never taken for the old one.

    `server_key` is the public half of the CURVE key at the other end. With `events` to be told by its monitor socket it
    connects once: libzmq's own reconnecting would lose what was under way and say nothing.
    """
    socket = _options(context.socket(zmq.DEALER), limits)
    socket.identity = f"{os.getpid()}-{secrets.token_hex(8)}".encode()
    socket.immediate = 1
    if address.startswith("tcp:"):
        _over_tcp(socket, address)
    if events:
        socket.reconnect_ivl = -1
        socket.get_monitor_socket(events)  # before there is anything to tell
    if server_key:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = server_key.encode()
        socket.maxmsgsize = limits.frame_bytes + BOX_BYTES
    socket.connect(address)
    return socket
