"""Sessions of remote producers as the coordinator sees them, over real sockets: a new one ends the old one, silence and
LEAVE end it too, and its slots are leased anew only after ingest has said so."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from launch import coordinator, remotes
from launch.metrics import of_kind, read_rows
from protocol import messages as m
from protocol import sockets
from protocol.codec import Envelope, decode, encode
from protocol.dataset import write_dataset
from protocol.errors import Refused
from protocol.job import HOSTS_KEY_VARIABLE, HOSTS_TOKEN_VARIABLE, TOKEN_VARIABLE, Job, Listening, write_job
from protocol.peer import Peer, hello

LOCAL_TOKEN, REMOTE_TOKEN, SCHEMA = "5ec2e7", "e15ew4e2e", "schema"


class Station:
    """A coordinator in a thread, with a ring of one slot, a launcher, and peers that are closed at the end."""

    def __init__(self, folder: Path, job: Job, key: str) -> None:
        self.folder, self.job, self.key = folder, job, key
        self.failures: queue.Queue[BaseException] = queue.Queue()
        self._open = ExitStack()
        self._thread = threading.Thread(target=self._coordinate, daemon=True)
        self._thread.start()
        self.launcher = self.local("launcher", "launcher")
        self.ingest = self.local("ingest", "ingest")

    def _coordinate(self) -> None:
        try:
            coordinator.main(self.folder)
        except BaseException as error:
            self.failures.put(error)

    def local(self, role: str, name: str, token: str = LOCAL_TOKEN) -> Peer:
        return self._keep(Peer(self.job.address, self.job.run_id, hello(role, name, 0, token, SCHEMA)))

    def remote(self, name: str = "remote-a") -> Peer:
        assert self.job.hosts is not None
        greeting = hello("producer", name, 0, REMOTE_TOKEN, SCHEMA)
        return self._keep(Peer(self.job.hosts.address, self.job.run_id, greeting, server_key=self.key))

    def _keep(self, peer: Peer) -> Peer:
        self._open.callback(peer.close)
        return peer

    def events(self, what: str) -> list[str]:
        rows = of_kind(read_rows(self.folder / "metrics.jsonl"), "event")
        return [row["text"] for row in rows if row["what"] == what]

    def end(self) -> None:
        self.launcher.send(m.Order(order="done"))
        self._thread.join(10)
        self._open.close()
        if not self.failures.empty():
            raise self.failures.get()
        assert not self._thread.is_alive()


@pytest.fixture
def station(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: Callable[..., Job]) -> Iterator[Station]:
    public, secret = (half.decode() for half in zmq.curve_keypair())
    for variable, value in {
        TOKEN_VARIABLE: LOCAL_TOKEN,
        HOSTS_TOKEN_VARIABLE: REMOTE_TOKEN,
        HOSTS_KEY_VARIABLE: secret,
    }.items():
        monkeypatch.setenv(variable, value)
    samples = [(np.arange(6, dtype=np.int32), np.ones(6, np.uint8)) for _ in range(8)]
    write_dataset(tmp_path / "data", samples, {"fingerprint": "f"})
    run_id = f"run-{time.monotonic_ns()}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    job = make_job(
        plan={"batch_tokens": 12, "microbatch_tokens": 12},
        run_id=run_id,
        address=sockets.endpoint(run_id),
        dataset_dir=str(tmp_path / "data"),
        schema=SCHEMA,
        slots=1,
        hosts=Listening(address=address, payload_address="", producers=2),
    )
    write_job(tmp_path, job)
    one = Station(tmp_path, job, public)
    yield one
    one.end()


def heard(peer: Peer, kind: type[m.Message]) -> Any:
    """The next message of this kind, others apart."""
    while not isinstance(message := peer.inbox.get(timeout=10), kind):
        pass
    return message


def leased(station: Station, peer: Peer) -> m.Lease:
    peer.send(m.Want(kind="model"))
    lease: m.Lease = heard(peer, m.Lease)
    assert heard(station.ingest, m.Expect).attempt == lease.attempt
    return lease


def the_slot_goes_to_a_local_producer_once_it_is_fenced(station: Station, lease: m.Lease) -> None:
    local = station.local("producer", "producer-0")
    local.send(m.Want(kind="model"))
    assert heard(station.ingest, m.Fence) == m.Fence(holder="remote-a")
    with pytest.raises(queue.Empty):
        local.inbox.get(timeout=0.3)
    station.ingest.send(m.Fenced(holder="remote-a"))
    again = heard(local, m.Lease)
    assert (again.slot, again.step, again.index) == (lease.slot, lease.step, lease.index)
    assert again.attempt > lease.attempt


def test_a_new_session_ends_the_old_one_and_waits_until_it_is_fenced(station: Station) -> None:
    old = station.remote()
    lease = leased(station, old)
    coming: queue.Queue[Peer] = queue.Queue()
    thread = threading.Thread(target=lambda: coming.put(station.remote()))
    thread.start()
    assert "it has come again on another connection" in heard(old, m.Stop).reason
    assert heard(station.ingest, m.Fence) == m.Fence(holder="remote-a")
    with pytest.raises(queue.Empty):
        coming.get(timeout=0.3)
    station.ingest.send(m.Fenced(holder="remote-a"))
    new = coming.get(timeout=10)
    thread.join(10)
    again = leased(station, new)
    assert (again.slot, again.attempt > lease.attempt) == (lease.slot, True)


def test_what_an_old_session_still_says_is_from_nobody(station: Station) -> None:
    assert station.job.hosts is not None
    with zmq.Context() as context, sockets.dealer(context, station.job.hosts.address, server_key=station.key) as old:
        envelope = Envelope(station.job.run_id, 0)
        old.send(encode(hello("producer", "remote-a", 0, REMOTE_TOKEN, SCHEMA), envelope))
        assert isinstance(decode(old.recv())[1], m.Welcome)
        old.send(encode(m.Want(kind="model"), envelope))
        while not isinstance(lease := decode(old.recv())[1], m.Lease):
            pass
        old.send(encode(m.Leave(reason="enough"), envelope))
        ready = m.Ready(
            step=lease.step,
            index=lease.index,
            kind="model",
            attempt=lease.attempt,
            checksum=0,
            busy_s=0.0,
            halved=0,
            figures=(),
        )
        for message in (ready, m.Leave(reason="again"), m.Heartbeat(progress=1)):
            old.send(encode(message, envelope))
        the_slot_goes_to_a_local_producer_once_it_is_fenced(station, lease)
    (left,) = station.events("left")
    assert left == "remote-a has left (enough); blocks to lease anew: step 0 block 0"
    assert station.events("ignored") == []


def test_a_cut_connection_is_noticed_by_itself(station: Station) -> None:
    peer = station.remote()
    lease = leased(station, peer)
    peer.close()  # without a word
    the_slot_goes_to_a_local_producer_once_it_is_fenced(station, lease)
    assert "its connection was cut" in station.events("left")[0]


def test_silence_ends_a_session_and_its_peer_hears_of_it(station: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "REMOTE_SILENCE_S", 0.3)  # less than it beats
    peer = station.remote()
    assert "nothing was heard of it" in heard(peer, m.Stop).reason
    assert heard(station.ingest, m.Fence) == m.Fence(holder="remote-a")


def test_local_and_remote_doors_do_not_lead_to_each_other_s_rooms(station: Station) -> None:
    with pytest.raises(Refused, match="the run token is wrong"):
        station.local("producer", "producer-0", REMOTE_TOKEN)
    with pytest.raises(Refused, match="no such peer"):
        station.local("producer", "remote-a")
    with pytest.raises(Refused, match="only producers join from other hosts"):
        station.remote("producer-0")
    local = station.local("producer", "producer-0")
    local.send(m.Leave(reason="I may not"))  # it maps the ring, so only its death counts
    station.remote().send(m.Fenced(holder="remote-a"))
    deadline = time.monotonic() + 10
    while len(station.events("ignored")) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sorted(station.events("ignored")) == ["Fenced from remote-a", "Leave from producer-0"]


def test_the_identity_of_a_local_peer_is_worth_nothing_at_the_other_door(station: Station) -> None:
    assert station.job.hosts is not None
    envelope = Envelope(station.job.run_id, 0)
    with (
        zmq.Context() as context,
        sockets.dealer(context, station.job.address) as local,
        context.socket(zmq.DEALER) as thief,
    ):
        local.send(encode(hello("consumer", "consumer-0", 0, LOCAL_TOKEN, SCHEMA), envelope))
        assert isinstance(decode(local.recv())[1], m.Welcome)
        thief.linger, thief.identity = 0, local.identity
        thief.curve_publickey, thief.curve_secretkey = zmq.curve_keypair()
        thief.curve_serverkey = station.key.encode()
        thief.connect(station.job.hosts.address)
        thief.send(encode(m.Report(kind="event", row={"what": "forged", "text": ""}), envelope))
        thief.send(encode(hello("consumer", "consumer-0", 0, REMOTE_TOKEN, SCHEMA), envelope))
        assert isinstance(decode(thief.recv())[1], m.Reject)
    assert station.events("forged") == []
