"""A producer on another host: one loaded target, and one session with the run after the other.

A session is a connection to the coordinator and one to ingest. It ends when either is cut or silent, or when the run
ends it, and nothing of it is picked up again: what it was filling is leased anew, to this producer or to another, as
another attempt. So there is no state that two ends of a broken connection could see differently.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable

import zmq

from producer.join import Join
from producer.outlet import ChunkOutlet
from producer.stage import make_stage
from producer.taps import Taps
from producer.target import Target
from producer.worker import Producer
from protocol.errors import DraftwireError, Refused, RunError
from protocol.job import REMOTE_PREFIX
from protocol.messages import Lease, Leave
from protocol.peer import Peer, hello

# The coordinator beats every two seconds; it gives a silent producer up after as long.
SILENCE_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
SAY_EVERY_S = 10.0

Say = Callable[[str], None]


class Remote:
    """Serves the run of `join`, whose schema this host has found to be `schema`, with a loaded target."""

    def __init__(self, join: Join, schema: str, target: Target, taps: Taps, say: Say) -> None:
        self._join, self._schema, self._target, self._taps, self._say = join, schema, target, taps, say
        self.name = _own_name()
        self._blocks = self._tokens = 0
        self._said_s, self._said_tokens = time.monotonic(), 0
        self._reached_s = time.monotonic()

    def serve(self, patience_s: float) -> None:
        """Until the run has ended. Raises RunError when it refuses this producer, or is out of reach for
        `patience_s`."""
        pause_s = FIRST_PAUSE_S
        while True:
            blocks = self._blocks
            try:
                reason = self._session()
            except Refused as refused:
                raise RunError(f"run {self._join.run} takes no producer from here: {refused}") from None
            except (DraftwireError, zmq.ZMQError) as error:
                reason = str(error)
            if reason == "done":
                self._say(f"run {self._join.run} has ended; {self._blocks} blocks filled, {self._tokens} tokens")
                return
            if self._blocks > blocks:
                pause_s = FIRST_PAUSE_S
            left_s = self._reached_s + patience_s - time.monotonic()
            if left_s <= 0:
                raise RunError(f"run {self._join.run} has been out of reach for {patience_s:.0f} s: {reason}")
            pause_s = min(pause_s, left_s)
            self._say(f"{reason}; trying again in {pause_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _session(self) -> str:
        """Joins, and fills leases until the session is over; returns the coordinator's reason."""
        join = self._join
        greeting = hello("producer", self.name, 0, join.token, self._schema)
        peer = Peer(join.address, join.run_id, greeting, SILENCE_S, join.server_key)
        reason, outlet = "interrupted", None
        try:
            slot_bytes = peer.welcome.slot_bytes
            outlet = ChunkOutlet(join.payload_address, join.run_id, greeting, slot_bytes, peer, join.server_key)
            self._say(f"joined run {join.run} as {self.name}")
            try:
                stage = make_stage(self._target, slot_bytes, join.width)
                reason = Producer(join, self._target, self._taps, peer, outlet, stage, self._count).run()
            finally:
                self._reached_s = time.monotonic()
        except DraftwireError as error:
            reason = str(error)
            raise
        finally:
            if outlet is not None:
                outlet.close()
            if reason != "done":  # so that its blocks are leased anew at once
                with contextlib.suppress(RunError):
                    peer.send(Leave(reason=reason))
            peer.close()
        return reason

    def _count(self, lease: Lease) -> None:
        self._blocks += 1
        self._tokens += sum(lease.lengths[at] for at in lease.positions)
        now = time.monotonic()
        if (span_s := now - self._said_s) >= SAY_EVERY_S:
            rate = (self._tokens - self._said_tokens) / span_s
            self._say(f"{self._blocks} blocks filled, {rate:.0f} tokens/s")
            self._said_s, self._said_tokens = now, self._tokens


def _own_name() -> str:
    """Says where it runs; the random end keeps containers apart that share a host name and count pids from 1."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:60]
    return f"{REMOTE_PREFIX}{host}-{os.getpid()}-{secrets.token_hex(2)}"
