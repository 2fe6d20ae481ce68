"""Who may join a run: the same answer from the coordinator and from ingest."""

from __future__ import annotations

import secrets
from collections.abc import Container

from protocol.codec import Envelope
from protocol.job import Job
from protocol.messages import Hello


def refusal(job: Job, token: str, names: Container[str], hello: Hello, envelope: Envelope) -> str | None:
    """Why a peer cannot join, in words that its user can act on; None when it can. `names` are those of the run's
    peers. The token is compared in constant time."""
    if not secrets.compare_digest(hello.token.encode(), token.encode()):
        return "the run token is wrong"
    if envelope.run != job.run_id:
        return f"this is run {job.run_id}, not {envelope.run}"
    if hello.schema != job.schema:
        return "target, taps, dtype or plan differ from this run's"
    if hello.name not in names:
        return "this run has no such peer"
    return None
