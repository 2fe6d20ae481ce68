"""z-lab's checkpoint format: tensor names and shapes, and config.json to and from a DrafterShape. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from consumer.shape import DrafterShape, check_shape, token_ids
from protocol.errors import RequestError

ARCHITECTURE = "DFlashDraftModel"


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint: 11 per layer and 3 more; no embedding, no head."""
    hidden, mlp, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_heads * dim, shape.num_kv_heads * dim
    table: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(shape.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(shape.num_layers):
        table |= {
            f"layers.{layer}.{name}.weight": size
            for name, size in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (q, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, q),
                "self_attn.q_norm": (dim,),
                "self_attn.k_norm": (dim,),
                "mlp.gate_proj": (mlp, hidden),
                "mlp.up_proj": (mlp, hidden),
                "mlp.down_proj": (hidden, mlp),
            }.items()
        }
    return table


def check_tensors(where: str, found: Mapping[str, Sequence[int]], shape: DrafterShape) -> None:
    """Refuse (RequestError led by `where`) a table of name -> size that is not exactly `tensor_shapes`."""
    expected = tensor_shapes(shape)
    wrong = [
        *(f"missing {name}" for name in sorted(expected.keys() - found.keys())),
        *(f"unexpected {name}" for name in sorted(found.keys() - expected.keys())),
        *(
            f"{name} is {tuple(found[name])}, not {expected[name]}"
            for name in sorted(expected.keys() & found.keys())
            if tuple(found[name]) != expected[name]
        ),
    ]
    if wrong:
        raise RequestError(f"{where}: {'; '.join(wrong)}")


def config_json(shape: DrafterShape) -> dict[str, Any]:
    """z-lab's config.json. RoPE's base is written in both places that readers know: one that misses it guesses."""
    sliding = "sliding_attention" in shape.layer_types
    dflash: dict[str, Any] = {
        "target_layer_ids": list(shape.target_layer_ids),
        "mask_token_id": shape.mask_token_id,
        "block_size": shape.block_size,
    }
    if shape.input_embedding_scale != 1.0:
        dflash["input_embedding_scale"] = shape.input_embedding_scale
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": shape.block_size,
        "dflash_config": dflash,
        "num_target_layers": shape.num_target_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window,
        "use_sliding_window": sliding,
        "max_window_layers": shape.num_layers,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "eos_token_id": _one_or_list(shape.eos_token_ids),
        "pad_token_id": shape.pad_token_id,
        "bos_token_id": shape.bos_token_id,
        "dtype": "bfloat16",
    }
    if shape.is_causal is not None:
        config["is_causal"] = shape.is_causal
    return config


def shape_from_config_json(config: Mapping[str, Any]) -> DrafterShape:
    """The shape in a z-lab config.json of either layout (keys at top level or in dflash_config, RoPE likewise).

    Raises RequestError naming a missing key, or a feature that this drafter does not have.
    """
    dflash = config.get("dflash_config") or {}
    rope = config.get("rope_parameters") or {}
    flat = {**config, **dflash}
    if ARCHITECTURE not in config.get("architectures", [ARCHITECTURE]):
        raise RequestError(f"config.json: architectures is {config['architectures']}, not {ARCHITECTURE}")
    refuse_foreign(flat, rope)
    layers = _need(config, "num_hidden_layers")
    causal = config.get("is_causal", dflash.get("causal"))
    shape = DrafterShape(
        hidden_size=_need(config, "hidden_size"),
        target_layer_ids=tuple(_need(flat, "target_layer_ids")),
        num_layers=layers,
        num_heads=_need(config, "num_attention_heads"),
        num_kv_heads=_need(config, "num_key_value_heads"),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        intermediate_size=_need(config, "intermediate_size"),
        block_size=_need(flat, "block_size"),
        rope_theta=plain_rope_theta(config),
        rms_norm_eps=_need(config, "rms_norm_eps"),
        vocab_size=_need(config, "vocab_size"),
        mask_token_id=_need(flat, "mask_token_id"),
        layer_types=tuple(config.get("layer_types") or ("full_attention",) * layers),
        sliding_window=config.get("sliding_window"),
        is_causal=None if causal is None else bool(causal),
        num_target_layers=_need(config, "num_target_layers"),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        pad_token_id=config.get("pad_token_id"),
        bos_token_id=config.get("bos_token_id"),
        input_embedding_scale=float(flat.get("input_embedding_scale", 1.0)),
    )
    check_shape(shape, "config.json")
    return shape


def plain_rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotary positions, in either of the two places. Raises RequestError when it is in neither."""
    rope = config.get("rope_parameters") or {}
    return float(_need({"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}, "rope_theta"))


def refuse_foreign(flat: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Refuse (RequestError) a configuration with arithmetic that this drafter does not have."""
    plain = {
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "output_multiplier": (1.0, 1.0),
        "final_logit_softcapping": (None, 0),
        "rope_scaling": (None, None),
    }
    for key, neutral in plain.items():
        if flat.get(key, neutral[0]) not in neutral:
            raise RequestError(f"config.json: {key} is {flat[key]}, which this drafter does not have")
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise RequestError(f"config.json: rope_parameters is {dict(rope)}, this drafter has only plain full rotation")


def _need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise RequestError(f"config.json: {key} is missing: this is not a complete DFlash drafter")
    return config[key]


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return ids[0] if len(ids) == 1 else list(ids) or None
