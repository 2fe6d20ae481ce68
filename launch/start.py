"""From a configuration to a job: what the request means on this machine, and whether it can work at all.

Everything that can be refused is refused here, before a model is loaded: wrong taps, a block that no slot holds, a
model that does not fit, a checkpoint of another plan.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from consumer.checkpoints import read_cursor, read_manifest, read_shape
from consumer.shape import DrafterShape, differing_fields, resolve_shape
from launch.budget import Budgets, Need, divide, occupied
from launch.config import Config
from launch.hosts import listening
from launch.lengths import dataset_folder as dataset_folder
from launch.lengths import longest_sample
from launch.machine import Gpu
from launch.partition import Partition, choose, kept, partitions
from launch.placement import Placement
from launch.sizes import sizes
from producer.division import check_division
from producer.kernels import kernel_notes
from producer.locate import feature_dtype, read_target_facts, target_fingerprint
from producer.precision import check_precision
from protocol.block import CARRIERS
from protocol.cursor import check_fit
from protocol.dataset import TokenDataset
from protocol.errors import RequestError
from protocol.job import Job, schema_hash
from protocol.plan import Plan, PlanParams
from protocol.ring import RingSize
from protocol.sockets import endpoint, payload_endpoint
from protocol.units import parse_seconds, show_bytes


class Outline(msgspec.Struct, frozen=True):
    """What is known before any data is read or model loaded. `shape` still has a provisional mask token."""

    target_dir: Path
    facts: dict[str, Any]
    shape: DrafterShape
    placement: Placement
    dtype: str
    width: int
    partition: Partition
    ring: RingSize
    producer_need: Need
    consumer_need: Need
    budgets: Budgets
    checkpoint_bytes: int
    notes: list[str]
    trained: DrafterShape | None


def outline(
    config: Config,
    target_dir: Path,
    placement: Placement,
    gpus: Sequence[Gpu],
    free_bytes: int,
    checkpoint: Path | None = None,
    trained: DrafterShape | None = None,
    weight_bytes: int | None = None,
) -> Outline:
    """Checks a request against its target and this machine; `checkpoint` is the one to go on from, `trained` the shape
    of the drafter that it starts from. `weight_bytes`: the size of weights that need not be there, for a plan. Raises
    RequestError."""
    facts = read_target_facts(target_dir)
    if weight_bytes is None:
        check_precision(target_dir, placement.producers[0])
        check_division(target_dir, config.target, facts)
    shape = resolve_shape(config.drafter, facts, range(facts["vocab_size"]), trained)
    dtype = feature_dtype(config.target, facts, placement.producers[0])
    size = sizes(config, placement, gpus, free_bytes, target_dir, facts, shape, dtype, weight_bytes)
    allowed = partitions(config.train, longest_sample(config), shape.block_size)
    earlier = kept(config.train, _trained_with(checkpoint), allowed[-1]) if checkpoint is not None else None
    partition, said = choose(allowed, earlier, size.lacking)
    needs, ring, staged = size.needs(partition), size.ring(partition), size.checkpoint_bytes
    if placement.producers[0] == "cpu":
        _refuse_what_cannot_fit(needs[0], placement, free_bytes)
    budgets = divide(placement, gpus, *needs)
    notes = [*occupied(placement, gpus), *kernel_notes(target_dir), *([said] if said else [])]
    if budgets.producer:
        shares = f"{show_bytes(budgets.producer)} for the producer, {show_bytes(budgets.consumer)} for the consumer"
        needed = f"they need {show_bytes(needs[0].total)} and {show_bytes(needs[1].total)} at most"
        notes.append(f"GPU memory, shared: {shares}; {needed}")
    if ring.total_bytes + staged > free_bytes:
        raise RequestError(
            f"ring.bytes: the ring takes {show_bytes(ring.total_bytes)} and checkpoints {show_bytes(staged)} on their "
            f"way to the disk, but only {show_bytes(free_bytes)} of memory is free: set ring.bytes to at most "
            f"{show_bytes(max(free_bytes - staged, 0))}, or use a smaller drafter"
        )
    known = (target_dir, facts, shape, placement, dtype, size.width, partition, ring)
    return Outline(*known, *needs, budgets, staged, notes, trained)


def plan_params(config: Config, found: Outline) -> PlanParams:
    """What decides the plan beside the data."""
    return PlanParams(
        seed=config.train.seed,
        epochs=config.train.epochs,
        batch_tokens=config.train.batch_tokens,
        anchors=config.train.anchors,
        block_size=found.shape.block_size,
        microbatch_tokens=found.partition.tokens,
        microbatch_draft_tokens=found.partition.draft_tokens,
        consumers=len(found.placement.consumers),
        max_steps=config.train.max_steps,
    )


def make_plan(config: Config, found: Outline, dataset: TokenDataset) -> Plan:
    """The plan of this configuration over a prepared dataset. Raises RequestError."""
    return Plan(dataset.lengths, dataset.eligible, plan_params(config, found), dataset.fingerprint)


def check_resumable(config: Config, found: Outline, checkpoint: Path) -> None:
    """Refuses (RequestError) to go on with another drafter or target than `checkpoint` has, before the set-up would
    replace what belongs to it. The mask token is settled only by the data; `make_job` compares it."""
    mask_token = read_shape(checkpoint).mask_token_id
    shape = msgspec.structs.replace(found.shape, mask_token_id=mask_token)
    _check_same_training(checkpoint, shape, _target(config, found))


def make_job(
    config: Config,
    found: Outline,
    dataset: TokenDataset,
    plan: Plan,
    checkpoint: Path | None,
    padding_mask: bool | None,
    moves: bool = False,
) -> tuple[Job, list[str]]:
    """The job of this start, going on from `checkpoint` if there is one, and notes for the user. `padding_mask` is what
    the self-check of the target decided, None when everything comes from a cache and there is no target. `moves`:
    devices may change sides when a cache is complete."""
    cursor = read_cursor(checkpoint) if checkpoint is not None else None
    change = check_fit(str(checkpoint), cursor, plan) if cursor is not None else ""
    notes = [f"resuming with {change}"] if change else []
    shape = _final_shape(config, found, dataset)
    weights = _target(config, found)
    if checkpoint is not None:
        _check_same_training(checkpoint, shape, weights)
    # A part of an abstract socket's address, which holds 107 bytes.
    computes = padding_mask is not None
    run_id = f"{re.sub('[^A-Za-z0-9._-]', '-', config.run.name)[:40]}-{secrets.token_hex(6)}"
    job = Job(
        run_id=run_id,
        incarnation=secrets.randbits(31),
        address=endpoint(run_id),
        # On one node shared memory takes every byte once; over ZeroMQ it is copied four times.
        transport="shm" if config.ring.transport == "auto" else config.ring.transport,
        payload_address=payload_endpoint(run_id),
        target_dir=str(found.target_dir),
        padding_mask=bool(padding_mask),
        dataset_dir=str(dataset_folder(config)),
        taps=found.shape.target_layer_ids,
        width=found.width,
        dtype=found.dtype,
        slots=found.ring.slots,
        slot_bytes=found.ring.slot_bytes,
        schema=schema_hash(weights, found.shape.target_layer_ids, found.dtype, found.width, plan.hash),
        shape=msgspec.to_builtins(shape),
        plan=plan.params,
        plan_hash=plan.hash,
        start_step=cursor.next_step if cursor is not None else 0,
        checkpoint=str(checkpoint) if checkpoint is not None else None,
        quarantined=cursor.quarantined if cursor is not None else {},
        producers=found.placement.producers if computes else (),
        consumers=found.placement.consumers,
        tensor_parallel=found.placement.tensor_parallel,
        producer_bytes=found.budgets.producer,
        # Nobody is there to share with.
        consumer_bytes=found.budgets.consumer if computes else 0,
        max_s=config.train.max_hours * 3600 if config.train.max_hours is not None else None,
        trained_s=cursor.trained_s if cursor is not None else 0.0,
        cooldown_step=cursor.cooldown_step if cursor is not None else None,
        quarantine_limit=config.train.quarantine_limit,
        hang_s=parse_seconds(config.run.hang_after, "run.hang_after"),
        hosts=listening(config.hosts),
        cached=str(config.cache.folder) if config.cache.mode != "off" else None,
        spills=config.cache.mode == "spill",
        regroups=config.cache.mode == "spill" and computes and moves,
    )
    return job, notes


def bill(found: Outline, dataset: TokenDataset, plan: Plan) -> dict[str, Any]:
    """plan.json: what the run is going to do and what a full dump of its features would take."""
    tokens, eligible = int(dataset.lengths.sum()), int(dataset.eligible.sum())
    anchors = int(np.minimum(dataset.eligible, plan.params.anchors).sum())
    bytes_per_token = found.width * CARRIERS[found.dtype].itemsize
    return {
        "samples": len(dataset),
        "tokens": tokens,
        "steps": plan.total_steps,
        "epochs": plan.params.epochs,
        "eligible_anchors": eligible,
        "anchors_per_epoch": anchors,
        "anchor_coverage": anchors / eligible if eligible else None,
        "bytes_per_token": bytes_per_token,
        "full_dump_bytes": tokens * bytes_per_token,
        "ring_bytes": found.ring.total_bytes,
        "gpu_memory": {"producer": found.producer_need.total, "consumer": found.consumer_need.total},
        "host_memory": {"ring": found.ring.total_bytes, "checkpoint": found.checkpoint_bytes},
        "plan_hash": plan.hash,
        "step_hash": plan.step_hash,
    }


def _final_shape(config: Config, found: Outline, dataset: TokenDataset) -> DrafterShape:
    """The shape with a mask token that the data never holds: a special token first, then any other unused id."""
    special = [int(token) for token in dataset.meta["unused_special_ids"]]
    unused = np.setdiff1d(np.arange(found.facts["vocab_size"]), dataset.occurring_ids()).tolist()
    there = set(unused)
    preferred = [token for token in special if token in there]
    return resolve_shape(config.drafter, found.facts, [*preferred, *unused], found.trained)


def _trained_with(checkpoint: Path) -> Partition:
    cursor = read_cursor(checkpoint)
    return Partition(cursor.microbatch_tokens, cursor.microbatch_draft_tokens)


def _refuse_what_cannot_fit(producer: Need, placement: Placement, free_bytes: int) -> None:
    if producer.held * len(placement.producers) > free_bytes:
        raise RequestError(
            f"target.model: {len(placement.producers)} x {show_bytes(producer.held)} of weights do not fit into "
            f"{show_bytes(free_bytes)} of free memory: use a smaller target or fewer producers"
        )


def _target(config: Config, found: Outline) -> str:
    return target_fingerprint(found.target_dir, config.target, found.placement.producers[0])


def _check_same_training(checkpoint: Path, shape: DrafterShape, target: str) -> None:
    """A checkpoint goes on only with the drafter and the target that it was made with."""
    trained = read_shape(checkpoint)
    if differing := differing_fields(trained, shape):
        name = differing[0]
        then, now = getattr(trained, name), getattr(shape, name)
        raise RequestError(
            f"{checkpoint} has a drafter with {name} = {then}, the configuration asks for {now}: "
            "restore [drafter] and [target], or start another run"
        )
    if read_manifest(checkpoint).target != target:
        raise RequestError(
            f"{checkpoint} was trained for another target or dtype: restore [target], or start another run"
        )
