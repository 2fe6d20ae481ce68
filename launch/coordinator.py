"""The coordinator process: `python -P -m launch.coordinator RUN_DIR`, started by the launcher.

A thin shell around `launch.conductor`: one ROUTER socket, one thread, one metrics file. It never touches payload.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from launch.admission import refusal
from launch.awake import AwakeClock
from launch.conductor import LAUNCHER, Conductor
from launch.metrics import Journal
from launch.stall import Watch
from launch.tally import Tally
from launch.utilisation import run_costs
from protocol import sockets
from protocol.child import run_child
from protocol.codec import Envelope, decode, encode
from protocol.dataset import TokenDataset
from protocol.errors import ProtocolError
from protocol.job import INGEST, Job, read_job, run_token
from protocol.messages import AnyMessage, Gone, Heartbeat, Hello, Hung, Message, Reject, Rewind, Snapshot, Welcome
from protocol.plan import Plan

HEARTBEAT_S = 2.0
SNAPSHOT_S = 1.0
STREAM_ROW_S = 10.0
POLL_MS = 200
FRAMES_A_TURN = 256

log = logging.getLogger(__name__)


class Coordinator:
    """Sockets and clock of one start of a run; every decision is the conductor's."""

    def __init__(self, run_dir: Path, router: zmq.Socket[bytes]) -> None:
        self.job: Job = read_job(run_dir)
        dataset = TokenDataset.open(Path(self.job.dataset_dir))
        plan = Plan(dataset.lengths, dataset.eligible, self.job.plan, dataset.fingerprint)
        self.conductor = Conductor(self.job, plan, dataset)
        self.tally = Tally(self.job, plan.total_steps, run_costs(self.job, run_dir, dataset))
        names = self.job.producer_names, self.job.consumer_names
        ingests = self.job.transport == "zmq"
        self._awake = AwakeClock()
        self.watch = Watch(*names, self.job.start_step, self._awake(), ingests=ingests, hang_s=self.job.hang_s)
        self._told_hung: set[str] = set()
        self._journal = Journal(run_dir / "metrics.jsonl")
        self._router = router
        self._envelope = Envelope(self.job.run_id, self.job.incarnation)
        self._token = run_token()
        self._expected = {LAUNCHER, INGEST, *self.job.producer_names, *self.job.consumer_names}
        self._identities: dict[str, bytes] = {}
        self._names: dict[bytes, str] = {}
        self._unreachable: set[bytes] = set()
        self._successors: dict[str, tuple[bytes, Hello, Envelope]] = {}
        self._due = dict.fromkeys((HEARTBEAT_S, SNAPSHOT_S, STREAM_ROW_S), time.monotonic())

    def run(self) -> None:
        """Until the launcher orders the end. Raises ProtocolError when a message cannot be from this run."""
        while not self.conductor.ended:
            if self._router.poll(POLL_MS):
                # A bounded turn: a flood of frames must not keep answers and heartbeats waiting.
                for _ in range(FRAMES_A_TURN):
                    if self.conductor.ended or not self._router.poll(0):
                        break
                    # A frame is one part; of several, which no peer of ours sends, the whole is refused.
                    identity, *parts = self._router.recv_multipart()
                    self._receive(identity, b"".join(parts))
            self._flush()
            self._tick(time.monotonic())
        self._flush()
        self._journal.write("stream", self._state(time.monotonic()))

    def _receive(self, identity: bytes, frame: bytes) -> None:
        try:
            envelope, message = decode(frame)
        except ProtocolError as error:
            self._send_to(identity, Reject(reason=str(error)))
            return
        if isinstance(message, Hello):
            self._join(identity, message, envelope)
        elif (name := self._names.get(identity)) is not None:
            if isinstance(message, Heartbeat):
                self.watch.heard(name, message, self._awake())
            else:
                self._dispatch(name, message)

    def _join(self, identity: bytes, hello: Hello, envelope: Envelope) -> None:
        reason = refusal(self.job, self._token, self._expected, hello, envelope)
        if reason is not None:
            log.warning("refused %r (pid %s): %s", hello.name, hello.pid, reason)
            self._send_to(identity, Reject(reason=reason))
            return
        if hello.name in self._identities:
            # A restarted producer whose predecessor's GONE is still under way, on another connection: it waits for it.
            log.info("%s is here twice: the one with pid %s waits", hello.name, hello.pid)
            self._successors[hello.name] = (identity, hello, envelope)
            return
        log.info("%s joined (pid %s on %s)", hello.name, hello.pid, hello.host)
        self._identities[hello.name], self._names[identity] = identity, hello.name
        welcome = Welcome(slots=self.job.slots, slot_bytes=self.job.slot_bytes, heartbeat_s=HEARTBEAT_S)
        self._send_to(identity, welcome)
        self.watch.joined(hello.name, self._awake())
        self._told_hung.discard(hello.name)
        self.conductor.joined(hello)

    def _dispatch(self, name: str, message: AnyMessage) -> None:
        if self.conductor.handle(name, message):
            self.tally.note(message, time.monotonic())
            self.watch.heard(name, message, self._awake())
            if isinstance(message, Gone):
                self._forget((message.name,))
            elif isinstance(message, Rewind):
                self._forget(message.names)

    def _forget(self, names: tuple[str, ...]) -> None:
        """Children that have ended; whoever came in their place meanwhile joins."""
        for name in names:
            self._names.pop(self._identities.pop(name, b""), None)
        for name in names:
            if (successor := self._successors.pop(name, None)) is not None:
                self._join(*successor)

    def _flush(self) -> None:
        for kind, row in self.conductor.rows:
            self._journal.write(kind, row)
            if kind == "event":
                self.tally.event(row)
                log.info("%s", row["text"])
        self.conductor.rows.clear()
        pending, self.conductor.out = self.conductor.out, []
        for name, message in pending:
            if (identity := self._identities.get(name)) is not None:
                self.watch.sent(name, message, self._awake())
                self._send_to(identity, message)

    def _send_to(self, identity: bytes, message: Message) -> None:
        try:
            self._router.send_multipart([identity, encode(message, self._envelope)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # It has left, at the end, or it is dead: the launcher reaps it and says so, and its work is granted again.
            if identity not in self._unreachable:
                self._unreachable.add(identity)
                log.info("%s hears nothing any more: %s", self._names.get(identity, "a stranger"), error)

    def _tick(self, now: float) -> None:
        if self._is_due(HEARTBEAT_S, now):
            for identity in self._names:
                self._send_to(identity, Heartbeat(progress=0))
        if self._is_due(SNAPSHOT_S, now) and (launcher := self._identities.get(LAUNCHER)):
            self._look(launcher)
            self._send_to(launcher, Snapshot(state=self._state(now)))
        if self._is_due(STREAM_ROW_S, now):
            self._journal.write("stream", self._state(now))

    def _look(self, launcher: bytes) -> None:
        """Says what is waited for, when that is due, and who hangs, once for each start of a child."""
        gate, now = self.conductor.gate, self._awake()
        if line := self.watch.look(gate, self.conductor.ledger.counts["ready"], now):
            self._journal.write("event", {"what": "stall", "text": line})
            log.info("%s", line)
        for name, reason in self.watch.hung(gate, now).items():
            if name not in self._told_hung:
                self._told_hung.add(name)
                self._journal.write("event", {"what": "hang", "text": f"{name} hangs: {reason}"})
                log.warning("%s hangs: %s", name, reason)
                self._send_to(launcher, Hung(name=name, reason=reason))

    def _is_due(self, every_s: float, now: float) -> bool:
        if now < self._due[every_s]:
            return False
        self._due[every_s] = now + every_s
        return True

    def _state(self, now: float) -> dict[str, Any]:
        return self.tally.state(self.conductor, now) | self.watch.state(self.conductor.gate, self._awake())


def main(run_dir: Path) -> None:
    with zmq.Context() as context, sockets.router(context, read_job(run_dir).address) as router:
        Coordinator(run_dir, router).run()
        # `linger=0` would drop the last words, so they get a moment.
        time.sleep(0.2)


if __name__ == "__main__":
    run_child("coordinator", lambda: main(Path(sys.argv[1])))
