"""`draftwire tune`: which split of the GPUs is best, from measurements of this machine or of a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launch.config import Config, load_config
from launch.kept import places_of
from launch.machine import visible_gpus
from launch.measurements import Measurements, read_measurements
from launch.split_writer import write_split
from launch.splits import ranked, table
from launch.tune_here import Verified, Wish, measure_here, show_verified
from launch.tune_table import answer, describe, name_of
from protocol.errors import RequestError


def tune(path: Path | None, overrides: Iterable[str], wish: Wish) -> tuple[dict[str, Any], list[str]]:
    """The command: the report and the same as lines. Raises RequestError, RunError, Interrupted."""
    source, write = wish.source, wish.write
    if path is None and (write or source is None):
        raise RequestError(
            "--write: name the config to write to" if write else "name a config to measure, or --from FILE"
        )
    if source is not None and (wish.verify_s or wish.again):
        raise RequestError("--from replays what was measured: leave out --verify and --again, or name a config alone")
    config = load_config(path, overrides) if path is not None else None
    here = visible_gpus()
    places = wish.gpus if wish.gpus is not None else places_of(here)
    verified: list[Verified] = []
    if source is not None:
        measured = read_measurements(source)
    else:
        assert config is not None
        measured, verified = measure_here(config, here, wish, places)
    report, lines = recommend(measured, places)
    report |= {"verified": [each._asdict() for each in verified]}
    lines += [show_verified(each) for each in verified]
    if write and path is not None and config is not None:
        written = write_best(path, config, measured, places)
        report, lines = report | {"written": written}, [*lines, written]
    return report, lines


def recommend(measured: Measurements, gpus: int) -> tuple[dict[str, Any], list[str]]:
    """The splits of `gpus` GPUs as a report and as lines. Raises RequestError when there is none."""
    rows = table(measured, gpus)
    return answer(measured, gpus, rows), describe(measured, gpus, rows)


def write_best(path: Path, config: Config, measured: Measurements, gpus: int) -> str:
    """Puts the best split into the config file `path`; a line for the user. Raises RequestError when it cannot."""
    order = ranked(table(measured, gpus))
    if not order:
        raise RequestError("--write: no split fits, so there is nothing to write")
    split = order[0].split
    if split.tensor_parallel != config.target.tensor_parallel:
        raise RequestError(
            f"--write: the best split is {name_of(split)}, for target.tensor_parallel = {split.tensor_parallel}, and "
            f"{path} has {config.target.tensor_parallel}: set that first"
        )
    if split.shared and gpus > 1:
        devices = list(range(gpus))
        raise RequestError(
            f"--write: the best split shares all {gpus} GPUs, which is no gpus.split: write gpus.producers = {devices} "
            f"and gpus.consumers = {devices} in its place"
        )
    text = "shared" if split.shared else f"{split.producers}:{split.consumers}"
    if not write_split(path, text):
        return f'{path} has gpus.split = "{text}" already'
    return f'{path}: gpus.split = "{text}"'
