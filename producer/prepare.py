"""Chat data to the token dataset, once: every row is kept or skipped with a reason, and rows = kept + skipped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from producer.config import HUB, DataConfig, SourceConfig
from producer.inputs import source_digest, source_files
from producer.preparing import PrepareReport, add, describe, length_histogram
from producer.samples import SampleMaker
from producer.spool import Spool, alone, samples_of
from producer.spooling import spool_rows
from protocol.dataset import Sample, TokenDataset, eligible_anchors, write_dataset
from protocol.errors import RequestError

# Raised whenever the same rows would become other samples than before.
FORMAT = 3
KEPT_BY_AUTO = 0.98  # of the supervised tokens
_LENGTH_MULTIPLE = 64
_PADDED_RANGE_SHOWN = 64
# Starting processes takes some seconds, so they are worth it for larger data only.
_BYTES_FOR_WORKERS = 32 << 20
_MOST_WORKERS = 16


def prepare(
    data: DataConfig,
    tokenizer: Any,
    facts: dict[str, Any],
    folder: Path,
    say: Callable[[str], None] | None = None,
    workers: int | None = None,
) -> TokenDataset:
    """The token dataset of `data.train` in `folder`: opened when its fingerprint fits, written anew otherwise.

    `facts` are the target's (`read_target_facts`). `meta` of the result holds `fingerprint`, `settings`, `report`
    (a PrepareReport as a map), `max_length`, `files` and `unused_special_ids`. The bytes are the same for any number of
    `workers` (processes; None: as many as pay). Interrupted work goes on where it was. Raises RequestError when no row
    can be used, when all or none of the tokens would be supervised, and in strict mode at the first bad row.
    """
    say = say or (lambda line: None)
    maker = SampleMaker(tokenizer, int(facts["vocab_size"]), data.limit)
    settings = _settings(data, maker)
    fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    with alone(folder, say):
        found = _existing(folder, fingerprint)
        if found is not None:
            say(f"token dataset is up to date: {len(found)} samples in {folder}")
            return found
        spool = Spool(folder.with_name(f"{folder.name}.work"), fingerprint)
        try:
            report, files = spool_rows(data, maker, spool, workers or _workers(data), say)
            meta = {"fingerprint": fingerprint, "settings": settings, "files": files}
            dataset = _written(folder, spool, report, maker, facts["eos_token_id"], meta)
        except RequestError:
            spool.discard()
            raise
        except BaseException:
            spool.close()  # to go on from its last saved state
            raise
        spool.discard()
    for line in describe(report_of(dataset)):
        say(line)
    return dataset


def report_of(dataset: TokenDataset) -> PrepareReport:
    """The report that was made when the dataset was written."""
    return msgspec.convert(dataset.meta["report"], PrepareReport)


def unused_special_ids(tokenizer: Any, vocab_size: int, seen: NDArray[np.bool_], end_ids: Any = None) -> list[int]:
    """Ids that can stand for a masked token: rows of the embedding that the data never uses.

    First the padded range (rows past the tokenizer's last id), then special and added tokens, each ascending; never
    the begin, end, pad or unknown token. `seen` `[vocab_size]` marks the ids that occur.
    """
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    named |= set(end_ids if isinstance(end_ids, list) else [end_ids])
    padded = range(len(tokenizer), vocab_size)[:_PADDED_RANGE_SHOWN]
    candidates = [*padded, *sorted(tokenizer.added_tokens_decoder)]
    return [token for token in candidates if token < vocab_size and token not in named and not seen[token]]


def _workers(data: DataConfig) -> int:
    """Processes that pay for the data's size."""
    paths = [source.path for source in data.train if not source.path.startswith(HUB)]
    size = sum(file.stat().st_size for path in paths for file in source_files(path) if file.exists())
    cores = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    return cores if size >= _BYTES_FOR_WORKERS or len(paths) < len(data.train) else 1


def _written(
    folder: Path, spool: Spool, report: PrepareReport, maker: SampleMaker, end_ids: Any, meta: dict[str, Any]
) -> TokenDataset:
    """The dataset out of a complete spool, with its report. Raises RequestError when it would be useless."""
    tokens, mask, table = spool.read()
    limit = maker.max_length or auto_length(mask, table[:, 0])
    kept: list[int] = []
    seen = np.zeros(maker.vocab_size, dtype=np.bool_)
    arrays: dict[str, NDArray[Any]] = {}

    def cut() -> Iterator[Sample]:
        for place, (whole_ids, whole_mask) in enumerate(samples_of(tokens, mask, table[:, 0])):
            ids, flags = whole_ids[:limit], whole_mask[:limit]
            if eligible_anchors(flags):
                kept.append(place)
                seen[ids] = True
                report.supervised_tokens += int(np.count_nonzero(flags))
                yield ids, flags
        if maker.max_length is None:
            _count_cut(report, limit, mask, table, kept, meta["files"])
        arrays["places"] = table[kept, 1:3]
        report.max_length = limit
        report.lengths = length_histogram(np.minimum(table[kept, 0], limit))
        _refuse_useless(report)
        meta["report"] = msgspec.to_builtins(report)
        meta["max_length"] = limit
        meta["unused_special_ids"] = unused_special_ids(maker.tokenizer, maker.vocab_size, seen, end_ids)

    return write_dataset(folder, cut(), meta, arrays)


def auto_length(mask: NDArray[np.uint8], lengths: NDArray[np.int64]) -> int:
    """The least length, in whole multiples of 64, that keeps 98 % of the supervised tokens of `mask` `[T]`, samples of
    `lengths` one behind the other; the longest sample's length where that is less."""
    longest = int(lengths.max(initial=2))
    supervised = np.zeros(longest, dtype=np.int64)
    for _, flags in samples_of(mask, mask, lengths):
        supervised[: len(flags)] += flags
    sums = np.cumsum(supervised)
    enough = int(np.searchsorted(sums, KEPT_BY_AUTO * sums[-1])) + 1
    return min(-(-enough // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, longest)


def _count_cut(
    report: PrepareReport,
    limit: int,
    mask: NDArray[np.uint8],
    table: NDArray[np.int64],
    kept: list[int],
    files: list[str],
) -> None:
    """Counts what a limit that was found last takes away: tokens, samples, and rows of which no sample is left."""
    lengths = table[:, 0]
    report.tokens = int(np.minimum(lengths[kept], limit).sum())
    report.truncated = int(np.count_nonzero(lengths[kept] > limit))
    report.cut_tokens = int(lengths.sum()) - report.tokens
    report.cut_supervised_tokens = int(np.count_nonzero(mask)) - report.supervised_tokens
    report.samples = len(kept)
    rest = set(table[kept, 3].tolist())
    for _, file, row, count in table[np.setdiff1d(np.arange(len(table)), kept)].tolist():
        if count in rest:
            add(report.left_out, "answer behind max_length")
            continue
        rest.add(count)
        reason = "no two supervised tokens in a row within max_length"
        add(report.skipped, reason)
        report.examples.setdefault(reason, [f"{files[file]}:{row}"])
        report.kept -= 1


def _refuse_useless(report: PrepareReport) -> None:
    if not report.kept:
        counts = report.skipped.items()
        why = "; ".join(f"{count} x {reason} ({report.examples[reason][0]})" for reason, count in counts)
        raise RequestError(f"data.train: none of {report.rows} rows can be used: {why or 'the files are empty'}")
    if report.supervised_tokens == report.tokens:
        raise RequestError(
            "data.train: 100 % of the tokens are supervised, prompts included; give loss masks that mark answers only"
        )


def _settings(data: DataConfig, maker: SampleMaker) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "sources": [source_settings(source) for source in data.train],
        "tokenizer": maker.tokenizer_id,
        "template": maker.tokenizer.chat_template,
        "vocab_size": maker.vocab_size,
        "max_length": data.max_length,
        "max_samples": data.max_samples,
    }


def source_settings(source: SourceConfig) -> dict[str, Any]:
    """What decides the rows of a source and what becomes of them, its content included. Raises RequestError when a
    file cannot be read."""
    settings: dict[str, Any] = {"sha256": source_digest(source.path), "format": source.format}
    return settings | {"thinking": source.thinking, "turns": source.turns, "weight": source.weight}


def _existing(folder: Path, fingerprint: str) -> TokenDataset | None:
    if not folder.exists():
        return None
    try:
        dataset = TokenDataset.open(folder)
    except RequestError:
        return None  # damaged or half deleted: written anew
    return dataset if dataset.fingerprint == fingerprint else None
