"""`draftwire prepare` and `draftwire generate`: the data commands, on the target that a config names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from launch.config import Config
from launch.machine import visible_gpus
from launch.placement import place
from launch.start import dataset_folder
from producer.locate import locate_target, read_target_facts, target_fingerprint

Say = Callable[[str], None]


def prepare_dataset(config: Config, say: Say) -> tuple[dict[str, Any], list[str]]:
    """Prepares the token dataset of a config; the report and the same as lines. Raises RequestError."""
    from producer.prepare import describe, prepare, report_of
    from producer.template import load_tokenizer

    folder = locate_target(config.target, say)
    tokenizer = load_tokenizer(folder, config.target.trust_remote_code)
    dataset = prepare(config.data, tokenizer, read_target_facts(folder), dataset_folder(config), say)
    report = report_of(dataset)
    facts = msgspec.to_builtins(report) | {"folder": str(dataset_folder(config))}
    return facts, [*describe(report), f"dataset in {dataset_folder(config)}"]


def generate_data(
    config: Config, out: Path, max_new_tokens: int, batch_rows: int, with_tokens: bool, say: Say
) -> tuple[dict[str, Any], list[str]]:
    """Answers the prompts of data.train with the target, into `out`. Raises RequestError."""
    from producer.generate import generate_answers
    from producer.samples import SampleMaker
    from producer.target import load_target, stop_ids
    from producer.template import load_tokenizer

    folder = locate_target(config.target, say)
    device = place(config.gpus, len(visible_gpus())).producers[0]
    tokenizer = load_tokenizer(folder, config.target.trust_remote_code)
    target = load_target(folder, config.target, device)
    maker = SampleMaker(tokenizer, int(target.facts["vocab_size"]), config.data.max_length)
    report = generate_answers(
        config.data,
        target,
        maker,
        out,
        stop_ids=stop_ids(target, tokenizer),
        max_new_tokens=max_new_tokens,
        weights=target_fingerprint(folder, config.target, device),
        with_tokens=with_tokens,
        batch_rows=batch_rows,
        say=say,
    )
    facts = msgspec.to_builtins(report)
    return facts, [
        ", ".join(f"{value} {name}" for name, value in facts.items()),
        f"answers in {out}, how they were made in {out}.provenance.json",
    ]
