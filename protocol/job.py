"""What the launcher has resolved for one start of a run, written once as `job.json` and read by every child.

The configuration says what the user asked for; a job says what that means here and now: a local model folder, tap
ids, devices, ring geometry and the step to start from.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from protocol.errors import ProtocolError, RequestError
from protocol.plan import PlanParams

TOKEN_VARIABLE = "DRAFTWIRE_RUN_TOKEN"
HOSTS_TOKEN_VARIABLE = "DRAFTWIRE_HOSTS_TOKEN"
HOSTS_KEY_VARIABLE = "DRAFTWIRE_HOSTS_KEY"
# Producers of other hosts name themselves, and no local peer is called like that.
REMOTE_PREFIX = "remote-"
REPLAY = "replay-0"
INGEST = "ingest"  # role and name of the process that takes payload sent over ZeroMQ
Section = TypeVar("Section", bound=msgspec.Struct)


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Where producers of other hosts come in, by numeric addresses, and how many at a time."""

    address: str
    payload_address: str
    producers: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run. `producers` and `consumers` are the devices of each side; a producer has `tensor_parallel` of
    them in a row. `width` is taps x hidden; `dtype` is that of the features in the ring; `shape` is the
    drafter's, as the consumers know it. Payload reaches the ring through shared memory ("shm") or over ZeroMQ ("zmq"),
    then by way of `payload_address`; with `hosts` producers of other hosts may join, which always send it. A process
    may allocate `producer_bytes` or `consumer_bytes` on its GPU; 0: all that is free there. `padding_mask`: whether the
    target's batches are run with it. Who shows no life for `hang_s` seconds is taken to hang. The run may train for
    `max_s` seconds in all, of which `trained_s` are over; from `cooldown_step` on its rate falls. `cached`: the folder
    of the cache that blocks are replayed from, if there is one; `spills`: what passes is kept there;
    `regroups`: once it holds everything, the run is to go on with the producers' devices among the consumers."""

    run_id: str
    incarnation: int
    address: str
    transport: Literal["shm", "zmq"]
    payload_address: str
    target_dir: str
    padding_mask: bool
    dataset_dir: str
    taps: tuple[int, ...]
    width: int
    dtype: str
    slots: int
    slot_bytes: int
    schema: str
    shape: dict[str, Any]
    plan: PlanParams
    plan_hash: str
    start_step: int
    checkpoint: str | None
    quarantined: dict[str, str]
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    tensor_parallel: int = 1
    producer_bytes: int
    consumer_bytes: int
    quarantine_limit: float
    hang_s: float
    max_s: float | None = None
    trained_s: float = 0.0
    cooldown_step: int | None = None
    hosts: Listening | None = None
    cached: str | None = None
    spills: bool = False
    regroups: bool = False

    @property
    def ingests(self) -> bool:
        """Whether there is an ingest process: somebody does not map the ring."""
        return self.transport == "zmq" or self.hosts is not None

    @property
    def producer_names(self) -> list[str]:
        """The names under which producers join: those with a target in the order of their devices, then replay."""
        return [*self.computing_names, *([] if self.cached is None else [REPLAY])]

    @property
    def computing_names(self) -> list[str]:
        """Those with a target."""
        return [f"producer-{index}" for index in range(len(self.producers) // self.tensor_parallel)]

    def producer_devices(self, index: int) -> tuple[str, ...]:
        """The devices of producer `index`."""
        return self.producers[index * self.tensor_parallel : (index + 1) * self.tensor_parallel]

    @property
    def consumer_names(self) -> list[str]:
        """The names under which consumers join, by rank."""
        return [f"consumer-{rank}" for rank in range(len(self.consumers))]


def write_job(run_dir: Path, job: Job) -> None:
    """Replaces the file in one step: a child may be reading it."""
    part = run_dir / "job.json.part"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(job)))
    part.rename(run_dir / "job.json")


def read_job(run_dir: Path) -> Job:
    return msgspec.json.decode((run_dir / "job.json").read_bytes(), type=Job)


def read_section(run_dir: Path, name: str, kind: type[Section]) -> Section:
    """One section of the run's resolved configuration. Raises RequestError when the file is damaged."""
    path = run_dir / "config.resolved.json"
    try:
        return msgspec.convert(msgspec.json.decode(path.read_bytes())[name], kind)
    except (OSError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise RequestError(f"{path}: not a run's configuration ({error})") from None


def schema_hash(weights: str, taps: tuple[int, ...], dtype: str, width: int, plan_hash: str) -> str:
    """What all peers of a run must agree on, in one word; `weights` is the target's fingerprint."""
    schema = (weights, taps, dtype, width, plan_hash)
    return hashlib.blake2b(msgspec.json.encode(schema), digest_size=16).hexdigest()


def run_token() -> str:
    """The secret that the launcher gave its children; peers without it are refused."""
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ProtocolError(f"{TOKEN_VARIABLE} is not set: children are started by `draftwire run`")
    return token


def hosts_secrets() -> tuple[str, str]:
    """The token for producers of other hosts, and the secret half of the run's CURVE key ("": nothing is encrypted)."""
    token = os.environ.get(HOSTS_TOKEN_VARIABLE)
    if not token:
        raise ProtocolError(f"{HOSTS_TOKEN_VARIABLE} is not set: children are started by `draftwire run`")
    return token, os.environ.get(HOSTS_KEY_VARIABLE, "")
