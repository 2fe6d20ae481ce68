"""All splits of so many GPUs: what each gives, whether it fits, which is best, and hours by mode. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from launch.budget import CONTEXT_BYTES
from launch.measurements import Measurements
from launch.split_model import MODEL_ERROR, Limit, Model, Split, rate_of
from protocol.arena import slot_stride_bytes
from protocol.errors import RequestError
from protocol.ring import LARGEST_SHARE_OF_FREE_MEMORY, SLOTS_PER_PROCESS
from protocol.units import show_bytes

MOST_GPUS = 128
# Of measurements that vary more, this is all that the range says.
MOST_OFF = 0.9


class Row(NamedTuple):
    """One split: tokens/s with the range they are expected in, what limits them, each side's own tokens/s. One that
    does not fit has 0 everywhere, and `lacking` says why."""

    split: Split
    tokens_per_s: float
    low: float
    high: float
    limited_by: Limit
    producers_alone: float
    trainers_alone: float
    rank_efficiency: float
    slots: int
    lacking: str = ""


class Mode(NamedTuple):
    """Hours of all epochs in a mode with its best split; None where it cannot be done, and `lacking` says why."""

    name: str
    split: Split | None
    hours: float | None
    lacking: str = ""


def splits_of(measured: Measurements, gpus: int) -> list[Split]:
    """Every way to give `gpus` GPUs to both roles: own ones by producers, then shared ones."""
    if not 1 <= gpus <= MOST_GPUS:
        raise RequestError(f"--gpus {gpus}: write 1 to {MOST_GPUS}")
    sizes = sorted(rate.tensor_parallel for rate in measured.producers)
    own = [Split(count, gpus - count, size) for size in sizes for count in range(size, gpus, size)]
    # Processes on CPUs have no device of their own that they could share.
    shares = 1 in sizes and measured.room.gpu_bytes is not None
    return own + [Split(gpus, gpus, 1, shared=True)] * shares


def table(measured: Measurements, gpus: int) -> list[Row]:
    """A row for each split. Raises RequestError when there is none."""
    widest = max((rate.spread for rate in measured.producers), default=0.0)
    off = min(math.hypot(MODEL_ERROR, max(widest, measured.trainer.spread)), MOST_OFF)
    models = Model(measured), Model(measured, 1 - off), Model(measured, 1 + off)
    rows = [_row(measured, models, split) for split in splits_of(measured, gpus)]
    if not rows:
        least = min(rate.tensor_parallel for rate in measured.producers)
        raise RequestError(f"--gpus {gpus}: a producer takes {least} GPUs and a consumer one of its own")
    return rows


def ranked(rows: list[Row]) -> list[Row]:
    """Those that fit, best first; of equals the one whose GPUs have more to spare on both sides together.

    Several GPUs that are shared come last: how roles disturb each other there is left out of the model.
    """
    fitting = [row for row in rows if not row.lacking]

    def order(row: Row) -> tuple[bool, float, float]:
        shares_several = row.split.shared and row.split.producers > 1
        return shares_several, -row.tokens_per_s, -(row.producers_alone + row.trainers_alone)

    return sorted(fitting, key=order)


def ring_slots(measured: Measurements, split: Split) -> int:
    """Slots of the ring that a run with this split has on this machine, as protocol/ring.py counts them."""
    room = measured.room
    stride_bytes = slot_stride_bytes(room.slot_bytes)
    if room.ring_bytes is not None:
        return min(room.ring_bytes, room.host_bytes) // stride_bytes
    return min(SLOTS_PER_PROCESS * peers(split), int(room.host_bytes * LARGEST_SHARE_OF_FREE_MEMORY) // stride_bytes)


def peers(split: Split) -> int:
    return split.producers // split.tensor_parallel + split.consumers


def lacking(measured: Measurements, split: Split) -> str:
    """What the machine does not hold of a split, "" when it holds it."""
    room = measured.room
    producer = rate_of(measured.producers, split.tensor_parallel).need_bytes
    consumer = measured.trainer.need_bytes
    slots, stride_bytes = ring_slots(measured, split), slot_stride_bytes(room.slot_bytes)
    if slots < (least := peers(split) + 1):
        return f"{peers(split)} processes need {least} slots of {show_bytes(stride_bytes)}, the ring holds {slots}"
    host_bytes = slots * stride_bytes + room.checkpoint_bytes
    if room.gpu_bytes is None:
        host_bytes += producer * split.producers + consumer * split.consumers
    else:
        needs = [producer + consumer] if split.shared else [producer, consumer]
        needed = max(needs) + CONTEXT_BYTES * (2 if split.shared else 1)
        if needed > room.gpu_bytes:
            return f"a GPU needs {show_bytes(needed)}, {show_bytes(room.gpu_bytes)} are free"
    if host_bytes > room.host_bytes:
        return f"the host needs {show_bytes(host_bytes)}, {show_bytes(room.host_bytes)} are free"
    return ""


def modes(measured: Measurements, gpus: int, rows: list[Row]) -> list[Mode]:
    """Hours of all epochs: streamed each time; kept in the first and read again by the same ranks; kept in the first,
    then a second run in which the producers' GPUs train too (cache.mode = "only")."""
    work, room, best = measured.work, measured.room, ranked(rows)[:1]
    if not best:
        return [Mode(name, None, None, "no split fits") for name in ("off", "spill", "spill, then only")]
    tokens, again = work.tokens_per_epoch, work.epochs - 1
    off = Mode("off", best[0].split, _hours(tokens * work.epochs, best[0].tokens_per_s))
    if problem := _no_cache(measured):
        return [off, Mode("spill", None, None, problem), Mode("spill, then only", None, None, problem)]
    model = Model(measured)
    write, read = ((rate or 0.0) / work.bytes_per_token for rate in _disk(measured))
    every = min(model.trainers(gpus), read)
    candidates = [row for row in ranked(rows) if row is best[0] or not row.split.shared]
    first = [(row, _hours(tokens, min(row.tokens_per_s, write))) for row in candidates]
    kept = [(row, hours + _hours(tokens * again, min(row.trainers_alone, read))) for row, hours in first]
    spill, then = min(kept, key=lambda each: each[1]), min(first, key=lambda each: each[1])
    found = [off, Mode("spill", spill[0].split, spill[1])]
    if room.gpu_bytes is not None and measured.trainer.need_bytes + CONTEXT_BYTES > room.gpu_bytes:
        return [*found, Mode("spill, then only", None, None, "a rank does not fit")]
    return [*found, Mode("spill, then only", then[0].split, then[1] + _hours(tokens * again, every))]


def _row(measured: Measurements, models: tuple[Model, Model, Model], split: Split) -> Row:
    slots = ring_slots(measured, split)
    if problem := lacking(measured, split):
        return Row(split, 0.0, 0.0, 0.0, "memory", 0.0, 0.0, 0.0, slots, problem)
    expected, low, high = (model.rates(split, slots) for model in models)
    share = expected.trainers / expected.trainers_ideal
    limits = (expected.limited_by, expected.producers, expected.trainers, share, slots)
    return Row(split, expected.tokens_per_s, low.tokens_per_s, high.tokens_per_s, *limits)


def _no_cache(measured: Measurements) -> str:
    """Why epochs cannot come from the disk, "" when they can."""
    dump_bytes = measured.work.tokens_per_epoch * measured.work.bytes_per_token
    if measured.room.disk_bytes is None or None in _disk(measured):
        return "the disk was not measured"
    if dump_bytes > measured.room.disk_bytes:
        return f"the disk has {show_bytes(measured.room.disk_bytes)} free, an epoch takes {show_bytes(dump_bytes)}"
    return ""


def _disk(measured: Measurements) -> tuple[float | None, float | None]:
    return measured.room.disk_write_bytes_per_s, measured.room.disk_read_bytes_per_s


def _hours(tokens: float, tokens_per_s: float) -> float:
    return tokens / tokens_per_s / 3600 if tokens_per_s > 0 else math.inf
