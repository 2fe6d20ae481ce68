"""The lines of an answered data set: what each holds, and how they get onto the disk one whole line at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from producer.chat import conversation_of
from producer.decoding import Decoding
from producer.dialogue import Dialogue
from producer.rows import Row, SkipRow
from producer.samples import Item, SampleMaker

# How often progress is said.
SAID_EVERY = 100


class GenerateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `draftwire generate` did.

    `rows` were read, `skipped` ones included; the answers of `resumed` rows were there already. `unfinished` answers
    hit the token limit. `shortened` conversations end early: a later prompt had become longer than `data.max_length`.
    `inexact` ones read back as other token ids than the target wrote: text does not always tokenise the way it was
    generated. Keep the tokens where that matters. Of a server: `refused` rows stand in the output without an answer;
    for `other_prompts` it counted another number of prompt tokens than the target's own template makes.
    """

    rows: int = 0
    resumed: int = 0
    answered: int = 0
    unfinished: int = 0
    shortened: int = 0
    inexact: int = 0
    refused: int = 0
    other_prompts: int = 0
    skipped: dict[str, int] = {}


class AnswerFile:
    """Appends lines to `path`. Each is written with one call, so that an interruption tears the last one at most."""

    def __init__(self, path: Path, resumed: int, say: Callable[[str], None] | None) -> None:
        self._lines = resumed
        self._said = resumed
        self._say = say
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, line: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._lines += 1
        if self._lines - self._said >= SAID_EVERY:
            self.sync()

    def sync(self) -> None:
        """Makes what was written durable, and says how much that is."""
        os.fsync(self._fd)
        if self._say is not None and self._lines > self._said:
            self._say(f"generate: {self._lines} answers written")
        self._said = self._lines

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.sync()
        os.close(self._fd)


def answer_line(
    dialogue: Dialogue,
    finish_reason: str,
    decoding: Decoding,
    tokens: tuple[list[int], list[int]] | None,
    tokenizer: str,
) -> dict[str, Any]:
    """One line of the output. `tokens` are the ids of the last prompt and its answer, where they are kept."""
    item = dialogue.item
    named = item.row.value.get("source")
    line: dict[str, Any] = {}
    if item.conversation is not None:
        line["messages"] = dialogue.said
        if item.conversation.tools:
            line["tools"] = list(item.conversation.tools)
    line["finish_reason"] = finish_reason
    line["source"] = named if isinstance(named, str) else item.row.place
    line["sampling"] = decoding.described()
    if tokens is not None:
        prompt, answer = tokens
        line["input_ids"] = [*prompt, *answer]
        line["loss_mask"] = [0] * len(prompt) + [1] * len(answer)
        line["tokenizer"] = tokenizer
    return line


def reads_back(line: dict[str, Any], item: Item, exact: list[int], maker: SampleMaker) -> bool:
    """Whether `prepare` will make the target's own tokens of a line, as far as both go."""
    try:
        conversation = conversation_of(line, "messages")
        ids = maker.sample(Item(Row(item.row.path, item.row.line, line), item.source, conversation, None)).ids
    except SkipRow:
        return False
    return bool((ids[: len(exact)] == np.asarray(exact[: len(ids)])).all())
