"""How large a target's weights are when only its `config.json` is there: counted on a model without memory.

transformers builds the class that `load_target` would load on the meta device, which allocates nothing, so the count is
exact for every family that it knows, hybrids and experts included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from producer.locate import read_config, read_target_facts

Basis = Literal["files", "shapes", "estimate"]


def has_weights(folder: Path) -> bool:
    """Whether all weight files that `folder` names are in it."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    names = set(json.loads(index.read_text()).get("weight_map", {}).values())
    return all((folder / name).is_file() for name in names)


def counted_parameters(folder: Path, trust_remote_code: bool = False) -> tuple[int, Basis]:
    """Parameters of the target as it is loaded, and whether they are exact ("shapes") or an "estimate", for a family
    that this transformers cannot build. Raises RequestError for a config.json that cannot be planned for."""
    import torch
    import transformers

    from producer.quiet import hush

    hush()
    loader: Any = transformers.AutoConfig
    try:
        config = loader.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        # Only the count matters, and packed weights have no size that a model class could tell.
        for part in (config, config.get_text_config()):
            if hasattr(part, "quantization_config"):
                del part.quantization_config
        with torch.device("meta"):
            model = _built(config, trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError, AttributeError, TypeError):
        return _dense_parameters(folder), "estimate"
    return sum(parameter.numel() for parameter in model.parameters()), "shapes"


def _built(config: Any, trust_remote_code: bool) -> Any:
    import transformers

    text_model: Any = transformers.AutoModelForCausalLM
    multimodal: Any = transformers.AutoModelForImageTextToText
    try:
        return text_model.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError:
        return multimodal.from_config(config, trust_remote_code=trust_remote_code)


def _dense_parameters(folder: Path) -> int:
    """As if every layer were attention and a gated MLP; experts count in full."""
    facts, config = read_target_facts(folder), read_config(folder)
    hidden, dim = facts["hidden_size"], facts["head_dim"]
    attention = 2 * hidden * dim * (facts["num_attention_heads"] + facts["num_key_value_heads"])
    experts = next((int(config[key]) for key in ("num_local_experts", "num_experts") if config.get(key)), 1)
    mlp = 3 * hidden * int(config.get("moe_intermediate_size") or facts["intermediate_size"]) * experts
    ends = facts["vocab_size"] * hidden * (1 if facts["tied"] else 2)
    return int(facts["num_layers"] * (attention + mlp) + ends)
