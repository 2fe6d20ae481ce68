"""`draftwire plan`: what a run will move, need and take, before a model is loaded or a GPU is touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launch.bill import about_steps, bill_of, checkpoints_disk_bytes
from launch.config import Config
from launch.corpus import Corpus, Drawn, counted, estimated, given
from launch.fitting import fitted, measured_target
from launch.hours import forward_flop, hours
from launch.kept import kept, split_to_use
from launch.machine import Gpu
from launch.measured_hours import measured_hours
from launch.site import anywhere, roles, site_of
from launch.start import Outline, dataset_folder, make_plan
from producer.locate import locate_target, read_config, read_target_facts
from protocol.block import CARRIERS
from protocol.dataset import TokenDataset
from protocol.errors import RequestError

Say = Callable[[str], None]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command: another source of lengths than the prepared data, another machine than this one."""

    samples: int | None = None
    mean_tokens: float | None = None
    estimate: int | None = None
    gpu: str | None = None
    gpus: int | None = None
    memory: str | None = None


def plan_run(config: Config, request: Request, say: Say) -> dict[str, Any]:
    """The bill as a map, for `launch.plan_table.describe` and `--json`. Raises RequestError for what cannot work."""
    _check(config, request)
    site = site_of(request.gpu, request.gpus, request.memory, config.gpus)
    folder = locate_target(config.target, say, with_weights=False)
    facts = read_target_facts(folder)
    if request.samples is not None and site.here and not site.gpus:
        site = anywhere(config.gpus)  # asked about a target, not about a machine without GPUs
    measured = kept(config, site.gpus) if site.here else None
    if measured is not None:
        split = split_to_use(config, site.gpus, Path(config.run.dir) / config.run.name, say)
        config = msgspec.structs.replace(config, gpus=split)
    plan = fitted(config, measured_target(config, folder, facts), site)
    found = plan.found
    dataset, corpus = _corpus(config, request, folder, facts, say)
    steps = make_plan(config, found, dataset).total_steps if dataset is not None else None
    train = config.train
    itemsize = CARRIERS[found.dtype].itemsize
    costs = bill_of(corpus, found.width, itemsize, train.batch_tokens, train.epochs, train.max_steps, steps)
    checkpoints = checkpoints_disk_bytes(found.checkpoint_bytes, train.keep_checkpoints)
    passes = min(train.epochs, costs.steps / about_steps(corpus, train.batch_tokens, 1, None))
    return {
        "basis": corpus.basis,
        "samples": corpus.samples,
        "samples_interval": corpus.samples_interval,
        "tokens": corpus.tokens,
        "tokens_interval": corpus.tokens_interval,
        "epochs": train.epochs,
        **msgspec.to_builtins(costs),
        "eligible_anchors": corpus.eligible,
        "anchors_per_epoch": corpus.anchors,
        "free_disk_bytes": free_disk_bytes(dump_folder(config)),
        "disk": str(dump_folder(config)),
        "taps": list(found.shape.target_layer_ids),
        "hidden_size": found.shape.hidden_size,
        "dtype": found.dtype,
        "weight_bytes": found.producer_need.held,
        "weights_from": plan.weights_from,
        "microbatch_tokens": found.partition.tokens,
        "microbatch_draft_tokens": found.partition.draft_tokens,
        "ring_slots": found.ring.slots,
        "ring_bytes": found.ring.total_bytes,
        "gpu_memory": {"producer": found.producer_need.total, "consumer": found.consumer_need.total},
        "host_memory": {"ring": found.ring.total_bytes, "checkpoint": found.checkpoint_bytes},
        "free_memory_bytes": plan.site.free_bytes if plan.site.here else None,
        "checkpoints_disk_bytes": checkpoints,
        "devices": roles(found, plan.site.gpus),
        "hours": msgspec.to_builtins(
            (measured_hours(measured, found.placement, corpus, passes) if measured is not None else None)
            or _hours(config, found, plan.site.gpus, folder, corpus, passes)
        ),
        "notes": plan.notes,
    }


def dump_folder(config: Config) -> Path:
    """Where a dump of the features would lie."""
    return Path(config.run.dir)


def free_disk_bytes(folder: Path) -> int:
    """What is free on the disk of a folder that need not be there yet."""
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def _check(config: Config, request: Request) -> None:
    if (request.samples is None) != (request.mean_tokens is None):
        raise RequestError("--samples and --mean-tokens go together")
    if request.samples is not None and request.estimate is not None:
        raise RequestError("--estimate and --samples both tell the lengths: leave one out")
    limit = config.data.limit
    if request.mean_tokens is not None and limit is not None and request.mean_tokens > limit:
        raise RequestError(f"--mean-tokens {request.mean_tokens:g}: samples are cut at data.max_length = {limit}")


def _corpus(
    config: Config, request: Request, folder: Path, facts: dict[str, Any], say: Say
) -> tuple[TokenDataset | None, Corpus]:
    anchors = config.train.anchors
    if request.samples is not None and request.mean_tokens is not None:
        return None, given(request.samples, request.mean_tokens)
    from producer.template import load_tokenizer

    tokenizer = load_tokenizer(folder, config.target.trust_remote_code)
    if request.estimate is not None:
        from producer.estimate import draw_rows

        drawn, rows = draw_rows(config.data, tokenizer, facts, request.estimate)
        made = [Drawn(tuple(length for length, _ in row), tuple(count for _, count in row)) for row in drawn]
        return None, estimated(made, rows, anchors)
    from producer.prepare import prepare

    dataset = prepare(config.data, tokenizer, facts, dataset_folder(config), say)
    return dataset, counted(dataset, anchors)


def _hours(config: Config, found: Outline, gpus: Sequence[Gpu], folder: Path, corpus: Corpus, passes: float) -> Any:
    in_16_bits = found.dtype != "float32" and config.train.precision != "fp32"
    if "cpu" in found.placement.producers or not in_16_bits:
        return None
    last_tap = max(found.shape.target_layer_ids)
    forward = forward_flop(found.facts, read_config(folder), last_tap, corpus.mean_context)
    producers, consumers = (
        [gpus[int(device.partition(":")[2])] for device in devices]
        for devices in (found.placement.producers, found.placement.consumers)
    )
    shared = bool(set(found.placement.producers) & set(found.placement.consumers))
    return hours(corpus, passes, forward, found.shape, config.train.anchors, producers, consumers, shared)
