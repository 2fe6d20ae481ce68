"""The dataset out of what `prepare` has spooled, with its report: samples cut at a limit that is found last, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from producer.preparing import PrepareReport, add, length_histogram
from producer.samples import SampleMaker
from producer.spool import Spool
from protocol.dataset import Sample, TokenDataset, adopt_dataset, eligible_anchors, write_dataset
from protocol.errors import RequestError

KEPT_BY_AUTO = 0.98  # of the supervised tokens
_LENGTH_MULTIPLE = 64
_PADDED_RANGE_SHOWN = 64


def dataset_of(
    folder: Path, spool: Spool, report: PrepareReport, maker: SampleMaker, end_ids: Any, meta: dict[str, Any]
) -> TokenDataset:
    """The dataset of a complete spool in `folder`; `report` is completed and becomes part of `meta`. Raises
    RequestError when it would be useless."""
    table = spool.table()
    if maker.max_length is None:
        return _cut_last(folder, spool, table, report, maker, end_ids, meta)
    seen = np.zeros(maker.vocab_size, dtype=np.bool_)
    for tokens, mask, _ in spool.pieces(table[:, 0]):
        seen[tokens] = True
        report.supervised_tokens += int(np.count_nonzero(mask))
    _complete(report, meta, maker, table[:, 0], maker.max_length, seen, end_ids)
    arrays = {"places": table[:, 1:3]}
    return adopt_dataset(folder, spool.files, table[:, 0], table[:, 4], report.supervised_tokens, meta, arrays)


def _cut_last(
    folder: Path,
    spool: Spool,
    table: NDArray[np.int64],
    report: PrepareReport,
    maker: SampleMaker,
    end_ids: Any,
    meta: dict[str, Any],
) -> TokenDataset:
    lengths = table[:, 0]
    limit, supervised = auto_length((mask, lengths[part]) for _, mask, part in spool.pieces(lengths))
    kept: list[int] = []
    seen = np.zeros(maker.vocab_size, dtype=np.bool_)
    arrays: dict[str, NDArray[Any]] = {}

    def cut() -> Iterator[Sample]:
        for tokens, mask, part in spool.pieces(lengths):
            ends = np.cumsum(lengths[part])
            for place, end, length in zip(range(part.start, part.stop), ends.tolist(), lengths[part].tolist(),
                                          strict=True):  # fmt: skip
                piece = slice(end - length, min(end, end - length + limit))
                if eligible_anchors(mask[piece]):
                    kept.append(place)
                    seen[tokens[piece]] = True
                    report.supervised_tokens += int(np.count_nonzero(mask[piece]))
                    yield tokens[piece], mask[piece]
        _count_cut(report, limit, supervised, table, kept, meta["files"])
        arrays["places"] = table[kept, 1:3]
        _complete(report, meta, maker, np.minimum(lengths[kept], limit), limit, seen, end_ids)

    return write_dataset(folder, cut(), meta, arrays)


def _complete(
    report: PrepareReport,
    meta: dict[str, Any],
    maker: SampleMaker,
    lengths: NDArray[np.int64],
    limit: int,
    seen: NDArray[np.bool_],
    end_ids: Any,
) -> None:
    """Puts into the report and into `meta` what only the whole data tells. Raises RequestError."""
    report.max_length = limit
    report.lengths = length_histogram(lengths)
    _refuse_useless(report)
    meta["report"] = msgspec.to_builtins(report)
    meta["max_length"] = limit
    meta["unused_special_ids"] = unused_special_ids(maker.tokenizer, maker.vocab_size, seen, end_ids)


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


def auto_length(samples: Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]) -> tuple[int, int]:
    """The least length, in whole multiples of 64, that keeps 98 % of the supervised tokens (the longest sample's length
    where that is less), and how many supervised tokens there are. `samples`: masks `[T]` of several samples, one behind
    the other, with their lengths `[n]`."""
    at = np.zeros(2, dtype=np.int64)  # supervised tokens by their place in a sample
    longest = 2
    for mask, lengths in samples:
        longest = max(longest, int(lengths.max()))
        ends = np.cumsum(lengths)
        places = np.arange(len(mask)) - np.repeat(ends - lengths, lengths)
        found = np.bincount(places[mask != 0], minlength=len(at))
        found[: len(at)] += at
        at = found
    sums = np.cumsum(at)
    enough = int(np.searchsorted(sums, KEPT_BY_AUTO * sums[-1])) + 1
    return min(-(-enough // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, longest), int(sums[-1])


def _count_cut(
    report: PrepareReport,
    limit: int,
    supervised: int,
    table: NDArray[np.int64],
    kept: list[int],
    files: list[str],
) -> None:
    """Counts what a limit that was found last takes away of `supervised` tokens: tokens, samples, and rows of which no
    sample is left."""
    lengths = table[:, 0]
    report.tokens = int(np.minimum(lengths[kept], limit).sum())
    report.truncated = int(np.count_nonzero(lengths[kept] > limit))
    report.cut_tokens = int(lengths.sum()) - report.tokens
    report.cut_supervised_tokens = supervised - report.supervised_tokens
    report.samples = len(kept)
    rest = set(table[kept, 3].tolist())
    for _, file, row, count, _ in table[np.setdiff1d(np.arange(len(table)), kept)].tolist():
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
