"""One side of the conversation with the coordinator: a thread that owns the DEALER socket.

Other threads never touch the socket: they put messages into a bounded outbox and read a bounded inbox. The thread
sends heartbeats by itself, so a long forward pass does not look like a hang, and ends loudly when the coordinator has
said nothing for `silence_s` (a job's `hang_s`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time

import zmq

from protocol.codec import Envelope, decode, encode
from protocol.errors import ProtocolError, Refused, RunError
from protocol.line import Line
from protocol.messages import AnyMessage, Heartbeat, Hello, Message, Reject, Stop, Welcome
from protocol.version import DRAFTWIRE_VERSION

QUEUE_MESSAGES = 1024
JOIN_S = 60.0
TURN_MS = 50
# The socket's own `linger` of 0 would drop the last words of a peer that closes.
DRAIN_MS = 5000


class Peer:
    """A joined peer. `inbox` yields messages; Stop is the last one, also when the coordinator is lost. `arrived_fd` is
    an eventfd that is written for each, so that a poller of other sockets wakes for them too. `server_key`: the
    coordinator's CURVE key, over TCP."""

    def __init__(self, address: str, run: str, hello: Hello, silence_s: float = 60.0, server_key: str = "") -> None:
        self.inbox: queue.Queue[AnyMessage] = queue.Queue(QUEUE_MESSAGES)
        self.progress = 0
        self._envelope = Envelope(run, 0)
        self._silence_s = silence_s
        self._outbox: queue.Queue[Message] = queue.Queue(QUEUE_MESSAGES)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.arrived_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._closed = False  # by its owner; `_closing` is also set by STOP
        self._closing = threading.Event()
        self._joined: queue.Queue[Welcome | Reject | ProtocolError] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, args=(address, server_key, hello), name="peer", daemon=True)
        self._thread.start()
        self.welcome = self._await_welcome()

    def send(self, message: Message) -> None:
        """Queues a message; blocks when QUEUE_MESSAGES are waiting, raises RunError when that lasts for a minute, and
        after `close`."""
        self._refuse_when_closed()
        try:
            self._outbox.put(message, timeout=self._silence_s)
        except queue.Full:
            raise RunError("the coordinator takes no more messages") from None
        with self._wake_lock:
            self._refuse_when_closed()
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Sends what is queued, then ends the thread and closes the socket. A second call does nothing."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            self._closing.set()
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():  # else it still uses the descriptors
            os.close(self._wake_fd)
            os.close(self.arrived_fd)

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise RunError("this peer is closed")

    def _await_welcome(self) -> Welcome:
        try:
            answer = self._joined.get(timeout=JOIN_S)
        except queue.Empty:
            answer = ProtocolError(f"no answer from the coordinator within {JOIN_S:.0f} s")
        if isinstance(answer, Welcome):
            return answer
        self.close()
        raise answer if isinstance(answer, ProtocolError) else Refused(f"refused: {answer.reason}")

    def _run(self, address: str, server_key: str, hello: Hello) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        line = Line(context, address, server_key=server_key)
        drain_ms = 0
        try:
            self._put(line, hello)
            reason = self._loop(line)
            drain_ms = DRAIN_MS if self._closing.is_set() else 0
        except (zmq.ZMQError, ProtocolError) as error:
            reason = str(error)
        finally:
            line.close(drain_ms)
            context.term()
        with contextlib.suppress(queue.Full):  # whoever still waits for WELCOME learns why there is none
            self._joined.put_nowait(ProtocolError(reason))
        if not self._closing.is_set():
            self._hand_over(Stop(reason=reason))

    def _hand_over(self, message: AnyMessage) -> None:
        self.inbox.put(message)
        os.eventfd_write(self.arrived_fd, 1)

    def _put(self, line: Line, message: Message) -> None:
        """Sends when there is a connection: with `immediate`, a plain send would wait for one for ever."""
        turns = 0
        while not line.ready_to_send(TURN_MS):
            turns += 1
            if self._closing.is_set() or turns * TURN_MS > self._silence_s * 1000:
                raise ProtocolError("the coordinator cannot be reached")
        line.dealer.send(encode(message, self._envelope))

    def _loop(self, line: Line) -> str:
        poller, dealer = zmq.Poller(), line.dealer
        line.watch(poller)
        poller.register(self._wake_fd, zmq.POLLIN)
        heartbeat_s, quiet_s = 1.0, 0.0
        before = beat = time.monotonic()
        joined = False
        while True:
            ready = dict(poller.poll(int(heartbeat_s * 500)))
            now = time.monotonic()
            # Counted in turns of this loop: a pause of this very process is not the coordinator's silence.
            quiet_s += min(now - before, heartbeat_s)
            before = now
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            while not self._outbox.empty():
                self._put(line, self._outbox.get_nowait())
            if dealer in ready:
                quiet_s = 0.0
                while dealer.poll(0):
                    self._envelope, message = decode(dealer.recv())
                    if isinstance(message, Reject) and joined:
                        return f"refused: {message.reason}"
                    if isinstance(message, Welcome | Reject):
                        joined = True
                        self._joined.put(message)
                    elif not isinstance(message, Heartbeat):
                        self._hand_over(message)
                    if isinstance(message, Welcome):
                        heartbeat_s = message.heartbeat_s
                    elif isinstance(message, Stop):
                        self._closing.set()
            if self._closing.is_set() and self._outbox.empty():
                self._put(line, Heartbeat(progress=self.progress))  # how far it got
                return "closed"
            line.check()
            if quiet_s > self._silence_s:
                return f"the coordinator has been silent for {self._silence_s:.0f} s"
            if now - beat > heartbeat_s:
                self._put(line, Heartbeat(progress=self.progress))
                beat = now


def hello(role: str, name: str, rank: int, token: str, schema: str) -> Hello:
    """The HELLO of this process."""
    versions = {"draftwire": DRAFTWIRE_VERSION, "pyzmq": zmq.pyzmq_version(), "libzmq": zmq.zmq_version()}
    return Hello(
        role=role,
        name=name,
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        token=token,
        schema=schema,
        versions=versions,
    )
