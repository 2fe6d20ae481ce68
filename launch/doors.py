"""The sockets by which peers come in: one for those of this host and, with `hosts.listen`, one for other hosts'.

Which door a peer came by decides what it may be, and it is answered through the same. An identity is chosen by the
peer, so it says who somebody is only together with the door.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import zmq

from protocol import sockets
from protocol.errors import RunError
from protocol.job import hosts_secrets
from protocol.sockets import Limits


class Seat(NamedTuple):
    """A connected peer, as its socket knows it."""

    remote: bool
    identity: bytes


class Doors:
    """ROUTERs that are polled together. `remote` is None when nobody comes from other hosts, and `token` is what those
    who do have to show."""

    def __init__(self, local: zmq.Socket[bytes], remote: zmq.Socket[bytes] | None = None, token: str = "") -> None:
        self.token = token
        self._routers = [local, *([remote] if remote is not None else [])]
        self._poller = zmq.Poller()
        for router in self._routers:
            self._poller.register(router, zmq.POLLIN)

    def wake_for(self, fd: int) -> None:
        """`wait` ends for this descriptor too."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> None:
        """Until something has arrived, at most so long."""
        self._poller.poll(timeout_ms)

    def messages(self, most: int) -> Iterator[tuple[bool, zmq.Socket[bytes]]]:
        """A turn of at most `most` messages that have arrived: whether from another host, and the socket to receive one
        from. The doors take turns, so that a flood at one does not keep the other shut."""
        left, open_doors = most, list(enumerate(self._routers))
        while open_doors:
            for door in list(open_doors):
                if left == 0:
                    return
                if not door[1].poll(0):
                    open_doors.remove(door)
                    continue
                left -= 1
                yield bool(door[0]), door[1]

    def send(self, seat: Seat, frame: bytes) -> None:
        """Raises zmq.ZMQError when the peer has left or takes no more."""
        self._routers[seat.remote].send_multipart([seat.identity, frame], zmq.NOBLOCK)


@contextmanager
def opened(
    context: zmq.Context[zmq.Socket[bytes]],
    local: str,
    remote: str | None,
    limits: Sequence[Limits],
) -> Iterator[Doors]:
    """Binds both addresses with the `limits` of each (local, remote). Raises RunError when the remote one is taken."""
    with sockets.router(context, local, limits[0]) as inside:
        if remote is None:
            yield Doors(inside)
            return
        token, secret_key = hosts_secrets()
        try:
            outside = sockets.router(context, remote, limits[1], secret_key)
        except zmq.ZMQError as error:
            raise RunError(f"hosts.listen: cannot listen on {remote}: {error}") from None
        with outside:
            yield Doors(inside, outside, token)
