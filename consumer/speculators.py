"""The speculators format of a DFlash drafter: config.json to and from a DrafterShape, and the tensors besides. Pure.

Its body has z-lab's tensor names. Layer ids are one higher than here (the input of the layer behind, not its output),
and neither the target's depth nor its special tokens stand in the file. A full-vocabulary drafter borrows embedding and
head from its verifier; older files hold a copy of both. Facts: the public speculators sources (models/dflash,
convert/dflash) and reference 2.6.
"""

from collections.abc import Mapping
from typing import Any

from consumer.shape import DrafterShape, check_shape, token_ids
from consumer.zlab import config_json, plain_rope_theta, refuse_foreign
from protocol.errors import RequestError

TYPE_KEY = "speculators_model_type"
# Copies of the verifier's ends, and maps between two vocabularies that are one here.
BORROWED = ("embed_tokens.weight", "lm_head.weight")
MAPS = ("t2d", "d2t")


def is_speculators(config: Mapping[str, Any]) -> bool:
    return TYPE_KEY in config


def shape_from_speculators(config: Mapping[str, Any], target: Mapping[str, Any]) -> DrafterShape:
    """The shape in a speculators config.json, as a drafter for `target` (as in `resolve_shape`).

    Raises RequestError naming a missing key, or a feature that this drafter does not have.
    """
    if config[TYPE_KEY] != "dflash":
        raise RequestError(f'config.json: {TYPE_KEY} is "{config[TYPE_KEY]}": only "dflash" is a drafter of this kind')
    inner = config.get("transformer_layer_config") or {}
    refuse_foreign(inner, inner.get("rope_parameters") or {})
    if config.get("sample_from_anchor") or config.get("projector_type", "dflash") != "dflash":
        raise RequestError("config.json: sample_from_anchor and projector_type are features this drafter does not have")
    vocab_size, drafted = _need(inner, "vocab_size"), config.get("draft_vocab_size")
    if drafted not in (None, vocab_size):
        raise RequestError(
            f"config.json: draft_vocab_size is {drafted} and the target's is {vocab_size}: a drafter with a vocabulary "
            "of its own cannot be trained on here"
        )
    layers = _need(inner, "num_hidden_layers")
    kinds = tuple(inner.get("layer_types") or ("full_attention",) * layers)
    sliding = "sliding_attention" in kinds
    shape = DrafterShape(
        hidden_size=_need(inner, "hidden_size"),
        target_layer_ids=tuple(layer - 1 for layer in _need(config, "aux_hidden_state_layer_ids")),
        num_layers=layers,
        num_heads=_need(inner, "num_attention_heads"),
        num_kv_heads=_need(inner, "num_key_value_heads"),
        head_dim=inner.get("head_dim") or inner["hidden_size"] // inner["num_attention_heads"],
        intermediate_size=_need(inner, "intermediate_size"),
        block_size=_need(config, "block_size"),
        rope_theta=plain_rope_theta(inner),
        rms_norm_eps=_need(inner, "rms_norm_eps"),
        vocab_size=vocab_size,
        mask_token_id=_need(config, "mask_token_id"),
        layer_types=kinds,
        sliding_window=inner.get("sliding_window") if sliding else None,
        is_causal=False if sliding and config.get("sliding_window_non_causal") else None,
        num_target_layers=target["num_layers"],
        max_position_embeddings=inner.get("max_position_embeddings", 32768),
        eos_token_ids=token_ids(target.get("eos_token_id")),
        pad_token_id=target.get("pad_token_id"),
        bos_token_id=target.get("bos_token_id"),
        input_embedding_scale=float(target.get("input_embedding_scale", 1.0)),
    )
    check_shape(shape, "config.json")
    return shape


def speculators_json(shape: DrafterShape, verifier: str) -> dict[str, Any]:
    """speculators' config.json; `verifier` is the target, by hub id or folder. Raises RequestError for what the format
    cannot say."""
    if shape.num_target_layers - 1 in shape.target_layer_ids:
        raise RequestError(
            "the drafter taps the target's last layer, which speculators' layer ids cannot name: use --format zlab"
        )
    if shape.is_causal:
        raise RequestError("full layers of this drafter are causal, which speculators cannot say: use --format zlab")
    flat = config_json(shape)
    own = ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "is_causal")
    return {
        "architectures": ["DFlashSpeculator"],
        TYPE_KEY: "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.block_size - 1}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": {key: value for key, value in flat.items() if key not in own},
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.target_layer_ids],
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": shape.is_causal is False,
        "dtype": flat["dtype"],
    }


def _need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise RequestError(f"config.json: {key} is missing: this is not a complete speculators drafter")
    return config[key]
