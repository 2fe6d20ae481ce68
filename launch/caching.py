"""What a run has to do with its disk cache: whether it may use it, and whether it holds enough."""

from __future__ import annotations

import importlib.metadata
import json

import numpy as np
from numpy.typing import NDArray

from launch.cache_room import kept_form, room_of, row_bytes_of
from launch.config import Config
from launch.spilling import LARGEST_SHARE
from launch.start import Outline, dataset_folder
from producer.locate import weights_fingerprint
from producer.precision import quantisation
from producer.template_files import template_fingerprint
from protocol.cache import FORMAT, Cache, Manifest, in_use
from protocol.dataset import TokenDataset
from protocol.errors import RequestError
from protocol.plan import Plan
from protocol.shards import SCALE_BYTES, sample_key


def manifest_of(config: Config, found: Outline) -> Manifest:
    """Everything that decides the features of given token ids and what is kept of them. The chat template is in the
    token ids already; its hash is there to name the reason when all of them differ. Raises RequestError."""
    target, taps = config.target, found.shape.target_layer_ids
    kept, scales = kept_form(config.cache, found.dtype, len(taps))
    if scales and found.width % SCALE_BYTES:
        raise RequestError(
            f'cache.dtype = "fp8" keeps {found.width} bytes a token for this target, which is no multiple of '
            f'{SCALE_BYTES}: write "bf16"'
        )
    fingerprint: dict[str, str | int] = {
        "weights": weights_fingerprint(found.target_dir),
        "revision": target.revision or "",
        "dtype": found.dtype,
        "quantisation": quantisation(found.target_dir) or "",
        "taps": json.dumps(list(taps)),
        "transformers": importlib.metadata.version("transformers"),
        "attn": target.attn,
        "compiled": str(target.compiles_on(found.placement.producers[0])).lower(),
        "tensor_parallel": target.tensor_parallel,
        "template": template_fingerprint(found.target_dir),
        "cache.dtype": config.cache.dtype,
    }
    return Manifest(FORMAT, found.width, kept, fingerprint, scales)


def open_cache(config: Config, found: Outline) -> Cache | None:
    """The cache of a configuration, made when it is to be filled; None without one. Raises RequestError when there is
    none to read from, when it holds other features, and when another run fills it."""
    folder = config.cache.folder
    match config.cache.mode:
        case "off":
            return None
        case "only":
            cache = Cache.open(folder)
            cache.refuse_other(manifest_of(config, found))
            return cache
    cache = Cache.create(folder, manifest_of(config, found))
    with in_use(folder), in_use(folder, ".writing", alone=True):
        return cache


def needs_no_target(config: Config) -> bool:
    """Whether everything is to come from the cache, as far as that is known before the data is looked at."""
    if config.cache.mode != "spill":
        return config.cache.mode == "only"
    try:
        dataset, cache = TokenDataset.open(dataset_folder(config)), Cache.open(config.cache.folder)
    except RequestError:
        return False
    return bool(cache.held(dataset).all())


def coverage(config: Config, found: Outline, cache: Cache, dataset: TokenDataset, plan: Plan) -> tuple[bool, list[str]]:
    """Whether a run needs no target, and how much of it the cache holds, as lines. Raises RequestError, with counts,
    unless it holds all that a run from the cache only needs."""
    if config.cache.mode == "spill":
        row_bytes = _row_bytes(cache.manifest)
        room = room_of(config, row_bytes, len(dataset), int(dataset.lengths.sum()), cache, dataset)
        if room.held == room.samples:
            return True, [f"cache: {config.cache.folder} holds all {room.samples} samples; no target is loaded"]
        few = found.ring.slots < LARGEST_SHARE
        lines = [f"cache: the ring has {found.ring.slots} slots, too few to lend one: nothing is kept"] if few else []
        return False, [f"cache: {room}", *lines]
    needed = samples_of(plan, len(dataset))
    missing = int(np.count_nonzero(~cache.held(dataset)[needed]))
    if missing:
        raise RequestError(
            f"cache.mode = only, but {cache.folder} holds {len(needed) - missing} of the {len(needed)} samples that "
            f"this run trains on, {missing} are missing: `draftwire cache build CONFIG` computes them"
        )
    return True, ["cache: it holds all that this run trains on; no target is loaded"]


def samples_of(plan: Plan, samples: int) -> NDArray[np.int64]:
    """The samples that a plan trains on, ascending: all of `samples`, unless it ends within its first epoch."""
    if plan.total_steps and plan.epoch_at(plan.total_steps) > 0:
        return np.arange(samples)
    return np.unique(np.concatenate([np.array(plan.samples(step)) for step in range(plan.total_steps)]))


def missing_bytes(cache: Cache, dataset: TokenDataset) -> tuple[int, int]:
    """(samples, bytes) that the cache lacks of a dataset; what occurs twice counts once."""
    lengths: dict[str, int] = {}
    for at in range(len(dataset)):
        if (key := sample_key(dataset.tokens(at))) not in cache.samples:
            lengths[key] = int(dataset.lengths[at])
    return len(lengths), sum(lengths.values()) * _row_bytes(cache.manifest)


def _row_bytes(manifest: Manifest) -> int:
    return row_bytes_of(manifest.width, manifest.dtype, manifest.scales)
