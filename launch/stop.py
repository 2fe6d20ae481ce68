"""`draftwire stop`: ask a live run to checkpoint at its next step boundary and end, and wait for it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from launch.runfolder import is_alive, launcher_pid
from protocol.errors import RequestError, RunError
from protocol.units import show_seconds

POLL_S = 0.1


def stop_run(run_dir: Path, timeout_s: float) -> None:
    """Returns once the run has ended. Raises RequestError when it is not alive, RunError when it still is after
    `timeout_s`; it goes on stopping then."""
    pid = launcher_pid(run_dir)
    if pid is None:
        raise RequestError(f"{run_dir}: this run is not alive; `draftwire status {run_dir}` says how it ended")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while is_alive(run_dir):
        if time.monotonic() > deadline:
            raise RunError(f"{run_dir} has not ended within {show_seconds(timeout_s)}; it was asked to and will")
        time.sleep(POLL_S)
