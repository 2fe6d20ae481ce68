"""How far `prepare` is with reading its sources: bytes as they lie on the disk, packed ones too, of bytes in all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from producer.preparing import PrepareReport
from protocol.units import show_seconds


class Meter:
    """Told of each part of the data (a file, a hub set) in turn; `at` is how much of `total` bytes was read."""

    def __init__(self, total_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self._before, self._size = 0, 0
        self._read: Callable[[], int] = int

    @contextmanager
    def passing(self, size_bytes: int, read: Callable[[], int]) -> Iterator[None]:
        """While the next part is read: `read` says how many of its bytes were."""
        self._size, self._read = size_bytes, read
        yield
        self._before += size_bytes
        self._size, self._read = 0, int

    @property
    def at(self) -> int:
        return self._before + min(self._read(), self._size)


class Pace:
    """The line that says how far `prepare` is, how fast, and how long it still takes; `max_samples` may end it before
    all is read. `report`: what an earlier attempt has done already."""

    def __init__(self, report: PrepareReport, total_bytes: int, max_samples: int | None) -> None:
        self._total_bytes, self._max_samples = total_bytes, max_samples
        self._tokens = report.tokens
        self._started_s = self._from_s = time.monotonic()
        self._from: float | None = None if report.rows else 0.0

    def line(self, report: PrepareReport, at: int) -> str:
        """With `at` bytes read."""
        shares = [at / self._total_bytes if self._total_bytes else 0.0]
        if self._max_samples is not None:
            shares.append(report.samples / self._max_samples)
        share, passed_s = min(max(shares), 1.0), time.monotonic() - self._started_s
        rate = (report.tokens - self._tokens) / max(passed_s, 1e-9)
        return (
            f"prepare: {100 * share:.0f} %, {report.rows:,} rows, {report.kept:,} kept, {report.tokens:,} tokens, "
            f"{rate:,.0f} tokens/s, left: {self._left(share)}"
        )

    def _left(self, share: float) -> str:
        """From the share that was done since the beginning, or since the first line where work goes on: until then what
        was done before is passed over."""
        if self._from is None:
            self._from, self._from_s = share, time.monotonic()
        if share <= self._from:
            return "not known yet"
        return show_seconds((1 - share) * (time.monotonic() - self._from_s) / (share - self._from))
