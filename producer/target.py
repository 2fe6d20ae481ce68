"""Loads the frozen target for text-only hidden states, and finds its parts by structure instead of by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn

from producer.config import TargetConfig
from producer.locate import feature_dtype, read_target_facts
from producer.mirror import ALONE, Mirror, Pass
from producer.precision import check_precision, quantisation
from producer.quiet import hush
from protocol.errors import RequestError, RunError


@dataclass(frozen=True)
class Target:
    """A loaded target in eval mode, without gradients.

    `model` is the whole causal LM (for generation), `text` the decoder stack without the head, `layers` its decoder
    layers, `embedding` and `head` the modules that hold the weights `[V, H]`. `facts` is `read_target_facts`.
    `padding_mask`: whether batches with padding need their mask (producer/selfcheck.py). Of a target that is divided
    over several ranks, each holds its part of the weights, and `mirror` has the others run what this one runs.
    """

    model: Any
    text: nn.Module
    layers: nn.ModuleList
    embedding: nn.Module
    head: nn.Module
    facts: dict[str, Any]
    dtype: torch.dtype
    device: torch.device
    padding_mask: bool = True
    mirror: Mirror = ALONE


def load_target(folder: Path, config: TargetConfig, device: str) -> Target:
    """The target out of the local model `folder` on `device` ("cpu", "cuda:0"); of a divided one the part of this rank,
    which has joined its group (`producer.ranks`).

    Raises RequestError when transformers does not know the architecture, when the weights are quantised in a way that
    would not run here as it is served, when the checkpoint lacks tensors (they would silently be random), or when
    decoder layers, embedding or output head cannot be told apart.
    """
    hush()
    check_precision(folder, device, _capability(device))
    facts = read_target_facts(folder)
    options: dict[str, Any] = {
        "dtype": getattr(torch, feature_dtype(config, facts, device)),
        "attn_implementation": None if config.attn == "auto" else config.attn,
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": True,
        "output_loading_info": True,
    }
    if quantisation(folder):
        options["device_map"] = {"": device}  # packed weights are laid out for their device while they are loaded
    if config.tensor_parallel > 1:
        from transformers.distributed.configuration_utils import DistributedConfig  # who needs one GPU does without it

        options["distributed_config"] = DistributedConfig(tp_size=config.tensor_parallel)
    text_model: Any = transformers.AutoModelForCausalLM
    multimodal: Any = transformers.AutoModelForImageTextToText
    try:
        model, info = text_model.from_pretrained(folder, **options)
    except ValueError as refused:
        try:
            model, info = multimodal.from_pretrained(folder, **options)
        except ValueError:
            raise RequestError(f"{folder}: transformers cannot load it: {str(refused).splitlines()[0]}") from refused
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{folder}: the weights cannot be read: {error}") from None
    absent = sorted([*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])])
    if absent:
        extra = ", ".join(sorted(info["unexpected_keys"])[:8]) or "none"
        raise RequestError(f"{folder}: the checkpoint lacks {', '.join(absent[:8])}; tensors without a place: {extra}")
    return as_target(model.to(device), facts)


def _capability(device: str) -> tuple[int, int] | None:
    known = device.startswith("cuda") and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if known else None


def as_target(model: Any, facts: dict[str, Any]) -> Target:
    """Wraps a loaded causal LM. Raises RequestError when its layers, embedding or head cannot be found."""
    model.eval().requires_grad_(False)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    shape = (facts["vocab_size"], facts["hidden_size"])
    for name, module in (("input embedding", embedding), ("output head", head)):
        weight = getattr(module, "weight", None)
        if weight is None or weight.shape[1:] != shape[1:] or weight.shape[0] < 1:
            near = [key for key, value in model.named_parameters() if value.ndim == 2 and shape[0] in value.shape]
            raise RequestError(f"no {name} of shape {shape} in {type(model).__name__}; candidates: {near or 'none'}")
    text, layers = _decoder(model, embedding, int(facts["num_layers"]))
    return Target(model, text, layers, embedding, head, facts, embedding.weight.dtype, embedding.weight.device)


def _decoder(model: nn.Module, embedding: nn.Module, count: int) -> tuple[nn.Module, nn.ModuleList]:
    """The innermost module that owns both the embedding and a ModuleList of `count` layers, and that list.

    A vision tower may have as many layers, but it does not own the text embedding.
    """
    found: list[tuple[nn.Module, nn.ModuleList]] = []
    for owner in model.modules():
        lists = [child for child in owner.children() if isinstance(child, nn.ModuleList) and len(child) == count]
        if lists and any(module is embedding for module in owner.modules()):
            found.append((owner, lists[0]))
    if not found:
        raise RequestError(f"{type(model).__name__}: no list of {count} decoder layers beside the text embedding")
    return found[-1]


def run_text(
    target: Target, input_ids: NDArray[np.int64], attention_mask: NDArray[np.int64] | None, last: int | None = None
) -> None:
    """One forward pass of the decoder stack, `[B, S]` ids and mask (None: none): no head, cache or graph.

    What it computes is read through taps; the result itself is not needed. `last` is the layer at which taps end the
    pass, for the other ranks of a divided target. They would wait for ever for one that ran out of memory in the
    middle, so that is a RunError there, and otherwise a torch.OutOfMemoryError.
    """
    ids = on_device(input_ids, target.device)
    mask = None if attention_mask is None else on_device(attention_mask, target.device)
    mask_bytes = None if attention_mask is None else attention_mask.tobytes()
    target.mirror.tell(Pass(len(input_ids), input_ids.tobytes(), mask_bytes, last))
    try:
        with torch.inference_mode():
            target.text(input_ids=ids, attention_mask=mask, use_cache=False)
    except torch.OutOfMemoryError as error:
        if target.mirror is ALONE:
            raise
        raise RunError(
            f"out of memory in a pass over {input_ids.shape[0]} x {input_ids.shape[1]} tokens, which the ranks of a "
            f"divided target cannot halve: lower train.microbatch_tokens or data.max_length ({error})"
        ) from None


def on_device(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """The array on the device; a copy to a GPU is only enqueued."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def stop_ids(target: Target, tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer: those of the model's generation settings and the tokenizer's end token."""
    named = target.facts["eos_token_id"]
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return frozenset(int(token) for token in ids if token is not None)
