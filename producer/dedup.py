"""Keeps held-out prompts out of the training data: what the drafter has been trained on says nothing about it.

A held-out exchange is dropped when
- its prompt equals another held-out one's,
- its prompt equals the prompt of any training answer, every turn of every conversation counted, or
- at least half (`ANSWER_OVERLAP`) of the 8-grams (`NGRAM`) of its answer occur in training answers.
Texts are compared without case and with white space collapsed, the system prompt left out; pre-tokenised rows are
compared by their ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from producer.chat import Conversation
from producer.samples import Item, answer_runs

NGRAM = 8
ANSWER_OVERLAP = 0.5


@dataclass(frozen=True)
class Exchange:
    """One question and its answer: `prompt` is a hash of the normalised prompt, `answer` its words or token ids."""

    prompt: str
    answer: tuple[str, ...]


@dataclass(frozen=True)
class Deduplicated:
    """`kept` are the indices of held-out exchanges that stay, in order; the rest are counted by why they went."""

    kept: tuple[int, ...]
    repeated: int
    prompt_in_training: int
    answer_in_training: int


def exchanges(item: Item) -> list[Exchange]:
    """One exchange per answer of a row; a question without an answer at the end is one with an empty answer."""
    if item.conversation is not None:
        return _text_exchanges(item.conversation)
    assert item.tokens is not None
    ids = [str(token) for token in item.tokens.ids.tolist()]
    runs = answer_runs(item.tokens.mask) or [(len(ids), len(ids))]
    return [Exchange(_hashed("ids " + " ".join(ids[:start])), tuple(ids[start:end])) for start, end in runs]


def _text_exchanges(conversation: Conversation) -> list[Exchange]:
    found, asked = [], hashlib.sha256()
    last = len(conversation.messages) - 1
    for place, message in enumerate(conversation.messages):
        words = message["content"].casefold().split()
        if message["role"] == "assistant":
            found.append(Exchange(asked.hexdigest(), tuple(words)))
        if message["role"] != "system":
            asked.update(f"{message['role']}: {' '.join(words)}\n".encode("utf-8", "surrogatepass"))
        if place == last and message["role"] != "assistant":
            found.append(Exchange(asked.hexdigest(), ()))
    return found


def deduplicate(held_out: Sequence[Exchange], training: Iterable[Exchange]) -> Deduplicated:
    """Which held-out exchanges are new. Memory is bounded by the held-out set; `training` is read once."""
    first: dict[str, int] = {}
    for place, exchange in enumerate(held_out):
        first.setdefault(exchange.prompt, place)
    fresh = [place for place in range(len(held_out)) if first[held_out[place].prompt] == place]
    wanted = {gram for place in fresh for gram in _ngrams(held_out[place].answer)}
    asked: set[str] = set()
    said: set[tuple[str, ...]] = set()
    for exchange in training:
        if exchange.prompt in first:
            asked.add(exchange.prompt)
        if wanted:
            said.update(wanted.intersection(_ngrams(exchange.answer)))
    new = [place for place in fresh if held_out[place].prompt not in asked]
    kept = tuple(place for place in new if _overlap(held_out[place].answer, said) < ANSWER_OVERLAP)
    return Deduplicated(kept, len(held_out) - len(fresh), len(fresh) - len(new), len(new) - len(kept))


def _overlap(answer: Sequence[str], said: set[tuple[str, ...]]) -> float:
    grams = _ngrams(answer)
    return sum(gram in said for gram in grams) / len(grams) if grams else 0.0


def _ngrams(words: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(words[place : place + NGRAM]) for place in range(len(words) - NGRAM + 1)]


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
