"""Acceptance length by how long rows are and by how the target was asked to think: a drafter may be good at one of
them. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from consumer.walk import Acceptance, per_prompt_means
from protocol.errors import RequestError

# Prompt and answer together, in tokens; behind the last one everything is one bucket.
EDGES = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)


def row_facts(path: Path) -> tuple[list[int], list[str]]:
    """Tokens of each row of an eval shard, and its thinking ("on", "off", "" for unknown). Raises RequestError."""
    try:
        with safe_open(path, framework="numpy") as file:
            lengths = np.diff(file.get_tensor("offsets")).tolist()
            metadata = file.metadata() or {}
        return lengths, json.loads(metadata.get("thinking", "[]")) or [""] * len(lengths)
    except (OSError, SafetensorError, ValueError) as error:
        raise RequestError(f"{path}: not a readable eval shard: {error}") from error


def parts(found: Acceptance, lengths: Sequence[int], thinking: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """`by_length` and `by_thinking`: prompts that were drafted for and their mean acceptance length, none empty.

    `lengths` and `thinking` are those of the rows that `found` was measured on, in order.
    """
    means = per_prompt_means(found)
    bounds = [next((edge for edge in EDGES if length <= edge), None) for length in lengths]
    by_length = [
        {"up_to_tokens": bound, **part}
        for bound in (*EDGES, None)
        if (part := _part([mean for mean, own in zip(means, bounds, strict=True) if own == bound]))
    ]
    by_thinking = [
        {"thinking": mode, **part}
        for mode in ("on", "off", "")
        if (part := _part([mean for mean, own in zip(means, thinking, strict=True) if own == mode]))
    ]
    return {"by_length": by_length, "by_thinking": by_thinking}


def show_parts(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The same as lines; what is all in one part is not said."""
    lines = []
    if len(found["by_length"]) > 1:
        named = [(f"up to {row['up_to_tokens']:,}" if row["up_to_tokens"] else "longer", row)
                 for row in found["by_length"]]  # fmt: skip
        lines.append("by tokens of prompt and answer: " + _shown(named))
    if len(found["by_thinking"]) > 1:
        lines.append("by thinking: " + _shown([(row["thinking"] or "unknown", row) for row in found["by_thinking"]]))
    return lines


def _part(means: list[float]) -> dict[str, Any] | None:
    drafted = [float(mean) for mean in means if not np.isnan(mean)]
    return {"prompts": len(drafted), "acceptance_mean": float(np.mean(drafted))} if drafted else None


def _shown(named: Sequence[tuple[str, dict[str, Any]]]) -> str:
    return ", ".join(f"{name} {row['acceptance_mean']:.3f} ({row['prompts']})" for name, row in named)
