"""Who may join a run: the same answer from the coordinator and from ingest."""

from __future__ import annotations

import re
import secrets
from collections.abc import Container

from protocol.codec import Envelope
from protocol.job import REMOTE_PREFIX, Job
from protocol.messages import Hello

_REMOTE_NAME = re.compile(re.escape(REMOTE_PREFIX) + r"[A-Za-z0-9._-]{1,100}")


def refusal(job: Job, token: str, names: Container[str], hello: Hello, envelope: Envelope) -> str | None:
    """Why a peer on this host cannot join, in words that its user can act on; None when it can. `names` are those of
    the run's peers. The token is compared in constant time."""
    if (reason := _stranger(job, token, hello, envelope)) is not None:
        return reason
    return None if hello.name in names else "this run has no such peer"


def remote_refusal(job: Job, token: str, hello: Hello, envelope: Envelope) -> str | None:
    """Likewise for a peer of another host, whose `token` is another one: only producers come from there."""
    if (reason := _stranger(job, token, hello, envelope)) is not None:
        return reason
    if hello.role != "producer" or not _REMOTE_NAME.fullmatch(hello.name):
        return f"only producers join from other hosts, under names that begin with {REMOTE_PREFIX}"
    return None


def _stranger(job: Job, token: str, hello: Hello, envelope: Envelope) -> str | None:
    if not secrets.compare_digest(hello.token.encode(), token.encode()):
        return "the run token is wrong"
    if envelope.run != job.run_id:
        return f"this is run {job.run_id}, not {envelope.run}"
    if hello.schema != job.schema:
        return "target, taps, dtype or plan differ from this run's"
    return None
