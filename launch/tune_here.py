"""The part of `draftwire tune` that works on this machine: measures, keeps, verifies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from launch.config import Config
from launch.kept import kept, kept_path
from launch.live import Screen
from launch.machine import Gpu
from launch.measurements import Measurements, write_measurements
from launch.run import STOPPED_AT_ONCE
from launch.signals import Interrupted, Signals
from launch.splits import Row, ranked, table
from launch.tune_measure import Bench

# How many of the best splits are tried.
VERIFIED = 2


class Wish(NamedTuple):
    """What the command line asks for: measurements to replay, GPUs to divide, whether to measure `again`, for how many
    `seconds` each part, whether to write the best split down, and seconds to `verify` it (0: not)."""

    source: Path | None = None
    gpus: int | None = None
    again: bool = False
    seconds: float = 30.0
    write: bool = False
    verify_s: float = 0.0


class Verified(NamedTuple):
    """One split as predicted and as it ran, in tokens/s."""

    producers: int
    consumers: int
    predicted: float
    measured: float
    spread: float


def measure_here(config: Config, gpus: Sequence[Gpu], wish: Wish, places: int) -> tuple[Measurements, list[Verified]]:
    """What is known of this configuration here, measured unless it was before, and the best splits tried for real.
    Raises RequestError, RunError, Interrupted."""
    measured = None if wish.again else kept(config, gpus)
    path = kept_path(config, gpus)
    screen = Screen(Console(file=sys.stderr, highlight=False, soft_wrap=True))
    if measured is not None:
        screen.say(f"measured before: {path} (--again measures anew)")
        if not wish.verify_s:
            return measured, []
    signals = Signals()
    try:
        return _with_bench(config, gpus, wish, places, measured, signals, screen)
    except Interrupted:
        screen.say("interrupted")
        sys.exit(STOPPED_AT_ONCE)


def _with_bench(
    config: Config,
    gpus: Sequence[Gpu],
    wish: Wish,
    places: int,
    measured: Measurements | None,
    signals: Signals,
    screen: Screen,
) -> tuple[Measurements, list[Verified]]:
    path = kept_path(config, gpus)
    bench = Bench(config, gpus, signals, screen)
    try:
        if measured is None:
            measured = bench.measure(config, wish.seconds)
            write_measurements(path, measured)
            screen.say(f"kept in {path}")
        if not wish.verify_s:
            return measured, []
        rows = [row for row in ranked(table(measured, places)) if _can_be_tried(row, config, len(gpus))]
        return measured, [_verified(bench, row, wish.verify_s) for row in rows[:VERIFIED]]
    finally:
        bench.close()


def show_verified(one: Verified) -> str:
    return (
        f"verified {one.producers}:{one.consumers}: predicted {one.predicted:,.0f} tokens/s, measured "
        f"{one.measured:,.0f} ({one.measured / one.predicted - 1:+.1%}, spread {one.spread:.1%})"
    )


def _can_be_tried(row: Row, config: Config, gpus: int) -> bool:
    split = row.split
    if split.tensor_parallel != config.target.tensor_parallel:
        return False
    return (split.producers == 1 if split.shared else split.producers + split.consumers <= gpus) or not gpus


def _verified(bench: Bench, row: Row, seconds: float) -> Verified:
    rate = bench.try_split(row.split, seconds)
    return Verified(row.split.producers, row.split.consumers, row.tokens_per_s, *rate)
