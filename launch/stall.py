"""What a run waits for, by name, from the messages that pass through the coordinator. Pure: the clock is handed in.

Progress is a produced block, a verified block or a step. Without any for `limit_s` there is one line that names the
stage that is waited for; it comes again each time the wait has doubled. Slow is not dead: a child hangs (`hung`) only
when it has been silent, or has worked on one thing without any progress, for `hang_s`.

A step needs, in this order, that every rank has joined, that the step before is done, that every rank has come to it,
and that each rank has its block, which a producer must have made. The first of these that is missing is waited for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import msgspec

from protocol.job import INGEST, REMOTE_PREFIX
from protocol.messages import (
    AnyMessage,
    Bad,
    Deliver,
    Gone,
    Heartbeat,
    Lease,
    Message,
    Nack,
    Ready,
    Report,
    Rewind,
    Verified,
    Want,
)
from protocol.units import show_seconds

LIMIT_S = 30.0
# A peer beats every two seconds by a thread of its own, whatever else it does: silence means that it was stopped, or
# that its machine is badly short of something.
SILENT_S = 10.0
# A child that shows no life for this long is ended: longer than a machine may be paused or one sample may take.
HANG_S = 300.0
# From here on a wait is shown beside the other figures.
SHOWN_AFTER_S = 5.0


class Gate(Protocol):
    """What is asked of protocol/gate.py."""

    @property
    def next(self) -> tuple[int, int]: ...

    @property
    def finished(self) -> bool: ...

    def waiting_for(self) -> list[int]: ...

    def absent(self) -> list[int]: ...


class _Work(msgspec.Struct):
    """A lease or a delivery under way."""

    name: str
    step: int
    index: int
    micro_step: int
    since: float

    def __str__(self) -> str:
        return f"step {self.step} block {self.index}"


class Watch:
    """Follows one start of a run. `produced` and `trained` count blocks; `stall` is the newest line about the present
    wait, None while there is none to speak of."""

    def __init__(
        self,
        producers: list[str],
        consumers: list[str],
        start_step: int,
        now: float,
        limit_s: float = LIMIT_S,
        ingests: bool = False,
        hang_s: float = HANG_S,
    ) -> None:
        self.produced = self.trained = 0
        self.stall: str | None = None
        self._producers, self._consumers = list(producers), consumers
        self._limit_s, self._hang_s = limit_s, hang_s
        self._ingest = [INGEST] if ingests else []
        self._moved = now
        self._due_s = limit_s
        # Who has not joined yet, since when.
        self._loading = dict.fromkeys((*self._ingest, *producers, *consumers), now)
        self._heard: dict[str, float] = {}
        self._progress: dict[str, tuple[int, float]] = {}  # each one's own count of what it did, and when it grew
        self._wants: Counter[str] = Counter()  # asked for and not granted
        self._leases: dict[int, _Work] = {}  # by attempt
        self._delivered: dict[tuple[int, int], _Work] = {}  # not yet verified, by step and index
        self._untrained: set[tuple[int, int]] = set()
        self._start_step = start_step
        self._finished = dict.fromkeys(consumers, start_step)  # steps done by each rank
        self._reported = ""

    def joined(self, name: str, now: float) -> None:
        self._loading.pop(name, None)
        self._heard[name] = now
        self._progress[name] = (-1, now)
        if name.startswith(REMOTE_PREFIX):
            self._producers.append(name)

    def left(self, name: str) -> None:
        """A producer of another host is not waited for any more."""
        self._producers.remove(name)
        self._forget(name)

    def heard(self, name: str, message: AnyMessage | Message, now: float) -> None:
        """A message of an admitted peer, heartbeats included."""
        self._heard[name] = now
        if isinstance(message, Heartbeat) and message.progress != self._progress.get(name, (-1, now))[0]:
            self._progress[name] = (message.progress, now)
        match message:
            case Want():
                self._wants[name] += 1
            case Ready(attempt=attempt):
                self._leases.pop(attempt, None)
                self.produced += 1
                self._move(now)
            case Nack(attempt=attempt):
                self._leases.pop(attempt, None)
            case Verified(step=step, index=index):
                self._delivered.pop((step, index), None)
                self._move(now)
            case Bad(step=step, index=index):
                self._delivered.pop((step, index), None)
                self._untrained.discard((step, index))
            case Heartbeat(progress=step) if name in self._finished:
                self._finished[name] = max(self._finished[name], step)
            case Report(kind=kind, row=row):
                self._reported = f"; it last reported {kind} of step {row.get('step', 0)}" if kind != "event" else ""
                if kind == "step":
                    self._step(name, row["step"], now)
            case Rewind(names=names, step=step):
                for rank in names:
                    self._loading[rank] = now
                    self._forget(rank)
                self._delivered.clear()
                self._untrained.clear()
                self._start_step = step
                self._finished = dict.fromkeys(self._consumers, step)
                self._reported = ""
                self._move(now)
            case Gone(name=gone, reaped=reaped):
                if reaped:  # else its name is not used again
                    self._loading[gone] = now
                self._forget(gone)

    def sent(self, name: str, message: Message, now: float) -> None:
        """A message to a peer."""
        match message:
            case Lease(step=step, index=index, attempt=attempt):
                self._wants[name] -= 1
                self._leases[attempt] = _Work(name, step, index, 0, now)
            case Deliver(step=step, index=index, micro_step=micro_step, slot=slot):
                self._delivered[step, index] = _Work(name, step, index, micro_step, now)
                if slot >= 0:
                    self._untrained.add((step, index))

    def look(self, gate: Gate, ready: int, now: float) -> str | None:
        """A line when one is due. `ready` blocks lie in the ring, waiting for their consumers."""
        waited_s = now - self._moved
        if waited_s < self._due_s:
            return None
        while self._due_s <= waited_s:
            self._due_s *= 2
        self.stall = (
            f"no progress for {show_seconds(waited_s)}: waiting for {self.waited_for(gate, now)}; "
            f"{self.produced} blocks produced, {ready} ready, {self.trained} trained"
        )
        return self.stall

    def state(self, gate: Gate, now: float) -> dict[str, Any]:
        """Its part of a snapshot; `waiting` is None while the wait is not worth showing."""
        shown = now - self._moved >= SHOWN_AFTER_S
        waiting = self.waited_for(gate, now) if shown else None
        counts = {"blocks_produced": self.produced, "blocks_trained": self.trained}
        return counts | {"waiting": waiting, "stall": self.stall}

    def waited_for(self, gate: Gate, now: float) -> str:
        """The stage, and who is in it for how long."""
        silent = [
            f"{name} has been silent for {show_seconds(now - heard)} (stopped?)"
            for name, heard in self._heard.items()
            if now - heard >= SILENT_S
            and name in (*self._producers, *self._consumers, *self._ingest)
            and not (gate.finished and self._finished.get(name, 0) >= gate.next[0])  # it is done, and has left
        ]
        return "; ".join([self._stage(gate, now), *silent])

    def hung(self, gate: Gate, now: float) -> dict[str, str]:
        """The children that get nowhere, and why each is taken to hang."""
        found: dict[str, str] = {}
        for name, since in self._heard.items():
            if now - since >= self._hang_s and name in (*self._producers, *self._consumers, *self._ingest):
                found[name] = f"it has been silent for {show_seconds(now - since)}"
        for work in self._leases.values():
            since = max(work.since, self._progress.get(work.name, (0, 0.0))[1])
            if work.name not in found and now - since >= self._hang_s:
                found[work.name] = f"it has made no progress with {work} for {show_seconds(now - since)}"
        # The first step may compile for long. Later, who is inside one has all that it needs.
        for name in self._consumers:
            done, since = self._finished[name], self._progress.get(name, (0, now))[1]
            inside = name not in (*self._loading, *found) and self._start_step < done < gate.next[0]
            if inside and now - max(since, self._moved) >= self._hang_s:
                found[name] = f"it has been inside step {done} for {show_seconds(now - since)}"
        return found

    # --- inside ---

    def _forget(self, name: str) -> None:
        """One that has ended owes nothing any more."""
        self._heard.pop(name, None)
        self._progress.pop(name, None)
        self._wants.pop(name, None)
        self._leases = {attempt: work for attempt, work in self._leases.items() if work.name != name}

    def _move(self, now: float) -> None:
        self._moved, self._due_s, self.stall = now, self._limit_s, None

    def _step(self, name: str, step: int, now: float) -> None:
        self._finished[name] = step
        done = {key for key in self._untrained if key[0] < step}
        self._untrained -= done
        self.trained += len(done)
        self._move(now)

    def _stage(self, gate: Gate, now: float) -> str:
        if loading := [name for name in (*self._ingest, *self._consumers) if name in self._loading]:
            return self._to_join(loading + [name for name in self._producers if name in self._loading], now)
        step, micro_step = gate.next
        absent = [self._consumers[rank] for rank in gate.absent()]
        # Every micro-step before the next one has its GO, so who has not done its step is at it. A rank that has come
        # to the next step by then only waits in the reduction for one that has not.
        if inside := [name for name in self._consumers if self._finished[name] < step]:
            late = [name for name in inside if name in absent]
            return f"{_and(late or inside)} in step {step - 1} (arithmetic or reduction)"
        if gate.finished:
            return f"{_and(self._consumers)} to evaluate, export and end{self._reported}"
        if absent:
            return f"{_and(absent)} to come to step {step} (evaluates or writes){self._reported}"
        ranks = [self._consumers[rank] for rank in gate.waiting_for()]
        unverified = [
            f"{work.name} to verify {work}, delivered {show_seconds(now - work.since)} ago"
            for work in self._delivered.values()
            if (work.step, work.micro_step) == (step, micro_step) and work.name in ranks
        ]
        return "; ".join(unverified) if unverified else self._making(step, now)

    def _making(self, step: int, now: float) -> str:
        """Who should make what the ranks have not got: the oldest leases first."""
        if leases := [work for work in self._leases.values() if work.step <= step]:
            return _and([f"{work.name} (leased {work} {show_seconds(now - work.since)} ago)" for work in leases])
        loading = [name for name in self._producers if name in self._loading]
        if loading:
            return self._to_join(loading, now)
        if busy := [name for name in self._producers if not self._wants[name]]:
            return f"{_and(busy)} to ask for work"
        return f"a free slot of the ring for step {step}"

    def _to_join(self, names: list[str], now: float) -> str:
        longest_s = max(now - self._loading[name] for name in names)
        return f"{_and(names)} to load and join, for {show_seconds(longest_s)} now"


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
