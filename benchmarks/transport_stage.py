"""Lends slots and passes descriptors on in benchmarks/transport.py, and starts the processes that do the work."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import zmq
from jobs import DTYPE, SAMPLES_PER_BLOCK, WIDTH, cpu_s, plain_job

from launch.machine import free_memory_bytes
from protocol import messages as m
from protocol import sockets
from protocol.arena import create_arena
from protocol.block import block_table
from protocol.codec import Envelope, decode, encode
from protocol.job import INGEST, TOKEN_VARIABLE, Job, write_job
from protocol.supervise import Child

IN_FLIGHT_BYTES, MOST_IN_FLIGHT = 64 << 20, 8
DEADLINE_S = 120.0
TURN_MS = 500
GRACE_S = 10.0


class Stage:
    """Stands in for the coordinator: it lends slots to the producer and delivers what is ready to the consumer."""

    def __init__(self, job: Job, router: zmq.Socket[bytes]) -> None:
        self.children: dict[str, Child] = {}
        self._job, self._router = job, router
        self._envelope = Envelope(job.run_id, 0)
        self._identities: dict[str, bytes] = {}
        self._free = list(range(job.slots))
        self._slots: dict[int, int] = {}  # by attempt, of the blocks under way
        self._attempt = 0
        tokens = job.slot_bytes // (2 * WIDTH)
        self._table = block_table(tokens, SAMPLES_PER_BLOCK, WIDTH, DTYPE)
        self._token_ids, self._mask = bytes(4 * tokens), bytes(tokens)

    def start(self, child: Child) -> None:
        """Waits until the child has joined and, the producer, asks for work."""
        self.children[child.name] = child
        while not isinstance(self._hear(), m.Want if child.name == "producer-0" else m.Hello):
            pass

    def transfer(self, blocks: int) -> tuple[float, dict[str, float]]:
        """Seconds from the first lease to the last release of so many blocks, and the CPU seconds of each process."""
        before = {name: cpu_s(child.pid) for name, child in self.children.items()}
        started = time.perf_counter()
        leased = released = 0
        while released < blocks:
            while self._free and leased < blocks:
                self._lease()
                leased += 1
            message = self._hear()
            if isinstance(message, m.Ready):
                self._deliver(message.attempt)
            elif isinstance(message, m.Release):
                self._free.append(self._slots.pop(message.attempt))
                released += 1
        seconds = time.perf_counter() - started
        return seconds, {name: cpu_s(child.pid) - before[name] for name, child in self.children.items()}

    def end(self) -> None:
        """Ends every child, the consumer first, and returns once they are reaped."""
        for name in self._identities:
            with suppress(zmq.ZMQError):  # it is gone
                self._send(name, m.Stop(reason="done"))
        for child in reversed(self.children.values()):
            child.wait(GRACE_S)
            child.end(GRACE_S)

    def _lease(self) -> None:
        self._attempt += 1
        attempt, slot = self._attempt, self._free.pop(0)
        self._slots[attempt] = slot
        if self._job.transport == "zmq":
            expect = m.Expect(holder="producer-0", attempt=attempt, slot=slot, nbytes=self._job.slot_bytes)
            self._send(INGEST, expect)
        lease = m.Lease(
            step=attempt,
            index=0,
            kind="model",
            attempt=attempt,
            slot=slot,
            samples=tuple(range(SAMPLES_PER_BLOCK)),
            lengths=(0,) * SAMPLES_PER_BLOCK,
            positions=tuple(range(SAMPLES_PER_BLOCK)),
            token_ids=self._token_ids,
            loss_mask=self._mask,
        )
        self._send("producer-0", lease)

    def _deliver(self, attempt: int) -> None:
        deliver = m.Deliver(
            step=attempt,
            index=0,
            micro_step=0,
            micro_steps=1,
            epoch=0,
            attempt=attempt,
            slot=self._slots[attempt],
            table=self._table,
            samples=tuple(range(SAMPLES_PER_BLOCK)),
            writers=(attempt,),
            checksum=0,
        )
        self._send("consumer-0", deliver)

    def _send(self, name: str, message: m.Message) -> None:
        self._router.send_multipart([self._identities[name], encode(message, self._envelope)], zmq.NOBLOCK)

    def _hear(self) -> m.Message:
        """The next message; raises SystemExit when a process has died or says nothing for too long."""
        deadline = time.monotonic() + DEADLINE_S
        while not self._router.poll(TURN_MS):
            if dead := [child.obituary() for child in self.children.values() if child.exit_code() is not None]:
                raise SystemExit(dead[0])
            if time.monotonic() > deadline:
                raise SystemExit(f"nobody has said anything for {DEADLINE_S:.0f} s")
        identity, frame = self._router.recv_multipart()
        message = decode(frame)[1]
        if isinstance(message, m.Hello):
            self._identities[message.name] = identity
            welcome = m.Welcome(slots=self._job.slots, slot_bytes=self._job.slot_bytes, heartbeat_s=2.0)
            self._send(message.name, welcome)
        elif isinstance(message, m.Heartbeat):
            self._router.send_multipart([identity, encode(message, self._envelope)], zmq.NOBLOCK)
        return message


@contextmanager
def stage(method: str, slot_bytes: int) -> Iterator[Stage]:
    """The processes of one method, joined and idle; nothing is left of them afterwards."""
    slots = max(2, min(MOST_IN_FLIGHT, IN_FLIGHT_BYTES // slot_bytes))
    run_id = secrets.token_hex(8)
    job = plain_job(
        run_id=run_id,
        address=sockets.endpoint(run_id),
        transport="zmq" if method in ("ipc", "tcp") else "shm",
        payload_address=f"tcp://127.0.0.1:{free_port()}" if method == "tcp" else sockets.payload_endpoint(run_id),
        slots=slots,
        slot_bytes=slot_bytes,
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"OMP_NUM_THREADS": "1", TOKEN_VARIABLE: secrets.token_hex(32), "PYTHONPATH": path}
    ring_fd = create_arena(slots, slot_bytes, free_memory_bytes())
    with (
        tempfile.TemporaryDirectory(prefix="draftwire-bench-", dir="/dev/shm") as folder,
        zmq.Context() as context,
        sockets.router(context, job.address) as router,
    ):
        run_dir = Path(folder)
        write_job(run_dir, job)
        one = Stage(job, router)

        def start(name: str, module: str, *arguments: str) -> None:
            one.start(Child(name, module, arguments, run_dir / f"{name}.log", environment, [ring_fd]))

        try:
            if job.transport == "zmq":
                start(INGEST, "launch.ingest", folder, str(ring_fd))
            for role in ("producer", "consumer"):
                start(f"{role}-0", "transport_roles", role, method, folder, str(ring_fd))
            yield one
        finally:
            one.end()
            os.close(ring_fd)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
