"""The logger process: `python -P -m launch.logger RUN_DIR START_BYTE`, started by the launcher with [log].

It follows metrics.jsonl from START_BYTE on and passes curves to TensorBoard and Weights & Biases until it gets TERM. A
run waits for nothing here: whatever a logger raises is one event, and that logger is off.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from launch.curves import points
from launch.log_config import LogConfig
from launch.metrics import Row, append_row
from protocol.child import run_child
from protocol.job import read_section

POLL_S = 0.5

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Something that takes curves."""

    def add(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard; what was written past `start_step` before is superseded."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step)

    def add(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One run of a project; a resumed run goes on with it, by the name of its folder."""

    def __init__(self, run_dir: Path, project: str) -> None:
        import wandb

        config = msgspec.json.decode((run_dir / "config.resolved.json").read_bytes())
        name = run_dir.resolve().name
        self._run: Any = wandb.init(
            project=project, name=name, id=name, resume="allow", dir=str(run_dir), config=config
        )

    def add(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class Loggers:
    """Those that still work, by name."""

    def __init__(self, run_dir: Path, config: LogConfig, start_step: int) -> None:
        self._run_dir = run_dir
        self._sinks: dict[str, Sink] = {}
        if config.tensorboard:
            self._try("tensorboard", lambda: TensorBoard(run_dir, start_step))
        if config.wandb is not None:
            project = config.wandb
            self._try("wandb", lambda: Wandb(run_dir, project))

    def add(self, row: Row) -> None:
        if values := points(row):
            for name, sink in list(self._sinks.items()):
                self._try(name, lambda sink=sink: sink.add(values, int(row["step"])))

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)

    def _try(self, name: str, act: Any) -> None:
        """A logger is somebody else's code and may raise anything; nothing of it is worth a run."""
        try:
            made = act()
        except Exception as error:
            log.exception("%s failed", name)
            self._sinks.pop(name, None)
            text = f"{name} is off: {type(error).__name__}: {error}"
            append_row(self._run_dir / "metrics.jsonl", "event", {"what": "logger", "text": text})
        else:
            if made is not None:
                self._sinks[name] = made


def rows_from(path: Path, start_byte: int, done: Callable[[], bool]) -> Iterator[Row]:
    """Every row from there on, as it is written; when `done`, what is there by then is the last."""
    with path.open("rb") as file:
        file.seek(start_byte)
        rest, last = b"", False
        while not last:
            last = done()
            rest += file.read()
            *lines, rest = rest.split(b"\n")
            for line in lines:
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue
                yield row
            if not last:
                time.sleep(POLL_S)


def main(run_dir: Path, start_byte: int) -> None:
    told_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: told_to_end.append(number))
    loggers: Loggers | None = None
    config = read_section(run_dir, "log", LogConfig)
    for row in rows_from(run_dir / "metrics.jsonl", start_byte, lambda: bool(told_to_end)):
        if row["kind"] == "start":
            loggers = loggers or Loggers(run_dir, config, row["step"])
        elif loggers is not None:
            loggers.add(row)
    if loggers is not None:
        loggers.close()


if __name__ == "__main__":
    run_child("logger", lambda: main(Path(sys.argv[1]), int(sys.argv[2])))
