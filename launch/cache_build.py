"""`draftwire cache build`: fills a cache without training, on every device that a run would give to producers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from launch.caching import manifest_of, missing_bytes
from launch.config import Config
from launch.live import Screen
from launch.machine import free_memory_bytes, threads_per_process, visible_gpus
from launch.placement import place, show_placement
from launch.setting_up import one_off, set_up, write_json
from launch.signals import Interrupted, Signals
from launch.start import Outline, make_job, make_plan, outline
from launch.trained import inherited
from producer.checked import padding_mask_of
from producer.config import EMBEDDED
from producer.locate import locate_target
from protocol.cache import Cache, in_use
from protocol.child import ERROR_PREFIX
from protocol.dataset import TokenDataset
from protocol.errors import RunError
from protocol.job import TOKEN_VARIABLE, write_job
from protocol.shard_writer import remove_fragments
from protocol.supervise import Child
from protocol.units import show_bytes

# Inside the cache: logs, and what the builders are told.
BUILD_FOLDER = "build"
TICK_S = 0.2
# A builder that is told to end completes its open shard.
GRACE_S = 120.0


def build_cache(config: Config, screen: Screen) -> tuple[dict[str, Any], list[str]]:
    """Computes what the cache of a configuration lacks of its dataset; the report and the same as lines. Raises
    RequestError, and RunError when the disk or the budget is full: what is whole by then stays, and the next build goes
    on from there. An interrupt ends it likewise (Interrupted)."""
    signals, gpus = Signals(), visible_gpus()
    folder = config.cache.folder
    placement = place(config.gpus, len(gpus), config.target.tensor_parallel)
    build_dir = folder / BUILD_FOLDER
    screen.say(f"{show_placement(placement, gpus)}; log files in {build_dir}/log")
    if config.target.model == EMBEDDED:
        one_off("convert", "producer.embedded", [], build_dir, signals, screen)
    target_dir = locate_target(config.target, screen.say)
    config, trained = inherited(config, target_dir, None, screen.say)
    found = outline(config, target_dir, placement, gpus, free_memory_bytes(), None, trained)
    with ExitStack() as stack:
        Cache.create(folder, manifest_of(config, found))
        stack.enter_context(in_use(folder))
        stack.enter_context(in_use(folder, ".writing", alone=True))
        for path in remove_fragments(folder):
            screen.say(f"removed {path.name}: its writer was interrupted")
        build_dir.mkdir(exist_ok=True)
        dataset = set_up(config, found, None, build_dir, signals, screen, folder)
        return _fill(config, found, dataset, build_dir, signals, screen)


def _fill(
    config: Config, found: Outline, dataset: TokenDataset, build_dir: Path, signals: Signals, screen: Screen
) -> tuple[dict[str, Any], list[str]]:
    folder = config.cache.folder
    before = Cache.open(folder)
    missing, needed_bytes = missing_bytes(before, dataset)
    free_bytes = shutil.disk_usage(folder).free
    already = int(np.count_nonzero(before.held(dataset)))
    screen.say(
        f"{already} of {len(dataset)} samples are there; {missing} more take {show_bytes(needed_bytes)}, "
        f"{show_bytes(free_bytes)} of the disk are free" + _budget(config, before)
    )
    if missing:
        whole = msgspec.structs.replace(config.train, epochs=1, max_steps=None)
        epoch = msgspec.structs.replace(config, train=whole)
        plan = make_plan(epoch, found, dataset)
        job, _ = make_job(epoch, found, dataset, plan, None, padding_mask_of(build_dir))
        job = msgspec.structs.replace(job, producer_bytes=0, cached=None, spills=False)
        write_json(build_dir / "config.resolved.json", msgspec.to_builtins(config))
        write_job(build_dir, job)
        count = len(job.producer_names)
        environment = {"OMP_NUM_THREADS": str(threads_per_process()), TOKEN_VARIABLE: "unused"}
        names = [f"builder-{index}" for index in range(count)]
        children = [
            Child(
                name,
                "producer.builder",
                [str(build_dir), str(index)],
                build_dir / "log" / f"{name}.log",
                environment,
            )
            for index, name in enumerate(names)
        ]
        _tend(children, signals, screen)
    cache = Cache.open(folder)
    held = int(np.count_nonzero(cache.held(dataset)))
    report = {
        "samples": held,
        "computed": held - already,
        "already": already,
        "bytes": cache.nbytes,
        "shards": len(cache.shards),
        "needed_bytes": needed_bytes,
        "folder": str(folder),
    }
    lines = [
        f"{held - already} samples computed, {already} were there; {folder} holds {show_bytes(cache.nbytes)} in "
        f"{len(cache.shards)} shards",
        'with cache.mode = "only" the same configuration trains from it',
    ]
    return report, lines


def _budget(config: Config, cache: Cache) -> str:
    if config.cache.budget is None:
        return ""
    return f", {show_bytes(max(config.cache.budget - cache.nbytes, 0))} of cache.max_bytes"


def _tend(children: list[Child], signals: Signals, screen: Screen) -> None:
    """Until all have ended. The first that fails ends the others; RunError says why."""
    started_s = time.monotonic()
    logs = [child.log_path.open(encoding="utf-8", errors="replace") for child in children]
    for log in logs:
        log.seek(0, 2)
    try:
        while any(child.exit_code() is None for child in children):
            time.sleep(TICK_S)
            for child, log in zip(children, logs, strict=True):
                for line in log:
                    if not line.startswith(ERROR_PREFIX):
                        screen.say(f"{child.name}: {line.rstrip()}")
            screen.still("computes features", started_s)
            if signals.wishes or any(child.exit_code() not in (None, 0) for child in children):
                break
    finally:
        _end(children, at_once=signals.wishes > 1)
        for log in logs:
            log.close()
    if signals.wishes:
        raise Interrupted
    for child in children:
        if child.exit_code() != 0:
            raise RunError(child.last_error() or child.obituary())


def _end(children: Iterable[Child], at_once: bool) -> None:
    for child in children:
        child.end(0.0 if at_once else GRACE_S)
