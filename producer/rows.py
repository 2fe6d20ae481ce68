"""JSONL files row by row, so that one bad line costs one row and is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import RequestError

_BOM = b"\xef\xbb\xbf"


class SkipRow(Exception):
    """This row cannot be used: `reason` is a short fixed phrase to count by, `detail` is about this row alone."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Row:
    """Line `line` (1-based) of `path`: a JSON object, or why it is none."""

    path: Path
    line: int
    value: dict[str, Any]
    bad: SkipRow | None = None

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


def read_rows(path: Path) -> Iterator[Row]:
    """Every row of a JSONL file, good or bad, in order.

    A byte order mark, CRLF endings and blank lines are no fault; a blank line is no row. A line that is not UTF-8, not
    JSON or not an object comes back with `bad` set. Raises RequestError when the file cannot be opened.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}; check the path under [data]") from None
    with stream:
        for number, raw in enumerate(stream, start=1):
            line = raw.removeprefix(_BOM) if number == 1 else raw
            if line.strip():
                try:
                    yield Row(path, number, _parse(line))
                except SkipRow as bad:
                    yield Row(path, number, {}, bad)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SkipRow("not UTF-8", f"byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise SkipRow("not JSON", str(error)) from None
    if not isinstance(value, dict):
        raise SkipRow("not a JSON object", f"it is a {type(value).__name__}")
    return value


class Skips:
    """Counts skipped rows by reason and keeps a few places per reason; in strict mode the first one is an error."""

    def __init__(self, strict: bool, examples: int = 5) -> None:
        self.strict = strict
        self.counts: dict[str, int] = {}
        self.examples: dict[str, list[str]] = {}
        self._keep = examples

    def add(self, place: str, skip: SkipRow) -> None:
        """Counts one row at `place` (file:line). Raises RequestError instead when strict."""
        if self.strict:
            raise RequestError(f"{place}: {skip} (data.strict is on; fix the row or set strict = false to skip it)")
        self.counts[skip.reason] = self.counts.get(skip.reason, 0) + 1
        shown = self.examples.setdefault(skip.reason, [])
        if len(shown) < self._keep:
            shown.append(f"{place}: {skip.detail}" if skip.detail else place)
