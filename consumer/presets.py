"""Published drafters by name: the keys of [drafter] that make one of their shape (reference section 2.2). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIZES: dict[str, Any] = {"layers": 5, "block_size": 16, "heads": 32, "kv_heads": 8, "head_dim": 128}
_QWEN_27B: dict[str, Any] = _SIZES | {
    "taps": (1, 16, 31, 46, 61),
    "mlp": 17408,
    "rope_theta": 1e7,
    "mask_token": 248070,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Qwen3.6-27B-DFlash: four sliding layers, causal inside the block, and a full one.
    "qwen3.6-27b": _QWEN_27B
    | {"layer_types": ("sliding_attention",) * 4 + ("full_attention",), "sliding_window": 2048},
    # Qwen3.5-27B-DFlash.
    "qwen3.5-27b": _QWEN_27B,
    # Qwen3-8B-DFlash-b16.
    "qwen3-8b": _SIZES | {"taps": (1, 9, 17, 25, 33), "mlp": 12288, "rope_theta": 1e6, "mask_token": 151669},
}


def filled(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section as it was read, with the keys of its preset beside its own, which have the last word."""
    preset = section.get("preset")
    return (PRESETS.get(preset, {}) if isinstance(preset, str) else {}) | dict(section)
