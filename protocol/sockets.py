"""Every ZeroMQ socket is made here, with its options in one place.

`linger=0`: an unsent message never holds up an exit. ROUTER_MANDATORY: a message to an unknown or full peer is an
error, not a silent drop. The high-water mark only has to exceed what credit and leases allow in flight.
"""

from __future__ import annotations

import os
import secrets

import zmq

from protocol.codec import MAX_FRAME_BYTES

HIGH_WATER_MARK = 4096


def endpoint(run_id: str) -> str:
    """An abstract Unix address for a run: no file to leave behind, no path to grow too long, and a second bind on a
    live one is refused by the kernel."""
    return f"ipc://@draftwire-{run_id}"


def _options(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_FRAME_BYTES
    return socket


def router(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The coordinator's socket, bound to `address`; raises zmq.ZMQError when the address is taken."""
    socket = _options(context.socket(zmq.ROUTER))
    socket.router_mandatory = 1
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A peer's socket. Its identity is fresh for each process, so a restarted peer is never taken for the old one."""
    socket = _options(context.socket(zmq.DEALER))
    socket.identity = f"{os.getpid()}-{secrets.token_hex(8)}".encode()
    socket.immediate = 1
    socket.connect(address)
    return socket
