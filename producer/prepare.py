"""Chat data to the token dataset, once: every row is kept or skipped with a reason, and rows = kept + skipped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from producer.config import HUB, DataConfig, SourceConfig
from producer.inputs import source_digest, source_files
from producer.preparing import PrepareReport
from producer.samples import SampleMaker
from producer.spool import Spool, alone
from producer.spooling import spool_rows
from producer.unspool import dataset_of
from protocol.dataset import TokenDataset
from protocol.errors import RequestError

# Raised whenever the same rows would become other samples than before.
FORMAT = 4
# Starting processes takes a second, so they are worth it for larger data only.
_BYTES_FOR_WORKERS = 8 << 20
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
            dataset = dataset_of(folder, spool, report, maker, facts["eos_token_id"], meta)
        except RequestError:
            spool.discard()
            raise
        except BaseException:
            spool.close()  # to go on from its last saved state
            raise
        spool.discard()
    return dataset


def report_of(dataset: TokenDataset) -> PrepareReport:
    """The report that was made when the dataset was written."""
    return msgspec.convert(dataset.meta["report"], PrepareReport)


def _workers(data: DataConfig) -> int:
    """Processes that pay for the data's size."""
    paths = [source.path for source in data.train if not source.path.startswith(HUB)]
    size = sum(file.stat().st_size for path in paths for file in source_files(path) if file.exists())
    cores = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    return cores if size >= _BYTES_FOR_WORKERS or len(paths) < len(data.train) else 1


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
