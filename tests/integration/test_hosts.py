"""Producers of other hosts, as real processes over loopback TCP: whatever becomes of them and of their connections, the
loss curve is the undisturbed one, bit for bit; and who does not belong is refused with a reason."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from producer.join import Join, read_join
from protocol import sockets
from protocol.codec import Envelope, decode, encode
from protocol.errors import ProtocolError, Refused
from protocol.line import Line
from protocol.messages import Welcome
from protocol.peer import Peer, hello

# The ring holds all of the run: however fast the local producer is, something is left for the other when it is stopped.
SHORT = ("--set", "data.eval=[]", "--set", "train.epochs=12", "--set", "ring.bytes=8MB")
CALM: list[tuple[int, float]] = []  # losses of an undisturbed local run: the same whoever asks


class Host:
    """Another host, as far as a run can tell: `draftwire produce` in a folder of its own. `said` is what it printed."""

    def __init__(self, workspace: Any, join: Path, name: str, *arguments: str) -> None:
        self._out = join.parent / f"{name}.out"
        command = workspace.command("produce", str(join), *arguments)
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, process_group=0)

    @property
    def said(self) -> str:
        return self._out.read_text()

    def wait_for(self, words: str, times: int = 1, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while self.said.count(words) < times:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def end(self, timeout_s: float = 60) -> int:
        return self.process.wait(timeout_s)


class Run:
    """A run that listens on loopback, and hosts beside it."""

    def __init__(self, workspace: Any, name: str, *arguments: str) -> None:
        self.workspace, self.name = workspace, name
        self.elsewhere = workspace.folder / "elsewhere"
        self.elsewhere.mkdir(exist_ok=True)
        self.hosts: list[Host] = []
        listen = f'hosts.listen="tcp://127.0.0.1:{free_ports()}"'
        self.process = workspace.start(name, *SHORT, "--set", listen, *arguments)
        self.join_path = workspace.runs / name / "join.json"
        deadline = time.monotonic() + 60
        while not self.join_path.exists():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.join: Join = read_join(self.join_path)

    @property
    def output(self) -> str:
        return str((self.workspace.folder / f"{self.name}.out").read_text())

    def invite(self, name: str = "join", **changes: Any) -> Path:
        """The join.json as it arrives on another host."""
        path = self.elsewhere / f"{name}.json"
        path.write_text(json.dumps(json.loads(self.join_path.read_text()) | changes))
        return path

    def host(self, name: str, join: Path, *arguments: str) -> Host:
        self.hosts.append(Host(self.workspace, join, name, *arguments))
        return self.hosts[-1]

    def events(self, what: str) -> list[str]:
        return [row["text"] for row in self.workspace.rows(self.name, "event") if row["what"] == what]

    @contextmanager
    def local_side_stopped(self) -> Iterator[None]:
        """Whoever fills blocks meanwhile is on another host; and the run cannot end before this does."""
        self.workspace.wait_for_step(self.name, 1)
        pids = [self.workspace.pid_of(self.name, child) for child in ("consumer-0", "producer-0")]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):  # the run may have been killed
                    os.kill(pid, signal.SIGCONT)

    def wait_for_event(self, what: str, times: int = 1, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.events(what)) < times:
            assert time.monotonic() < deadline, self.events(what)
            time.sleep(0.02)


def free_ports() -> int:
    """A port that is free, as the next one is."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                return port


@pytest.fixture
def start(workspace: Any) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(name: str, *arguments: str) -> Run:
        runs.append(Run(workspace, name, *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        for process in (run.process, *(host.process for host in run.hosts)):
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def calm(workspace: Any) -> list[tuple[int, float]]:
    if not CALM:
        finished = workspace.run("calm", *SHORT)
        assert finished.returncode == 0, finished.stderr
        CALM.extend(workspace.losses("calm"))
        assert len(CALM) > 30
    return CALM


class Proxy:
    """Relays TCP connections to `port`. The n-th one is cut, both ways at once, when `cuts[n]` bytes have gone to the
    server; the one after them is held there when `hold` bytes have, until `go_on`. Later ones are left alone."""

    def __init__(self, port: int, cuts: list[int], hold: int = 1 << 60) -> None:
        self._to, self._budgets = port, [*cuts, hold]
        self._cuts = len(cuts)
        self.made = 0
        self.held, self.go_on = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        for number in range(1 << 30):
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            self._ends += [near, far]
            for source, sink, upward in ((near, far, True), (far, near, False)):
                thread = threading.Thread(target=self._relay, args=(source, sink, number, upward), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, sink: socket.socket, number: int, upward: bool) -> None:
        left = self._budgets[number] if upward and number < len(self._budgets) else 1 << 60
        with suppress(OSError):
            while data := source.recv(min(left, 4096)):
                sink.sendall(data)
                left -= len(data)
                if left == 0 and number < self._cuts:
                    self.made += 1
                    break
                if left == 0:
                    self.held.set()
                    self.go_on.wait(60)
                    left = 1 << 60
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.go_on.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()
        for end in self._ends:
            end.close()


@pytest.fixture
def proxy() -> Iterator[Callable[..., Proxy]]:
    proxies: list[Proxy] = []

    def relay(address: str, cuts: list[int], hold: int = 1 << 60) -> Proxy:
        proxies.append(Proxy(int(address.rpartition(":")[2]), cuts, hold))
        return proxies[-1]

    yield relay
    for each in proxies:
        each.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("curve", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_cut_in_the_middle_of_chunks_and_killed_it_costs_nothing_but_time(
    start: Any, calm: Any, proxy: Any, curve: bool
) -> None:
    run = start("cut", "--set", f"hosts.curve={str(curve).lower()}")
    assert stat.S_IMODE(run.join_path.stat().st_mode) == 0o600
    assert bool(run.join.server_key) == curve
    # A block is a chunk of some 20 kB; HELLO is half said after 300 bytes, and after 1,500 some blocks are filled.
    never = 1 << 60
    payload = proxy(run.join.payload_address, [3_000, 20_000, never], hold=30_000)
    control = proxy(run.join.address, [never, 300, never, 1_500])
    host = run.host("far", run.invite(address=control.address, payload_address=payload.address))
    with run.local_side_stopped():
        assert payload.held.wait(60), host.said
        assert (payload.made, control.made) == (2, 2), host.said
        assert host.said.count("trying again") >= 4
        sessions = len(run.events("left"))
        host.process.kill()
        run.wait_for_event("left", sessions + 1)
        assert "its connection was cut); blocks to lease anew: step" in run.events("left")[-1]
        reached = run.workspace.losses("cut")[-1][0]
    run.workspace.wait_for_step("cut", reached + 2)
    payload.go_on.set()  # half a chunk for a slot that the local producer has been leased since
    assert run.process.wait(90) == 0, run.output
    assert run.workspace.losses("cut") == calm
    assert run.events("bad") + run.events("quarantine") + run.events("ignored") == []
    assert not run.join_path.exists()


@pytest.mark.timeout(180)
def test_who_does_not_belong_is_refused_with_a_reason_and_the_run_goes_on(
    start: Any, calm: Any, make_folder: Any
) -> None:
    run = start("guarded", "--set", "hosts.producers=2")
    join: Join = run.join
    copy = make_folder("llama", "copy")
    host = run.host("near", run.invite(), "--target", str(copy))
    other = run.host("other", run.invite(), "--target", str(make_folder("qwen3", "other")))
    assert other.end() == 2
    assert "these are not the weights of run guarded" in other.said
    with run.local_side_stopped():
        host.wait_for("joined run guarded")
        schema = json.loads((run.workspace.runs / "guarded" / "job.json").read_text())["schema"]

        def come(name: str = "remote-x", **changes: str) -> Peer:
            fields = {"role": "producer", "token": join.token, "schema": schema} | changes
            key = fields.pop("server_key", join.server_key)
            return Peer(join.address, join.run_id, hello(name=name, rank=0, **fields), server_key=key)

        for reason, changes in {
            "the run token is wrong": {"token": "guess"},
            "target, taps, dtype or plan differ": {"schema": "another"},
            "only producers join from other hosts": {"name": "producer-0"},
            "only producers join": {"role": "consumer"},
        }.items():
            with pytest.raises(Refused, match=reason):
                come(**changes)
        for key in (zmq.curve_keypair()[0].decode(), ""):
            with pytest.raises(ProtocolError, match=r"before it was secured.*CURVE key"):
                come(server_key=key)
        joined = come()
        with pytest.raises(Refused, match=r"2 producers of other hosts .* hosts.producers"):
            come("remote-y")
        joined.close()

        for address, limits in ((join.address, sockets.FROM_HOSTS), (join.payload_address, sockets.PAYLOAD)):
            _drown(join, address, limits, schema)
        assert host.said.count("joined run guarded") == 1  # nobody else lost a connection
    assert run.process.wait(90) == 0, run.output
    assert run.workspace.losses("guarded") == calm
    assert host.end() == 0, host.said
    assert int(host.said.rpartition("has ended; ")[2].split()[0]) > 0, host.said
    assert run.events("bad") + run.events("quarantine") == []
    assert f"`draftwire produce {run.join_path.name}`" in run.output
    assert "has joined from" in (run.workspace.runs / "guarded" / "report.md").read_text()
    told = "".join(path.read_text() for path in (run.workspace.runs / "guarded").rglob("*.log"))
    assert "refused 'remote-x'" in told
    assert join.token not in told + run.output


def _drown(join: Join, address: str, limits: sockets.Limits, schema: str) -> None:
    """Joins, and sends a frame that is too large: that is the end of this connection."""
    with zmq.Context() as context:
        line = Line(context, address, server_key=join.server_key)
        envelope = Envelope(join.run_id, 0)
        line.dealer.send(encode(hello("producer", "remote-x", 0, join.token, schema), envelope))
        assert line.dealer.poll(10_000)
        assert isinstance(decode(line.dealer.recv())[1], Welcome)
        line.dealer.send(b"x" * (limits.frame_bytes + 1000))
        with pytest.raises(ProtocolError, match="the connection was cut"):
            _listen(line)
        line.close()


def _listen(line: Line) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if line.ready_to_receive(20):
            line.dealer.recv()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_it_leaves_at_once_when_told_and_gives_up_when_the_run_is_out_of_reach(start: Any, calm: Any) -> None:
    run = start("left")
    wrong = run.host("wrong", run.invite("wrong", token="guess"))
    hosts = {number: run.host(number.name, run.invite()) for number in (signal.SIGINT, signal.SIGTERM)}
    lost = run.host("lost", run.invite(), "--patience", "3")
    with run.local_side_stopped():
        for host in (*hosts.values(), lost):
            host.wait_for("joined run left")
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 75)):
            hosts[number].process.send_signal(number)
            assert hosts[number].end(10) == code, hosts[number].said
        run.wait_for_event("left", 2)
        assert all("interrupted" in text for text in run.events("left"))
        assert wrong.end() == 1
        assert "takes no producer from here: refused: the run token is wrong" in wrong.said
        run.process.kill()
        assert lost.end() == 1
        assert "out of reach for 3 s" in lost.said
    assert run.join_path.exists()  # nobody was left to remove it
    assert run.workspace.run("left", *SHORT, "--resume").returncode == 0
    assert not run.join_path.exists()
    assert run.workspace.losses("left") == calm


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_host_that_stands_still_is_given_up_and_comes_again(start: Any, calm: Any) -> None:
    run = start("still")
    host = run.host("far", run.invite())
    with run.local_side_stopped():
        host.wait_for("joined run still")
        host.process.send_signal(signal.SIGSTOP)
        run.wait_for_event("left", timeout_s=60)
        host.process.send_signal(signal.SIGCONT)
        host.wait_for("joined run still", 2, timeout_s=90)
    assert run.process.wait(90) == 0, run.output
    assert run.workspace.losses("still") == calm
    assert host.end() == 0, host.said


@pytest.mark.slow
def test_an_address_that_is_taken_is_refused_by_its_key(workspace: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = workspace.run("taken", "--set", f'hosts.listen="tcp://127.0.0.1:{port}"')
    assert refused.returncode == 2
    assert f"hosts.listen = 'tcp://127.0.0.1:{port}': cannot listen on" in refused.stderr
