"""What a run is doing or did, from its folder alone: the answer of `draftwire status` and the last lines of `run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.metrics import learned, of_kind, read_rows
from launch.progress import show_cache
from launch.runfolder import is_alive
from protocol.units import show_bytes, show_seconds

# What only a run that is alive has: of its newest snapshot, ten seconds old at most.
LIVE_KEYS = (
    "producer_tokens_per_s",
    "consumer_tokens_per_s",
    "producer_mfu",
    "consumer_mfu",
    "remote_producers",
    "waiting",
    "eta_s",
)

_WITHOUT_A_WORD = "its launcher ended without a word; --resume goes on"


def summarise(run_dir: Path, ended: bool = False) -> dict[str, Any]:
    """The keys of `draftwire status --json`; a figure that is not known yet is None.

    `ended`: the run is over, although its launcher, who asks, still holds its lock.
    """
    rows = read_rows(run_dir / "metrics.jsonl")
    steps, evals, streams = (of_kind(rows, kind) for kind in ("step", "eval", "stream"))
    # Only an end behind the newest start speaks of it: a launcher that was killed wrote none.
    lives = [row for row in rows if row["kind"] in ("start", "end")]
    ends = [row for row in lives[-1:] if row["kind"] == "end"]
    last_step = steps[-1] if steps else {}
    last_stream = streams[-1] if streams else {}
    alive = not ended and is_alive(run_dir)
    # A stretch of its own begins with a row of kind "start"; what lies before it says nothing about now.
    prepares = alive and (not lives or lives[-1]["kind"] == "end")
    plan = _read_json(run_dir / "plan.json")
    export = run_dir / "export"
    baselines = of_kind(rows, "baseline")
    return {
        "run": run_dir.name,
        "prepares": prepares,
        "state": "running" if alive else (ends[-1]["state"] if ends else "failed"),
        "reason": None if alive else _why(rows, ends[-1]) if ends else _WITHOUT_A_WORD if lives else None,
        "step": last_step.get("step", 0),
        "steps": plan.get("steps"),
        "epoch": last_step.get("epoch", 0),
        "samples_trained": last_step.get("samples_trained", 0),
        "tokens_trained": last_step.get("tokens_trained", 0),
        "loss": next((row["loss"] for row in reversed(steps) if learned(row)), None),
        "acceptance_before": evals[0]["acceptance_mean"] if evals else None,
        "acceptance_after": evals[-1]["acceptance_mean"] if len(evals) > 1 else None,
        "acceptance_interval": evals[-1]["interval"] if evals else None,
        "acceptance_per_position": evals[-1]["acceptance_per_position"] if evals else None,
        "baselines": {
            name: row["acceptance_mean"]
            for name, row in (baselines[-1] if baselines else {}).items()
            if isinstance(row, dict)
        },
        "producer_wait_share": last_stream.get("producer_wait_share"),
        "consumer_wait_share": last_stream.get("consumer_wait_share"),
        "advice": last_stream.get("advice"),
        "bytes_streamed": _streamed(rows),
        "full_dump_bytes": plan.get("full_dump_bytes"),
        "cache": last_stream.get("cache"),
        "quarantined": last_stream.get("quarantined", 0),
        "skipped": sum(row.get("skipped", False) for row in steps),
        "starts": sum(row["kind"] == "start" for row in lives),
        "restarts": sum(row["what"] in ("gone", "rewind") for row in of_kind(rows, "event")),
        "export": str(export) if export.exists() else None,
        "export_step": _read_json(export / "config.json").get("draftwire", {}).get("steps"),
    } | {key: last_stream.get(key) if alive and not prepares else None for key in LIVE_KEYS}


def describe(summary: dict[str, Any]) -> list[str]:
    """The same for a person, a line a thing."""
    lines = [f"{summary['run']}: {summary['state']}" + (f" ({summary['reason']})" if summary["reason"] else "")]
    if summary["prepares"]:
        lines[0] += ", being prepared"
    if summary["steps"] is None:
        lines.append("no plan yet: nothing trained")
    else:
        lines.append(
            f"step {summary['step']} of {summary['steps']}, {summary['samples_trained']} samples, "
            f"{summary['tokens_trained']} tokens trained"
            + (f", loss {summary['loss']:.3f}" if summary["loss"] is not None else "")
        )
    if summary["acceptance_after"] is not None:
        low, high = summary["acceptance_interval"]
        beside = ", ".join(f"{name} {value:.3f}" for name, value in summary["baselines"].items())
        lines.append(
            f"acceptance length {summary['acceptance_before']:.3f} before, {summary['acceptance_after']:.3f} after "
            f"(95 % interval {low:.3f} to {high:.3f})" + (f"; baselines: {beside}" if beside else "")
        )
    if summary["producer_wait_share"] is not None:
        since = " since the last of its starts" if summary["starts"] > 1 else ""
        lines.append(
            f"waits{since}: producer {summary['producer_wait_share']:.0%}, "
            f"consumer {summary['consumer_wait_share']:.0%}; "
            f"streamed {show_bytes(summary['bytes_streamed'])}; restarts {summary['restarts']}, "
            f"quarantined samples {summary['quarantined']}"
            + (f", skipped steps {summary['skipped']}" if summary["skipped"] else "")
        )
    if summary["cache"] is not None:
        lines.append(f"cache: {show_cache(summary['cache'])}")
    if summary["advice"] is not None:
        lines.append(f"split: {summary['advice']['text']}")
    if summary["state"] == "running" and summary["producer_tokens_per_s"] is not None:
        left = show_seconds(summary["eta_s"]) if summary["eta_s"] is not None else "not known yet"
        lines.append(
            f"now: produced {summary['producer_tokens_per_s']:.0f} tok/s, trained "
            f"{summary['consumer_tokens_per_s']:.0f} tok/s, left: {left}"
            + (f"; waiting for {summary['waiting']}" if summary["waiting"] else "")
        )
    if summary["remote_producers"]:
        lines.append(f"producers on other hosts: {', '.join(summary['remote_producers'])}")
    if summary["export"] is not None:
        step = summary["export_step"]
        older = f" of step {step}" if step not in (None, summary["step"]) else ""
        lines.append(f"drafter{older}: {summary['export']} (its README.md says how to serve it)")
    return lines


def _why(rows: list[dict[str, Any]], end: dict[str, Any]) -> str:
    """Why a run ended; one that was done before the end of its plan was told to finish, in its last stretch."""
    finished = ""
    for row in rows:
        finished = "" if row["kind"] == "start" else row["text"] if row.get("what") == "finish" else finished
    return end["reason"] or finished


def _streamed(rows: list[dict[str, Any]]) -> int:
    """Bytes over all stretches: each counts from zero, so the last row of each is added up."""
    total = last = 0
    for row in rows:
        if row["kind"] == "start":
            total, last = total + last, 0
        elif row["kind"] == "stream":
            last = row["bytes_streamed"]
    return total + last


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
