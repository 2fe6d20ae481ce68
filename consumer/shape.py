"""The drafter's shape, resolved from configuration and target. Pure.

The drafter always rotates the whole head (plain RoPE): a target's partial or multi-axis rotation is never copied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from consumer.config import LAYER_TYPES, DrafterConfig
from protocol.errors import RequestError

NAMED_ONLY = ("max_position_embeddings", "eos_token_ids", "pad_token_id", "bos_token_id")
AUTO_TAPS = 5  # published drafters read five layers whatever their own depth


class DrafterShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the drafter's tensors and arithmetic. Token ids are rows of the target's embedding."""

    hidden_size: int
    target_layer_ids: tuple[int, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None  # None: causal inside the block iff the layer is sliding
    num_target_layers: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    input_embedding_scale: float

    def causal(self, layer: int) -> bool:
        """Whether slots of `layer` see only slots up to themselves (reference rule of serving engines)."""
        return self.layer_types[layer] == "sliding_attention" if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """Tokens a slot of `layer` may look back, itself included; None: all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


def auto_taps(num_target_layers: int, n: int) -> tuple[int, ...]:
    """`n` target layer ids spread from the second to the third-last layer: id_i = round(1 + i (L - 4) / (n - 1)).

    n = 1 gives (L // 2,). Raises RequestError when the target is too shallow for n different ids.
    """
    if n == 1 and num_target_layers >= 1:
        return (num_target_layers // 2,)
    if n < 1 or num_target_layers - 3 < n:
        raise RequestError(
            f"drafter.taps: {n} automatic taps need a target of at least {max(n, 1) + 3} layers and this one has "
            f"{num_target_layers}: list the taps yourself, ids 0 to {num_target_layers - 1}"
        )
    return tuple(round(1 + i * (num_target_layers - 4) / (n - 1)) for i in range(n))


def resolve_shape(
    config: DrafterConfig,
    target: Mapping[str, Any],
    unused_ids: Sequence[int],
    trained: DrafterShape | None = None,
) -> DrafterShape:
    """The shape for this configuration on this target.

    target: the JSON `config` of target_io.safetensors. unused_ids: every id inside the embedding that the training
    data never holds, best first (a declared mask token, then spare embedding rows, then unused special tokens).
    Mask token "auto" is the first of them that is not pad, end or start token; a mask token given by number must be
    one of them. Automatic taps are five, or as many as a shallow target has room for. trained: the shape of the drafter
    that it starts from, whose arithmetic it keeps where [drafter] has no key for it.

    Raises RequestError naming the field.
    """
    layers = int(target["num_layers"])
    eos = token_ids(target.get("eos_token_id"))
    special = {*eos, *token_ids(target.get("pad_token_id")), *token_ids(target.get("bos_token_id"))}
    taps = auto_taps(layers, max(1, min(AUTO_TAPS, layers - 3))) if config.taps == "auto" else config.taps
    shape = DrafterShape(
        hidden_size=target["hidden_size"],
        target_layer_ids=taps,
        num_layers=config.layers,
        num_heads=config.heads or target["num_attention_heads"],
        num_kv_heads=config.kv_heads or target["num_key_value_heads"],
        head_dim=config.head_dim or target["head_dim"],
        intermediate_size=config.mlp or target["intermediate_size"],
        block_size=config.block_size,
        rope_theta=float(config.rope_theta or target["rope_theta"]),
        rms_norm_eps=target["rms_norm_eps"] if trained is None else trained.rms_norm_eps,
        vocab_size=target["vocab_size"],
        mask_token_id=_mask_token(config.mask_token, int(target["vocab_size"]), special, unused_ids),
        layer_types=config.layer_types or ("full_attention",) * config.layers,
        sliding_window=config.sliding_window,
        is_causal=None if trained is None else trained.is_causal,
        num_target_layers=layers,
        max_position_embeddings=target["max_position_embeddings"],
        eos_token_ids=eos,
        pad_token_id=target.get("pad_token_id"),
        bos_token_id=target.get("bos_token_id"),
        input_embedding_scale=float(target.get("input_embedding_scale", 1.0)),
    )
    check_shape(shape, "drafter")
    if config.init == "target":
        _check_fits_target_layers(shape, target)
    return shape


def _check_fits_target_layers(shape: DrafterShape, target: Mapping[str, Any]) -> None:
    if shape.num_layers > shape.num_target_layers:
        raise RequestError(
            f"drafter.layers is {shape.num_layers}, more than the {shape.num_target_layers} layers that drafter.init = "
            '"target" can start from: lower it, or write drafter.init = "random"'
        )
    sizes = {
        "heads": (shape.num_heads, target["num_attention_heads"]),
        "kv_heads": (shape.num_kv_heads, target["num_key_value_heads"]),
        "head_dim": (shape.head_dim, target["head_dim"]),
        "mlp": (shape.intermediate_size, target["intermediate_size"]),
    }
    wrong = [f"drafter.{name} is {own}, the target's {its}" for name, (own, its) in sizes.items() if own != its]
    if wrong:
        raise RequestError(
            f'{"; ".join(wrong)}: drafter.init = "target" needs the target\'s own sizes, so leave these keys out, or '
            'write drafter.init = "random"'
        )


def differing_fields(one: DrafterShape, other: DrafterShape) -> list[str]:
    """Names of the fields in which two shapes differ, in the order of declaration."""
    return [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]


def other_arithmetic(one: DrafterShape, other: DrafterShape) -> list[str]:
    """Likewise of those that decide what weights mean. Published drafters name end tokens and a longest position of
    their own, which nothing computes with."""
    return [name for name in differing_fields(one, other) if name not in NAMED_ONLY]


def check_shape(shape: DrafterShape, where: str) -> None:
    """Refuse a shape that cannot be built. `where` (a section or a file) leads the RequestError's message."""
    taps, layers = shape.target_layer_ids, shape.num_target_layers
    if not taps or len(set(taps)) != len(taps) or min(taps) < 0 or max(taps) >= layers:
        raise RequestError(
            f"{where}.taps is {list(taps)}: write different layer ids from 0 to {layers - 1} "
            f"(the target has {layers} layers)"
        )
    if shape.num_heads % shape.num_kv_heads:
        raise RequestError(
            f"{where}.heads is {shape.num_heads} and {where}.kv_heads {shape.num_kv_heads}: "
            "heads must be a multiple of kv_heads"
        )
    if shape.head_dim % 2:
        raise RequestError(f"{where}.head_dim is {shape.head_dim}: rotary positions need an even number")
    if not 0 <= shape.mask_token_id < shape.vocab_size:
        raise RequestError(
            f"{where}.mask_token is {shape.mask_token_id}, outside the target's embedding: "
            f"write an id from 0 to {shape.vocab_size - 1}"
        )
    if len(shape.layer_types) != shape.num_layers or any(kind not in LAYER_TYPES for kind in shape.layer_types):
        raise RequestError(
            f"{where}.layer_types is {list(shape.layer_types)}: write {shape.num_layers} of {', '.join(LAYER_TYPES)}"
        )
    if "sliding_attention" in shape.layer_types and not shape.sliding_window:
        raise RequestError(f"{where}.sliding_window is missing but {where}.layer_types has sliding layers")


def _mask_token(choice: str | int, vocab_size: int, special: set[int], unused_ids: Sequence[int]) -> int:
    if isinstance(choice, str):
        for token in unused_ids:
            if 0 <= token < vocab_size and token not in special:
                return int(token)
        raise RequestError(
            "drafter.mask_token: no id of the target's embedding is free of the data and of pad, end and start "
            "tokens: set it to an id that your data does not need"
        )
    if not 0 <= choice < vocab_size:
        raise RequestError(
            f"drafter.mask_token is {choice}, outside the target's embedding: write an id from 0 to {vocab_size - 1}"
        )
    if choice in special:
        raise RequestError(f"drafter.mask_token is {choice}, the target's pad, end or start token: choose another id")
    if choice not in unused_ids:
        raise RequestError(f"drafter.mask_token is {choice}, which the data holds: choose an id that never occurs")
    return choice


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """One id, several or none, as model configurations write them, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
