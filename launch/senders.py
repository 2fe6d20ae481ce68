"""Who may send which message to the coordinator, by role."""

from __future__ import annotations

from protocol.job import INGEST
from protocol.messages import (
    Bad,
    Checkpointed,
    Credit,
    Fenced,
    Gone,
    Message,
    Nack,
    Order,
    Reached,
    Ready,
    Release,
    Report,
    Rewind,
    Spilled,
    Verified,
    Want,
)

LAUNCHER = "launcher"
SENT_BY: dict[str, tuple[type[Message], ...]] = {
    "producer": (Want, Ready, Nack, Spilled),
    "consumer": (Credit, Verified, Release, Bad, Reached, Report, Checkpointed),
    INGEST: (Fenced,),
    LAUNCHER: (Gone, Rewind, Order),
}
