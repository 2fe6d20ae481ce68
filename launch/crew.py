"""The processes of one start of a run: started, watched, restarted, ended."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from consumer.checkpoints import newest_good, read_cursor
from launch.live import Screen
from launch.machine import threads_per_process
from launch.news import News
from launch.rendezvous import ranks_environment
from launch.restarts import RESTARTS, Restarts
from launch.signals import Interrupted, Signals
from protocol.child import FAILED_FOR_GOOD, WRONG_REQUEST
from protocol.errors import RunError
from protocol.gate import ABANDON, COOLDOWN, STOP, UNCACHED
from protocol.job import INGEST, REPLAY, TOKEN_VARIABLE, Job, write_job
from protocol.messages import Again, Error, Gone, Hung, Order, Rewind, Snapshot, Stop
from protocol.peer import Peer, hello
from protocol.supervise import REAP_S, Child, await_news

# Exit codes of a consumer: the plan is done, or it stopped at a step boundary after a checkpoint.
DONE, INTERRUPTED = 0, 75
TICK_S = 0.1
GRACE_S, SHARD_GRACE_S = 20.0, 120.0  # who fills a cache completes its open shard first
# A run that cannot go on gets so long for the checkpoint of what it has trained.
LAST_CHECKPOINT_S = 60.0
# On a CPU, PyTorch and the oneDNN below it each keep what they compiled for the last 1024 shapes of a bf16 product, a
# third of a MiB apiece and scattered over the heap. Blocks differ in their rows, so a consumer of 374 steps met 2,192
# shapes and grew to 2.8 GiB; with 64 it stays at 0.9, computes the same bits and is no slower. The shapes of one block
# must fit, and 0 crashes PyTorch.
COMPILED_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


class Crew:
    """The processes of one start of a run and the launcher's line to the coordinator."""

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        ring_fd: int,
        signals: Signals,
        screen: Screen,
        hosts: dict[str, str],
        modules: Mapping[str, str] | None = None,
    ) -> None:
        self._job, self._run_dir, self._ring_fd = job, run_dir, ring_fd
        self._signals, self._screen = signals, screen
        # What stands for a role's own module: `draftwire tune` measures one side beside a part that costs nothing.
        self._modules = modules or {}
        self._hosts = hosts  # what only those who listen to other hosts may know
        base = {"OMP_NUM_THREADS": str(threads_per_process()), TOKEN_VARIABLE: secrets.token_hex(32)}
        self._environment = base | COMPILED_PRODUCTS | ranks_environment(len(job.consumers))
        self._step = job.start_step
        self._restarts = Restarts()
        self._asleep: dict[str, float] = {}  # when to start whom again
        self._dying: dict[str, float] = {}  # killed because they hung, and until when they may take to end
        self._lost: set[str] = set()
        self._last_words: str | None = None
        self._again: Again | None = None
        self._filled: dict[str, int] = {}  # blocks by producer
        self._deadline = math.inf
        self._children: dict[str, Child] = {}
        self._peer: Peer | None = None
        self._stopping = self._cooling = False
        self._news = News()

    def work(self, over: Callable[[], bool] = lambda: False) -> tuple[str, str]:
        """("done" | "interrupted" | "again" | "over", reason): "again": the run is to go on with other processes,
        "over": `over` says so. Raises RunError with the lines for the user, Interrupted."""
        self._start("coordinator")
        greeting = hello("launcher", "launcher", 0, self._token, self._job.schema)
        self._peer = Peer(self._job.address, self._job.run_id, greeting, self._job.hang_s)
        ingest = [INGEST] if self._job.ingests else []
        for name in (*ingest, *self._job.producer_names, *self._job.consumer_names):
            self._start(name)
        while True:
            alive = [child for child in self._children.values() if child.exit_code() is None]
            await_news(alive, [self._peer.arrived_fd], TICK_S)
            self._obey_signals()
            self._read_mail()
            self._tend()
            if over():
                return "over", ""
            codes = [self._children[name].exit_code() for name in self._job.consumer_names]
            if self._last_words is not None and (None not in codes or time.monotonic() > self._deadline):
                raise RunError(self._last_words)
            if all(code == DONE for code in codes):
                return "done", ""
            if self._again is not None and not self._stopping and self._has_paused(codes, self._again):
                return "again", self._again.text
            if all(code in (DONE, INTERRUPTED) for code in codes):
                return "interrupted", "stopped at a step boundary after a checkpoint"

    def end(self) -> None:
        """Ends whoever is left, the coordinator last, and returns when all are reaped."""
        if self._peer is not None and self._alive("coordinator"):
            self._peer.send(Order(order="done"))
            self._children["coordinator"].wait(GRACE_S)
            while not self._peer.inbox.empty():  # it tells what has happened since it was last heard
                if isinstance(message := self._peer.inbox.get_nowait(), Snapshot):
                    self._note(message.state)
        for child in self._children.values():
            grace_s = SHARD_GRACE_S if child.name == REPLAY else GRACE_S
            child.end(grace_s if self._signals.wishes < 2 else 0.0)
        if self._peer is not None:
            self._peer.close()

    # --- inside ---

    @property
    def _token(self) -> str:
        return self._environment[TOKEN_VARIABLE]

    def _start(self, name: str) -> None:
        role, _, index = name.partition("-")
        own = "producer.replay" if name == REPLAY else f"{role}.worker" if index else f"launch.{role}"
        module = self._modules.get(role, own)
        # Who sends payload over ZeroMQ gets no hold on the ring: a late writer could not be told from the next one.
        maps_ring = role == "consumer" or name in (INGEST, REPLAY)
        maps_ring = maps_ring or (role == "producer" and self._job.transport == "shm")
        arguments = [str(self._run_dir), *([index] if index else []), *([str(self._ring_fd)] if maps_ring else [])]
        environment = self._environment | ({"RANK": index, "LOCAL_RANK": index} if role == "consumer" else {})
        environment = environment | (self._hosts if name in ("coordinator", INGEST) else {})
        log_path = self._run_dir / "log" / f"{name}.log"
        fds = [self._ring_fd] if maps_ring else []
        self._children[name] = Child(name, module, arguments, log_path, environment, fds)

    def _alive(self, name: str) -> bool:
        return name in self._children and self._children[name].exit_code() is None

    def _obey_signals(self) -> None:
        if self._signals.wishes > 1:
            raise Interrupted
        if self._signals.wishes == 1 and not self._stopping:
            self._stopping = True
            self._screen.say("stopping at the next step boundary, after a checkpoint (interrupt again to end at once)")
            self._tell(Order(order=STOP))
        if self._signals.cooldown and not self._cooling:
            self._cooling = True
            self._tell(Order(order=COOLDOWN))

    def _tell(self, message: Order | Gone | Rewind) -> None:
        assert self._peer is not None
        self._peer.send(message)

    def _read_mail(self) -> None:
        assert self._peer is not None
        with contextlib.suppress(BlockingIOError):  # nothing has arrived
            os.eventfd_read(self._peer.arrived_fd)
        while True:
            try:
                message = self._peer.inbox.get_nowait()
            except queue.Empty:
                return
            match message:
                case Snapshot(state=state):
                    self._note(state)
                    self._screen.show(state)
                case Hung(name=name, reason=reason):
                    self._end_hung(name, reason)
                case Error(text=text):
                    self._give_up(text, text)
                case Again() if self._again is None and self._last_words is None:
                    self._again, self._deadline = message, time.monotonic() + LAST_CHECKPOINT_S
                    self._screen.say(f"{message.text}; the run starts again by itself from its next checkpoint")
                    self._tell(Order(order=ABANDON if message.at_once else STOP))
                case Stop(reason=reason):
                    raise RunError(f"the run is cut off: {reason} (log: {self._run_dir}/log/coordinator.log)")

    def _has_paused(self, codes: list[int | None], again: Again) -> bool:
        """Whether the run has come to its checkpoint; where blocks do not come, that is not waited for long."""
        late = again.at_once and (self._step == self._job.start_step or time.monotonic() > self._deadline)
        return late or None not in codes

    def _note(self, state: dict[str, Any]) -> None:
        self._step, self._filled = state["step"], state["filled"]
        for line in self._news.of(state):
            self._screen.say(line)

    def _tend(self) -> None:
        """Starts again whoever died, for as long as that makes sense."""
        for name, at in list(self._asleep.items()):
            if time.monotonic() >= at:
                del self._asleep[name]
                self._start(name)
        for name in ("coordinator", INGEST):
            if name in self._children and self._children[name].exit_code() is not None:
                raise RunError(self._children[name].obituary())
        if self._last_words is not None:
            return
        for name in self._awake(self._job.producer_names):
            if self._children[name].exit_code() is not None:
                self._replace_producer(name)
            elif time.monotonic() > self._dying.get(name, math.inf):
                self._lose_producer(name)
        for name in self._awake(self._job.consumer_names):
            if self._children[name].exit_code() not in (None, DONE, INTERRUPTED):
                self._rewind(name)
                return
            if time.monotonic() > self._dying.get(name, math.inf):
                raise RunError(f"{name} was killed and does not end (log: {self._children[name].log_path})")

    def _awake(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self._asleep and name not in self._lost]

    def _end_hung(self, name: str, reason: str) -> None:
        if self._alive(name):
            self._screen.say(f"{name} hangs ({reason}) and is ended (log: {self._children[name].log_path})")
            self._children[name].kill()
            self._dying[name] = time.monotonic() + REAP_S

    def _replace_producer(self, name: str) -> None:
        """A reaped producer: what it was filling is leased anew, and another takes its place after a pause."""
        child = self._children[name]
        self._dying.pop(name, None)
        self._tell(Gone(name=name, reaped=True, how=child.how()))
        pause_s = self._restarts.died(name, self._step, self._filled.get(name, 0))
        if child.exit_code() in (WRONG_REQUEST, FAILED_FOR_GOOD) or pause_s is None:
            if name == REPLAY and self._job.producers:  # what it would have read can be computed
                self._lost.add(name)
                self._tell(Order(order=UNCACHED))
            else:
                self._give_up(child.obituary(), _last_words(child, self._step, looping=pause_s is None))
            return
        again = f" in {pause_s:.0f} s" if pause_s else ""
        self._screen.say(f"{child.obituary()}; starting it again{again}")
        self._asleep[name] = time.monotonic() + pause_s

    def _lose_producer(self, name: str) -> None:
        """It was killed and is still there: the slots that it may write are never used again, nor is its name."""
        self._lost.add(name)
        self._tell(Gone(name=name, reaped=False, how="was killed"))
        text = f"{name} was killed and does not end; the run goes on without it and without the slots it may write"
        self._screen.say(text)
        if self._lost.issuperset(self._job.computing_names or [REPLAY]):
            self._give_up(text, f"{text}: no producer is left")

    def _rewind(self, dead: str) -> None:
        """A rank has died: all start again from the newest good checkpoint, and the ledger goes back to it."""
        child = self._children[dead]
        pause_s = self._restarts.died("consumers", self._step, self._step)
        if child.exit_code() in (WRONG_REQUEST, FAILED_FOR_GOOD) or pause_s is None:
            raise RunError(_last_words(child, self._step, looping=pause_s is None))
        # The others may be inside a collective, which nothing but their end gets them out of.
        for name in self._job.consumer_names:
            if not self._children[name].end(0.0):
                raise RunError(f"{name} was killed and does not end (log: {self._children[name].log_path})")
            self._dying.pop(name, None)
        checkpoint, notes = newest_good(self._run_dir / "checkpoints")
        for note in notes:
            self._screen.say(note)
        if checkpoint is not None:
            cursor = read_cursor(checkpoint)
            place = {"checkpoint": str(checkpoint), "start_step": cursor.next_step, "quarantined": cursor.quarantined}
            place |= {"trained_s": cursor.trained_s, "cooldown_step": cursor.cooldown_step}
            self._job = msgspec.structs.replace(self._job, **place)
            write_job(self._run_dir, self._job)
        elif self._job.start_step > 0:
            raise RunError(f"{child.obituary()}; and there is no checkpoint left to go on from")
        step = self._job.start_step
        self._screen.say(f"{child.obituary()}; every consumer starts again from step {step}")
        names = tuple(self._job.consumer_names)
        how = f"{dead} {child.how()}"
        self._tell(Rewind(names=names, step=step, quarantined=self._job.quarantined, how=how))
        if self._stopping:  # the GO that carried it may be lost with the dead
            self._tell(Order(order=STOP))
        self._environment |= ranks_environment(len(names))
        self._asleep |= dict.fromkeys(names, time.monotonic() + pause_s)

    def _give_up(self, why: str, last_words: str) -> None:
        """The run cannot go on, for a reason that `why` gives in one line. What has been trained is saved first, if
        there is something and it goes quickly."""
        if self._last_words is not None:
            return
        if self._step == self._job.start_step or not all(map(self._alive, self._job.consumer_names)):
            raise RunError(last_words)
        self._screen.say(f"{why}; the run ends after a checkpoint")
        self._last_words, self._deadline = last_words, time.monotonic() + LAST_CHECKPOINT_S
        self._tell(Order(order=ABANDON))


def _last_words(child: Child, step: int, looping: bool) -> str:
    """The obituary of a child that is not started again, why it is not, and the end of its log."""
    often = f"; that was the {RESTARTS + 1}th time while the run stood at step {step}" if looping else ""
    tail = "".join(f"\n    {line}" for line in child.tail())
    return child.obituary() + often + (f"; the end of its log:{tail}" if tail else "")
