"""Short runs for `draftwire tune`: real processes that work for some seconds, and what they came to."""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from launch.crew import COMPILED_PRODUCTS, Crew
from launch.live import Screen
from launch.machine import free_memory_bytes, threads_per_process
from launch.metrics import append_row, of_kind, read_rows
from launch.rendezvous import ranks_environment
from launch.signals import Interrupted, Signals
from protocol.arena import create_arena
from protocol.errors import RequestError, RunError
from protocol.job import Job, write_job
from protocol.supervise import Child

# The first steps come out of a ring that was filled while others loaded, or wait for the last one to load.
FIRST_STEPS = 2
LEAST_STEPS = 4
CHUNKS = 4
LOOK_S = 1.0
TICK_S = 0.1


class Rate(NamedTuple):
    """Tokens/s of some steps, and the relative standard deviation of the rates of four parts of them."""

    tokens_per_s: float
    spread: float


def run_for(
    job: Job, run_dir: Path, seconds: float, what: str, signals: Signals, screen: Screen, modules: Mapping[str, str]
) -> Rate:
    """Runs a crew until `seconds` after its first steps, or to the end of its plan; raises RunError, Interrupted."""
    write_job(run_dir, job)
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    append_row(run_dir / "metrics.jsonl", "start", {"step": 0})
    looked_s, began_s, started_s = 0.0, 0.0, time.monotonic()

    def over() -> bool:
        nonlocal looked_s, began_s
        now = time.monotonic()
        if now - looked_s < LOOK_S:
            return False
        looked_s, steps = now, len(of_kind(read_rows(run_dir / "metrics.jsonl"), "step"))
        if steps >= FIRST_STEPS and not began_s:
            began_s = now
        doing = f"{what}: {steps} steps" if began_s else f"{what}: processes load"
        screen.still(doing, began_s or started_s)
        return bool(began_s) and now - began_s >= seconds and steps >= FIRST_STEPS + LEAST_STEPS

    ring_fd = create_arena(job.slots, job.slot_bytes, free_memory_bytes())
    try:
        # What its processes say goes to their logs.
        crew = Crew(job, run_dir, ring_fd, signals, Screen(Console(file=io.StringIO())), {}, modules)
        try:
            crew.work(over)
        finally:
            crew.end()
    finally:
        os.close(ring_fd)
    if signals.wishes:
        raise Interrupted
    return rate_of_steps(of_kind(read_rows(run_dir / "metrics.jsonl"), "step"))


def rate_of_steps(rows: list[dict[str, Any]]) -> Rate:
    """Of rows of kind "step", all but the first ones. Raises RunError when there are too few."""
    counted = rows[FIRST_STEPS:]
    if len(counted) < LEAST_STEPS:
        raise RunError(f"{len(rows)} steps are too few to measure with: raise train.epochs, or name more data")
    size = -(-len(counted) // CHUNKS)
    parts = [counted[start : start + size] for start in range(0, len(counted), size)]
    mean = _rate(counted)
    rates = [_rate(part) for part in parts if len(part) * 2 >= size]
    return Rate(mean, min(statistics.pstdev(rates) / mean, 0.9))


def train_alone(
    job: Job, run_dir: Path, ranks: int, seconds: float, signals: Signals, screen: Screen
) -> dict[str, Any]:
    """What `consumer.alone` found: of one rank its blocks and steps, of several the reduction. Raises RunError,
    Interrupted."""
    write_job(run_dir, job)
    base = {"OMP_NUM_THREADS": str(threads_per_process())} | COMPILED_PRODUCTS | ranks_environment(ranks)
    children = [
        Child(
            f"alone-{rank}",
            "consumer.alone",
            [str(run_dir), str(rank), str(seconds)],
            run_dir / "log" / f"alone-{rank}.log",
            base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    what = "one rank trains alone" if ranks == 1 else f"{ranks} ranks reduce"
    started_s = time.monotonic()
    try:
        while None in (codes := [child.wait(TICK_S / ranks) for child in children]):
            screen.still(what, started_s)
            if signals.wishes:
                raise Interrupted
            if any(codes):
                break
    finally:
        for child in children:
            child.end(0.0)
    for child, code in zip(children, codes, strict=True):
        if code == 2:
            raise RequestError(child.last_error())
        if code:
            raise RunError(child.obituary())
    found: dict[str, Any] = json.loads((run_dir / "alone.json").read_text(encoding="utf-8"))
    return found


def _rate(rows: list[dict[str, Any]]) -> float:
    return float(sum(row["tokens"] for row in rows) / max(sum(row["step_s"] for row in rows), 1e-9))
