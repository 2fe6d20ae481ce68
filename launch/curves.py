"""What of a row of metrics.jsonl is a curve, by name. Pure."""

from __future__ import annotations

from typing import Any

from launch.metrics import Row, learned

# Figures of each kind of row; lists become one curve an entry.
FIGURES = {
    "step": ("loss", "accuracy", "lr", "grad_norm", "tokens_per_s", "mfu", "step_s", "wait_s", "samples_trained"),
    "eval": ("acceptance_mean", "acceptance_token_weighted", "acceptance_per_position"),
    "stream": ("producer_tokens_per_s", "producer_wait_share", "consumer_wait_share", "imbalance", "gpu_memory_bytes"),
}
NOT_FINITE = ("loss", "accuracy", "grad_norm")


def points(row: Row) -> dict[str, float]:
    """Name -> value of everything in `row` that can be drawn over its step; nothing that is not a finite number, and no
    figure of a step that taught nothing."""
    kind = row["kind"]
    found: dict[str, float] = {}
    for name in FIGURES.get(kind, ()):
        if kind == "step" and name in NOT_FINITE and not learned(row):
            continue
        value: Any = row.get(name)
        values = {f"{name}/{place}": part for place, part in enumerate(value, 1)} if isinstance(value, list) else {}
        for key, part in (values or {name: value}).items():
            if isinstance(part, int | float) and not isinstance(part, bool):
                found[f"{kind}/{key}"] = float(part)
    return found
