"""Rows in chunks: the unit of work that a process tokenises, the same on any number of processes.

Borders and copies are pure functions of the data and the sources, so interrupted work goes on behind the last whole
chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from producer.config import SourceConfig
from producer.inputs import read_source
from producer.masks import Tokenised
from producer.meter import Meter
from producer.rows import Payload, SkipRow, row_of
from producer.samples import Item, SampleMaker
from protocol.dataset import eligible_anchors, eligible_of
from protocol.keyed import words

CHUNK_ROWS = 256
_CHUNK_BYTES = 1 << 20
# Which rows a fractional weight takes is the same in every run, whatever its seed: the data set is made once.
_MIX_KEY = 7


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file of source number `source`: (row number, content, how often it counts). `at`: bytes
    of all sources that were read by then."""

    source: int
    path: str
    rows: list[tuple[int, Payload, int]]
    unused: int
    at: int


@dataclass(frozen=True)
class Done:
    """What a chunk's rows became. Per sample: its length and eligible anchors, the row (by place in the chunk) that it
    is of, and the tokens and supervised tokens that `max_length` cut off. Per row: its format, whether it has reasoning
    and tool calls, and why it was skipped."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    eligible: NDArray[np.int64]
    row: NDArray[np.int64]
    cut_tokens: NDArray[np.int64]
    cut_supervised: NDArray[np.int64]
    kinds: list[str]
    reasons: list[bool]
    calls: list[bool]
    skips: dict[int, SkipRow]
    left_out: dict[int, dict[str, int]]


def chunks_of(sources: Sequence[SourceConfig], meter: Meter) -> Iterator[Chunk]:
    """All rows of all sources, in order; `meter` is told. Raises RequestError for what cannot be read."""
    for place, source in enumerate(sources):
        count, path = 0, ""
        rows: list[tuple[int, Payload]] = []
        size = 0
        for file, number, payload in read_source(source.path, meter):
            if rows and (str(file) != path or len(rows) == CHUNK_ROWS or size >= _CHUNK_BYTES):
                yield _weighted(place, path, rows, meter.at, source.weight, count)
                rows, size, count = [], 0, count + 1
            path = str(file)
            rows.append((number, payload))
            size += len(payload) if isinstance(payload, bytes) else _CHUNK_BYTES // CHUNK_ROWS
        if rows:
            yield _weighted(place, path, rows, meter.at, source.weight, count)


def _weighted(source: int, path: str, rows: list[tuple[int, Payload]], at: int, weight: float, count: int) -> Chunk:
    copies = np.full(len(rows), math.floor(weight))
    part = weight - math.floor(weight)
    if part:
        copies += words(len(rows), _MIX_KEY, source, count) < np.uint64(int(part * 2**64))
    used = [(*row, int(times)) for row, times in zip(rows, copies, strict=True) if times]
    return Chunk(source, path, used, len(rows) - len(used), at)


def tokenise_chunk(maker: SampleMaker, sources: Sequence[SourceConfig], chunk: Chunk) -> Done:
    """The samples of a chunk's rows, cut at the maker's `max_length`."""
    source, path = sources[chunk.source], Path(chunk.path)
    items: list[tuple[int, Item]] = []
    skips: dict[int, SkipRow] = {}
    kinds = [""] * len(chunk.rows)
    reasons, calls = ([False] * len(chunk.rows) for _ in range(2))
    for place, (number, payload, _) in enumerate(chunk.rows):
        try:
            item = maker.item(row_of(path, number, payload), source)
        except SkipRow as skip:
            skips[place] = skip
            continue
        items.append((place, item))
        kinds[place] = item.kind
        if item.conversation is not None:
            reasons[place], calls[place] = item.conversation.reasons, item.conversation.calls
    kept: list[tuple[int, Tokenised]] = []
    left_out: dict[int, dict[str, int]] = {}
    for (place, _), made in zip(items, maker.samples([item for _, item in items]), strict=True):
        if isinstance(made, SkipRow):
            skips[place] = made
            continue
        useful = [sample for sample in made.samples if _is_useful(sample.mask, maker.max_length)]
        if not useful:
            skips[place] = SkipRow("no two supervised tokens in a row within max_length", f"{maker.max_length} tokens")
            continue
        behind = len(made.samples) - len(useful)
        if made.left_out or behind:
            left_out[place] = made.left_out | ({"answer behind max_length": behind} if behind else {})
        kept += [(place, sample) for sample in useful]
    most = maker.max_length
    whole = np.asarray([len(sample.ids) for _, sample in kept], dtype=np.int64)
    lengths = whole if most is None else np.minimum(whole, most)
    mask = np.concatenate([np.empty(0, np.uint8)] + [sample.mask[:most] for _, sample in kept])
    supervised_behind = [int(sample.mask[most:].sum()) if most and len(sample.ids) > most else 0 for _, sample in kept]
    return Done(
        tokens=np.concatenate([np.empty(0, np.int32)] + [sample.ids[:most] for _, sample in kept]),
        mask=mask,
        lengths=lengths,
        eligible=eligible_of(mask, lengths),
        row=np.asarray([place for place, _ in kept], dtype=np.int64),
        cut_tokens=whole - lengths,
        cut_supervised=np.asarray(supervised_behind, dtype=np.int64),
        kinds=kinds,
        reasons=reasons,
        calls=calls,
        skips=skips,
        left_out=left_out,
    )


def _is_useful(mask: NDArray[np.uint8], max_length: int | None) -> bool:
    """Whether something is left to learn of a sample that has something to learn when it is whole."""
    return max_length is None or len(mask) <= max_length or eligible_anchors(mask[:max_length]) > 0
