"""From a configuration to a job: what the request means on this machine, and whether it can work at all.

Everything that can be refused is refused here, before a model is loaded: wrong taps, a block that no slot holds, a
model that does not fit, a checkpoint of another plan.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from consumer.checkpoints import read_cursor, read_manifest, read_shape
from consumer.shape import DrafterShape, differing_fields, resolve_shape
from launch.budget import Block, Budgets, Need, checkpoint_bytes, consumer_need, divide, occupied, producer_need
from launch.config import Config
from launch.hosts import listening
from launch.machine import Gpu
from launch.placement import Placement
from producer.kernels import kernel_notes
from producer.locate import feature_dtype, read_target_facts, target_fingerprint, weight_size
from producer.precision import check_precision
from protocol.block import CARRIERS
from protocol.cursor import check_fit
from protocol.dataset import TokenDataset
from protocol.errors import RequestError
from protocol.job import Job, schema_hash
from protocol.plan import Plan, PlanParams
from protocol.ring import RingSize, ring_size
from protocol.sockets import endpoint, payload_endpoint
from protocol.units import parse_seconds, show_bytes

# Bounds of one block when the config leaves them open: blocks of this many tokens keep a GPU busy, and fewer, larger
# ones would only cost memory.
MICROBATCH_TOKENS = 4096
DRAFT_TOKENS_PER_TOKEN = 2


class Outline(msgspec.Struct, frozen=True):
    """What is known before any data is read or model loaded. `shape` still has a provisional mask token."""

    target_dir: Path
    facts: dict[str, Any]
    shape: DrafterShape
    placement: Placement
    dtype: str
    width: int
    microbatch_tokens: int
    microbatch_draft_tokens: int
    ring: RingSize
    producer_need: Need
    consumer_need: Need
    budgets: Budgets
    checkpoint_bytes: int
    notes: list[str]


def outline(config: Config, target_dir: Path, placement: Placement, gpus: Sequence[Gpu], free_bytes: int) -> Outline:
    """Checks a request against its target and this machine. Raises RequestError."""
    facts = read_target_facts(target_dir)
    check_precision(target_dir, placement.producers[0])
    shape = resolve_shape(config.drafter, facts, range(facts["vocab_size"]))
    dtype = feature_dtype(config.target, facts, placement.producers[0])
    if config.drafter.init_from is not None:
        _check_init_from(Path(config.drafter.init_from), shape)
    train = config.train
    asked_tokens, asked_draft_tokens = train.microbatch_tokens, train.microbatch_draft_tokens
    default_tokens = max(config.data.max_length, min(train.batch_tokens, MICROBATCH_TOKENS))
    tokens = default_tokens if asked_tokens == "auto" else asked_tokens
    if tokens < config.data.max_length:
        raise RequestError(
            f"train.microbatch_tokens = {tokens} is less than data.max_length = {config.data.max_length}: a sample is "
            "never split, so raise the first or lower the second"
        )
    default_draft_tokens = max(train.anchors * shape.block_size, DRAFT_TOKENS_PER_TOKEN * tokens)
    draft_tokens = default_draft_tokens if asked_draft_tokens == "auto" else asked_draft_tokens
    width = len(shape.target_layer_ids) * shape.hidden_size
    largest = min(tokens, max(train.batch_tokens, config.data.max_length))
    needs = _needs(config, target_dir, facts, shape, dtype, Block(largest, draft_tokens, config.data.max_length))
    if placement.producers[0] == "cpu":
        _refuse_what_cannot_fit(needs[0], placement, free_bytes)
    budgets = divide(placement, gpus, *needs)
    notes = [*occupied(placement, gpus), *kernel_notes(target_dir)]
    if budgets.producer:
        shares = f"{show_bytes(budgets.producer)} for the producer, {show_bytes(budgets.consumer)} for the consumer"
        needed = f"they need {show_bytes(needs[0].total)} and {show_bytes(needs[1].total)} at most"
        notes.append(f"GPU memory, shared: {shares}; {needed}")
    processes = len(placement.producers) + len(placement.consumers)
    # A sample has two tokens at least: an anchor and what follows it.
    guests = config.hosts.producers if config.hosts.listen else 0
    ring = ring_size(config.ring, largest, largest // 2, width, dtype, processes, free_bytes, guests)
    staged = checkpoint_bytes(shape, _compute_width(config))
    if ring.total_bytes + staged > free_bytes:
        raise RequestError(
            f"ring.bytes: the ring takes {show_bytes(ring.total_bytes)} and checkpoints {show_bytes(staged)} on their "
            f"way to the disk, but only {show_bytes(free_bytes)} of memory is free: set ring.bytes to at most "
            f"{show_bytes(max(free_bytes - staged, 0))}, or use a smaller drafter"
        )
    known = (target_dir, facts, shape, placement, dtype, width, tokens, draft_tokens, ring)
    return Outline(*known, *needs, budgets, staged, notes)


def dataset_folder(config: Config) -> Path:
    """Where the token dataset of this target and data lies; runs that share both share it."""
    key = msgspec.json.encode((config.target.model, config.target.revision, config.data))
    return Path(config.run.dir) / "datasets" / hashlib.blake2b(key, digest_size=8).hexdigest()


def plan_params(config: Config, found: Outline) -> PlanParams:
    """What decides the plan beside the data."""
    return PlanParams(
        seed=config.train.seed,
        epochs=config.train.epochs,
        batch_tokens=config.train.batch_tokens,
        anchors=config.train.anchors,
        block_size=found.shape.block_size,
        microbatch_tokens=found.microbatch_tokens,
        microbatch_draft_tokens=found.microbatch_draft_tokens,
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
    padding_mask: bool,
) -> tuple[Job, list[str]]:
    """The job of this start, going on from `checkpoint` if there is one, and notes for the user. `padding_mask` is what
    the self-check of the target decided."""
    cursor = read_cursor(checkpoint) if checkpoint is not None else None
    change = check_fit(str(checkpoint), cursor, plan) if cursor is not None else ""
    notes = [f"resuming with {change}"] if change else []
    shape = _final_shape(config, found, dataset)
    weights = _target(config, found)
    if checkpoint is not None:
        _check_same_training(checkpoint, shape, weights)
    # A part of an abstract socket's address, which holds 107 bytes.
    run_id = f"{re.sub('[^A-Za-z0-9._-]', '-', config.run.name)[:40]}-{secrets.token_hex(6)}"
    job = Job(
        run_id=run_id,
        incarnation=secrets.randbits(31),
        address=endpoint(run_id),
        # On one node shared memory takes every byte once; over ZeroMQ it is copied four times.
        transport="shm" if config.ring.transport == "auto" else config.ring.transport,
        payload_address=payload_endpoint(run_id),
        target_dir=str(found.target_dir),
        padding_mask=padding_mask,
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
        producers=found.placement.producers,
        consumers=found.placement.consumers,
        producer_bytes=found.budgets.producer,
        consumer_bytes=found.budgets.consumer,
        quarantine_limit=config.train.quarantine_limit,
        hang_s=parse_seconds(config.run.hang_after, "run.hang_after"),
        hosts=listening(config.hosts),
    )
    return job, notes


def bill(found: Outline, dataset: TokenDataset, plan: Plan) -> dict[str, Any]:
    """plan.json: what the run is going to do and what a full dump of its features would take."""
    tokens = int(dataset.lengths.sum())
    bytes_per_token = found.width * CARRIERS[found.dtype].itemsize
    return {
        "samples": len(dataset),
        "tokens": tokens,
        "steps": plan.total_steps,
        "epochs": plan.params.epochs,
        "bytes_per_token": bytes_per_token,
        "full_dump_bytes": tokens * bytes_per_token,
        "ring_bytes": found.ring.total_bytes,
        "gpu_memory": {"producer": found.producer_need.total, "consumer": found.consumer_need.total},
        "host_memory": {"ring": found.ring.total_bytes, "checkpoint": found.checkpoint_bytes},
        "plan_hash": plan.hash,
        "step_hash": plan.step_hash,
    }


def _final_shape(config: Config, found: Outline, dataset: TokenDataset) -> DrafterShape:
    """The shape with a mask token that the data never holds: that of the drafter it starts from, then special tokens,
    then any other unused id."""
    special = [int(token) for token in dataset.meta["unused_special_ids"]]
    unused = np.setdiff1d(np.arange(found.facts["vocab_size"]), dataset.occurring_ids()).tolist()
    init_from = config.drafter.init_from
    trained = [read_shape(Path(init_from)).mask_token_id] if init_from is not None else []
    there = set(unused)
    preferred = [token for token in (*trained, *special) if token in there]
    return resolve_shape(config.drafter, found.facts, [*preferred, *unused])


def _check_init_from(folder: Path, shape: DrafterShape) -> None:
    """The mask token may still become that of `folder`; all else must be the same."""
    try:
        trained = read_shape(folder)
    except (OSError, ValueError) as error:
        raise RequestError(f"drafter.init_from: {folder} is neither an export nor a checkpoint ({error})") from None
    if differing := [name for name in differing_fields(trained, shape) if name != "mask_token_id"]:
        raise RequestError(f"drafter.init_from: {folder} has another {', '.join(differing)} than [drafter] asks for")


def _needs(
    config: Config, target_dir: Path, facts: dict[str, Any], shape: DrafterShape, dtype: str, block: Block
) -> tuple[Need, Need]:
    """Bytes that a producer and a consumer need on their devices."""
    width = CARRIERS[dtype].itemsize
    # As stored, but for what is cast on loading; quantised weights keep their size.
    stored = CARRIERS[facts["dtype"]].itemsize if facts["dtype"] in CARRIERS else width
    weight_bytes = weight_size(target_dir)[1] * width // stored
    taps = len(shape.target_layer_ids)
    producer = producer_need(weight_bytes, facts, taps, width, block)
    return producer, consumer_need(shape, facts["tied"], width, _compute_width(config), block)


def _compute_width(config: Config) -> int:
    """Bytes of one number in the drafter's products."""
    return 4 if config.train.precision == "fp32" else 2


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
