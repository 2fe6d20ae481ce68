"""One row of a data file to one sample: format, conversation, token ids and mask."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.chat import Conversation, conversation_of
from producer.config import SourceConfig, Thinking
from producer.fidelity import Fidelity
from producer.rows import Row, SkipRow, read_rows
from producer.template import Template, Tokenised
from protocol.dataset import eligible_anchors

_ID_KEYS = ("input_ids", "token_ids")
_IGNORED_LABEL = -100
_PROBES = ("Hello  12 caf\u00e9 \U0001f642\n\n\tx", "<|im_start|>user\nhi<|im_end|>")


@dataclass(frozen=True)
class Item:
    """A good row: a conversation, or token ids int32 `[L]` with their mask uint8 `[L]`."""

    row: Row
    source: SourceConfig
    conversation: Conversation | None
    tokens: Tokenised | None


class SampleMaker:
    """Turns rows into samples of at most `max_length` tokens, with ids below `vocab_size`, for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.tokenizer_id = tokenizer_fingerprint(tokenizer)
        self._templates: dict[Thinking, tuple[Template, Fidelity]] = {}

    def items(self, sources: Iterable[SourceConfig]) -> Iterator[Item | tuple[Row, SkipRow]]:
        """Every row of every source in order: the item, or the row with why it is none."""
        for source in sources:
            for row in read_rows(Path(source.path).expanduser()):
                try:
                    yield self._item(row, source)
                except SkipRow as skip:
                    yield row, skip

    def _item(self, row: Row, source: SourceConfig) -> Item:
        if row.bad is not None:
            raise row.bad
        kind = _kind(row.value) if source.format == "auto" else source.format
        if kind == "tokens":
            return Item(row, source, None, self._given_tokens(row.value))
        conversation = conversation_of(row.value, kind)
        if source.thinking == "off" and any("reasoning_content" in message for message in conversation.messages):
            raise SkipRow("reasoning in a row of a source with thinking off")
        return Item(row, source, conversation, None)

    def sample(self, item: Item) -> Tokenised:
        """The training sample of an item. Raises SkipRow when nothing in it can be learned."""
        if item.conversation is None:
            assert item.tokens is not None
            ids, mask = item.tokens.ids, item.tokens.mask
            sample = Tokenised(ids[: self.max_length], mask[: self.max_length], len(ids) > self.max_length)
        else:
            if not any(message["role"] == "assistant" for message in item.conversation.messages):
                raise SkipRow("no assistant turn")
            template, fidelity = self.template(item.source.thinking)
            fidelity.check(item.conversation)
            sample = template.tokenise(item.conversation, self.max_length)
        self._check_ids(sample.ids)
        if not eligible_anchors(sample.mask):
            raise SkipRow(
                f"no two supervised tokens in a row{' within max_length' if sample.truncated else ''}",
                f"{int(sample.mask.sum())} of {len(sample.ids)} tokens are supervised",
            )
        return sample

    def prompt(self, item: Item) -> NDArray[np.int32]:
        """Token ids int32 `[P]` that ask for the last answer of an item. Raises SkipRow when there is no question."""
        if item.conversation is not None:
            template, fidelity = self.template(item.source.thinking)
            question = item.conversation.prompt()
            fidelity.check(question)
            ids = template.prompt_ids(question)
        else:
            assert item.tokens is not None
            answers = answer_runs(item.tokens.mask)
            ids = item.tokens.ids[: answers[-1][0]] if answers else item.tokens.ids
        if not len(ids):
            raise SkipRow("no prompt to answer", "the first token is supervised already")
        if len(ids) > self.max_length:
            raise SkipRow("prompt longer than max_length", f"{len(ids)} tokens")
        self._check_ids(ids)
        return ids

    def template(self, thinking: Thinking) -> tuple[Template, Fidelity]:
        """The chat template at a thinking setting. Raises RequestError when the tokenizer has none."""
        if thinking not in self._templates:
            template = Template(self.tokenizer, thinking)
            self._templates[thinking] = (template, Fidelity(template))
        return self._templates[thinking]

    def _given_tokens(self, row: dict[str, Any]) -> Tokenised:
        made_for = row.get("tokenizer")
        if made_for is not None and made_for != self.tokenizer_id:
            raise SkipRow("token ids of another tokenizer", f"{made_for}, the target's is {self.tokenizer_id}")
        ids = _integers(next((row[key] for key in _ID_KEYS if key in row), None), "token ids")
        if "loss_mask" in row:
            mask = _integers(row["loss_mask"], "loss_mask")
            if not np.isin(mask, (0, 1)).all():
                raise SkipRow("loss_mask is not 0 and 1")
        else:
            mask = _integers(row.get("labels"), "loss_mask") != _IGNORED_LABEL
        if len(mask) != len(ids):
            raise SkipRow("token ids and mask differ in length", f"{len(ids)} ids, {len(mask)} mask entries")
        return Tokenised(ids.astype(np.int32), mask.astype(np.uint8), False)

    def _check_ids(self, ids: NDArray[np.int32]) -> None:
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            token = int(outside[0])
            text = self.tokenizer.convert_ids_to_tokens(token) if 0 <= token < len(self.tokenizer) else None
            where = f"token {text!r} has id {token}, the target's embedding has {self.vocab_size} rows"
            raise SkipRow("token id outside the embedding", where)


def answer_runs(mask: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """The runs `[start, end)` of supervised tokens in a mask `[L]`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Tells tokenizers apart by their vocabulary and what they make of two probe texts, not by how they were saved."""
    probes = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in _PROBES]
    known = json.dumps([sorted(tokenizer.get_vocab().items()), probes]).encode()
    return hashlib.sha256(known).hexdigest()[:16]


def _kind(row: dict[str, Any]) -> str:
    if any(key in row for key in _ID_KEYS):
        return "tokens"
    for key, kind in (("messages", "messages"), ("conversations", "sharegpt")):
        if key in row:
            return kind
    raise SkipRow("unknown row format", f"it has the keys {', '.join(sorted(row))[:80] or 'none'}")


def _integers(values: Any, name: str) -> NDArray[np.int64]:
    if not isinstance(values, list) or not all(type(value) is int and -(2**31) <= value < 2**31 for value in values):
        raise SkipRow(f"{name} missing or not a list of integers")
    return np.asarray(values, dtype=np.int64)
