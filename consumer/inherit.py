"""What a drafter that starts from trained weights takes over from them. No torch: the launcher asks before it starts
anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from consumer.config import DrafterConfig
from consumer.shape import DrafterShape
from consumer.speculators import is_speculators, shape_from_speculators
from consumer.zlab import shape_from_config_json
from protocol.errors import RequestError

# Key of [drafter] -> field of a shape.
FIELDS = {
    "taps": "target_layer_ids",
    "layers": "num_layers",
    "block_size": "block_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "rope_theta": "rope_theta",
    "mask_token": "mask_token_id",
    "layer_types": "layer_types",
    "sliding_window": "sliding_window",
}
# What must be the target's: key of its facts -> field of a shape.
PAIRED = {"num_layers": "num_target_layers", "hidden_size": "hidden_size", "vocab_size": "vocab_size"}


def trained_shape(folder: Path, target: Mapping[str, Any]) -> DrafterShape:
    """The shape of an export, a published drafter (z-lab or speculators) or a checkpoint, as a drafter for `target` (as
    in `resolve_shape`). Raises RequestError when it is none, or belongs to another kind of target."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"drafter.init_from: {folder} is neither an export nor a checkpoint ({error})") from None
    try:
        shape = shape_from_speculators(config, target) if is_speculators(config) else shape_from_config_json(config)
    except RequestError as error:
        raise RequestError(f"drafter.init_from: {folder}: {error}") from None
    wrong = [
        f"{key} {getattr(shape, field)} against {target[key]}"
        for key, field in PAIRED.items()
        if getattr(shape, field) != target[key]
    ]
    if wrong:
        raise RequestError(
            f"drafter.init_from: {folder} was trained for another target: {', '.join(wrong)} (drafter against target)"
        )
    return shape


def inherit(config: DrafterConfig, trained: DrafterShape, folder: str) -> tuple[DrafterConfig, list[str]]:
    """`config` with the shape of `trained`, which lies in `folder`, wherever it leaves a key at its default; and a line
    for each key that it takes over. Raises RequestError for a key that says otherwise, naming both values."""
    plain, taken, lines = DrafterConfig(), {}, []
    for key, field in FIELDS.items():
        asked, there = getattr(config, key), getattr(trained, field)
        if key == "layer_types" and "sliding_attention" not in there:
            there = None if asked is None else there  # all full is what none means
        if key == "sliding_window" and "sliding_attention" not in trained.layer_types:
            there = None
        if asked == getattr(plain, key):
            taken[key] = there
            lines += [f"drafter.{key} = {_shown(there)}, from init_from"] if there is not None else []
        elif asked != there:
            raise RequestError(
                f"drafter.{key} is {_shown(asked)}, and the drafter in {folder} has {_shown(there)}: remove the key, "
                "or start from another drafter"
            )
    return msgspec.structs.replace(config, **taken), lines


def _shown(value: object) -> str:
    return json.dumps(value)
