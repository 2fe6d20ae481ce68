"""Where measurements of a configuration on this machine are kept, and what was kept of them before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from launch.config import Config
from launch.machine import Gpu, describe_machine, processors, threads_per_process
from launch.measurements import Measurements, read_measurements
from launch.placement import GpusConfig
from launch.splits import ranked, table
from protocol.errors import RequestError
from protocol.job import read_job


def places_of(gpus: Sequence[Gpu]) -> int:
    """How many GPUs there are to divide; without any, processes that have processors of their own."""
    return len(gpus) or max(processors() // threads_per_process(), 2)


def kept_path(config: Config, gpus: Sequence[Gpu]) -> Path:
    """A file for each machine, by what it has, and configuration, by what both sides' work depends on."""
    parts = (config.target, config.data, config.drafter, config.train, config.ring)
    key = msgspec.json.encode((describe_machine(gpus), *parts))
    name = f"measured-{hashlib.blake2b(key, digest_size=8).hexdigest()}.json"
    return Path(config.run.dir) / "tune" / name


def kept(config: Config, gpus: Sequence[Gpu]) -> Measurements | None:
    """What an earlier `draftwire tune` measured; None when there is nothing, or nothing that this version reads."""
    path = kept_path(config, gpus)
    try:
        return read_measurements(path) if path.exists() else None
    except RequestError:
        return None


def split_to_use(config: Config, gpus: Sequence[Gpu], run_dir: Path, say: Callable[[str], None]) -> GpusConfig:
    """[gpus] with "auto" replaced by the best split that was measured here, which a line says; as it is where a split
    is given or nothing was measured. A run that goes on with as many GPUs keeps the split that it has."""
    asked = config.gpus
    if asked.split != "auto" or asked.producers is not None or asked.consumers is not None:
        return asked
    if (before := _split_of(run_dir, len(gpus), config.target.tensor_parallel)) is not None:
        return GpusConfig(split=before)
    measured = kept(config, gpus)
    rows = ranked(table(measured, places_of(gpus))) if measured is not None else []
    # What gpus.split can say of a target that is divided as the configuration has it.
    own = [row for row in rows if row.split.tensor_parallel == config.target.tensor_parallel]
    best = next((row for row in own if not row.split.shared or row.split.producers == 1), None)
    if best is None:
        return asked
    split = "shared" if best.split.shared else f"{best.split.producers}:{best.split.consumers}"
    say(
        f'gpus.split: "auto" means {split}, as draftwire tune measured: {best.tokens_per_s:,.0f} tokens/s are expected '
        f"({kept_path(config, gpus)})"
    )
    return GpusConfig(split=split)


def _split_of(run_dir: Path, gpus: int, tensor_parallel: int) -> str | None:
    """That of the run's last start, if it had as many GPUs as there are, all of one role or all of both."""
    if not any((run_dir / "checkpoints").glob("step-*")) or not (run_dir / "job.json").exists():
        return None
    job = read_job(run_dir)
    if not job.producers:
        return None
    devices = {device for device in (*job.producers, *job.consumers) if device != "cpu"}
    if len(devices) != gpus or not gpus or job.tensor_parallel != tensor_parallel:
        return None
    if set(job.producers) & set(job.consumers):
        return "shared" if gpus == 1 else None
    return f"{len(job.producers)}:{len(job.consumers)}"
