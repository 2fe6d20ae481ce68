"""What `draftwire tune` knows of a machine and a configuration: each part measured alone, kept as one JSON file.

A file holds numbers and the lengths of some steps, no path and no text of the data, so that it can be handed on and
replayed elsewhere, for any number of GPUs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from protocol.errors import RequestError

FORMAT = 1


class ProducerRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One producer alone: real tokens/s, their relative standard deviation, and the bytes that it needs on each of its
    `tensor_parallel` devices."""

    tensor_parallel: int = 1
    tokens_per_s: float
    spread: float = 0.0
    need_bytes: int = 0


class TrainerRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank alone. A block takes `block_s` and `cost_s` for each unit of its cost (protocol/packing.py), the
    optimiser `finish_s` a step; all times may be off by the share `spread`. `need_bytes` on its device."""

    cost_s: float
    block_s: float = 0.0
    finish_s: float = 0.0
    spread: float = 0.0
    need_bytes: int = 0


class Reduction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one step's all-reduce over so many ranks."""

    ranks: int
    seconds: float


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What there is to do: of some steps the tokens and draft tokens of each sample, the bounds of a block, and an
    epoch's tokens. `stall_s`: what a step loses on average to checkpoints."""

    steps: list[list[tuple[int, int]]]
    tokens_per_epoch: int
    epochs: int
    microbatch_tokens: int
    microbatch_draft_tokens: int
    anchors: int
    bytes_per_token: int
    stall_s: float = 0.0


class Room(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the machine has. `gpu_bytes` of each GPU, None where roles run on CPUs and take the host's memory;
    `host_bytes` of one host; `slot_bytes` of a ring's slot, `ring_bytes` of all, None: "auto". `link_bytes_per_s`
    between one GPU and the host; the disk's figures are those of the cache. None: not measured."""

    gpu_bytes: int | None
    host_bytes: int
    slot_bytes: int
    ring_bytes: int | None = None
    checkpoint_bytes: int = 0
    link_bytes_per_s: float | None = None
    disk_bytes: int | None = None
    disk_write_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None


class Measurements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All parts. `machine` and `config` say in words what was measured; several `producers` differ in their number of
    GPUs."""

    format: int = FORMAT
    machine: str = ""
    config: str = ""
    producers: list[ProducerRate]
    trainer: TrainerRate
    reductions: list[Reduction] = []
    work: Work
    room: Room


def read_measurements(path: Path) -> Measurements:
    """Raises RequestError, naming the file and the key, for what is no such file or cannot be true."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Measurements)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path}: not what `draftwire tune` writes: {error}") from None
    if found.format != FORMAT:
        raise RequestError(f"{path}: format {found.format}, this version reads {FORMAT}: measure again")
    if problem := _problem(found):
        raise RequestError(f"{path}: {problem}")
    return found


def write_measurements(path: Path, measured: Measurements) -> None:
    """Replaces the file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(measured)) + b"\n")
    part.rename(path)


def _problem(found: Measurements) -> str:
    """What is wrong with numbers of the right kinds, "" when nothing is."""
    trainer, work, room = found.trainer, found.work, found.room
    if not found.producers:
        return "producers is empty: one rate at least"
    for rate in found.producers:
        if rate.tensor_parallel < 1 or rate.tokens_per_s <= 0:
            return f"producers: {rate.tokens_per_s} tokens/s on {rate.tensor_parallel} GPUs: write positive numbers"
    if any(not 0 <= spread < 1 for spread in (trainer.spread, *(rate.spread for rate in found.producers))):
        return "spread: a share, at least 0 and less than 1"
    times = (
        trainer.cost_s,
        trainer.block_s,
        trainer.finish_s,
        work.stall_s,
        *(one.seconds for one in found.reductions),
    )
    if min(times) < 0:
        return f"a time of {min(times)} s: none is less than 0"
    if trainer.cost_s + trainer.block_s + trainer.finish_s <= 0:
        return "trainer: all times are 0"
    if any(each.ranks < 2 for each in found.reductions):
        return "reductions: of two ranks at least"
    if not work.steps or not all(work.steps):
        return "work.steps: one step at least, and one sample in each"
    for tokens, draft_tokens in (sample for step in work.steps for sample in step):
        if not (0 < tokens <= work.microbatch_tokens and 0 <= draft_tokens <= work.microbatch_draft_tokens):
            return f"work.steps: a sample of {tokens} tokens and {draft_tokens} draft tokens is over a block's bounds"
    counts = (work.tokens_per_epoch, work.epochs, work.bytes_per_token, room.slot_bytes)
    if min(counts) < 1:
        return "work.tokens_per_epoch, work.epochs, work.bytes_per_token and room.slot_bytes must be positive"
    return ""
