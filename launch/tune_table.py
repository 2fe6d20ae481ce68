"""What `draftwire tune` says: the table of all splits for people, the same for scripts, and what would help. Pure."""

from __future__ import annotations

from typing import Any

from launch.measurements import Measurements
from launch.split_model import MODEL_ERROR, Limit, Split
from launch.splits import Mode, Row, modes, ranked
from protocol.packing import DRAFT_TOKEN_COST

BAR_CELLS = 20
# What is less than this share is not worth a word.
WORTH_SAYING = 0.05
# Measurements that vary by more say that something else was at work.
UNSTEADY = 0.1

LIMITS: dict[Limit, str] = {
    "producers": "the producers",
    "link": "the producers' link to the host",
    "trainers": "the trainers",
    "ranks": "the ranks, which wait for the slowest of them or for steps' fixed costs",
    "all-reduce": "the reduction of gradients",
    "ring": "the ring, too short for the unevenness of blocks",
    "sharing": "both roles, which take turns",
    "memory": "memory",
}


def name_of(split: Split) -> str:
    """As gpus.split has it, and how producers are made up if they take several GPUs."""
    if split.shared:
        return f"shared x {split.producers}" if split.producers > 1 else "shared"
    divided = f" (tp {split.tensor_parallel})" if split.tensor_parallel > 1 else ""
    return f"{split.producers}:{split.consumers}{divided}"


def answer(measured: Measurements, gpus: int, rows: list[Row]) -> dict[str, Any]:
    """The keys of `draftwire tune --json`; `verified` is filled in by who verifies."""
    order = ranked(rows)
    return {
        "gpus": gpus,
        "machine": measured.machine,
        "config": measured.config,
        "splits": [_as_dict(row) for row in rows],
        "best": _as_dict(order[0]) if order else None,
        "second": _as_dict(order[1]) if len(order) > 1 else None,
        "modes": [_mode_dict(mode) for mode in modes(measured, gpus, rows)],
        "advice": advice(measured, rows),
        "verified": [],
    }


def describe(measured: Measurements, gpus: int, rows: list[Row]) -> list[str]:
    """The same as lines: the table, the best two, hours by mode, what would help."""
    order = ranked(rows)
    most = max((row.high for row in rows), default=0.0)
    names = [name_of(row.split) for row in rows]
    width = max(len(name) for name in names)
    word = "GPUs" if measured.room.gpu_bytes is not None else "processes"
    lines = [f"{gpus} {word}, measured on: {measured.machine or 'not said'}"]
    lines.append(f"{'split':{width}}  {'tokens/s':>10}  {'expected range':>19}  {'':{BAR_CELLS}}  limited by")
    for name, row in zip(names, rows, strict=True):
        if row.lacking:
            lines.append(f"{name:{width}}  {'-':>10}  {'-':>19}  {'':{BAR_CELLS}}  does not fit: {row.lacking}")
            continue
        span = f"{row.low:,.0f} to {row.high:,.0f}"
        bar = ("#" * max(round(BAR_CELLS * row.tokens_per_s / most), 1)).ljust(BAR_CELLS)
        lines.append(f"{name:{width}}  {row.tokens_per_s:>10,.0f}  {span:>19}  {bar}  {LIMITS[row.limited_by]}")
    if not order:
        return [*lines, "no split fits this machine"]
    lines += [_placed("best", order[0]), *[_placed("second", row) for row in order[1:2]]]
    lines += [_mode_line(mode, measured.work.epochs) for mode in modes(measured, gpus, rows)]
    return lines + [f"would help: {line}" for line in advice(measured, rows)]


def advice(measured: Measurements, rows: list[Row]) -> list[str]:
    """What would make the best split better, or costs it nothing."""
    if not (order := ranked(rows)):
        return []
    best, found = order[0], []
    spare = best.trainers_alone / best.tokens_per_s - 1
    if best.limited_by in ("producers", "link", "ring") and spare >= WORTH_SAYING:
        tokens, drafts = (
            sum(each) for each in zip(*(one for step in measured.work.steps for one in step), strict=True)
        )
        if drafts:
            more = 1 + spare * (tokens + DRAFT_TOKEN_COST * drafts) / (DRAFT_TOKEN_COST * drafts)
            found.append(
                f"more anchors cost no time: the trainers could take {1 + spare:.2f} times the tokens, that is up to "
                f"{more:.2f} times as many anchors (train.anchors = {measured.work.anchors}), where samples have them"
            )
    if best.limited_by in ("ranks", "all-reduce"):
        found.append(
            f"larger steps (train.batch_tokens): {best.split.consumers} ranks reach {best.rank_efficiency:.0%} of so "
            "many times one rank"
        )
    if best.limited_by == "ring":
        found.append(f"a larger ring (ring.bytes): {best.slots} slots do not even out the blocks")
    if (spread := max(measured.trainer.spread, *(rate.spread for rate in measured.producers))) > UNSTEADY:
        found.append(
            f"a quiet machine: parts of a measurement differed by {spread:.0%}; --again measures anew, with a larger "
            "--seconds for longer"
        )
    for row in order[1:]:
        if row.split.shared and row.tokens_per_s > best.tokens_per_s * (1 + MODEL_ERROR):
            devices = list(range(row.split.producers))
            found.append(
                f"both roles on every GPU (gpus.producers and gpus.consumers = {devices}): {row.tokens_per_s:,.0f} "
                "tokens/s, if they did not disturb each other"
            )
    return found


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "producers": row.split.producers,
        "consumers": row.split.consumers,
        "shared": row.split.shared,
        "tensor_parallel": row.split.tensor_parallel,
        "tokens_per_s": row.tokens_per_s,
        "low": row.low,
        "high": row.high,
        "limited_by": row.limited_by,
        "producers_alone": row.producers_alone,
        "trainers_alone": row.trainers_alone,
        "rank_efficiency": row.rank_efficiency,
        "ring_slots": row.slots,
        "lacking": row.lacking,
    }


def _mode_dict(mode: Mode) -> dict[str, Any]:
    split = name_of(mode.split) if mode.split is not None else None
    return {"mode": mode.name, "split": split, "hours": mode.hours, "lacking": mode.lacking}


def _placed(place: str, row: Row) -> str:
    return (
        f"{place}: {name_of(row.split)}, {row.tokens_per_s:,.0f} tokens/s ({row.low:,.0f} to {row.high:,.0f}); "
        f"alone the producers would make {row.producers_alone:,.0f}, the trainers take {row.trainers_alone:,.0f}"
    )


def _mode_line(mode: Mode, epochs: int) -> str:
    if mode.split is None or mode.hours is None:
        return f"{epochs} epochs, features on disk ({mode.name}): {mode.lacking}"
    kept = "streamed" if mode.name == "off" else f"features on disk ({mode.name})"
    time = f"{mode.hours:.1f} h" if mode.hours >= 1 else f"{mode.hours * 60:.0f} min"
    return f"{epochs} epochs, {kept}: {time} with {name_of(mode.split)}"
