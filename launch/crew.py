"""The processes of one start of a run: started, watched, restarted, ended."""

from __future__ import annotations

import queue
import secrets
import socket
import time
from pathlib import Path

from launch.live import Screen
from launch.machine import threads_per_process
from launch.signals import Interrupted, Signals
from launch.supervise import Child
from protocol.errors import RunError
from protocol.gate import STOP
from protocol.job import INGEST, TOKEN_VARIABLE, Job
from protocol.messages import Error, Gone, Order, Snapshot, Stop
from protocol.peer import Peer, hello

# Exit codes of a consumer: the plan is done, or it stopped at a step boundary after a checkpoint.
DONE, INTERRUPTED = 0, 75
TICK_S = 0.1
# A producer that has died this often while the run made no step is not started again.
DEATHS_A_STEP = 3
GRACE_S = 20.0
# On a CPU, PyTorch and the oneDNN below it each keep what they compiled for the last 1024 shapes of a bf16 product, a
# third of a MiB apiece and scattered over the heap. Blocks differ in their rows, so a consumer of 374 steps met 2,192
# shapes and grew to 2.8 GiB; with 64 it stays at 0.9, computes the same bits and is no slower. The shapes of one block
# must fit, and 0 crashes PyTorch.
COMPILED_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


class Crew:
    """The processes of one start of a run and the launcher's line to the coordinator."""

    def __init__(
        self, job: Job, run_dir: Path, ring_fd: int, signals: Signals, screen: Screen, hosts: dict[str, str]
    ) -> None:
        self._job, self._run_dir, self._ring_fd = job, run_dir, ring_fd
        self._signals, self._screen = signals, screen
        self._hosts = hosts  # what only those who listen to other hosts may know
        token = secrets.token_hex(32)
        threads = str(threads_per_process())
        base = {"OMP_NUM_THREADS": threads, TOKEN_VARIABLE: token}
        self._environment = base | COMPILED_PRODUCTS | _ranks(len(job.consumers))
        self._step = job.start_step
        self._deaths: dict[str, tuple[int, int]] = {}  # step at the last death, deaths at that step
        self._asleep: dict[str, float] = {}
        self._children: dict[str, Child] = {}
        self._peer: Peer | None = None
        self._stopping = False

    def work(self) -> tuple[str, str]:
        """("done" | "interrupted", reason). Raises RunError with the line for the user, Interrupted."""
        self._start("coordinator")
        self._peer = Peer(
            self._job.address, self._job.run_id, hello("launcher", "launcher", 0, self._token, self._job.schema)
        )
        ingest = [INGEST] if self._job.ingests else []
        for name in (*ingest, *self._job.producer_names, *self._job.consumer_names):
            self._start(name)
        while True:
            time.sleep(TICK_S)
            self._obey_signals()
            self._read_mail()
            self._tend_producers()
            codes = self._consumer_codes()
            if all(code == 0 for code in codes):
                return "done", ""
            if all(code in (0, INTERRUPTED) for code in codes):
                return "interrupted", "stopped at a step boundary after a checkpoint"

    def end(self) -> None:
        """Ends whoever is left, the coordinator last, and returns when all are reaped."""
        if self._peer is not None and self._alive("coordinator"):
            self._peer.send(Order(order="done"))
            self._children["coordinator"].wait(GRACE_S)
        for child in self._children.values():
            child.end(GRACE_S if self._signals.wishes < 2 else 0.0)
        if self._peer is not None:
            self._peer.close()

    # --- inside ---

    @property
    def _token(self) -> str:
        return self._environment[TOKEN_VARIABLE]

    def _start(self, name: str) -> None:
        role, _, index = name.partition("-")
        module = f"{role}.worker" if index else f"launch.{role}"
        # Who sends payload over ZeroMQ gets no hold on the ring: a late writer could not be told from the next one.
        maps_ring = role == "consumer" or name == INGEST or (role == "producer" and self._job.transport == "shm")
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

    def _tell(self, message: Order | Gone) -> None:
        assert self._peer is not None
        self._peer.send(message)

    def _read_mail(self) -> None:
        assert self._peer is not None
        while True:
            try:
                message = self._peer.inbox.get_nowait()
            except queue.Empty:
                return
            match message:
                case Snapshot(state=state):
                    self._step = state["step"]
                    self._screen.show(state)
                case Error(text=text):
                    raise RunError(text)
                case Stop(reason=reason):
                    raise RunError(f"the coordinator is gone: {reason} (log: {self._run_dir}/log/coordinator.log)")

    def _tend_producers(self) -> None:
        """Reaps dead producers, tells the coordinator, and starts each again after a pause that doubles."""
        for name in ("coordinator", INGEST):
            if name in self._children and self._children[name].exit_code() is not None:
                raise RunError(self._children[name].obituary())
        for name in self._names("producer"):
            child = self._children[name]
            if name in self._asleep:
                if time.monotonic() >= self._asleep[name]:
                    del self._asleep[name]
                    self._start(name)
            elif (code := child.exit_code()) is not None:
                self._tell(Gone(name=name))
                died_at, deaths = self._deaths.get(name, (-1, 0))
                deaths = deaths + 1 if died_at == self._step else 1
                self._deaths[name] = (self._step, deaths)
                if code == 2 or deaths > DEATHS_A_STEP:
                    raise RunError(child.obituary())
                self._screen.say(f"{child.obituary()}; starting it again")
                self._asleep[name] = time.monotonic() + 2.0 ** (deaths - 1) - 1.0

    def _consumer_codes(self) -> list[int | None]:
        codes = {name: self._children[name].exit_code() for name in self._names("consumer")}
        for name, code in codes.items():
            if code not in (None, DONE, INTERRUPTED):
                raise RunError(self._children[name].obituary())
        return list(codes.values())

    def _names(self, role: str) -> list[str]:
        return [name for name in self._children if name.startswith(role)]


def _ranks(consumers: int) -> dict[str, str]:
    """The environment that torchrun would give, so that consumers find each other; only several need it."""
    if consumers < 2:
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"WORLD_SIZE": str(consumers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
