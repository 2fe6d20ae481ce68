"""What `draftwire prepare` counts and says: rows in = rows kept + rows skipped by reason, and what was cut."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from producer.config import SourceConfig

_LENGTH_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_BAR_CHARS = 30


class SourceReport(msgspec.Struct, kw_only=True):
    """One source: rows read, how many of each format, and what came of them. `unused` rows its weight left out."""

    path: str
    rows: int = 0
    unused: int = 0
    kept: int = 0
    samples: int = 0
    tokens: int = 0
    formats: dict[str, int] = {}


class PrepareReport(msgspec.Struct, kw_only=True):
    """What `draftwire prepare --json` prints.

    `rows` = `kept` + those `skipped` by reason + `unused` (left out by a weight). `examples` holds a few `file:line`
    places per skip reason. `left_out` counts answers inside kept rows that are not learned, by reason. `cut_tokens`
    and `cut_supervised_tokens` lay behind `max_length`. `lengths` counts samples by length, keys are upper bounds.
    `with_reasoning` and `with_tool_calls` count kept rows; of rows of token ids nothing is known.
    """

    rows: int = 0
    kept: int = 0
    unused: int = 0
    skipped: dict[str, int] = {}
    examples: dict[str, list[str]] = {}
    left_out: dict[str, int] = {}
    with_reasoning: int = 0
    with_tool_calls: int = 0
    samples: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    cut_tokens: int = 0
    cut_supervised_tokens: int = 0
    max_length: int = 0
    lengths: dict[str, int] = {}
    sources: list[SourceReport] = []


def new_report(sources: Sequence[SourceConfig]) -> PrepareReport:
    """A report of nothing yet."""
    return PrepareReport(sources=[SourceReport(path=source.path) for source in sources])


def add(counts: dict[str, int], reason: str, count: int = 1) -> None:
    """Counts `reason`."""
    counts[reason] = counts.get(reason, 0) + count


def length_histogram(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Samples by length: upper bound (inclusive, as text) to count, empty ends left out."""
    edges = [edge for edge in _LENGTH_EDGES if edge < (lengths.max() if len(lengths) else 0)]
    bounds = [*edges[1:], int(lengths.max())] if len(lengths) else []
    counts = np.histogram(lengths, [0, *(bound + 1 for bound in bounds)])[0] if bounds else np.empty(0)
    found = {str(bound): int(count) for bound, count in zip(bounds, counts, strict=True)}
    while found and not found[next(iter(found))]:
        del found[next(iter(found))]
    return found


def describe(report: PrepareReport) -> list[str]:
    """The report as lines for a person."""
    lines = [line for source in report.sources for line in _source_lines(source, report)]
    unused = f", {report.unused:,} left out by their source's weight" if report.unused else ""
    lines.append(
        f"{report.rows:,} rows: {report.kept:,} kept, {sum(report.skipped.values()):,} skipped{unused}; "
        f"{report.samples:,} samples"
    )
    if report.with_reasoning or report.with_tool_calls:
        lines.append(f"{report.with_reasoning:,} rows with reasoning, {report.with_tool_calls:,} with tool calls")
    share = 100 * report.supervised_tokens / max(report.tokens, 1)
    lines.append(f"{report.tokens:,} tokens, {report.supervised_tokens:,} supervised ({share:.1f} %)")
    whole = report.supervised_tokens + report.cut_supervised_tokens
    lost = 100 * report.cut_supervised_tokens / max(whole, 1)
    lines.append(
        f"max_length {report.max_length:,} cuts {report.truncated:,} samples: {report.cut_tokens:,} tokens, "
        f"{report.cut_supervised_tokens:,} of them supervised ({lost:.1f} % of the supervised)"
    )
    most = max(report.lengths.values(), default=1)
    for bound, count in report.lengths.items():
        lines.append(f"  up to {int(bound):>7,} tokens {count:>11,} {'#' * round(_BAR_CHARS * count / most)}")
    for reason, count in sorted(report.skipped.items(), key=lambda entry: -entry[1]):
        lines.append(f"  skipped {count:,}: {reason} (first: {report.examples[reason][0]})")
    for reason, count in sorted(report.left_out.items(), key=lambda entry: -entry[1]):
        lines.append(f"  {count:,} answers inside kept rows are not learned: {reason}")
    return lines


def _source_lines(source: SourceReport, report: PrepareReport) -> list[str]:
    told = sum(source.formats.values())
    lines = [
        f"{source.path}: {kind}, {count:,} of {source.rows:,} rows"
        for kind, count in sorted(source.formats.items(), key=lambda entry: (-entry[1], entry[0]))
    ]
    if not told:
        lines = [f"{source.path}: no row of a known format among {source.rows:,}"]
    if len(report.sources) > 1:
        share = 100 * source.tokens / max(report.tokens, 1)
        lines.append(
            f"{source.path}: {source.kept:,} rows kept, {source.samples:,} samples, {source.tokens:,} tokens "
            f"({share:.1f} % of all)"
        )
    return lines
