"""`join.json`, which lets producers of other hosts into one start of a run, and the secrets behind it.

Everything is made anew for each start: a token that is not the one of local peers, and the key by which coordinator and
ingest prove themselves and encrypt (CURVE), unless that was turned off by name.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from launch.config import Config
from launch.hosts import EVERYWHERE, host_and_port
from launch.machine import threads_per_process
from producer.join import Join
from producer.locate import weights_fingerprint
from protocol.job import HOSTS_KEY_VARIABLE, HOSTS_TOKEN_VARIABLE, Job
from protocol.version import DRAFTWIRE_VERSION, PROTOCOL_VERSION

JOIN_NAME = "join.json"


@contextmanager
def inviting(config: Config, job: Job, run_dir: Path, say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """While a run lives: its `join.json`, readable by its owner only. Yields the environment of the processes that
    listen, which holds the secrets: they stand in no file but that one, and in no command line."""
    path = run_dir / JOIN_NAME
    path.unlink(missing_ok=True)  # of a start that was killed
    if job.hosts is None:
        yield {}
        return
    token, secret_key, public_key = secrets.token_hex(32), "", ""
    if config.hosts.curve:
        public_key, secret_key = (half.decode() for half in zmq.curve_keypair())
    join = _invitation(config, job, token, public_key)
    say(f"producers of other hosts may join at {join.address}: copy {path} there, then `draftwire produce {JOIN_NAME}`")
    if not config.hosts.curve and not _is_loopback(job.hosts.address):
        say("warning: hosts.curve = false: payload and token travel in the clear, and anyone on the way can read them")
    _write_private(path, msgspec.json.format(msgspec.json.encode(join)))
    try:
        yield {HOSTS_TOKEN_VARIABLE: token, HOSTS_KEY_VARIABLE: secret_key}
    finally:
        path.unlink(missing_ok=True)


def _invitation(config: Config, job: Job, token: str, public_key: str) -> Join:
    host, port = host_and_port(config.hosts)
    # Whoever listens everywhere is called by name.
    name = socket.gethostname() if host in EVERYWHERE else host
    return Join(
        run=config.run.name,
        run_id=job.run_id,
        protocol=PROTOCOL_VERSION,
        address=f"tcp://{name}:{port}",
        payload_address=f"tcp://{name}:{port + 1}",
        token=token,
        server_key=public_key,
        target=msgspec.structs.replace(config.target, dtype=job.dtype),
        weights=weights_fingerprint(Path(job.target_dir)),
        taps=job.taps,
        width=job.width,
        dtype=job.dtype,
        padding_mask=job.padding_mask,
        plan_hash=job.plan_hash,
        threads=threads_per_process(),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """What decides how a forward pass rounds, and whether two ends understand each other."""
    return {"draftwire": DRAFTWIRE_VERSION} | {
        name: importlib.metadata.version(name) for name in ("torch", "transformers")
    }


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.removeprefix("tcp://").rpartition(":")[0].strip("[]")).is_loopback


def _write_private(path: Path, data: bytes) -> None:
    """In one rename, and never readable by others, not even for a moment."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    part.rename(path)
