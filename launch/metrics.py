"""metrics.jsonl: one row a line, appended while the run lives, readable by anyone.

Every row has `kind` and `time`. A `start` or `rewind` row with `step` s begins a new stretch: what was recorded past s
before it comes again, so those rows are superseded.

    start  step (steps done when this stretch began), versions, host, machine, command, placement
    rewind  step (of the checkpoint that the consumers began from again, within one start)
    step   step, epoch, loss, accuracy (per slot), lr, grad_norm, samples, tokens, skipped, samples_trained, ...
    eval   step, acceptance_mean, acceptance_per_position, ...
    baseline  unigram, bigram: the same keys, measured once
    stream step, ring, producer_tokens_per_s, consumer_tokens_per_s, waits, bytes_streamed
    taps   step, index, producer, taps: tap, mean, deviation, zeros (share of exact zeros) of one block in a hundred
    event  what, text        (gone, leased again, rewind, bad, quarantine, skipped, checkpoint, cooldown, finish, ...)
    end    state (done, failed, interrupted), reason
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

Row = dict[str, Any]
WAITING_ROWS = 10_000

log = logging.getLogger(__name__)


def to_json(answer: Any) -> str:
    """One line of JSON. NaN and infinity, which JSON does not have, become null."""
    return json.dumps(json.loads(json.dumps(answer), parse_constant=lambda _: None))


class Journal:
    """Appends rows for as long as the run lives. Rows that a full disk refuses wait, the newest WAITING_ROWS of them,
    and are written when there is room again: a run does not die of its notes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[tuple[str, Row]] = deque(maxlen=WAITING_ROWS)

    def write(self, kind: str, row: Row) -> None:
        self._waiting.append((kind, {"time": round(time.time(), 3)} | row))
        try:
            while self._waiting:
                append_row(self._path, *self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            log.warning("%s: %s; %d rows wait", self._path, error, len(self._waiting))


def append_row(path: Path, kind: str, row: Row) -> None:
    """Appends one row, on a line of its own behind a torn one; it is written in one call, so that a reader never sees
    half of it."""
    line = to_json({"kind": kind, "time": round(time.time(), 3)} | row).encode() + b"\n"
    with path.open("ab+", buffering=0) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_rows(path: Path) -> list[Row]:
    """The rows that count, oldest first: superseded `step` and `eval` rows are left out, as is what is no row."""
    rows: list[Row] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return rows
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(row, dict) or "kind" not in row:
            continue
        if row["kind"] in ("start", "rewind"):
            at = row.get("step", 0)
            rows = [old for old in rows if old["kind"] not in ("step", "eval") or _counts(old.get("step", 0), at)]
        rows.append(row)
    return rows


def _counts(step: int, start: int) -> bool:
    """Whether what was recorded after `step` steps still stands when a stretch begins at `start`: what lies at the
    boundary does, save at the very beginning, which is measured anew."""
    return step < start or step == start > 0


def learned(row: Row) -> bool:
    """Whether a `step` row has figures of the training: of a skipped step, or one without any anchor, they say
    nothing."""
    return row["loss"] is not None and not row.get("skipped", False) and row.get("anchors", 1) > 0


def of_kind(rows: list[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]
