"""The coordinator process: `python -P -m launch.coordinator RUN_DIR`, started by the launcher.

A thin shell around `launch.conductor`: its ROUTER sockets, one thread, one metrics file. It never touches payload.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from launch.admission import refusal, remote_refusal
from launch.advice import Advisor, Done
from launch.awake import AwakeClock
from launch.balance import Balance
from launch.conductor import Conductor
from launch.doors import Doors, Seat, opened
from launch.metrics import Journal
from launch.pace import Pace
from launch.parts import parts_of
from launch.remotes import REMOTE_SILENCE_S, Remotes
from launch.senders import LAUNCHER
from launch.stall import Watch
from launch.tally import Tally
from launch.utilisation import run_costs
from protocol import sockets
from protocol.child import run_child
from protocol.codec import Envelope, decode, encode
from protocol.dataset import TokenDataset
from protocol.errors import ProtocolError
from protocol.job import INGEST, Job, read_job, run_token
from protocol.messages import (
    AnyMessage,
    Gone,
    Heartbeat,
    Hello,
    Hung,
    Leave,
    Message,
    Reject,
    Rewind,
    Snapshot,
    Stop,
    Welcome,
)
from protocol.plan import Plan

HEARTBEAT_S = 2.0
SNAPSHOT_S = 1.0
STREAM_ROW_S = 10.0
POLL_MS = 200
FRAMES_A_TURN = 256

log = logging.getLogger(__name__)


class Coordinator:
    """Sockets and clock of one start of a run; every decision is the conductor's."""

    def __init__(self, run_dir: Path, doors: Doors) -> None:
        self.job: Job = read_job(run_dir)
        dataset = TokenDataset.open(Path(self.job.dataset_dir))
        plan = Plan(dataset.lengths, dataset.eligible, self.job.plan, dataset.fingerprint)
        pace, parts = Pace(self.job, plan.total_steps), parts_of(self.job, dataset)
        self.conductor = Conductor(self.job, plan, dataset, pace, parts)
        self.tally = Tally(self.job, run_costs(self.job, run_dir, dataset), Balance(plan, len(self.job.consumers)))
        self.advisor = Advisor(self.job, plan)
        names = self.job.producer_names, self.job.consumer_names
        self._awake = AwakeClock()
        start, ingests = self.job.start_step, self.job.ingests
        self.watch = Watch(*names, start, self._awake(), ingests=ingests, hang_s=self.job.hang_s)
        self._told_hung: set[str] = set()
        self._journal = Journal(run_dir / "metrics.jsonl")
        self._doors = doors
        self._remotes = Remotes(self.job.hosts.producers if self.job.hosts is not None else 0)
        self._envelope = Envelope(self.job.run_id, self.job.incarnation)
        self._token = run_token()
        self._expected = {LAUNCHER, INGEST, *self.job.producer_names, *self.job.consumer_names}
        self._seats: dict[str, Seat] = {}
        self._names: dict[Seat, str] = {}
        self._unreachable: set[Seat] = set()
        self._cut: list[Seat] = []
        self._successors: dict[str, tuple[Seat, Hello, Envelope]] = {}
        self._due = dict.fromkeys((HEARTBEAT_S, SNAPSHOT_S, STREAM_ROW_S), time.monotonic())

    def run(self) -> None:
        """Until the launcher orders the end. Raises ProtocolError when a message cannot be from this run."""
        while not self.conductor.ended:
            self._doors.wait(POLL_MS)
            # A bounded turn: a flood of frames must not keep answers and heartbeats waiting.
            for remote, router in self._doors.messages(FRAMES_A_TURN):
                # A frame is one part; of several, which no peer of ours sends, the whole is refused.
                identity, *parts = router.recv_multipart()
                self._receive(Seat(remote, identity), b"".join(parts))
                if self.conductor.ended:
                    break
            if self.conductor.pace.left_s == 0.0:  # the run ends although nothing may have arrived
                self.conductor.pump()
            self._flush()
            self._tick(time.monotonic())
        self._flush()
        state = self._state(time.monotonic())
        self._journal.write("stream", state)
        if (launcher := self._seats.get(LAUNCHER)) is not None:
            self._send_to(launcher, Snapshot(state=state | self.tally.news()))

    def _receive(self, seat: Seat, frame: bytes) -> None:
        try:
            envelope, message = decode(frame)
        except ProtocolError as error:
            self._send_to(seat, Reject(reason=str(error)))
            return
        if isinstance(message, Hello):
            self._join(seat, message, envelope)
        elif (name := self._names.get(seat)) is not None:
            if seat.remote:
                self._remotes.heard(name, self._awake())
            if isinstance(message, Heartbeat):
                self.watch.heard(name, message, self._awake())
            elif isinstance(message, Leave) and seat.remote:
                self._part(name, message.reason)
            else:
                self._dispatch(name, message)

    def _join(self, seat: Seat, hello: Hello, envelope: Envelope) -> None:
        if seat.remote:
            reason = remote_refusal(self.job, self._doors.token, hello, envelope) or self._remotes.refusal(hello.name)
        else:
            reason = refusal(self.job, self._token, self._expected, hello, envelope)
        if reason is None and seat in self._names:
            reason = f"this connection has joined as {self._names[seat]}"
        if reason is not None:
            log.warning("refused %.120r (pid %s): %s", hello.name, hello.pid, reason)
            self._send_to(seat, Reject(reason=reason))
            return
        if seat.remote and hello.name in self._seats:
            # It alone has this name, and has begun anew: whatever became of its last connection, that is over.
            self._dismiss(hello.name, "it has come again on another connection")
        if hello.name in self._seats or self.conductor.closing(hello.name):
            # A restarted producer whose predecessor's GONE is still under way, on another connection, or has come and
            # is not yet done with: it waits for that.
            log.info("%s is here twice: the one with pid %s waits", hello.name, hello.pid)
            self._successors[hello.name] = (seat, hello, envelope)
            return
        log.info("%s joined (pid %s on %s)", hello.name, hello.pid, hello.host)
        self._seats[hello.name], self._names[seat] = seat, hello.name
        welcome = Welcome(slots=self.job.slots, slot_bytes=self.job.slot_bytes, heartbeat_s=HEARTBEAT_S)
        self._send_to(seat, welcome)
        if seat.remote:
            self._remotes.heard(hello.name, self._awake())
        self.watch.joined(hello.name, self._awake())
        self._told_hung.discard(hello.name)
        self.conductor.joined(hello)

    def _dismiss(self, name: str, reason: str) -> None:
        """Ends the session of a remote producer that may not know of it."""
        self._send_to(self._seats[name], Stop(reason=f"this session is over: {reason}"))
        self._part(name, reason)

    def _part(self, name: str, reason: str) -> None:
        """A session of a remote producer is over: what still comes on its connection is from nobody."""
        del self._names[self._seats.pop(name)]
        self._remotes.left(name)
        self.watch.left(name)
        self.conductor.left(name, reason)
        self._seat_successors()

    def _dispatch(self, name: str, message: AnyMessage) -> None:
        if self.conductor.handle(name, message):
            self.tally.note(message, time.monotonic())
            self.watch.heard(name, message, self._awake())
            if isinstance(message, Gone | Rewind):
                for ended in (message.name,) if isinstance(message, Gone) else message.names:
                    if (seat := self._seats.pop(ended, None)) is not None:
                        del self._names[seat]
            self._seat_successors()

    def _seat_successors(self) -> None:
        """Lets in who waited until its predecessor was done with."""
        for name in list(self._successors):
            if name not in self._seats and not self.conductor.closing(name):
                self._join(*self._successors.pop(name))

    def _flush(self) -> None:
        for kind, row in (*self.conductor.rows, *self.conductor.pace.rows):
            self._journal.write(kind, row | {"mfu": self.tally.step_mfu(row)} if kind == "step" else row)
            if kind == "event":
                self.tally.event(row)
                log.info("%s", row["text"])
        self.conductor.rows.clear()
        self.conductor.pace.rows.clear()
        pending, self.conductor.out = self.conductor.out, []
        for name, message in pending:
            if (seat := self._seats.get(name)) is not None:
                self.watch.sent(name, message, self._awake())
                self._send_to(seat, message)

    def _send_to(self, seat: Seat, message: Message) -> None:
        try:
            self._doors.send(seat, encode(message, self._envelope))
        except zmq.ZMQError as error:
            # It has left, at the end, or it is dead: the launcher reaps it and says so, and its work is granted again.
            if seat.remote and error.errno == zmq.EHOSTUNREACH and seat in self._names:
                self._cut.append(seat)
            if seat not in self._unreachable:
                self._unreachable.add(seat)
                log.info("%s hears nothing any more: %s", self._names.get(seat, "a stranger"), error)

    def _tick(self, now: float) -> None:
        while self._cut:
            # No launcher reaps a producer of another host, and one that was cut off comes again as somebody new.
            if (name := self._names.get(self._cut.pop())) is not None:
                self._part(name, "its connection was cut")
        for name in self._remotes.silent(self._awake()):
            self._dismiss(name, f"nothing was heard of it for {REMOTE_SILENCE_S:.0f} s")
        if self._is_due(HEARTBEAT_S, now):
            for seat in self._names:
                self._send_to(seat, Heartbeat(progress=0))
        if self._is_due(SNAPSHOT_S, now) and (launcher := self._seats.get(LAUNCHER)):
            self._look(launcher)
            self._send_to(launcher, Snapshot(state=self._state(now) | self.tally.news()))
        if self._is_due(STREAM_ROW_S, now):
            self._journal.write("stream", self._state(now))

    def _look(self, launcher: Seat) -> None:
        """Says what is waited for, when that is due, and who hangs, once for each start of a child."""
        gate, now = self.conductor.gate, self._awake()
        if line := self.watch.look(gate, self.conductor.ledger.counts["ready"], now):
            self._journal.write("event", {"what": "stall", "text": line})
            log.info("%s", line)
        for name, reason in self.watch.hung(gate, now).items():
            if name in self._seats and self._seats[name].remote:
                self._dismiss(name, reason)
            elif name not in self._told_hung:
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
        done = Done(self.conductor.produced_tokens, self.conductor.busy_s, *self.tally.trained)
        # Producers of other hosts come and go, and are no part of the split; what is read from a cache costs no side.
        apart = self.conductor.remotes or self.conductor.replayed_tokens
        advice = None if apart else self.advisor.advise(done)
        state = self.tally.state(self.conductor, now) | {"advice": advice}
        return state | self.watch.state(self.conductor.gate, self._awake())


def main(run_dir: Path) -> None:
    job = read_job(run_dir)
    remote = job.hosts.address if job.hosts is not None else None
    limits = sockets.CONTROL, sockets.FROM_HOSTS
    with zmq.Context() as context, opened(context, job.address, remote, limits) as doors:
        Coordinator(run_dir, doors).run()
        # `linger=0` would drop the last words, so they get a moment.
        time.sleep(0.2)


if __name__ == "__main__":
    run_child("coordinator", lambda: main(Path(sys.argv[1])))
