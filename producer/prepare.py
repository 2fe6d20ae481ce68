"""Chat data to the token dataset, once: every row is kept or skipped with a reason, and rows = kept + skipped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from producer.config import DataConfig, SourceConfig
from producer.rows import SkipRow, Skips
from producer.samples import SampleMaker
from protocol.dataset import Sample, TokenDataset, write_dataset
from protocol.errors import RequestError

# Raised whenever the same rows would become other samples than before.
FORMAT = 2
_PADDED_RANGE_SHOWN = 64
_PROGRESS_ROWS = 20_000


class PrepareReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `draftwire prepare --json` prints. `examples` holds a few `file:line` places per skip reason."""

    rows: int
    kept: int
    skipped: dict[str, int]
    examples: dict[str, list[str]]
    truncated: int
    tokens: int
    supervised_tokens: int


def prepare(
    data: DataConfig,
    tokenizer: Any,
    facts: dict[str, Any],
    folder: Path,
    say: Callable[[str], None] | None = None,
) -> TokenDataset:
    """The token dataset of `data.train` in `folder`: opened when its fingerprint fits, written anew otherwise.

    `facts` are the target's (`read_target_facts`). `meta` of the result holds `fingerprint`, `settings`, `report`
    (a PrepareReport as a map) and `unused_special_ids`. Raises RequestError when no row can be used, when all or none
    of the tokens would be supervised, and in strict mode at the first bad row.
    """
    say = say or (lambda line: None)
    maker = SampleMaker(tokenizer, int(facts["vocab_size"]), data.max_length)
    settings = _settings(data, maker)
    fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    found = _existing(folder, fingerprint)
    if found is not None:
        say(f"token dataset is up to date: {len(found)} samples in {folder}")
        return found
    meta: dict[str, Any] = {"fingerprint": fingerprint, "settings": settings}
    dataset = write_dataset(folder, _samples(data, maker, facts, meta, say), meta)
    for line in describe(report_of(dataset)):
        say(line)
    return dataset


def report_of(dataset: TokenDataset) -> PrepareReport:
    """The report that was made when the dataset was written."""
    return msgspec.convert(dataset.meta["report"], PrepareReport)


def describe(report: PrepareReport) -> list[str]:
    """The report as lines for a person."""
    share = 100 * report.supervised_tokens / max(report.tokens, 1)
    lines = [
        f"{report.rows} rows: {report.kept} kept ({report.truncated} cut at max_length), "
        f"{sum(report.skipped.values())} skipped",
        f"{report.tokens} tokens, {report.supervised_tokens} supervised ({share:.1f} %)",
    ]
    for reason, count in sorted(report.skipped.items(), key=lambda entry: -entry[1]):
        lines.append(f"  skipped {count}: {reason} (first: {report.examples[reason][0]})")
    return lines


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


def _samples(
    data: DataConfig, maker: SampleMaker, facts: dict[str, Any], meta: dict[str, Any], say: Callable[[str], None]
) -> Iterator[Sample]:
    skips = Skips(data.strict)
    seen = np.zeros(maker.vocab_size, dtype=np.bool_)
    rows = kept = truncated = tokens = supervised = 0
    for item in maker.items(data.train):
        if kept == data.max_samples:
            break
        rows += 1
        if rows % _PROGRESS_ROWS == 0:
            say(f"prepare: {rows} rows, {kept} kept, {tokens} tokens")
        if isinstance(item, tuple):
            skips.add(item[0].place, item[1])
            continue
        try:
            sample = maker.sample(item)
        except SkipRow as skip:
            skips.add(item.row.place, skip)
            continue
        kept += 1
        truncated += sample.truncated
        tokens += len(sample.ids)
        supervised += int(sample.mask.sum())
        seen[sample.ids] = True
        yield sample.ids, sample.mask
    _refuse_useless(rows, kept, tokens, supervised, skips)
    meta["unused_special_ids"] = unused_special_ids(maker.tokenizer, maker.vocab_size, seen, facts["eos_token_id"])
    meta["report"] = msgspec.to_builtins(
        PrepareReport(
            rows=rows,
            kept=kept,
            skipped=skips.counts,
            examples=skips.examples,
            truncated=truncated,
            tokens=tokens,
            supervised_tokens=supervised,
        )
    )


def _refuse_useless(rows: int, kept: int, tokens: int, supervised: int, skips: Skips) -> None:
    if not kept:
        why = "; ".join(f"{count} x {reason} ({skips.examples[reason][0]})" for reason, count in skips.counts.items())
        raise RequestError(f"data.train: none of {rows} rows can be used: {why or 'the files are empty'}")
    if supervised == tokens:
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
    """What decides the rows of a source, its content included. Raises RequestError when the file cannot be read."""
    path = Path(source.path).expanduser()
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise RequestError(f"[data] {path}: cannot be read: {error.strerror}") from None
    return {"sha256": digest, "format": source.format, "thinking": source.thinking}


def _existing(folder: Path, fingerprint: str) -> TokenDataset | None:
    if not folder.exists():
        return None
    try:
        dataset = TokenDataset.open(folder)
    except RequestError:
        return None  # damaged or half deleted: written anew
    return dataset if dataset.fingerprint == fingerprint else None
