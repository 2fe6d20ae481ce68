"""The coordinator's decisions: messages in, messages out. No sockets, no files; only the pace looks at a clock.

It joins the ledger (which block next, in which slot), the gate (which micro-step may run), the pace (when the run ends)
and the counters (what a person wants to see). The coordinator process feeds it and sends what it answers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from launch.descriptors import Descriptors, Samples
from launch.pace import Pace
from launch.parts import Parts
from launch.senders import LAUNCHER, SENT_BY
from launch.spilling import Spilling
from protocol import messages as m
from protocol.block import table_bytes
from protocol.gate import ABANDON, COOLDOWN, STOP, UNCACHED, VerifiedGate
from protocol.grants import Delivery, Key
from protocol.job import INGEST, REMOTE_PREFIX, REPLAY, Job
from protocol.ledger import Ledger
from protocol.plan import Plan


class Conductor:
    """Decides for one start of a run. `out` holds (peer name, message) pairs to send, oldest first; `rows` holds
    (kind, row) pairs for metrics.jsonl; `ended` is set once everyone has been told to stop."""

    def __init__(self, job: Job, plan: Plan, samples: Samples, pace: Pace, parts: Parts | None = None) -> None:
        self.out: list[tuple[str, m.Message]] = []
        self.rows: list[tuple[str, dict[str, Any]]] = []
        self.ended = False
        self.produced_tokens = self.replayed_tokens = 0
        self.filled: Counter[str] = Counter()  # blocks by producer
        self.busy_s = 0.0
        self.streamed_bytes = 0
        self.numerics_changed = 0
        self._job, self._plan, self.pace = job, plan, pace
        self._descriptors = Descriptors(job, plan, samples)
        ranks = len(job.consumers)
        quarantined = {int(sample): reason for sample, reason in job.quarantined.items()}
        start = job.start_step
        parts = parts or Parts.none(plan.total_samples)
        self.ledger = Ledger(plan, job.slots, ranks, parts_of=parts, next_step=start, quarantined=quarantined)
        self.spilling = Spilling(job, plan, self.ledger, parts, self.rows)
        self.gate = VerifiedGate(ranks, plan.total_steps, plan.micro_steps, job.start_step)
        self._roles = {LAUNCHER: LAUNCHER}
        self._ranks: dict[str, int] = {}
        self._credit: Counter[int] = Counter()
        self._wants: list[tuple[str, str]] = []
        self._held: dict[Key, Delivery] = {}
        self._closing: dict[str, str] = {}  # gone, and ingest has not yet said that nothing more of it is written
        self._known_quarantined = len(quarantined)

    # --- events ---

    def joined(self, hello: m.Hello) -> None:
        """A peer was admitted. A consumer learns at once what is quarantined; once ingest is there, work can go out."""
        self._roles[hello.name] = hello.role
        if hello.role == "consumer":
            self._ranks[hello.name] = hello.rank
            self._credit[hello.rank] = 0
            self._tell_quarantine([hello.name])
        self.spilling.joined(hello.name)
        if hello.name.startswith(REMOTE_PREFIX):
            self.rows.append(("event", {"what": "joined", "text": f"{hello.name} has joined from {hello.host}"}))
        self.pump()

    @property
    def remotes(self) -> list[str]:
        """The producers of other hosts that are here."""
        return [name for name in self._roles if name.startswith(REMOTE_PREFIX)]

    def left(self, name: str, reason: str) -> None:
        """A producer of another host has left, or is held to have: nothing of it is heard from here on."""
        del self._roles[name]
        self._gone(name, f"has left ({reason})")
        self.pump()

    def closing(self, name: str) -> bool:
        """Whether a peer that is gone still holds slots, so that nobody may join under its name."""
        return name in self._closing

    def handle(self, name: str, message: m.AnyMessage) -> bool:
        """One message of an admitted peer. False when its role has no such message to send: nothing came of it."""
        if not isinstance(message, SENT_BY.get(self._roles.get(name, ""), ())):
            self.rows.append(("event", {"what": "ignored", "text": f"{type(message).__name__} from {name}"}))
            return False
        match message:
            case m.Want(kind=kind):
                self._wants.append((name, kind))
            case m.Ready():
                self._ready(name, message)
            case m.Nack():
                self._nack(name, message)
            case m.Credit(blocks=blocks):
                self._credit[self._ranks[name]] += blocks
            case m.Verified():
                if held := self._current(message):
                    self.gate.verified(held.step, held.micro_step, held.rank)
            case m.Release():
                self._release(message)
            case m.Spilled():
                self.out += self.spilling.done(message)
            case m.Bad():
                self._bad(message)
            case m.Reached(step=step):
                self.gate.reached(step, self._ranks[name])
            case m.Report(kind=kind, row=row):
                self.rows += [(kind, row)] if kind != "rank" else []  # the tally sums those up
            case m.Checkpointed(next_step=step, stall_s=stall_s, write_s=write_s):
                row = {"what": "checkpoint", "text": f"checkpoint at step {step}", "step": step}
                self.rows.append(("event", row | {"stall_s": stall_s, "write_s": write_s}))
            case m.Gone(name=gone, reaped=reaped, how=how):
                self._gone(gone, how, reaped)
            case m.Rewind():
                self._rewind(message)
            case m.Fenced(holder=holder):
                if (said := self._closing.pop(holder, None)) is not None:
                    self._reopen(holder, said)
            case m.Order(order=order):
                self._order(order)
        self.pump()
        return True

    # --- inside ---

    def _gone(self, name: str, how: str, reaped: bool = True) -> None:
        """A child has been reaped, or a remote producer has left. What it was filling is open again, but what it has
        sent may still lie in a socket of ingest's, and the slot's next writer may be one that ingest knows nothing of:
        so ingest is asked first. One that maps the ring and does not end may write for ever."""
        self._wants = [want for want in self._wants if want[0] != name]
        self._unsay((name,))
        self.spilling.gone(name, for_good=not reaped)
        if self._sends(name) and INGEST in self._roles:
            self._closing[name] = how
            self.out.append((INGEST, m.Fence(holder=name)))
        elif reaped:
            self._reopen(name, how)
        else:
            slots = ", ".join(map(str, self.ledger.holder_lost(name))) or "none"
            text = f"{name} {how} and does not end: it is not started again; slots of the ring lost: {slots}"
            self.rows.append(("event", {"what": "gone", "text": text}))

    def _reopen(self, name: str, how: str) -> None:
        reopened = self.ledger.holder_died(name)
        blocks = ", ".join(f"step {lease.step} block {lease.index}" for lease in reopened) or "none"
        what = "left" if name.startswith(REMOTE_PREFIX) else "gone"
        self.rows.append(("event", {"what": what, "text": f"{name} {how}; blocks to lease anew: {blocks}"}))

    def _unsay(self, names: tuple[str, ...]) -> None:
        """What these have not even been told must not reach whoever joins under their names."""
        self.out = [(to, message) for to, message in self.out if to not in names]

    def _sends(self, name: str) -> bool:
        """Whether this producer's payload goes by way of ingest."""
        zmq = self._job.transport == "zmq" and name in self._job.producer_names and name != REPLAY
        return zmq or name.startswith(REMOTE_PREFIX)

    def _rewind(self, message: m.Rewind) -> None:
        """Every rank has ended: the run goes back to a checkpoint, and what lies in the ring for later steps stays."""
        self._unsay(message.names)
        for name in message.names:
            self._ranks.pop(name, None)
            self._roles.pop(name, None)
        self._credit.clear()
        self._held.clear()
        quarantined = {int(sample): reason for sample, reason in message.quarantined.items()}
        self.ledger.rewind(message.step, quarantined)
        self.ledger.paused = False
        self.gate.rewind(message.step)
        self._known_quarantined = len(quarantined)
        self.rows.append(("rewind", {"step": message.step}))
        text = f"{message.how}; every consumer starts again from step {message.step}"
        self.rows.append(("event", {"what": "rewind", "text": text}))

    def _ready(self, name: str, message: m.Ready) -> None:
        key = (message.step, message.index)
        leased = next((lease for lease in self.ledger.live_leases if lease.attempt == message.attempt), None)
        if self.ledger.ready(key, message.kind, message.attempt, name) and leased is not None:
            self._descriptors.filled(message.attempt, message.checksum, name)
            self.filled[name] += 1
            tokens = self._descriptors.tokens(leased.samples)
            if message.kind == "replay" and self._job.producers:
                self.replayed_tokens += tokens
            else:
                self.produced_tokens += tokens
                self.busy_s += message.busy_s
            if message.figures:
                self.rows.append(("taps", self._descriptors.figures(name, message)))
            if message.halved:
                self.numerics_changed += message.halved
                text = f"step {message.step} block {message.index}: a batch was halved {message.halved} times"
                self.rows.append(("event", {"what": "numerics_changed", "text": text}))

    def _nack(self, name: str, message: m.Nack) -> None:
        # The samples of a damaged shard are in order: they are not quarantined.
        damaged = message.kind == "replay" and message.reason != m.TAKEN_BACK
        if damaged and (end := self.spilling.damaged(message.samples, message.reason)):
            self.out += end
            return
        place = ((message.step, message.index), message.kind, message.attempt, name)
        self.ledger.nack(*place, message.retryable, reason=message.reason, harmless=damaged)

    def _release(self, message: m.Release) -> None:
        held = self._current(message)
        spill = held is not None and self.spilling.takes(held)
        if not self.ledger.release((message.step, message.index), message.attempt, spill) or held is None:
            return
        self._descriptors.done_with(self._held.pop(held.key))
        if spill:
            self.out.append(self.spilling.spill(held, self._descriptors.table(held.samples)))
        self.out += self.spilling.reached(self._plan.epoch_at(self.ledger.lowest_unreleased_step))

    def _bad(self, message: m.Bad) -> None:
        if held := self._current(message):
            self.gate.bad(held.step, held.micro_step, held.rank)
            text = f"step {held.step} block {held.index} of {self._descriptors.producers(held)}: {message.reason}"
            self.rows.append(("event", {"what": "bad", "text": text}))
            self._descriptors.done_with(self._held.pop(held.key))
            self.ledger.bad(held.key, message.attempt, message.samples or None, message.reason)

    def _current(self, message: m.Verified | m.Bad | m.Release) -> Delivery | None:
        """The delivery that a consumer speaks of, unless it is an earlier one."""
        held = self._held.get((message.step, message.index))
        return held if held is not None and held.attempt == message.attempt else None

    def _order(self, order: str) -> None:
        if order in (STOP, COOLDOWN):
            # Leases go on until the boundary: the step before it needs its blocks.
            self.gate.order([order])
        elif order == ABANDON:
            self.gate.abandon()
        elif order == UNCACHED:
            self.spilling.gone(REPLAY, for_good=True)
        else:
            self.ended = True
            names = (*self._job.producer_names, *self.remotes, *sorted(self._ranks), *[INGEST] * self._job.ingests)
            self.out += [(name, m.Stop(reason=order)) for name in names]

    def pump(self) -> None:
        """Everything that the last event, or the time that has passed, made possible."""
        self._check_quarantine()
        for lease in self.ledger.take_revocations():
            revoke = m.Revoke(step=lease.step, index=lease.index, kind=lease.kind, attempt=lease.attempt)
            self.out.append((lease.holder, revoke))
        self._lease()
        for name, rank in self._ranks.items():
            while self._credit[rank] > 0 and (delivery := self.ledger.next_delivery(rank)) is not None:
                self._credit[rank] -= 1
                self._held[delivery.key] = delivery
                message = self._descriptors.deliver(delivery)
                self.streamed_bytes += sum(spec.nbytes for spec in message.table)
                self.out.append((name, message))
        # A GO that a rank is not there to hear would be lost.
        complete = len(self._ranks) == len(self._job.consumers)
        while complete and (go := self.pace.go(self.gate)) is not None:
            self.ledger.paused = self.ledger.paused or go.stop
            self.out += [(name, go) for name in self._ranks]

    def _lease(self) -> None:
        """Work for everyone who wants some, as far as there are slots."""
        self.spilling.pass_on()
        waiting, self._wants = self._wants, []
        for name, kind in waiting:
            sends = self._sends(name)
            # Without ingest nobody would place what is sent.
            lease = self.ledger.want(name, kind) if INGEST in self._roles or not sends else None
            if lease is None:
                self._wants.append((name, kind))
                continue
            if self.ledger.history((lease.step, lease.index)) != (0, 0):
                text = f"step {lease.step} block {lease.index} is leased again, to {name}"
                self.rows.append(("event", {"what": "leased again", "text": text}))
            if sends:
                nbytes = table_bytes(self._descriptors.table(lease.block_samples))
                self.out.append((INGEST, m.Expect(holder=name, attempt=lease.attempt, slot=lease.slot, nbytes=nbytes)))
            self.out.append((name, self._descriptors.lease(lease)))

    def _check_quarantine(self) -> None:
        if self.ledger.exhausted:
            self.out.append((LAUNCHER, m.Error(text="every slot of the ring is lost: producers could not be ended")))
        quarantined = self.ledger.quarantined
        if len(quarantined) == self._known_quarantined:
            return
        self._known_quarantined = len(quarantined)
        newest = list(quarantined.items())[-1]
        text = f"{len(quarantined)} samples are quarantined, the last one sample {newest[0]}: {newest[1]}"
        self.rows.append(("event", {"what": "quarantine", "text": text, "samples": len(quarantined)}))
        self._tell_quarantine(list(self._ranks))
        if len(quarantined) > self._job.quarantine_limit * self._plan.total_samples:
            self.out.append((LAUNCHER, m.Error(text=f"{text}; that is over train.quarantine_limit")))

    def _tell_quarantine(self, names: list[str]) -> None:
        samples = {str(sample): reason for sample, reason in self.ledger.quarantined.items()}
        self.out += [(name, m.Quarantine(samples=samples)) for name in names]
