"""`draftwire run`: one training run under supervision, from a config to an exported drafter.

The launcher holds the run's lock and the ring's memory, starts every process, restarts producers that die, and turns
signals into an orderly end. It decides nothing about blocks and loads no model.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from consumer.checkpoints import newest_good
from launch.caching import coverage, needs_no_target, open_cache
from launch.checkpoint_commands import export_checkpoint
from launch.config import Config
from launch.crew import DONE, INTERRUPTED, Crew
from launch.difference import differences
from launch.hosts import check_free
from launch.invitation import inviting
from launch.kept import split_to_use
from launch.live import Screen
from launch.log_config import check_installed
from launch.logging_to import logging_to
from launch.machine import Gpu, free_memory_bytes, processors, visible_gpus
from launch.metrics import append_row, of_kind, read_rows
from launch.pace import Pace
from launch.placement import GpusConfig, idle, place, show_placement
from launch.reckoned import reckoned, undecided
from launch.report import show_coverage, write_report
from launch.runfolder import RunLock
from launch.setting_up import one_off, prepare_alone, set_up, write_json
from launch.signals import Interrupted, Signals
from launch.start import bill, check_resumable, make_job, make_plan, outline
from launch.summary import describe, summarise
from launch.trained import inherited
from producer.checked import padding_mask_of
from producer.config import EMBEDDED
from producer.locate import locate_target
from protocol.arena import create_arena
from protocol.errors import DraftwireError, RequestError, RunError
from protocol.job import Job, write_job
from protocol.pages import describe_pages
from protocol.units import show_bytes
from protocol.version import DRAFTWIRE_VERSION

STOPPED_AT_ONCE = 130

Say = Callable[[str], None]


def run(config: Config, resume: bool, screen: Screen, forked_from: Path | None = None) -> int:
    """Runs to the end of the plan, a stop or a failure; returns the exit code. `forked_from` is the folder of the run
    whose weights the configuration starts from. Raises RequestError before anything is started when the request cannot
    be carried out."""
    signals = Signals()
    run_dir = Path(config.run.dir) / config.run.name
    _refuse_blocked_export(run_dir)
    lock = RunLock(run_dir)
    try:
        if _has_started(run_dir) and not resume:
            raise RequestError(
                f"{run_dir} already holds a run: --resume goes on with it, --set run.name=NAME starts another"
            )
        earlier = forked_from or run_dir
        while (code := _run_locked(config, run_dir, earlier, signals, screen)) is None:
            earlier = run_dir
        return code
    except Interrupted:
        screen.say(_after_an_interruption(run_dir))
        return STOPPED_AT_ONCE
    finally:
        lock.release()


def _run_locked(config: Config, run_dir: Path, earlier: Path, signals: Signals, screen: Screen) -> int | None:
    """One start; None when another one is to follow, with other processes."""
    say = screen.say
    gpus, free_bytes = visible_gpus(), free_memory_bytes()
    alone = needs_no_target(config)
    division = config.gpus if alone else split_to_use(config, gpus, run_dir, say)
    placement = place(division, len(gpus), config.target.tensor_parallel, alone)
    check_free(config.hosts)
    check_installed(config.log)
    if config.target.model == EMBEDDED:
        one_off("convert", "producer.embedded", [], run_dir, signals, screen)
    target_dir = locate_target(config.target, say)
    checkpoint, notes = newest_good(run_dir / "checkpoints")
    reckon = not alone and undecided(division, len(gpus))
    prepared = None  # else the data says how much memory its samples take, and how much work they are
    if config.data.limit is None or reckon:
        prepared = prepare_alone(config, target_dir, run_dir, signals, screen)
    config, trained = inherited(config, target_dir, checkpoint, say)
    if reckon and prepared is not None:
        division = reckoned(config, gpus, target_dir, trained, prepared, say)
        placement = place(division, len(gpus), config.target.tensor_parallel)
    say(f"run {config.run.name}: {show_placement(placement, gpus)}; log files in {run_dir}/log")
    found = outline(config, target_dir, placement, gpus, free_bytes, checkpoint, trained)
    _say_all(found.notes, say)
    if checkpoint is not None:
        check_resumable(config, found, checkpoint)
    elif notes:
        where = run_dir / "checkpoints"
        raise RequestError(f"{'; '.join(notes)}: there is no checkpoint to go on from; move {where} away to begin anew")
    cache = open_cache(config, found)
    only, covered = config.cache.mode == "only", False
    kept = cache.folder if cache is not None else None
    changed = _differences(earlier, config)
    _say_all(changed, say)
    try:
        dataset = set_up(config, found, checkpoint, run_dir, signals, screen, kept, cached_only=only)
    except Interrupted:
        append_row(run_dir / "metrics.jsonl", "end", {"state": "interrupted", "reason": "while it was being prepared"})
        raise
    except RunError as error:
        with suppress(OSError):  # a full disk may be the very reason
            append_row(run_dir / "metrics.jsonl", "end", {"state": "failed", "reason": str(error)})
        raise
    plan = make_plan(config, found, dataset)
    if cache is not None:
        covered, lines = coverage(config, found, cache, dataset, plan)
        _say_all(lines, say)
    moves = config.gpus == GpusConfig() and len(gpus) > 1
    if moves and covered != placement.alone:  # known only now that the data is prepared
        return None
    if covered and not placement.alone and (left := idle(placement.producers, placement.consumers)):
        say(f"cache{left}")
    # Without a target there is nothing to run with a mask.
    job, more = make_job(config, found, dataset, plan, checkpoint, None if covered else padding_mask_of(run_dir), moves)
    _say_all([*notes, *more], say)
    costs = bill(found, dataset, plan)
    write_json(run_dir / "plan.json", costs)
    over = Pace(job, plan.total_steps).why_over(job.start_step) if checkpoint is not None else None
    if over is not None:
        say(f"{over} already, at step {job.start_step}")
        if not (run_dir / "export").exists():
            export_checkpoint(str(run_dir), run_dir / "export")
            append_row(run_dir / "metrics.jsonl", "end", {"state": "done", "reason": ""})
        _say_all(_ended(run_dir, "done"), say)
        return DONE
    # Only now is it certain that this configuration is the run's: a refused one leaves the old one in place.
    write_json(run_dir / "config.resolved.json", msgspec.to_builtins(config))
    write_job(run_dir, job)
    say(
        f"{costs['samples']} samples, {costs['tokens']} tokens, {costs['steps']} steps; {costs['bytes_per_token']} "
        f"bytes a token: a full dump would take {show_bytes(costs['full_dump_bytes'])}, "
        f"the ring takes {show_bytes(costs['ring_bytes'])}"
    )
    say(f"anchors: {show_coverage(costs)}; mask token {job.shape['mask_token_id']}")
    say("producers and consumers load" if job.producers else "consumers load")
    start = {"step": job.start_step, "changed": changed} | circumstances(job, gpus)
    with inviting(config, job, run_dir, say) as hosts, logging_to(config.log, run_dir, say):
        return _supervise(job, run_dir, start, hosts, signals, screen)


def _supervise(
    job: Job, run_dir: Path, start: dict[str, Any], hosts: dict[str, str], signals: Signals, screen: Screen
) -> int | None:
    # Asked anew: the set-up may have taken minutes.
    ring_fd = create_arena(job.slots, job.slot_bytes, free_memory_bytes())
    try:
        screen.say(f"ring of {job.slots} slots: {describe_pages(ring_fd)}")
        crew = Crew(job, run_dir, ring_fd, signals, screen, hosts)
        append_row(run_dir / "metrics.jsonl", "start", start)
        state, reason = "failed", "the launcher was interrupted"
        try:
            state, reason = crew.work()
        except DraftwireError as error:
            state, reason = "failed", str(error)
        except Interrupted:
            state, reason = "interrupted", "interrupted at once"
            raise
        finally:
            crew.end()
            screen.settle()
            if state != "again":
                _close(run_dir, state, reason, screen.say)
    finally:
        os.close(ring_fd)
    if state == "failed":
        raise RunError(reason)
    if state == "again":
        return None
    _say_all(_ended(run_dir, state), screen.say)
    return DONE if state == "done" else INTERRUPTED


def circumstances(job: Job, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """What a reader of the run's folder may ask later: versions, machine, command, who ran where."""
    versions = {"draftwire": DRAFTWIRE_VERSION, "python": platform.python_version()}
    return {
        "versions": versions | {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "host": socket.gethostname(),
        "machine": {"system": platform.platform(), "processors": processors(), "gpus": [gpu.name for gpu in gpus]},
        "command": shlex.join(["draftwire", *sys.argv[1:]]),
        "placement": {"producers": job.producers, "consumers": job.consumers},
    }


def _has_started(run_dir: Path) -> bool:
    """Whether training began here; a run that was stopped while it was prepared has lost nothing by a new start."""
    return bool(of_kind(read_rows(run_dir / "metrics.jsonl"), "start")) or _has_checkpoint(run_dir)


def _has_checkpoint(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("step-*"))


def _after_an_interruption(run_dir: Path) -> str:
    if _has_checkpoint(run_dir):
        return "interrupted at once; with --resume the same command goes on from the newest checkpoint"
    return "interrupted before there was a checkpoint; the same command with --resume begins anew"


def _refuse_blocked_export(run_dir: Path) -> None:
    export = run_dir / "export"
    if export.exists() and not (export / "config.json").is_file():
        raise RequestError(
            f"{export} is in the way of the drafter and is no export: remove it or choose another run.name"
        )


def _close(run_dir: Path, state: str, reason: str, say: Say) -> None:
    """The last row and the report. A full disk costs these, not the exit code."""
    try:
        append_row(run_dir / "metrics.jsonl", "end", {"state": state, "reason": reason})
        write_report(run_dir)
    except OSError as error:
        say(f"the end of this run could not be written down: {error}")


def _ended(run_dir: Path, state: str) -> list[str]:
    """The summary of a run that has ended."""
    return describe(summarise(run_dir, ended=True) | {"state": state})


def _differences(earlier: Path, config: Config) -> list[str]:
    """How the configuration differs from that of an earlier start, or of the run that it forks from."""
    path = earlier / "config.resolved.json"
    try:
        then, now = json.loads(path.read_bytes()), json.loads(msgspec.json.encode(config))
    except (OSError, ValueError):
        return []
    return [f"{earlier.name} had another {line}" for line in differences(then, now)]


def _say_all(lines: Iterable[str], say: Say) -> None:
    for line in lines:
        say(line)
