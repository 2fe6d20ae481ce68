"""Writes `target_io.safetensors`: the target's embedding and output head, all that a trainer needs of the target.

Tensors `embed_tokens` `[V, H]` and `lm_head` `[V, H]` in the target's dtype; tied weights are stored once, as
`embed_tokens`, with metadata `tied` = "true". Metadata `config` is JSON (the target's facts), `fingerprint` names the
weights.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from producer.target import Target, run_text
from producer.whole import whole
from protocol.errors import RequestError
from protocol.files import open_to_others

# bf16 rounds a factor by up to 0.4 %.
_SCALE_TOLERANCE = 0.005


def write_target_io(path: Path, target: Target, fingerprint: str) -> None:
    """Writes the file in one rename. Raises RequestError for a head that a weight matrix alone does not describe."""
    embedding = whole(target, target.embedding.weight)  # type: ignore[arg-type]
    shares = target.head.weight is target.embedding.weight
    head = embedding if shares else whole(target, target.head.weight)  # type: ignore[arg-type]
    if getattr(target.head, "bias", None) is not None:
        raise RequestError(f"{target.facts['model']}: its output head has a bias, which drafters cannot share")
    if embedding.shape != head.shape:
        raise RequestError(f"{target.facts['model']}: embedding {tuple(embedding.shape)}, head {tuple(head.shape)}")
    tied = embedding.data_ptr() == head.data_ptr() or torch.equal(embedding, head)
    tensors = {"embed_tokens": embedding.detach().cpu().contiguous()}
    if not tied:
        tensors["lm_head"] = head.detach().cpu().contiguous()
    config = {
        **target.facts,
        "vocab_size": embedding.shape[0],
        "input_embedding_scale": embedding_scale(target, embedding),
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    metadata = {"config": json.dumps(config), "fingerprint": fingerprint, "tied": "true" if tied else "false"}
    save_atomically(path, tensors, metadata)


def embedding_scale(target: Target, embedding: torch.Tensor) -> float:
    """The factor between rows of `embedding` `[V, H]` and what enters decoder layer 0: sqrt(H) for Gemma-like targets,
    else 1.0.

    Measured on the model rather than looked up by its name. A layer input that is no multiple of the embedding
    (learned positions are added, say) has no such factor, and counts as 1.0.
    """
    entered: list[torch.Tensor] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append((args[0] if args else kwargs["hidden_states"]).detach().double().flatten().cpu())

    ids = np.arange(min(8, int(target.facts["vocab_size"])))[None, :]
    handle = target.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        run_text(target, ids, np.ones_like(ids))
    finally:
        handle.remove()
    rows = embedding[: ids.size].double().flatten().cpu()
    size = float(rows @ rows)
    scale = float(rows @ entered[0]) / size if size else 1.0
    off = float((entered[0] - scale * rows).norm()) / max(float(entered[0].norm()), 1e-30)
    if off > 2 * _SCALE_TOLERANCE or abs(scale - 1.0) < _SCALE_TOLERANCE:
        return 1.0
    root = math.sqrt(int(target.facts["hidden_size"]))
    if abs(scale / root - 1.0) < _SCALE_TOLERANCE:
        return float(torch.tensor(root, dtype=target.dtype))  # models round the factor to their own dtype
    return scale


def save_atomically(path: Path, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file so that it is complete or absent under its name, also after a power cut."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        try:
            save_file(tensors, part, metadata=dict(metadata))
        except SafetensorError as error:  # a full disk, mostly, which is no OSError there
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, str(error), str(path)) from error
        open_to_others(part)
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def is_current(path: Path, fingerprint: str) -> bool:
    """Whether `path` is a readable safetensors file that carries this fingerprint."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="np") as file:
            return bool((file.metadata() or {}).get("fingerprint") == fingerprint)
    except (SafetensorError, OSError):
        return False
