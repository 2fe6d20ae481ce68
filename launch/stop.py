"""`draftwire stop` and `draftwire cooldown`: ask a live run to end, at its next step boundary or after a cool-down."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from launch.metrics import read_rows
from launch.runfolder import is_alive, launcher_pid
from protocol.errors import RequestError, RunError
from protocol.units import show_seconds

POLL_S = 0.1


def stop_run(run_dir: Path, timeout_s: float) -> None:
    """Returns once the run has ended. Raises RequestError when it is not alive, RunError when it still is after
    `timeout_s`; it goes on stopping then."""
    os.kill(_launcher(run_dir), signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while is_alive(run_dir):
        if time.monotonic() > deadline:
            raise RunError(f"{run_dir} has not ended within {show_seconds(timeout_s)}; it was asked to and will")
        time.sleep(POLL_S)


def cool_down(run_dir: Path, timeout_s: float) -> str:
    """Asks a run to let its learning rate fall and then to end; returns what it makes of that, in words, or that it has
    not said so within `timeout_s`. Raises RequestError when it is not alive."""
    pid, before = _launcher(run_dir), len(_cooldowns(run_dir))
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if len(said := _cooldowns(run_dir)) > before:
            return said[-1]
        time.sleep(POLL_S)
    return "asked to; it takes effect at the next step boundary, and is asked for once in a start"


def _cooldowns(run_dir: Path) -> list[str]:
    rows = read_rows(run_dir / "metrics.jsonl")
    return [row["text"] for row in rows if row["kind"] == "event" and row["what"] == "cooldown"]


def _launcher(run_dir: Path) -> int:
    pid = launcher_pid(run_dir)
    if pid is None:
        raise RequestError(f"{run_dir}: this run is not alive; `draftwire status {run_dir}` says how it ended")
    return pid
