"""The long part of `prepare`: all rows read, tokenised and counted, in order, into the spool."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from producer.chunks import Chunk, Done, chunks_of
from producer.config import DataConfig
from producer.inputs import source_bytes
from producer.meter import Meter, Pace
from producer.pool import tokenised
from producer.preparing import PrepareReport, add, new_report
from producer.rows import Skips
from producer.samples import SampleMaker
from producer.spool import SAMPLE_COLUMNS, Spool

SAY_EVERY_S = 5.0
SAVE_EVERY_S = 20.0


def spool_rows(
    data: DataConfig, maker: SampleMaker, spool: Spool, workers: int, say: Callable[[str], None]
) -> tuple[PrepareReport, list[str]]:
    """Reads and tokenises all rows into the spool, from where an earlier attempt stopped.

    Returns the counts, and the files that rows came from. Raises RequestError for what cannot be read, and in strict
    mode at the first bad row.
    """
    report, begun = new_report(data.train), 0
    files: list[str] = []
    if spool.state:
        report = msgspec.convert(spool.state["report"], PrepareReport)
        files, begun = list(spool.state["files"]), int(spool.state["chunks"])
        say(f"prepare: going on behind {report.rows:,} rows that an interrupted attempt has done")
    skips = Skips(data.strict)
    skips.counts, skips.examples = report.skipped, report.examples
    said = saved = time.monotonic()
    meter = Meter(sum(source_bytes(source.path) for source in data.train))
    pace = Pace(report, meter.total_bytes, data.max_samples)
    rest = (chunk for place, chunk in enumerate(chunks_of(data.train, meter)) if place >= begun)
    for count, (chunk, done) in enumerate(tokenised(rest, maker, data.train, workers), start=begun + 1):
        if files[-1:] != [chunk.path]:
            files.append(chunk.path)
        full = _add(chunk, done, report, skips, spool, len(files) - 1, data.max_samples)
        now = time.monotonic()
        if now - said >= SAY_EVERY_S:
            said = now
            say(pace.line(report, chunk.at))
        if full:
            break
        if now - saved >= SAVE_EVERY_S:
            spool.save({"report": msgspec.to_builtins(report), "files": files, "chunks": count})
            saved = time.monotonic()
    return report, files


def _add(
    chunk: Chunk, done: Done, report: PrepareReport, skips: Skips, spool: Spool, file: int, most: int | None
) -> bool:
    """Counts a chunk row by row and keeps its samples; True once `most` samples are there."""
    source = report.sources[chunk.source]
    report.rows, report.unused = report.rows + chunk.unused, report.unused + chunk.unused
    source.rows, source.unused = source.rows + chunk.unused, source.unused + chunk.unused
    firsts = np.searchsorted(done.row, np.arange(len(chunk.rows) + 1))
    taken: list[int] = []  # samples of this chunk, in order, some of them several times
    rows: list[tuple[int, int]] = []
    for place, (number, _, copies) in enumerate(chunk.rows):
        if most is not None and report.samples + len(taken) >= most:
            break
        report.rows += 1
        source.rows += 1
        if done.kinds[place]:
            add(source.formats, done.kinds[place])
        if place in done.skips:
            skips.add(f"{chunk.path}:{number}", done.skips[place])
            continue
        report.kept += 1
        source.kept += 1
        report.with_reasoning += done.reasons[place]
        report.with_tool_calls += done.calls[place]
        for reason, count in done.left_out.get(place, {}).items():
            add(report.left_out, reason, count)
        samples = [*range(int(firsts[place]), int(firsts[place + 1]))] * copies
        if most is not None:
            samples = samples[: most - report.samples - len(taken)]
        taken += samples
        rows += [(number, report.rows)] * len(samples)
    picked = np.asarray(taken, dtype=np.int64)
    tokens, mask = _picked(done, picked)
    table = np.empty((len(picked), SAMPLE_COLUMNS), dtype=np.int64)
    table[:, 0], table[:, 1], table[:, 4] = done.lengths[picked], file, done.eligible[picked]
    table[:, 2:4] = np.asarray(rows, dtype=np.int64).reshape(-1, 2)
    spool.append(tokens, mask, table)
    for counted in (report, source):
        counted.samples += len(picked)
        counted.tokens += len(tokens)
    report.truncated += int(np.count_nonzero(done.cut_tokens[picked]))
    report.cut_tokens += int(done.cut_tokens[picked].sum())
    report.cut_supervised_tokens += int(done.cut_supervised[picked].sum())
    return most is not None and report.samples >= most


def _picked(done: Done, picked: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Tokens and mask of some samples of a chunk, one behind the other."""
    if len(picked) == len(done.lengths) and (np.diff(picked, prepend=-1) == 1).all():
        return done.tokens, done.mask
    ends = np.cumsum(done.lengths)
    pieces = [slice(int(ends[at] - done.lengths[at]), int(ends[at])) for at in picked]
    tokens = np.concatenate([done.tokens[:0], *(done.tokens[piece] for piece in pieces)])
    return tokens, np.concatenate([done.mask[:0], *(done.mask[piece] for piece in pieces)])
