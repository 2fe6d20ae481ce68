"""The [drafter], [train] and [eval] sections of a run's configuration.

Types are enforced by msgspec when the TOML is read; `check` adds what a type cannot say. This module is read by
`draftwire --help` and `plan`, so it never imports torch.
"""

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from protocol.errors import RequestError

LARGEST = 2**48
MOST_EPOCHS = 100_000
LAYER_TYPES = ("full_attention", "sliding_attention")


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[drafter]: the shape of the draft model; None or "auto" means "as the target has it".

    preset: a published drafter whose shape keys count where this section has none of its own (`consumer.presets`).
    taps: target layer ids, 0-based; tap i is the output of decoder layer i ("auto": `consumer.shape.auto_taps`).
    layers: draft layers. block_size: draft tokens per block, the anchor included.
    mask_token: id that fills the slots to be predicted ("auto": `consumer.shape.resolve_shape`).
    layer_types: one of full_attention, sliding_attention per layer (None: all full). sliding_window: in tokens.
    init: what the layers start from: "random" weights, or the "target"'s last `layers` layers, which needs the
    target's own heads, kv_heads, head_dim and mlp. init_from: folder of an exported drafter, or of a checkpoint, whose
    weights training starts from; init_optimiser: with the checkpoint's optimiser too.
    """

    kind: Literal["dflash"] = "dflash"
    preset: Literal["qwen3.6-27b", "qwen3.5-27b", "qwen3-8b"] | None = None
    taps: Literal["auto"] | tuple[int, ...] = "auto"
    layers: int = 5
    block_size: int = 16
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp: int | None = None
    rope_theta: float | None = None
    mask_token: Literal["auto"] | int = "auto"
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    init: Literal["random", "target"] = "random"
    init_from: str | None = None
    init_optimiser: bool = False


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[train]: the recipe. Defaults are DFlash's published ones where they are published.

    anchors: draft blocks per sample and epoch. warmup: share of all optimiser steps. gamma: decay of the slot
    weights of loss="ce" ("auto": `consumer.loss.default_gamma`). weight_decay: decoupled (AdamW); the paper does not
    give one, 0.01 is that of the best published independent recipe and AdamW's own default. precision "auto" is
    bf16-master32 where the machine multiplies bf16 in hardware, fp32 elsewhere. checkpoint_every: in steps.
    max_hours: ends the run at the first step boundary at which it has trained for so long, whatever the plan still has.
    microbatch_tokens, microbatch_draft_tokens: bounds of one block ("auto": one longest sample at least).
    skip_limit: share of the newest `consumer.skips.WINDOW_STEPS` steps that may be skipped, because loss or gradient
    was not finite, before the run fails.
    quarantine_limit: share of all samples that may be left out as poison before the run fails.
    """

    epochs: int = 1
    max_steps: int | None = None
    max_hours: float | None = None
    batch_tokens: int = 16384
    microbatch_tokens: Literal["auto"] | int = "auto"
    microbatch_draft_tokens: Literal["auto"] | int = "auto"
    anchors: int = 512
    lr: float = 6e-4
    warmup: float = 0.04
    schedule: Literal["cosine", "wsd"] = "cosine"
    loss: Literal["ce", "dpace"] = "ce"
    gamma: Literal["auto"] | float = "auto"
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    precision: Literal["auto", "bf16-master32", "fp32"] = "auto"
    checkpoint_every: int = 500
    keep_checkpoints: int = 3
    quarantine_limit: float = 0.01
    skip_limit: float = 0.05
    seed: int = 0


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[eval]: acceptance length on held-out prompts. every: in steps (0: only before and after training)."""

    every: int = 0
    prompts: int = 32
    max_new_tokens: int = 128


def check(drafter: DrafterConfig, train: TrainConfig, evaluation: EvalConfig) -> None:
    """Refuse values that no target could make right.

    Raises RequestError naming the field, the value and what to write instead. What depends on the target is checked
    by `consumer.shape.resolve_shape`.
    """
    _check_drafter(drafter)
    _check_train(train)
    _field("eval.every", evaluation.every, _at_least(0), "write 0 or a number of steps")
    _field("eval.prompts", evaluation.prompts, _at_least(1), "write at least 1")
    _field("eval.max_new_tokens", evaluation.max_new_tokens, _at_least(2), "write at least 2: one token drafts nothing")


def _check_drafter(drafter: DrafterConfig) -> None:
    _field("drafter.layers", drafter.layers, _at_least(1), "write at least 1")
    _field("drafter.block_size", drafter.block_size, _at_least(2), "write at least 2: slot 0 is the anchor")
    for name in ("heads", "kv_heads", "head_dim", "mlp", "sliding_window"):
        value = getattr(drafter, name)
        if value is not None:
            _field(f"drafter.{name}", value, _at_least(1), "write at least 1, or leave it out")
    if drafter.init_optimiser and drafter.init_from is None:
        raise RequestError(
            "drafter.init_optimiser needs drafter.init_from: name the checkpoint that holds the optimiser"
        )
    if drafter.init == "target" and drafter.init_from is not None:
        raise RequestError(
            'drafter.init = "target" and drafter.init_from both say what the drafter starts from: remove one of them'
        )
    if drafter.rope_theta is not None:
        _field("drafter.rope_theta", drafter.rope_theta, _above(0), "write a positive number, or leave it out")
    if drafter.layer_types is None:
        if drafter.sliding_window is not None:
            raise RequestError(
                "drafter.sliding_window has no effect without drafter.layer_types: "
                'name the layers that are "sliding_attention", or remove it'
            )
        return
    if len(drafter.layer_types) != drafter.layers:
        raise RequestError(
            f"drafter.layer_types names {len(drafter.layer_types)} layers but drafter.layers is {drafter.layers}: "
            "write one type per layer"
        )
    for index, kind in enumerate(drafter.layer_types):
        if kind not in LAYER_TYPES:
            raise RequestError(f'drafter.layer_types[{index}] is "{kind}": write one of {", ".join(LAYER_TYPES)}')
    if ("sliding_attention" in drafter.layer_types) != (drafter.sliding_window is not None):
        raise RequestError(
            'drafter.sliding_window and "sliding_attention" in drafter.layer_types belong together: set both or neither'
        )


def _check_train(train: TrainConfig) -> None:
    _field("train.epochs", train.epochs, lambda value: 1 <= value <= MOST_EPOCHS, f"write 1 to {MOST_EPOCHS}")
    for name in ("batch_tokens", "anchors", "checkpoint_every", "keep_checkpoints"):
        _field(f"train.{name}", getattr(train, name), _at_least(1), "write at least 1")
    if train.max_steps is not None:
        _field("train.max_steps", train.max_steps, _at_least(1), "write at least 1, or leave it out")
    if train.max_hours is not None:
        _field("train.max_hours", train.max_hours, _above(0), "write hours such as 8 or 0.5, or leave it out")
    for name in ("microbatch_tokens", "microbatch_draft_tokens"):
        value = getattr(train, name)
        if value != "auto":
            _field(f"train.{name}", value, _at_least(1), 'write at least 1, or "auto"')
    _field("train.lr", train.lr, _above(0), "write a positive number such as 6e-4")
    _field("train.warmup", train.warmup, lambda value: 0 <= value < 1, "write a share of all steps, 0 to below 1")
    if train.gamma != "auto":
        _field("train.gamma", train.gamma, _above(0), 'write a positive number, or "auto"')
        if train.loss != "ce":
            raise RequestError(f'train.gamma has no effect with train.loss = "{train.loss}": remove it')
    _field("train.weight_decay", train.weight_decay, _at_least(0), "write 0 or more")
    _field("train.grad_clip", train.grad_clip, _above(0), "write a positive number such as 1.0")
    for name in ("quarantine_limit", "skip_limit"):
        _field(f"train.{name}", getattr(train, name), lambda value: 0 <= value <= 1, "write a share, 0 to 1")
    _field("train.seed", train.seed, _at_least(0), "write 0 or a number below 2**48")


def _field(name: str, value: float, ok: Callable[[float], bool], advice: str) -> None:
    # NaN and infinity pass every comparison of one kind or another, so they are refused by themselves; what is larger
    # than any machine is a slip of the hand.
    if not math.isfinite(value) or abs(value) > LARGEST or not ok(value):
        raise RequestError(f"{name} is {value}: {advice}")


def _at_least(low: float) -> Callable[[float], bool]:
    return lambda value: value >= low


def _above(low: float) -> Callable[[float], bool]:
    return lambda value: value > low
