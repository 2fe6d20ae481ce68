"""`draftwire prepare` and `draftwire generate`: the data commands, on the target that a config names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from launch.config import Config
from launch.machine import visible_gpus
from launch.placement import place
from launch.start import dataset_folder
from producer.chat_server import Server
from producer.decoding import Decoding, check_decoding
from producer.locate import locate_target, read_target_facts, target_fingerprint

Say = Callable[[str], None]


def prepare_dataset(
    config: Config, say: Say, workers: int | None = None, show: int = 0, colour: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Prepares the token dataset of a config; the report and the same as lines, `show` samples among them, what is
    supervised in `colour`. Raises RequestError."""
    from producer.prepare import prepare, report_of
    from producer.preparing import describe
    from producer.show import show_samples
    from producer.template import load_tokenizer

    folder = locate_target(config.target, say)
    tokenizer = load_tokenizer(folder, config.target.trust_remote_code)
    dataset = prepare(config.data, tokenizer, read_target_facts(folder), dataset_folder(config), say, workers)
    report = report_of(dataset)
    facts = msgspec.to_builtins(report) | {"folder": str(dataset_folder(config))}
    shown = show_samples(dataset, tokenizer, show, colour) if show else []
    return facts, [*describe(report), *shown, f"dataset in {dataset_folder(config)}"]


def generate_data(
    config: Config, out: Path, decoding: Decoding, batch_rows: int, say: Say
) -> tuple[dict[str, Any], list[str]]:
    """Answers the prompts of data.train with the target, into `out`. Raises RequestError."""
    from producer.division import check_division
    from producer.generate import generate_answers
    from producer.ranks import loaded
    from producer.samples import SampleMaker
    from producer.target import stop_ids
    from producer.template import load_tokenizer

    check_decoding(decoding)
    _say_of_weights(config, say)
    folder = locate_target(config.target, say)
    devices = place(config.gpus, len(visible_gpus()), config.target.tensor_parallel).by_producer[0]
    check_division(folder, config.target, read_target_facts(folder))
    tokenizer = load_tokenizer(folder, config.target.trust_remote_code)
    with TemporaryDirectory() as logs, loaded(folder, config.target, devices, Path(logs) / "generate.log") as target:
        maker = SampleMaker(tokenizer, int(target.facts["vocab_size"]), config.data.limit)
        report = generate_answers(
            config.data,
            target,
            maker,
            out,
            stop_ids=stop_ids(target, tokenizer),
            decoding=decoding,
            weights=target_fingerprint(folder, config.target, devices[0]),
            batch_rows=batch_rows,
            say=say,
        )
    return _answered(msgspec.to_builtins(report), out)


def generate_served(
    config: Config, out: Path, decoding: Decoding, server: Server, model: str | None, concurrency: int, say: Say
) -> tuple[dict[str, Any], list[str]]:
    """The same through a server; of the target only its config.json and tokenizer are needed. Raises RequestError."""
    from producer.samples import SampleMaker
    from producer.served import served_answers
    from producer.template import load_tokenizer

    check_decoding(decoding)
    _say_of_weights(config, say)
    folder = locate_target(config.target, say, with_weights=False)
    tokenizer = load_tokenizer(folder, config.target.trust_remote_code)
    maker = SampleMaker(tokenizer, int(read_target_facts(folder)["vocab_size"]), config.data.limit)
    name = model or server.only_model()
    report = served_answers(config.data, maker, server, name, out, decoding, concurrency, say)
    facts, lines = _answered(msgspec.to_builtins(report), out)
    if report.other_prompts:
        lines.append(
            f"note: for {report.other_prompts} rows {name} counted other prompt tokens than the target's own template "
            "makes: is it the same model, with the same chat template and thinking?"
        )
    return facts, lines


def _say_of_weights(config: Config, say: Say) -> None:
    if any(source.weight != 1 for source in config.data.train):
        say("weights of sources count when the answers are prepared: here every row is answered once")


def _answered(facts: dict[str, Any], out: Path) -> tuple[dict[str, Any], list[str]]:
    return facts, [
        ", ".join(f"{value} {name}" for name, value in facts.items()),
        f"answers in {out}, how they were made in {out}.provenance.json",
    ]
