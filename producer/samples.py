"""Rows of data files to samples: format, conversation, token ids and mask."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producer.chat import Conversation, conversation_of
from producer.config import SourceConfig, Thinking
from producer.fidelity import Fidelity
from producer.formats import ID_KEYS, kind_of
from producer.inputs import read_source
from producer.masks import Masker, Tokenised
from producer.rows import Row, SkipRow, row_of
from producer.tagged import Shows
from producer.template import Template, encodable
from producer.turns import Drafts, drafts_of
from protocol.dataset import eligible_anchors

_IGNORED_LABEL = -100
_PROBES = ("Hello  12 caf\u00e9 \U0001f642\n\n\tx", "<|im_start|>user\nhi<|im_end|>")


@dataclass(frozen=True)
class Item:
    """A good row of the format `kind`: a conversation, or token ids int32 `[L]` with their mask uint8 `[L]`."""

    row: Row
    source: SourceConfig
    conversation: Conversation | None
    tokens: Tokenised | None
    kind: str = "messages"


@dataclass(frozen=True)
class Samples:
    """What a row became: its samples, uncut, and how many answers are learned in none of them, by reason."""

    samples: list[Tokenised]
    left_out: dict[str, int] = field(default_factory=dict)


class SampleMaker:
    """Turns rows into samples with ids below `vocab_size` for one tokenizer. `max_length` tokens of a sample, or of a
    prompt to be answered, are used; None: all."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_length: int | None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.tokenizer_id = tokenizer_fingerprint(tokenizer)
        self._masker = Masker(tokenizer)
        self._templates: dict[Thinking, tuple[Template, Fidelity]] = {}
        self._shows: Shows | None = None

    def items(self, sources: Iterable[SourceConfig]) -> Iterator[Item | tuple[Row, SkipRow]]:
        """Every row of every source in order: the item, or the row with why it is none."""
        for source in sources:
            for path, number, payload in read_source(source.path):
                row = row_of(path, number, payload)
                try:
                    yield self.item(row, source)
                except SkipRow as skip:
                    yield row, skip

    def item(self, row: Row, source: SourceConfig) -> Item:
        """The item of a row. Raises SkipRow when there is none."""
        if row.bad is not None:
            raise row.bad
        kind = kind_of(row.value) if source.format == "auto" else source.format
        if kind == "tokens":
            return Item(row, source, None, self._given_tokens(row.value), kind)
        if kind == "text":
            text = row.value.get("text")
            if not isinstance(text, str):
                raise SkipRow("text is not text", f"it is a {type(text).__name__}")
            return Item(row, source, None, self._masker.document(encodable(text)), kind)
        if self._shows is None:
            self._shows = self.template("keep")[0].shows()
        conversation = conversation_of(row.value, kind, self._shows)
        if source.thinking == "off" and conversation.reasons:
            raise SkipRow("reasoning in a row of a source with thinking off")
        return Item(row, source, conversation, None, kind)

    def samples(self, items: Sequence[Item]) -> list[Samples | SkipRow]:
        """The training samples of items, in their order, or why there are none. All are tokenised at once."""
        drafts: list[Drafts | SkipRow] = []
        for item in items:
            try:
                drafts.append(self._drafts(item))
            except SkipRow as skip:
                drafts.append(skip)
        texts = [text for found in drafts if isinstance(found, Drafts) for text in found.texts]
        made = iter(self._masker.tokenise(texts))
        results: list[Samples | SkipRow] = []
        for item, found in zip(items, drafts, strict=True):
            if isinstance(found, SkipRow):
                results.append(found)
                continue
            samples = [next(made) for _ in found.texts] if item.tokens is None else [item.tokens]
            try:
                results.append(self._checked(samples, found.left_out))
            except SkipRow as skip:
                results.append(skip)
        return results

    def _drafts(self, item: Item) -> Drafts:
        if item.conversation is None:
            return Drafts()
        template, fidelity = self.template(_switch(item))
        if any(message["role"] == "assistant" for message in item.conversation.messages):
            fidelity.check(item.conversation)
        return drafts_of(template, item.conversation, item.source.turns)

    def _checked(self, samples: list[Tokenised], left_out: list[SkipRow]) -> Samples:
        """Samples that something can be learned from. Raises SkipRow when there is none, or an id is out of range."""
        reasons: dict[str, int] = {}
        for reason in [skip.reason for skip in left_out] + [r for made in samples for r in made.left_out.elements()]:
            reasons[reason] = reasons.get(reason, 0) + 1
        for sample in samples:
            self._check_ids(sample.ids)
        useful = [sample for sample in samples if eligible_anchors(sample.mask)]
        if useful:
            return Samples(useful, reasons)
        if reasons:
            raise SkipRow(next(iter(reasons)))
        supervised, tokens = (sum(len(x) for x in y) for y in (
            [np.flatnonzero(sample.mask) for sample in samples], [sample.ids for sample in samples]))  # fmt: skip
        raise SkipRow("no two supervised tokens in a row", f"{supervised} of {tokens} tokens are supervised")

    def sample(self, item: Item) -> Tokenised:
        """The sample that ends with an item's last answer, its first `max_length` tokens. Raises SkipRow when nothing
        in it can be learned."""
        (made,) = self.samples([item])
        if isinstance(made, SkipRow):
            raise made
        whole = made.samples[-1]
        return Tokenised(whole.ids[: self.max_length], whole.mask[: self.max_length])

    def prompt(self, item: Item) -> NDArray[np.int32]:
        """Token ids int32 `[P]` that ask for the last answer of an item. Raises SkipRow when there is no question."""
        if item.conversation is not None:
            template, fidelity = self.template(_switch(item))
            question = item.conversation.prompt()
            fidelity.check(question)
            ids = template.prompt_ids(question)
        elif item.kind == "text":
            raise SkipRow("no prompt to answer", "a document asks nothing")
        else:
            assert item.tokens is not None
            answers = answer_runs(item.tokens.mask)
            ids = item.tokens.ids[: answers[-1][0]] if answers else item.tokens.ids
        if not len(ids):
            raise SkipRow("no prompt to answer", "the first token is supervised already")
        if self.max_length is not None and len(ids) > self.max_length:
            raise SkipRow("prompt longer than max_length", f"{len(ids)} tokens")
        self._check_ids(ids)
        return ids

    def template(self, thinking: Thinking) -> tuple[Template, Fidelity]:
        """The chat template at a thinking setting. Raises RequestError when the tokenizer has none."""
        if thinking not in self._templates:
            template = Template(self.tokenizer, thinking)
            self._templates[thinking] = (template, Fidelity(template))
        return self._templates[thinking]

    def thinking(self, item: Item) -> str:
        """How an item asks: with thinking "on" or "off"; "" where nobody can tell: token ids, documents, and templates
        without a switch."""
        if item.conversation is None or not self.template("keep")[0].has_switch():
            return ""
        return "off" if _switch(item) == "off" else "on"

    def _given_tokens(self, row: dict[str, Any]) -> Tokenised:
        made_for = row.get("tokenizer")
        if made_for is not None and made_for != self.tokenizer_id:
            raise SkipRow("token ids of another tokenizer", f"{made_for}, the target's is {self.tokenizer_id}")
        ids = _integers(next((row[key] for key in ID_KEYS if key in row), None), "token ids")
        if "loss_mask" in row:
            mask = _integers(row["loss_mask"], "loss_mask")
            if not np.isin(mask, (0, 1)).all():
                raise SkipRow("loss_mask is not 0 and 1")
        else:
            mask = _integers(row.get("labels"), "loss_mask") != _IGNORED_LABEL
        if len(mask) != len(ids):
            raise SkipRow("token ids and mask differ in length", f"{len(ids)} ids, {len(mask)} mask entries")
        return Tokenised(ids.astype(np.int32), mask.astype(np.uint8))

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


def _switch(item: Item) -> Thinking:
    """The thinking setting of a row: its source's, or its own where the source says "row": what the row names, and
    else whether it carries reasoning."""
    if item.source.thinking != "row" or item.conversation is None:
        return item.source.thinking
    asked = item.conversation.thinks
    return "keep" if asked or (asked is None and item.conversation.reasons) else "off"


def _integers(values: Any, name: str) -> NDArray[np.int64]:
    if not isinstance(values, list) or not all(type(value) is int and -(2**31) <= value < 2**31 for value in values):
        raise SkipRow(f"{name} missing or not a list of integers")
    return np.asarray(values, dtype=np.int64)
