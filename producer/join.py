"""`join.json`: all that a producer on another host has to know of a run. The launcher writes it; no torch here.

It holds the run's token for other hosts, so whoever can read it can join: it is kept as a password would be.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from producer.config import TargetConfig
from protocol.errors import RequestError


class Join(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One start of a run, as another host sees it. `server_key` is the public half of its CURVE key ("": plain text);
    `weights` names the target's weights and `target.dtype` is settled; `width` is taps x hidden;
    `padding_mask`: whether batches are run with it; `threads` is what each producer computes with on a CPU, where sums
    depend on it."""

    run: str
    run_id: str
    protocol: int
    address: str
    payload_address: str
    token: str
    server_key: str
    target: TargetConfig
    weights: str
    taps: tuple[int, ...]
    width: int
    dtype: str
    padding_mask: bool
    plan_hash: str
    threads: int
    versions: dict[str, str]


def read_join(path: Path) -> Join:
    """Raises RequestError when `path` is no join.json."""
    try:
        join = msgspec.json.decode(path.read_bytes(), type=Join)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; `draftwire run` writes it when hosts.listen is set") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise RequestError(f"{path}: not a run's join.json: {error}") from None
    for address in (join.address, join.payload_address):
        if not address.startswith("tcp://"):
            raise RequestError(f"{path}: {address!r} is no address of the form tcp://HOST:PORT")
    return join
