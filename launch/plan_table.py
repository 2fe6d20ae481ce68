"""The bill of `draftwire plan` as a short table for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.units import show_bytes, show_seconds

SHOWN_SPLITS = 3
_SOURCES = {"cards": "an estimate from a table of cards", "measured": "from what draftwire tune measured here"}
_BASIS = {"prepared": "", "estimate": " (from a random sample)", "given": " (as told)"}


def describe(bill: Mapping[str, Any]) -> list[str]:
    """Aligned lines: what, how much."""
    rows = [
        ("samples", _count(bill["samples"], bill["samples_interval"]) + _BASIS[bill["basis"]]),
        ("tokens", f"{_count(bill['tokens'], bill['tokens_interval'])} an epoch, {_mean(bill)} a sample"),
        ("steps", f"{'' if bill['basis'] == 'prepared' else 'about '}{bill['steps']:,} in {_epochs(bill['epochs'])}"),
        ("anchors", _anchors(bill)),
        ("features", _features(bill)),
        ("full dump", _dump(bill)),
        *([("cache", _cache(bill["cache"]))] if bill["cache"] is not None else []),
        ("ring", f"{show_bytes(bill['ring_bytes'])} in {bill['ring_slots']} slots instead of it"),
        ("host memory", _host(bill)),
        *((names, _device(row)) for names, row in _alike(bill["devices"])),
        ("checkpoints", f"{show_bytes(bill['checkpoints_disk_bytes'])} of disk at most"),
        ("time", _time(bill["hours"])),
        *([("splits", _splits(bill["split"], bill["splits"]))] if len(bill["splits"]) > 1 else []),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows] + [f"note: {note}" for note in bill["notes"]]


def _count(value: int, interval: tuple[int, int] | None) -> str:
    return f"{value:,}" if interval is None else f"{value:,} ({interval[0]:,} to {interval[1]:,})"


def _mean(bill: Mapping[str, Any]) -> str:
    return f"{bill['tokens'] / max(bill['samples'], 1):.0f}"


def _epochs(epochs: int) -> str:
    return f"{epochs} epoch" + ("s" if epochs > 1 else "")


def _anchors(bill: Mapping[str, Any]) -> str:
    if bill["anchor_coverage"] is None:
        return "known when the data is"
    used, eligible = bill["anchors_per_epoch"], bill["eligible_anchors"]
    return f"{used:,} an epoch, {100 * bill['anchor_coverage']:.1f} % of the {eligible:,} that there are"


def _features(bill: Mapping[str, Any]) -> str:
    shape = f"{len(bill['taps'])} taps x {bill['hidden_size']}, {bill['dtype']}"
    sample = show_bytes(bill["bytes_per_sample"])
    return f"{bill['bytes_per_token']:,} bytes a token ({shape}), {sample} a sample"


def _dump(bill: Mapping[str, Any]) -> str:
    whole, free = bill["full_dump_bytes"], bill["free_disk_bytes"]
    low_high = bill["full_dump_interval"]
    span = f" ({show_bytes(low_high[0])} to {show_bytes(low_high[1])})" if low_high else ""
    text = f"{show_bytes(whole)}{span}; {show_bytes(free)} free at {bill['disk']}"
    return text + (f": {100 * free / whole:.2g} % of it would fit" if whole > free else "")


def _cache(cache: Mapping[str, Any]) -> str:
    hours = cache["saved_hours"]
    saved = f", about {show_seconds(3600 * hours)} of the producers" if hours is not None else ""
    return (
        f"{cache['held']:,} samples are in {cache['folder']}, which may grow by {show_bytes(cache['room_bytes'])}: "
        f"{cache['share']:.0%} of an epoch of {show_bytes(cache['epoch_bytes'])}; each later epoch saves so much "
        f"of the target's work{saved}"
    )


def _host(bill: Mapping[str, Any]) -> str:
    needed = f"{show_bytes(sum(bill['host_memory'].values()))}: ring, and checkpoints on their way to the disk"
    free = bill["free_memory_bytes"]
    return needed if free is None else f"{needed}; {show_bytes(free)} free"


def _alike(devices: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Devices in a row of which all the same is to say, named by the first and the last."""
    groups: list[list[Mapping[str, Any]]] = []
    for row in devices:
        if groups and all(groups[-1][-1][key] == row[key] for key in ("name", "needs", "free_bytes")):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [
        (group[0]["device"] + (f" to {group[-1]['device']}" if len(group) > 1 else ""), group[0]) for group in groups
    ]


def _device(row: Mapping[str, Any]) -> str:
    needs = " + ".join(f"{role} {show_bytes(need)}" for role, need in row["needs"].items())
    free = "" if row["free_bytes"] is None else f" of {show_bytes(row['free_bytes'])}"
    return f"{needs} at most{free} ({row['name']})"


def _time(hours: Mapping[str, Any] | None) -> str:
    if hours is None:
        return "no estimate for this machine and target; `draftwire tune` measures it"
    total, producer, consumer = (show_seconds(3600 * hours[key]) for key in ("total", "producer", "consumer"))
    return f"about {total}, {_SOURCES[hours['source']]}: producers alone {producer}, consumers alone {consumer}"


def _splits(chosen: str, hours: Mapping[str, float]) -> str:
    """The quickest ones, and the one that this plan has."""
    shown = [split for place, split in enumerate(hours) if place < SHOWN_SPLITS or split == chosen]
    return ", ".join(
        f"{split}{' (this plan)' if split == chosen else ''} {show_seconds(3600 * hours[split])}" for split in shown
    )
