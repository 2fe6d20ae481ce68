"""What an export says about itself: which target it belongs to and what it was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from protocol.cursor import Cursor
from protocol.dataset import TokenDataset
from protocol.job import read_job


def export_facts(run_dir: Path, cursor: Cursor) -> dict[str, Any]:
    """The facts of a drafter at `cursor`, from the run's own files."""
    with safe_open(run_dir / "target_io.safetensors", framework="pt") as file:
        metadata = file.metadata() or {}
    target = json.loads(metadata["config"])
    dataset = TokenDataset.open(Path(read_job(run_dir).dataset_dir))
    return {
        "target": target["model"],
        "revision": target["revision"],
        "target_fingerprint": metadata["fingerprint"],
        "steps": cursor.next_step,
        "samples_trained": cursor.samples_trained,
        "tokens_trained": cursor.tokens_trained,
        "dataset_fingerprint": dataset.fingerprint,
        "longest_sample_tokens": int(dataset.lengths.max()),
    }
