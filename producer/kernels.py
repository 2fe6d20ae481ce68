"""Optional GPU kernels that a target's layers would use: which are missing here, and what that costs.

Told by the structure that `config.json` states, before anything is loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from producer.locate import read_config, read_target_facts

# Package, the module that it installs, what runs without it and what that costs. The rates are tokens a second of a
# hybrid of 27 B parameters on one H200, forward pass only.
LINEAR_ATTENTION = (
    (
        "flash-linear-attention",
        "fla",
        "their recurrence runs in plain torch, measured on an H200 with a 27B hybrid: 6.2k tokens/s, with it 9.1k",
    ),
    ("causal-conv1d", "causal_conv1d", "their convolutions run in plain torch, which has not been measured by itself"),
)


def kernel_notes(folder: Path) -> list[str]:
    """One line for each missing package that the target in `folder` would use. Raises RequestError."""
    linear, layers = linear_layers(read_config(folder)), read_target_facts(folder)["num_layers"]
    if not linear:
        return []
    return [
        f"{linear} of the target's {layers} layers have linear attention and {package} is missing: {cost}; "
        f"with CUDA: pip install {package}"
        for package, module, cost in LINEAR_ATTENTION
        if importlib.util.find_spec(module) is None
    ]


def linear_layers(config: Mapping[str, Any]) -> int:
    """How many decoder layers of a (text) config are recurrent ones with linear attention."""
    types = config.get("layer_types")
    if isinstance(types, list) and types:
        return types.count("linear_attention")
    # Older files of such models give only the period: every n-th layer has full attention.
    period, layers = config.get("full_attention_interval"), config.get("num_hidden_layers")
    if not isinstance(period, int) or not isinstance(layers, int) or period < 1:
        return 0
    return layers - layers // period if "linear_num_value_heads" in config else 0
