"""Checkpoints: one folder a step boundary, complete or not there at all.

    checkpoints/step-000500/  drafter.safetensors  weights in the compute dtype, z-lab names
                              state.safetensors    fp32 masters and both AdamW moments
                              config.json          the drafter's shape, as in an export
                              cursor.json          where training stands in the plan
                              manifest.json        bytes and crc32 of the files above, target, best acceptance so far
    checkpoints/latest, best  links

Everything is written under a hidden name, synced, then renamed in one step. An older checkpoint is removed only after
a newer one is complete; one of the same step steps aside under a hidden name until then.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from consumer.checkpoints import FileFacts, Manifest, crc32, point, problem_of, read_shape
from consumer.shape import DrafterShape
from consumer.state import served_weights
from consumer.zlab import config_json
from protocol.cursor import Cursor, encode_cursor
from protocol.errors import RequestError
from protocol.files import open_to_others


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint holds. `state` holds the fp32 tensors, from which the weights in the compute dtype
    `dtype` follow, `best` is the highest acceptance length that the run has measured so far (0 before the first),
    `target` the fingerprint of the target that it is trained for."""

    shape: DrafterShape
    dtype: torch.dtype
    state: Mapping[str, Tensor]
    cursor: Cursor
    target: str
    best: float = 0.0


def write_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Writes `folder`/step-N and points `latest` at it. Raises OSError, leaving every earlier one, when it cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{snapshot.cursor.next_step:06d}"
    part, aside = folder / f".{final.name}.part", folder / f".{final.name}.old"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        weights = served_weights(snapshot.state, snapshot.dtype)
        save_file(weights, part / "drafter.safetensors", metadata={"format": "pt"})
        save_file(dict(snapshot.state), part / "state.safetensors")
        for path in part.iterdir():
            open_to_others(path)
        (part / "config.json").write_text(json.dumps(config_json(snapshot.shape), indent=2) + "\n")
        (part / "cursor.json").write_bytes(encode_cursor(snapshot.cursor))
        files = {path.name: FileFacts(path.stat().st_size, crc32(path)) for path in sorted(part.iterdir())}
        manifest = Manifest(target=snapshot.target, best_acceptance=snapshot.best, files=files)
        (part / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        for path in (*part.iterdir(), part):
            _sync(path)
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        part.rename(final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        if aside.exists() and not final.exists():
            aside.rename(final)
        shutil.rmtree(part, ignore_errors=True)
        raise OSError(str(error)) from error
    point(folder, "latest", final)
    # This one's predecessor, and whatever a kill left half done at another step.
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)
    return final


def read_weights(checkpoint: Path) -> tuple[dict[str, Tensor], DrafterShape]:
    """The drafter of a checkpoint, as it would be exported. RequestError when it is damaged."""
    problem = problem_of(checkpoint)
    if problem is not None:
        raise RequestError(f"{checkpoint}: {problem}")
    return load_file(checkpoint / "drafter.safetensors"), read_shape(checkpoint)


def read_state(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "state.safetensors")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
