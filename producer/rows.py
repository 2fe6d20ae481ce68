"""One row of a data file: where it stands, what it holds, and the count of those that cannot be used."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import RequestError

_BOM = b"\xef\xbb\xbf"

# What a reader hands on: a line of a JSONL file as it is, or the value that a table or an array held.
Payload = bytes | Any


class SkipRow(Exception):
    """This row cannot be used: `reason` is a short fixed phrase to count by, `detail` is about this row alone."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Row:
    """Row `line` (1-based; the line in a JSONL file) of `path`: a JSON object, or why it is none."""

    path: Path
    line: int
    value: dict[str, Any]
    bad: SkipRow | None = None

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


def row_of(path: Path, number: int, payload: Payload) -> Row:
    """The row that a reader found. A line that is not UTF-8, not JSON or not an object comes back with `bad` set."""
    try:
        return Row(path, number, _parse(payload, number))
    except SkipRow as bad:
        return Row(path, number, {}, bad)


def _parse(payload: Payload, number: int) -> dict[str, Any]:
    value = payload
    if isinstance(payload, bytes):
        line = payload.removeprefix(_BOM) if number == 1 else payload
        try:
            value = _decoded(line)
        except UnicodeDecodeError as error:
            raise SkipRow("not UTF-8", f"byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise SkipRow("not JSON", str(error)) from None
    if not isinstance(value, dict):
        raise SkipRow("not a JSON object", f"it is a {type(value).__name__}")
    return value


def _decoded(line: bytes) -> Any:
    """JSON by the fast reader; what it does not take (NaN, half a surrogate pair) or refuses, by the standard one."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return json.loads(line.decode("utf-8"))


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
