"""How long a run is held up when a process of it is killed: a producer of two, then the consumer.

    python benchmarks/recovery.py [CONFIG] [--kills 3] [--split 2:1] [--set ...] [--json]

A real run of CONFIG (default: the quick start). Each producer in turn is killed with SIGKILL while it works, then the
consumer: times are from the kill to the rows that the coordinator writes. With two producers, a block of the dead one
goes to the other as soon as that one asks for work, so the wait is mostly the block that it is at. The references: the
aim of one second, and, for what has to start again, the same start at the beginning of this run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from report import publish, row

AIM_S = 1.0
DEADLINE_S = 900.0
POLL_S = 0.02
ROOT = Path(__file__).resolve().parents[1]


class Run:
    """`draftwire run` in the background, and what its folder says."""

    def __init__(self, arguments: list[str], runs: Path, split: str) -> None:
        self.folder = runs / "recovery"
        command = [sys.executable, "-P", "-m", "launch.cli", "run", *arguments, "--set", f"run.dir={runs}"]
        more = ["--set", "run.name=recovery", "--set", f'gpus.split="{split}"', "--set", "train.checkpoint_every=10"]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, env=environment)

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_row(self, wanted: Any, since: float) -> float:
        """The time of the first row after `since` that `wanted` accepts."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for found in self.rows():
                if found["time"] >= since and wanted(found):
                    return float(found["time"])
            time.sleep(POLL_S)
        raise SystemExit(f"nothing came of it: see {self.folder}/log")

    def kill(self, child: str) -> float:
        module, _, index = child.partition("-")
        pattern = re.compile(rf"-m {module}\.worker \S*recovery {index}( |$)")
        for path in Path("/proc").glob("[0-9]*"):
            try:
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if pattern.search(line):
                os.kill(int(path.name), signal.SIGKILL)
                return time.time()
        raise SystemExit(f"there is no {child} to kill")

    def await_joins(self, child: str, count: int) -> float:
        """When a child joined for the `count`-th time, from the coordinator's log."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            log = (self.folder / "log" / "coordinator.log").read_text()
            joins = [line for line in log.splitlines() if f"coordinator {child} joined" in line]
            if len(joins) >= count:
                stamp = datetime.strptime(joins[count - 1][:23], "%Y-%m-%d %H:%M:%S,%f")
                return stamp.timestamp()
            time.sleep(POLL_S)
        raise SystemExit(f"{child} did not join")


def event(what: str) -> Any:
    return lambda found: found["kind"] == "event" and found["what"] == what


def step_from(step: int) -> Any:
    return lambda found: found["kind"] == "step" and found["step"] >= step


def measure(run: Run, kills: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    start = run.await_row(lambda found: found["kind"] == "start", 0.0)
    note("first start of a producer", run.await_joins("producer-0", 1) - start)
    note("first start of the consumer", run.await_joins("consumer-0", 1) - start)
    run.await_row(step_from(12), 0.0)
    producers = len(json.loads((run.folder / "job.json").read_text())["producers"])
    for place in range(kills):
        name = f"producer-{place % producers}"
        killed = run.kill(name)
        note("producer: kill to its work being open", run.await_row(event("gone"), killed) - killed)
        note("producer: kill to its block leased again", run.await_row(event("leased again"), killed) - killed)
        note("producer: kill to its successor joined", run.await_joins(name, 2 + place // producers) - killed)
        run.await_row(step_from(run.rows()[-1].get("step", 0) + 1), time.time())
    for place in range(kills):
        before = max(found["step"] for found in run.rows() if found["kind"] == "step")
        killed = run.kill("consumer-0")
        note("consumer: kill to the ledger rewound", run.await_row(event("rewind"), killed) - killed)
        note("consumer: kill to its successor joined", run.await_joins("consumer-0", 2 + place) - killed)
        note("consumer: kill to the next step", run.await_row(step_from(0), killed + 0.05) - killed)
        note("consumer: kill to the step it died at", run.await_row(step_from(before), killed + 0.05) - killed)
    return times


def reference(name: str, times: dict[str, list[float]]) -> float:
    """The first start of this run for what loads a model or a checkpoint again, the aim for the rest."""
    if name.startswith("first") or not any(what in name for what in ("joined", "step")):
        return times[name][0] if name.startswith("first") else AIM_S
    return times["first start of a producer" if name.startswith("producer") else "first start of the consumer"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(ROOT / "examples" / "quickstart.toml"))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--split", default="2:1")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    overrides = [part for override in asked.overrides for part in ("--set", override)]
    with tempfile.TemporaryDirectory() as folder:
        run = Run([asked.config, *overrides], Path(folder), asked.split)
        try:
            times = measure(run, asked.kills)
        finally:
            run.process.terminate()
            run.process.wait(120)
    publish([row(name, median(found), "s", reference(name, times)) for name, found in times.items()], asked.json)


if __name__ == "__main__":
    main()
