"""Recomputes a golden training step (another implementation's, fp32) with this code, on any device."""

import json
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from consumer.attention import Layout
from consumer.blocks import DraftBlocks, blocks_at, document_positions
from consumer.drafter import Drafter, load
from consumer.gpu_step import masks_for
from consumer.loss import LossKind, draft_loss
from consumer.shape import DrafterShape
from protocol.errors import RequestError


class GoldenErrors(msgspec.Struct, frozen=True):
    """Worst relative errors: norm of the difference over norm of the golden tensor; grad: worst over all weights."""

    output: float
    loss: float
    grad: float


def recompute(path: Path, device: str = "cpu") -> GoldenErrors:
    """Run the step of one golden file in fp32. RequestError when the file is not a golden file."""
    tensors, metadata = _read(path)
    shape = _shape(metadata)
    draft, rows = {k: v.to(device) for k, v in tensors.items()}, tensors["input_ids"].shape[0]
    drafter = Drafter(shape).to(device)
    load(drafter, {name.removeprefix("draft."): value for name, value in draft.items() if name.startswith("draft.")})
    blocks, layout = _blocks(tensors, shape)
    features = draft["target_features"].flatten(0, 1)
    context = drafter.context(features, torch.from_numpy(document_positions(layout.offsets)).to(device))
    embedded = drafter.embed(draft["target.embed_tokens"], torch.from_numpy(blocks.input_ids).to(device))
    # On a GPU as in training there: compiled, and with attention in one kernel.
    masks = masks_for(drafter, int(layout.offsets[-1]), blocks.input_ids.size)
    if masks is not None:
        masks.fill(layout)
    output = drafter(embedded, torch.from_numpy(blocks.positions).to(device), context, masks or layout)
    kind: LossKind = "dpace" if metadata["loss_type"] == "dpace" else "ce"
    labels, supervised = torch.from_numpy(blocks.labels), torch.from_numpy(blocks.supervised)
    parts = draft_loss(output, draft["target.lm_head"], labels, supervised, kind=kind, gamma=float(metadata["gamma"]))
    # The golden D-PACE loss is divided by batch rows; training divides by supervised slots (see LossParts).
    loss = parts.loss / (rows if kind == "dpace" else parts.denominator)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = draft["draft_output"].view(rows, -1, shape.block_size, shape.hidden_size)[draft["anchor_valid"]]
    grads = [_error(draft[f"grad.{name}"], weight.grad) for name, weight in drafter.named_parameters()]
    return GoldenErrors(_error(expected, output.detach()), _error(draft["loss"], loss.detach()[None]), max(grads))


def _blocks(tensors: dict[str, Tensor], shape: DrafterShape) -> tuple[DraftBlocks, Layout]:
    rows, length = tensors["input_ids"].shape
    document, column = tensors["anchor_valid"].nonzero(as_tuple=True)
    anchor = tensors["anchors"][document, column].numpy()
    offsets = np.arange(rows + 1, dtype=np.int64) * length
    blocks = blocks_at(
        document.numpy(),
        anchor,
        tensors["input_ids"].flatten().numpy(),
        tensors["loss_mask"].flatten().numpy(),
        offsets,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
    )
    return blocks, Layout(offsets, document.numpy(), anchor)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path}: cannot be read as safetensors: {error}") from error
    if "loss_type" not in metadata or "draft_output" not in tensors:
        raise RequestError(f"{path}: not a golden training step: give a file of tests/golden")
    return tensors, metadata


def _shape(metadata: dict[str, str]) -> DrafterShape:
    config = json.loads(metadata["config"])
    return DrafterShape(
        hidden_size=config["hidden_size"],
        target_layer_ids=tuple(json.loads(metadata["target_layer_ids"])),
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        block_size=config["block_size"],
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
        vocab_size=config["vocab_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        layer_types=tuple(config["layer_types"]),
        sliding_window=config["sliding_window"],
        is_causal=None,
        num_target_layers=config["num_target_layers"],
        max_position_embeddings=4096,
        eos_token_ids=(),
        pad_token_id=None,
        bos_token_id=None,
        input_embedding_scale=1.0,
    )


def _error(golden: Tensor, ours: Tensor | None) -> float:
    return float("inf") if ours is None else float((ours.flatten() - golden.flatten()).norm() / golden.norm())
