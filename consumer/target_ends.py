"""The two frozen ends of the target that a drafter borrows: input embedding and output head.

Read from `target_io.safetensors`, memory-mapped; trainers never load the target.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from protocol.errors import RequestError


@dataclass(frozen=True)
class TargetEnds:
    """`embedding` and `head` `[V, hidden]` on the device asked for; `config` as producers describe the target."""

    embedding: Tensor
    head: Tensor
    config: dict[str, Any]
    fingerprint: str


def read_target_ends(path: Path, device: torch.device) -> TargetEnds:
    """RequestError naming the file when it cannot be read."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            embedding = file.get_tensor("embed_tokens")
            head = embedding if metadata.get("tied") == "true" else file.get_tensor("lm_head")
        return TargetEnds(embedding, head, json.loads(metadata["config"]), metadata["fingerprint"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RequestError(f"{path}: not a readable target_io file: {error}") from error
