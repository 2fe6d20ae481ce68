"""The part of benchmarks/cache.py with whole runs: off, spill and only, and the trainer alone."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from report import row
from rich.console import Console

from launch.live import Screen
from launch.metrics import of_kind, read_rows
from launch.signals import Signals
from launch.tune_runs import train_alone
from protocol.job import read_job
from protocol.packing import DRAFT_TOKEN_COST

ROOT = Path(__file__).resolve().parents[1]
REFUSED = 2
AIM = 0.97
Say = Callable[[str], None]


class Command:
    """`draftwire` with one configuration, in a folder of its own."""

    def __init__(self, config: str, overrides: Sequence[str], folder: Path, device: str, say: Say) -> None:
        self._config, self.runs, self._say = config, folder / "runs", say
        # Evaluations have a time of their own, which the trainer alone has not.
        changed = ["eval.every=0", *overrides, f"run.dir={self.runs}", f"cache.dir={folder / 'cache'}"]
        self._overrides = [part for each in changed for part in ("--set", each)]
        self._environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        if device == "cpu":
            self._environment["CUDA_VISIBLE_DEVICES"] = ""

    def seconds(self, name: str, words: Sequence[str], *overrides: str) -> float | None:
        """How long `draftwire WORDS CONFIG` takes, None when it is refused, which is said with the reason."""
        command = [sys.executable, "-P", "-m", "launch.cli", *words, self._config, *self._overrides]
        more = [part for each in overrides for part in ("--set", each)]
        started_s = time.perf_counter()
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=self._environment, check=False)
        seconds = time.perf_counter() - started_s
        if done.returncode == REFUSED:
            self._say(f"{name} is refused: {done.stderr.strip()}")
            return None
        if done.returncode:
            raise SystemExit(f"{name} ended with {done.returncode}: {done.stderr.strip()}")
        self._say(f"{name}: {seconds:.1f} s")
        return seconds

    def run(self, mode: str) -> float | None:
        return self.seconds(mode, ["run"], f"run.name={mode}", f"cache.mode={mode}")


def run_rows(
    config: str, overrides: Sequence[str], folder: Path, device: str, seconds: float, say: Say
) -> list[dict[str, Any]]:
    """Seconds of each mode against "off", and tokens/s from the cache against one rank alone times the ranks."""
    command = Command(config, overrides, folder, device, say)
    off = command.run("off")
    if off is None:
        raise SystemExit("without a cache the configuration is refused already")
    rows = [row("off: command to end", off, "s", off)]
    spill = command.run("spill")
    if spill is not None:
        rows.append(row("spill: command to end", spill, "s", off))
        rows += _later_epochs(command, "spill", seconds)
    build = command.seconds("cache build", ["cache", "build"])
    if build is not None:
        what = "cache build" if spill is None else "cache build of what spill has not kept"
        rows.append(row(f"{what}: command to end", build, "s", off))
    only = command.run("only")
    if only is not None:
        rows.append(row("only: command to end", only, "s", off))
        rows += _later_epochs(command, "only", seconds)
    return rows


def _later_epochs(command: Command, mode: str, seconds: float) -> list[dict[str, Any]]:
    """What the epochs after the first of a finished run reached, against its ranks when every block is there."""
    run_dir = command.runs / mode
    job = read_job(run_dir)
    steps = [each for each in of_kind(read_rows(run_dir / "metrics.jsonl"), "step") if each["epoch"] > 0]
    if not steps:
        raise SystemExit(f"{mode} has no second epoch: --set train.epochs=2")
    alone = train_alone(job, run_dir, 1, seconds, Signals(), Screen(Console(file=io.StringIO())))["steps"]
    tokens, spent_s = sum(each["tokens"] for each in steps), sum(each["step_s"] for each in steps)
    # Other steps than these were timed alone: what both share is the cost by which the plan cuts blocks.
    cost = sum(each["tokens"] + DRAFT_TOKEN_COST * each["draft_tokens"] for each in steps)
    cost_per_s = len(job.consumers) * sum(each["cost"] for each in alone) / sum(each["seconds"] for each in alone)
    reached, possible = tokens / spent_s, tokens / cost * cost_per_s
    share = row(f"{mode}, epochs after the first: share of that", reached / possible, "share", AIM)
    return [row(f"{mode}, epochs after the first, against the trainer alone", reached, "tokens/s", possible), share]
