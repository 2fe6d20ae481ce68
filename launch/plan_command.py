"""`draftwire plan`: what a run will move, need and take, before a model is loaded or a GPU is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from launch.bill import about_steps, bill_of, checkpoints_disk_bytes
from launch.cache_room import cache_of, disk_of, kept_form, room_of, row_bytes_of
from launch.config import Config
from launch.corpus import Corpus, Drawn, counted, estimated, given
from launch.fitting import fitted, measured_target
from launch.forecast import hours_by_split, hours_of
from launch.kept import kept, split_to_use
from launch.measured_hours import measured_by_split, measured_hours
from launch.placement import GpusConfig, split_text
from launch.reckoned import undecided
from launch.site import anywhere, roles, site_of
from launch.start import Outline, dataset_folder, make_plan
from producer.locate import locate_target, read_target_facts
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
    target = measured_target(config, folder, facts)
    plan = fitted(config, target, site)
    dataset, corpus = _corpus(config, request, folder, facts, say)
    splits = hours_by_split(config, plan.found, plan.site.gpus, folder, corpus)
    if splits and undecided(config.gpus, len(plan.site.gpus)):
        config = msgspec.structs.replace(config, gpus=GpusConfig(split=next(iter(splits))))
        plan = fitted(config, target, site)
    found = plan.found
    steps = make_plan(config, found, dataset).total_steps if dataset is not None else None
    train = config.train
    itemsize = CARRIERS[found.dtype].itemsize
    costs = bill_of(corpus, found.width, itemsize, train.batch_tokens, train.epochs, train.max_steps, steps)
    checkpoints = checkpoints_disk_bytes(found.checkpoint_bytes, train.keep_checkpoints)
    passes = min(train.epochs, costs.steps / about_steps(corpus, train.batch_tokens, 1, None))
    if measured is not None and (spent := measured_hours(measured, found.placement, corpus, passes)) is not None:
        splits = measured_by_split(measured, len(plan.site.gpus), config.target.tensor_parallel, corpus)
    else:
        spent = hours_of(config, found, plan.site.gpus, folder, corpus, passes)
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
        "free_disk_bytes": disk_of(dump_folder(config)).free,
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
        "hours": msgspec.to_builtins(spent),
        "split": split_text(found.placement),
        "splits": {split: passes * hours for split, hours in splits.items()},
        "cache": _cache(config, found, dataset, corpus, None if spent is None else spent.producer / passes),
        "notes": plan.notes,
    }


def dump_folder(config: Config) -> Path:
    """Where a dump of the features would lie."""
    return Path(config.run.dir) if config.cache.mode == "off" else config.cache.folder


def _cache(
    config: Config, found: Outline, dataset: TokenDataset | None, corpus: Corpus, producer_hours: float | None
) -> dict[str, Any] | None:
    """What a cache of this configuration holds, may hold and saves in each later epoch, `producer_hours` of which the
    target takes for all of it; None without one."""
    if config.cache.mode == "off":
        return None
    taps = found.shape.target_layer_ids
    kept, scales = kept_form(config.cache, found.dtype, len(taps))
    cache, row_bytes = cache_of(config.cache.folder, found.width, kept, taps), row_bytes_of(found.width, kept, scales)
    room = room_of(config, row_bytes, corpus.samples, corpus.tokens, cache, dataset)
    saved = None if producer_hours is None else producer_hours * room.share
    return {**msgspec.to_builtins(room), "share": room.share, "saved_hours": saved}


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
