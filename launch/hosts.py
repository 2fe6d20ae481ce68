"""[hosts]: whether a run listens for producers of other hosts, and where.

Nothing listens on a network unless `hosts.listen` names an address.
"""

from __future__ import annotations

import re
import socket

import msgspec

from protocol.errors import RequestError
from protocol.job import Listening

_ADDRESS = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
# What is bound for an address that means all of this host's.
EVERYWHERE = {"*": "0.0.0.0", "0.0.0.0": "0.0.0.0", "[::]": "[::]"}


class HostsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[hosts] — `listen` is "" (nobody joins from elsewhere) or an address such as "tcp://10.0.0.1:5757": messages on
    this port, payload on the next one. `curve` encrypts; at most `producers` join at a time."""

    listen: str = ""
    curve: bool = True
    producers: int = 8


def check(config: HostsConfig) -> None:
    """Raises RequestError, with the key path and the remedy, for values that cannot be used."""
    if config.listen:
        host_and_port(config)
    if config.producers < 1:
        raise RequestError(f"hosts.producers = {config.producers}: use at least 1, or leave hosts.listen out")


def listening(config: HostsConfig) -> Listening | None:
    """The numeric addresses to bind; None when hosts.listen is not set. Raises RequestError for an unknown host."""
    if not config.listen:
        return None
    host, port = host_and_port(config)
    number = EVERYWHERE.get(host) or _resolve(config, host)
    return Listening(
        address=f"tcp://{number}:{port}", payload_address=f"tcp://{number}:{port + 1}", producers=config.producers
    )


def check_free(config: HostsConfig) -> None:
    """Raises RequestError when an address cannot be listened on, before anything is started."""
    found = listening(config)
    for address in () if found is None else (found.address, found.payload_address):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        family = socket.AF_INET6 if "[" in host else socket.AF_INET
        with socket.socket(family) as probe:
            # As libzmq does: what the last start of a run left behind in the kernel is in nobody's way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host.strip("[]"), int(port)))
            except OSError as error:
                raise RequestError(
                    f"hosts.listen = {config.listen!r}: cannot listen on {address}: {error.strerror}; name an address "
                    "of this host and a port that is free, as the next one must be"
                ) from None


def host_and_port(config: HostsConfig) -> tuple[str, int]:
    """What `hosts.listen` says, as written. Raises RequestError when it is no address."""
    found = _ADDRESS.fullmatch(config.listen)
    if found is None or not 1 <= int(found[2]) < 65535:
        raise RequestError(
            f'hosts.listen = {config.listen!r}: write an address of this host and a port, e.g. "tcp://10.0.0.1:5757"; '
            "the next port is used too"
        )
    return found[1], int(found[2])


def _resolve(config: HostsConfig, host: str) -> str:
    try:
        *_, address = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise RequestError(f"hosts.listen = {config.listen!r}: {host} is not known here: {error.strerror}") from None
    number = str(address[0])
    return f"[{number}]" if ":" in number else number
