"""Model FLOPs utilisation (MFU): the arithmetic that the models need, as a share of what the GPUs could do. Pure.

A matrix of P parameters costs 2 P floating-point operations (FLOP) a row in the forward pass, and as many again for
each gradient that is wanted: of its input and of itself. Attention costs 4 x heads x head_dim FLOP per query and key
that it sees (scores and mixing), three times that when trained. This is the counting of PaLM (arXiv 2204.02311,
appendix B), except that keys behind the causal mask are left out. Norms, activations, the optimiser and whatever is
computed twice count as nothing.

Target, per token:  2 x (parameters of decoder layers 0 .. last tap) + 4 x heads x head_dim x context x layers.
Drafter, per step:  context rows x (4 x fc + 6 x k, v of each layer) + draft rows x 6 x layers
                    + supervised rows x 4 x head + 12 x heads x head_dim x keys x draft rows x layers,

where draft rows are anchors x block size, the anchor's own row is not supervised, and rows past the end of an answer
are counted as if they were. `fc` wants no gradient of its input, the frozen head none of itself. A step over
3,072 tokens and 512 anchors of the Qwen3-8B shape has 71 TFLOP.

Peaks are dense bf16 with fp32 accumulation, without sparsity, from NVIDIA's data sheets: A100 (312), H100 (SXM 989,
NVL 835, PCIe 756), H200 (SXM 989, NVL 835), GH200 (989), H20 (148), B200 (2,250), L4 (121), L40 (181), L40S (362),
A10 (125), and the Ada and Blackwell white papers: GeForce RTX 4090 (165), RTX 5090 (209),
RTX PRO 6000 (503).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from launch.machine import Gpu

TERA = 1e12
# By nvidia-smi's name without "NVIDIA"; the first that it begins with counts, so narrower names come first. What has
# no entry (a MIG slice, a laptop's variant) is unknown rather than guessed.
PEAKS = (
    ("A100", 312 * TERA),
    ("H100 NVL", 835 * TERA),
    ("H100 PCIe", 756 * TERA),
    ("H100", 989 * TERA),
    ("H200 NVL", 835 * TERA),
    ("H200", 989 * TERA),
    ("GH200", 989 * TERA),
    ("H20", 148 * TERA),
    ("B200", 2250 * TERA),
    ("L40S", 362 * TERA),
    ("L40", 181 * TERA),
    ("L4", 121 * TERA),
    ("A10", 125 * TERA),
    ("RTX PRO 6000 Blackwell", 503 * TERA),
    ("GeForce RTX 4090", 165 * TERA),
    ("GeForce RTX 5090", 209 * TERA),
)
VARIANTS = ("MIG", "D", "Laptop")
# Families whose decoder layers are attention and a gated MLP, all of them used for every token.
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3", "smollm3", "olmo2")


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides of a run compute and on what. `None`: not known. Peaks in FLOP/s of all processes of a side;
    `anchor_context` is the mean number of tokens before an anchor."""

    target_flop_per_token: float | None = None
    producer_peak: float | None = None
    consumer_peak: float | None = None
    shape: dict[str, Any] = {}
    anchor_context: float = 0.0

    def step_flop(self, tokens: int, anchors: int) -> float:
        """Of one optimiser step over all ranks; 0 where nothing can be made of it."""
        return drafter_flop(self.shape, tokens, anchors, self.anchor_context) if self.consumer_peak else 0.0

    def producer_mfu(self, tokens_per_s: float) -> float | None:
        if self.target_flop_per_token is None or self.producer_peak is None:
            return None
        return tokens_per_s * self.target_flop_per_token / self.producer_peak

    def consumer_mfu(self, flop_per_s: float) -> float | None:
        return None if self.consumer_peak is None else flop_per_s / self.consumer_peak


def costs_of(
    shape: dict[str, Any],
    facts: Mapping[str, Any],
    lengths: NDArray[np.int64],
    anchors: NDArray[np.int64],
    producers: Sequence[Gpu | None],
    consumers: Sequence[Gpu | None],
) -> Costs:
    """Of a drafter's shape, a target's facts, the lengths `[n]` of the samples and their `anchors` `[n]`.

    `producers` and `consumers` have the GPU of each process, None for one that does not compute in 16 bits on a GPU.
    """
    context = float((lengths * lengths).sum() / max(lengths.sum(), 1)) / 2
    return Costs(
        target_flop_per_token=target_flop(facts, max(shape["target_layer_ids"]), context),
        producer_peak=_sum(producers),
        consumer_peak=_sum(consumers),
        shape=shape,
        anchor_context=float((lengths * anchors).sum() / max(anchors.sum(), 1)) / 2,
    )


def target_flop(facts: Mapping[str, Any], last_tap: int, context: float) -> float | None:
    """FLOP a token up to the last tap; None for a family that may be no dense transformer with gated MLPs."""
    if facts["model_type"] not in DENSE:
        return None
    attention, mlp = _layer_parameters(
        facts["hidden_size"],
        facts["num_attention_heads"] * facts["head_dim"],
        facts["num_key_value_heads"] * facts["head_dim"],
        facts["intermediate_size"],
    )
    seen = 4 * facts["num_attention_heads"] * facts["head_dim"] * context
    return float((last_tap + 1) * (2 * (attention + mlp) + seen))


def drafter_flop(shape: Mapping[str, Any], tokens: int, anchors: int, context: float) -> float:
    """FLOP of a training step over `tokens` context rows and `anchors` draft blocks; `shape` has the fields of
    consumer/shape.py."""
    hidden, slots, window = shape["hidden_size"], shape["block_size"], shape["sliding_window"]
    heads, kv_heads = shape["num_heads"] * shape["head_dim"], shape["num_kv_heads"] * shape["head_dim"]
    attention, mlp = _layer_parameters(hidden, heads, kv_heads, shape["intermediate_size"])
    fuse = 4 * len(shape["target_layer_ids"]) * hidden * hidden
    context_rows = tokens * (fuse + 6 * shape["num_layers"] * 2 * hidden * kv_heads)
    draft_rows = anchors * slots
    head = 4 * anchors * (slots - 1) * hidden * shape["vocab_size"]
    keys = sum(
        min(context + slots, window) if kind == "sliding_attention" else context + slots
        for kind in shape["layer_types"]
    )
    layers = 6 * shape["num_layers"] * (attention + mlp)
    return float(context_rows + draft_rows * (layers + 12 * heads * keys) + head)


def peak(gpu_name: str) -> float | None:
    """FLOP/s of a GPU by nvidia-smi's name for it, or None."""
    name = gpu_name.removeprefix("NVIDIA ")
    if any(word in VARIANTS for word in name.split()):
        return None
    # A boundary behind the model's name: an "L4" is no "L40", an "A10" no "A100" and no "A10G".
    found = [flops for model, flops in PEAKS if name == model or name.startswith((f"{model} ", f"{model}-"))]
    return found[0] if found else None


def _sum(gpus: Sequence[Gpu | None]) -> float | None:
    peaks = [peak(gpu.name) if gpu is not None else None for gpu in gpus]
    known = [flops for flops in peaks if flops is not None]
    return sum(known) if known and len(known) == len(peaks) else None


def _layer_parameters(hidden: int, heads: int, kv_heads: int, mlp: int) -> tuple[int, int]:
    """(attention, MLP) of one decoder layer; `heads` and `kv_heads` are heads x head_dim."""
    return hidden * (2 * heads + 2 * kv_heads), 3 * hidden * mlp
