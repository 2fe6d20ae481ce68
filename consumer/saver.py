"""Checkpoints in the background: the step loop hands over a snapshot and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from consumer.checkpoint import Snapshot, write_checkpoint
from consumer.checkpoints import point, prune

# `next_step` of a checkpoint that can be resumed from, seconds that the step loop lost, seconds that writing took.
Durable = Callable[[int, float, float], None]


class Saver:
    """Writes one snapshot at a time. `durable` is called once a checkpoint can be resumed from, `failed` with the
    reason when it could not be written; earlier ones are then still there."""

    def __init__(self, folder: Path, keep: int, durable: Durable, failed: Callable[[str], None]) -> None:
        self.last_error: str | None = None
        self._folder, self._keep = folder, keep
        self._durable, self._failed = durable, failed
        self._written: set[Path] = set()
        self._writer = ThreadPoolExecutor(1, "saver")
        self._writing: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written, and its memory is in use."""
        return self._writing is not None and not self._writing.done()

    def submit(self, snapshot: Snapshot, best: bool, stall_s: float = 0.0) -> None:
        """Starts writing; waits first for the one before, so that at most one snapshot is held in memory."""
        self.wait()
        self._writing = self._writer.submit(self._write, snapshot, best, stall_s)

    def wait(self) -> None:
        """Returns when nothing is being written. Raises what ended the writing, unless it was an OSError: a disk may
        have room again the next time, a defect stays."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, snapshot: Snapshot, best: bool, stall_s: float) -> None:
        started = time.monotonic()
        try:
            written = write_checkpoint(self._folder, snapshot)
            self._written.add(written)
            if best:
                point(self._folder, "best", written)
            prune(self._folder, self._keep, self._written)
        except Exception as error:
            self.last_error = f"checkpoint at step {snapshot.cursor.next_step}: {error}"
            self._failed(self.last_error)
            if not isinstance(error, OSError):
                raise
        else:
            self.last_error = None
            self._durable(snapshot.cursor.next_step, stall_s, time.monotonic() - started)
