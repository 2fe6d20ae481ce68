"""What a run has to do with its disk cache: whether it may use it, and whether it holds enough."""

from __future__ import annotations

import importlib.metadata
import json

import numpy as np
from numpy.typing import NDArray

from launch.config import Config
from launch.start import Outline
from producer.locate import weights_fingerprint
from producer.precision import quantisation
from producer.template_files import template_fingerprint
from protocol.cache import FORMAT, Cache, Manifest
from protocol.dataset import TokenDataset
from protocol.errors import RequestError
from protocol.plan import Plan
from protocol.shards import FP8, SCALE_BYTES, sample_key

# Token ids and the loss mask.
SMALL_BYTES_A_TOKEN = 5


def manifest_of(config: Config, found: Outline) -> Manifest:
    """Everything that decides the features of given token ids and what is kept of them. The chat template is in the
    token ids already; its hash is there to name the reason when all of them differ. Raises RequestError."""
    target, taps = config.target, found.shape.target_layer_ids
    quantised = config.cache.dtype == "fp8"
    if quantised and found.width % SCALE_BYTES:
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
    if quantised:
        return Manifest(FORMAT, found.width, FP8, fingerprint, scales=len(taps))
    return Manifest(FORMAT, found.width, found.dtype, fingerprint)


def open_for_replay(config: Config, found: Outline) -> Cache:
    """The cache of a configuration. Raises RequestError when there is none, or one of other features."""
    cache = Cache.open(config.cache.folder)
    cache.refuse_other(manifest_of(config, found))
    return cache


def check_covered(cache: Cache, dataset: TokenDataset, plan: Plan) -> str:
    """How much of a run the cache holds, in a line. Raises RequestError, with counts, unless it holds all."""
    held = cache.held(dataset)
    needed = samples_of(plan, len(dataset))
    missing = int(np.count_nonzero(~held[needed]))
    if missing:
        raise RequestError(
            f"cache.mode = only, but {cache.folder} holds {len(needed) - missing} of the {len(needed)} samples that "
            f"this run trains on, {missing} are missing: `draftwire cache build CONFIG` computes them"
        )
    return "cache: it holds all that this run trains on; no target is loaded"


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
    row_bytes = cache.manifest.features_bytes + cache.manifest.scales_bytes + SMALL_BYTES_A_TOKEN
    return len(lengths), sum(lengths.values()) * row_bytes
