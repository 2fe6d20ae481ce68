"""A DEALER together with what becomes of its connection: a cut is noticed, and no wait for it is endless.

On one host a connection does not break while both ends live, so only one over TCP is watched.
"""

from __future__ import annotations

import sys

import zmq

from protocol import sockets
from protocol.errors import ProtocolError
from protocol.sockets import Limits

_FAILED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
_ENDED = zmq.Event.CLOSED | zmq.Event.DISCONNECTED


class Line:
    """One connection, made once. For the thread that made it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        limits: Limits = sockets.CONTROL,
        server_key: str = "",
    ) -> None:
        events = _FAILED | _ENDED | zmq.Event.HANDSHAKE_SUCCEEDED if address.startswith("tcp:") else 0
        self.dealer = sockets.dealer(context, address, limits, server_key, events)
        self._events = self.dealer.get_monitor_socket() if events else None
        self._address, self._joined = address, False

    def watch(self, poller: zmq.Poller) -> None:
        """Lets `poller` wake for what arrives and for a cut."""
        poller.register(self.dealer, zmq.POLLIN)
        if self._events is not None:
            poller.register(self._events, zmq.POLLIN)

    def check(self) -> None:
        """Raises ProtocolError, with the likely reason, when the connection is no more."""
        while self._events is not None and self._events.poll(0):
            # Two bytes of event, four of value, and the address in a second frame.
            event = int.from_bytes(self._events.recv_multipart()[0][:2], sys.byteorder)
            if event & _FAILED:
                raise ProtocolError(
                    f"{self._address}: the connection ended before it was secured; unless the network cut it, this "
                    "CURVE key is that of another run, or of another start of this one"
                )
            if event & _ENDED:
                raise ProtocolError(
                    f"{self._address}: {'the connection was cut' if self._joined else 'nobody answers'}"
                )
            self._joined = True

    def ready_to_send(self, timeout_ms: int) -> bool:
        """Whether a message can be sent now, or within `timeout_ms`. Raises as `check` does."""
        self.check()
        return bool(self.dealer.poll(timeout_ms, zmq.POLLOUT))

    def ready_to_receive(self, timeout_ms: int) -> bool:
        """Likewise whether there is one to receive: what arrived before a cut is still heard."""
        if self.dealer.poll(timeout_ms):
            return True
        self.check()
        return False

    def close(self, drain_ms: int = 0) -> None:
        """Closes the socket; what was sent gets `drain_ms` to leave, when its context ends."""
        if self._events is not None:
            self.dealer.disable_monitor()
            self._events.close(0)
        self.dealer.close(drain_ms)
