"""Starts the logger process beside a run, if [log] asks for one, and lets it finish what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.log_config import LogConfig
from protocol.supervise import Child

# It has seconds of rows left to pass on at most; a service that does not answer is not waited for.
GRACE_S = 20.0


@contextmanager
def logging_to(config: LogConfig, run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Around the writing of a run's rows, the one of kind "start" included."""
    if not config.tensorboard and config.wandb is None:
        yield
        return
    metrics = run_dir / "metrics.jsonl"
    start_byte = metrics.stat().st_size if metrics.exists() else 0
    metrics.touch()
    arguments = [str(run_dir), str(start_byte)]
    child = Child("logger", "launch.logger", arguments, run_dir / "log/logger.log", {"OMP_NUM_THREADS": "1"})
    try:
        yield
    finally:
        child.end(GRACE_S)
        if child.exit_code() != 0:
            say(f"{child.obituary()}; its curves are not complete")
