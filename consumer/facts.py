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
        "longest_sample_tokens": int(dataset.lengths.max()),
    }
