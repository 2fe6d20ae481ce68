"""What an export says about itself: which target it belongs to and what it was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from protocol.cursor import Cursor
from protocol.dataset import TokenDataset
from protocol.job import read_job

_PERCENTILES = (50, 90, 99)


def export_facts(run_dir: Path, cursor: Cursor) -> dict[str, Any]:
    """The facts of a drafter at `cursor`, from the run's own files."""
    with safe_open(run_dir / "target_io.safetensors", framework="pt") as file:
        metadata = file.metadata() or {}
    target, job = json.loads(metadata["config"]), read_job(run_dir)
    dataset = TokenDataset.open(Path(job.dataset_dir))
    # A server must find it: as a folder, or by the hub id that the configuration names.
    model = json.loads((run_dir / "config.resolved.json").read_bytes())["target"]["model"]
    return {
        "target": target["model"],
        "target_from": model if "/" in model else job.target_dir,
        "revision": target["revision"],
        "target_fingerprint": metadata["fingerprint"],
        "steps": cursor.next_step,
        "samples_trained": cursor.samples_trained,
        "tokens_trained": cursor.tokens_trained,
        "dataset_fingerprint": dataset.fingerprint,
        "tokenizer_fingerprint": dataset.meta.get("settings", {}).get("tokenizer"),
        **data_facts(dataset),
    }


def data_facts(dataset: TokenDataset) -> dict[str, Any]:
    """What a drafter was trained on, as far as it tells where it will be good: lengths in tokens, and the shares of
    rows with reasoning and with tool calls (None where the data does not say)."""
    report = dataset.meta.get("report", {})
    kept = report.get("kept", 0)
    shares = {name: report[name] / kept if kept and name in report else None
              for name in ("with_reasoning", "with_tool_calls")}  # fmt: skip
    percentiles = np.percentile(dataset.lengths, _PERCENTILES).round().astype(int).tolist()
    return {
        "longest_sample_tokens": int(dataset.lengths.max()),
        **{f"sample_tokens_p{percent}": tokens for percent, tokens in zip(_PERCENTILES, percentiles, strict=True)},
        "max_length": dataset.meta.get("max_length"),
        "rows_with_reasoning": shares["with_reasoning"],
        "rows_with_tool_calls": shares["with_tool_calls"],
    }
