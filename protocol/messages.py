"""Every control message as a frozen struct; docs/protocol.md gives the grammar and the order they come in.

A block is named by (step, index); `attempt` numbers grow over a run, so a late message about an earlier try is
recognised and dropped. Comments say who sends a message and what it promises.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.block import Table


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="t", tag=str.lower):
    """Base of all messages; the wire map holds the class name in lower case under "t"."""


# --- joining ---------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """peer -> coordinator, first of all. `token` proves that the launcher started the peer; `schema` hashes target,
    taps, dtype, width, tokenizer and plan, which must agree."""

    role: str
    name: str
    rank: int
    pid: int
    host: str
    token: str
    schema: str
    versions: dict[str, str]


class Welcome(Message, frozen=True):
    """coordinator -> peer. Slot geometry, and how often to send HEARTBEAT."""

    slots: int
    slot_bytes: int
    heartbeat_s: float


class Reject(Message, frozen=True):
    """coordinator -> peer: a reason that a user can act on. The peer ends with it."""

    reason: str


# --- work ------------------------------------------------------------------------------------------------------------


class Want(Message, frozen=True):
    """producer -> coordinator: I can fill one more block of this kind ("model" or "replay")."""

    kind: str


class Lease(Message, frozen=True):
    """coordinator -> producer: fill these positions of the block, in this slot. Token ids and masks of the whole block
    travel along (int32 and uint8 bytes, concatenated), so that a producer needs no dataset."""

    step: int
    index: int
    kind: str
    attempt: int
    slot: int
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: bytes
    loss_mask: bytes


class Ready(Message, frozen=True):
    """producer -> coordinator: the commit marker. Sent after the last byte is in the slot; `checksum` is the 64-bit
    sum of the features, `halved` how often a batch was cut in two for lack of memory (it then rounds differently)."""

    step: int
    index: int
    kind: str
    attempt: int
    checksum: int
    busy_s: float
    halved: int
    figures: tuple[tuple[float, float, float], ...]


# The reason of a NACK that answers REVOKE.
TAKEN_BACK = "taken back"


class Nack(Message, frozen=True):
    """producer -> coordinator: this lease cannot be filled; the slot has been left alone since. `samples` names those
    that could not be read from a cache; the others of the lease may be asked for again."""

    step: int
    index: int
    kind: str
    attempt: int
    reason: str
    retryable: bool
    samples: tuple[int, ...]


class Revoke(Message, frozen=True):
    """coordinator -> producer: give this lease up, nobody wants its content any more; a NACK of it is no failure."""

    step: int
    index: int
    kind: str
    attempt: int


# --- payload over ZeroMQ ---------------------------------------------------------------------------------------------


class Expect(Message, frozen=True):
    """coordinator -> ingest: `holder` fills this slot as `attempt`, within `nbytes`. From now on nobody else may write
    to the slot by way of ingest."""

    holder: str
    attempt: int
    slot: int
    nbytes: int


class Fence(Message, frozen=True):
    """coordinator -> ingest: nothing that `holder` has been leased so far may reach the ring any more, on whichever
    connection it is under way. The slots stay the holder's until FENCED."""

    holder: str


class Fenced(Message, frozen=True):
    """ingest -> coordinator: what `holder` was leased before FENCE is written no further, from here on."""

    holder: str


class Chunk(Message, frozen=True):
    """producer -> ingest, with the bytes as a second frame: they belong `offset` bytes into the slot of `attempt`.
    `checksum` is their xxh3 (64 bits); `last` ends the attempt and asks for an acknowledgement at once."""

    attempt: int
    offset: int
    checksum: int
    last: bool


class ChunkAck(Message, frozen=True):
    """ingest -> producer: `received` bytes of this attempt lie in the ring; up to `limit` may be sent in all. A
    `problem` ends the attempt: nothing more of it is taken."""

    attempt: int
    received: int
    limit: int
    problem: str


# --- delivery --------------------------------------------------------------------------------------------------------


class Credit(Message, frozen=True):
    """consumer -> coordinator: I can hold this many more blocks."""

    blocks: int


class Deliver(Message, frozen=True):
    """coordinator -> consumer: a block's descriptor. `slot` -1 marks an empty block of weight zero. `writers` are the
    attempts of the leases that filled it: the slot's header must name one of them."""

    step: int
    index: int
    micro_step: int
    micro_steps: int
    epoch: int
    attempt: int
    slot: int
    table: Table
    samples: tuple[int, ...]
    writers: tuple[int, ...]
    checksum: int


class Verified(Message, frozen=True):
    """consumer -> coordinator: the block is on my device and sound."""

    step: int
    index: int
    attempt: int


class Release(Message, frozen=True):
    """consumer -> coordinator: its bytes are copied out, the slot is yours. Says nothing about training."""

    step: int
    index: int
    attempt: int


class Bad(Message, frozen=True):
    """consumer -> coordinator: poison. `samples` names the culprits, or is empty when all are suspect."""

    step: int
    index: int
    attempt: int
    samples: tuple[int, ...]
    reason: str


class Reached(Message, frozen=True):
    """consumer -> coordinator: nothing but GO keeps this rank from running `step`: it evaluates and saves nothing."""

    step: int


class Go(Message, frozen=True):
    """coordinator -> consumers: every rank may run this micro-step. `stop` rides on the first micro-step of a step: end
    at this boundary, without running it; with `finish` the run is done there, else it goes on one day. `trained_s` are
    the seconds that the run has trained, `cooldown_step` the step from which on its rate falls (-1: none)."""

    step: int
    micro_step: int
    stop: bool
    finish: bool
    trained_s: float
    cooldown_step: int


class Quarantine(Message, frozen=True):
    """coordinator -> consumers: every sample (as a decimal string) that takes part no more, and why. Comes before any
    block that leaves one out, so that the next cursor holds it."""

    samples: dict[str, str]


class Checkpointed(Message, frozen=True):
    """consumer -> coordinator: a checkpoint whose cursor says `next_step` is durable. It took `stall_s` seconds of the
    step loop and `write_s` in the background."""

    next_step: int
    stall_s: float
    write_s: float


# --- the disk cache --------------------------------------------------------------------------------------------------


class Spill(Message, frozen=True):
    """coordinator -> replay: this slot holds a sound block that was delivered as `attempt` and is released. It is kept
    as it is until SPILLED."""

    attempt: int
    slot: int
    table: Table
    samples: tuple[int, ...]


class Flush(Message, frozen=True):
    """coordinator -> replay: an epoch is over, the next one is to find in the cache what this one has left. The open
    shard is completed, and SPILLED says what is in it."""


class Spilled(Message, frozen=True):
    """replay -> coordinator: done with the slot of `attempt` (0: the answer to FLUSH). `durable`: samples that can be
    replayed since the last of these messages. A `problem` says why nothing more is kept."""

    attempt: int
    durable: tuple[int, ...]
    problem: str


# --- life ------------------------------------------------------------------------------------------------------------


class Heartbeat(Message, frozen=True):
    """both ways: I am alive; `progress` grows with work done, so that a hang can be told from slowness."""

    progress: int


class Report(Message, frozen=True):
    """consumer -> coordinator: one row for metrics.jsonl, of a kind that launch/metrics.py lists."""

    kind: str
    row: dict[str, Any]


class Snapshot(Message, frozen=True):
    """coordinator -> launcher, each second: what the run is doing, for the progress line and status.json."""

    state: dict[str, Any]


class Hung(Message, frozen=True):
    """coordinator -> launcher: this child gets nowhere. The launcher ends it; GONE or REWIND says so."""

    name: str
    reason: str


class Gone(Message, frozen=True):
    """launcher -> coordinator: the producer of this name has been reaped and writes no more. When `reaped` is false it
    was killed and is still there (in the kernel, with a device): what it may write to is lost. `how` it ended."""

    name: str
    reaped: bool
    how: str


class Rewind(Message, frozen=True):
    """launcher -> coordinator: these consumers, every rank, have been reaped. New ones will start from the checkpoint
    before `step`, whose quarantine list is `quarantined` (as in QUARANTINE). `how` the first of them ended."""

    names: tuple[str, ...]
    step: int
    quarantined: dict[str, str]
    how: str


class Leave(Message, frozen=True):
    """producer of another host -> coordinator, its last word in this session: what it was filling may be leased anew,
    it sends nothing more of it."""

    reason: str


class Order(Message, frozen=True):
    """launcher -> coordinator: "stop" (checkpoint at the next step boundary, then end), "abandon" (the same before the
    step that is under way, whose blocks will not come), "cooldown" (let the rate fall from the next step on, then end)
    or "done" (end now)."""

    order: str


class Stop(Message, frozen=True):
    """coordinator -> peer: end; `reason` goes to the log."""

    reason: str


class Error(Message, frozen=True):
    """coordinator -> launcher: the run cannot go on; `text` is the one line for the user."""

    text: str


class Again(Message, frozen=True):
    """coordinator -> launcher: the run goes on better, or only, with other processes. It stops at the next step
    boundary, or `at_once` if blocks of the step under way will not come, and starts again from there; `text` is why."""

    text: str
    at_once: bool


AnyMessage = (
    Hello | Welcome | Reject
    | Want | Lease | Ready | Nack | Revoke
    | Expect | Fence | Fenced | Chunk | ChunkAck
    | Credit | Deliver | Verified | Release | Bad | Reached | Go | Quarantine | Checkpointed
    | Spill | Flush | Spilled
    | Heartbeat | Report | Snapshot | Hung | Gone | Rewind | Leave | Order | Stop | Error | Again
)  # fmt: skip
