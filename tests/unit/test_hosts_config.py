"""[hosts] and join.json: what is refused by its key, what the file holds, who can read it and how long it is there."""

from __future__ import annotations

import json
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.config import Config, load_config
from launch.hosts import HostsConfig, check, check_free, listening
from launch.invitation import inviting
from producer.config import DataConfig, TargetConfig
from producer.join import read_join
from protocol.arena import slot_stride_bytes
from protocol.errors import RequestError
from protocol.job import HOSTS_KEY_VARIABLE, HOSTS_TOKEN_VARIABLE, Job, Listening
from protocol.ring import RingConfig, ring_size


@pytest.mark.parametrize(
    "listen",
    ["10.0.0.1:5757", "tcp://10.0.0.1", "tcp://:5757", "ipc://x", "tcp://a:0", "tcp://a:65535", "tcp://a:99999", " "],
)
def test_what_is_no_address_is_refused_by_its_key_with_an_example(listen: str, tmp_path: Path) -> None:
    said = re.escape(f"hosts.listen = {listen!r}: write an address of this host and a port") + ".*tcp://10.0.0.1:5757"
    with pytest.raises(RequestError, match=said):
        check(HostsConfig(listen=listen))
    path = tmp_path / "config.toml"
    path.write_text(f'[target]\n[data]\ntrain = [{{ path = "x" }}]\n[hosts]\nlisten = "{listen}"\n')
    with pytest.raises(RequestError, match=r"config.toml:5: hosts\.listen"):
        load_config(path)


def test_nobody_is_not_a_number_of_producers() -> None:
    with pytest.raises(RequestError, match=r"hosts.producers = 0: use at least 1"):
        check(HostsConfig(producers=0))


def test_nothing_listens_unless_it_is_asked_for() -> None:
    assert listening(HostsConfig()) is None
    check_free(HostsConfig())


@pytest.mark.parametrize(
    ("listen", "bound", "payload"),
    [
        ("tcp://127.0.0.1:5757", "tcp://127.0.0.1:5757", "tcp://127.0.0.1:5758"),
        ("tcp://localhost:5757", r"tcp://(127\.0\.0\.1|\[::1\]):5757", r"tcp://(127\.0\.0\.1|\[::1\]):5758"),
        ("tcp://[::1]:5757", r"tcp://\[::1\]:5757", r"tcp://\[::1\]:5758"),
        ("tcp://*:5757", "tcp://0.0.0.0:5757", "tcp://0.0.0.0:5758"),
    ],
)
def test_payload_comes_in_on_the_next_port(listen: str, bound: str, payload: str) -> None:
    found = listening(HostsConfig(listen=listen, producers=3))
    assert found is not None
    assert re.fullmatch(bound, found.address)
    assert re.fullmatch(payload, found.payload_address)
    assert found.producers == 3


def test_a_host_that_nobody_knows_is_refused() -> None:
    with pytest.raises(RequestError, match=r"hosts.listen = 'tcp://no-such-host.invalid:1': .* is not known here"):
        listening(HostsConfig(listen="tcp://no-such-host.invalid:1"))


@pytest.mark.parametrize("taken_offset", [0, 1])
def test_a_port_that_is_taken_is_refused_before_anything_is_started(taken_offset: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] - taken_offset
        with pytest.raises(RequestError, match=rf"hosts.listen = .*127.0.0.1:{port + taken_offset}: Address already"):
            check_free(HostsConfig(listen=f"tcp://127.0.0.1:{port}"))


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(RequestError, match=r"hosts.listen = .*: Cannot assign"):
        check_free(HostsConfig(listen="tcp://192.0.2.1:5757"))


def test_the_ring_is_made_for_guests_too_but_does_not_insist_on_them() -> None:
    slot = ring_size(RingConfig(), 16, 8, 4, "float32", 2, 1 << 30).slot_bytes
    assert ring_size(RingConfig(), 16, 8, 4, "float32", 2, 1 << 30, guests=3).slots == 20
    stride = slot_stride_bytes(slot)
    assert ring_size(RingConfig(), 16, 8, 4, "float32", 2, 6 * stride, guests=3).slots == 3


@pytest.fixture
def invited(tmp_path: Path, make_folder: Callable[..., Path], make_job: Callable[..., Job]) -> Any:
    """Opens a run's invitation: (context manager, its folder, what is said)."""
    target = make_folder("llama")

    def open_(**hosts: Any) -> tuple[Any, Path, list[str]]:
        config = Config(target=TargetConfig(model="org/model"), data=DataConfig(), hosts=HostsConfig(**hosts))
        found = listening(config.hosts)
        job = make_job(target_dir=str(target), dtype="float32", plan_hash="p", hosts=found)
        said: list[str] = []
        return inviting(config, job, tmp_path, said.append), tmp_path, said

    return open_


def test_a_join_file_is_its_owner_s_alone_and_lives_as_long_as_the_run(invited: Any) -> None:
    opened, folder, said = invited(listen="tcp://127.0.0.1:5757")
    path = folder / "join.json"
    path.write_text("of a start that was killed")
    with opened as environment:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        join = read_join(path)
        assert (join.address, join.payload_address) == ("tcp://127.0.0.1:5757", "tcp://127.0.0.1:5758")
        assert join.token == environment[HOSTS_TOKEN_VARIABLE]
        assert len(join.token) == 64
        # The secret half of the key is in no file.
        assert environment[HOSTS_KEY_VARIABLE]
        written = "".join(file.read_text(errors="replace") for file in folder.iterdir() if file.is_file())
        assert environment[HOSTS_KEY_VARIABLE] not in written
        assert (join.target.model, join.target.dtype) == ("org/model", "float32")
        assert said == [
            f"producers of other hosts may join at tcp://127.0.0.1:5757: copy {path} there, then "
            "`draftwire produce join.json`"
        ]
    assert not path.exists()
    assert not list(folder.glob("join*"))


def test_each_start_has_secrets_of_its_own(invited: Any) -> None:
    seen = set()
    for _ in range(2):
        with invited(listen="tcp://127.0.0.1:5757")[0] as environment:
            seen |= set(environment.values())
    assert len(seen) == 4


def test_without_curve_there_is_no_key_and_beyond_loopback_a_warning(invited: Any) -> None:
    for listen, warned in (("tcp://127.0.0.1:5757", False), ("tcp://*:5757", True)):
        opened, folder, said = invited(listen=listen, curve=False)
        with opened as environment:
            assert environment[HOSTS_KEY_VARIABLE] == ""
            join = read_join(folder / "join.json")
            assert join.server_key == ""
            assert any("in the clear" in line for line in said) == warned
            # Who listens everywhere is called by name.
            assert ("0.0.0.0" in join.address, "*" in join.address) == (False, False)


def test_a_run_that_does_not_listen_leaves_no_file_not_even_an_old_one(invited: Any) -> None:
    opened, folder, said = invited()
    (folder / "join.json").write_text("{}")
    with opened as environment:
        assert (environment, said) == ({}, [])
        assert not (folder / "join.json").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), ("{", "not a run's join.json"), ('{"run": "x"}', "not a run's join.json: .*run_id")],
)
def test_what_is_no_join_file_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "join.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestError, match=said):
        read_join(path)


def test_a_join_file_that_leads_anywhere_but_to_tcp_is_refused(invited: Any) -> None:
    opened, folder, _ = invited(listen="tcp://127.0.0.1:5757")
    path = folder / "join.json"
    with opened:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"payload_address": "ipc://@elsewhere"}))
        with pytest.raises(RequestError, match="'ipc://@elsewhere' is no address"):
            read_join(path)


def test_listening_is_part_of_the_job_and_no_secret_is(make_job: Callable[..., Job]) -> None:
    job = make_job(hosts=Listening(address="tcp://127.0.0.1:1", payload_address="tcp://127.0.0.1:2", producers=1))
    assert job.ingests
    assert not make_job().ingests
    assert make_job(transport="zmq").ingests
