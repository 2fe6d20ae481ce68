from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from producer.chat import conversation_of
from producer.config import SourceConfig
from producer.dedup import Deduplicated, Exchange, deduplicate, exchanges
from producer.masks import Tokenised
from producer.rows import Row
from producer.samples import Item

LONG = "one two three four five six seven eight nine ten"


def item(*texts: str, system: str = "") -> Item:
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    conversation = conversation_of({"messages": turns, "system": system}, "messages")
    return Item(Row(Path("f"), 1, {}), SourceConfig(path="f"), conversation, None)


def given_tokens(ids: list[int], mask: list[int]) -> Item:
    tokens = Tokenised(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8), False)
    return Item(Row(Path("f"), 1, {}), SourceConfig(path="f"), None, tokens)


def check(held_out: list[Item], training: list[Item]) -> Deduplicated:
    return deduplicate([exchanges(one)[-1] for one in held_out], [e for one in training for e in exchanges(one)])


def test_prompt_seen_in_training_goes_whatever_its_dress() -> None:
    held_out = [item("What  is\nTHIS?", "a"), item("something new", "b")]
    assert check(held_out, [item("what is this?", "z", system="be kind")]) == Deduplicated((1,), 0, 1, 0)


def test_every_turn_of_a_training_conversation_is_a_prompt() -> None:
    training = [item("q", "a", "r", "b", "s", "c")]
    assert check([item("q")], training).prompt_in_training == 1
    assert check([item("q", "a", "r")], training).prompt_in_training == 1
    assert check([item("r")], training).kept == (0,)


def test_repeats_inside_the_held_out_set_keep_the_first() -> None:
    assert check([item("a", "x"), item("b", "x"), item("A ", "y")], []) == Deduplicated((0, 1), 1, 0, 0)


def test_answer_overlap_at_one_half_goes() -> None:
    # Ten words have three 8-grams.
    assert check([item("new", LONG)], [item("old", "zero " + LONG[: LONG.rindex(" ")])]).answer_in_training == 1
    assert check([item("new", LONG)], [item("old", LONG[: LONG.rindex(" nine")])]).kept == (0,)
    assert check([item("new", "too short to judge")], [item("old", "too short to judge")]).kept == (0,)


def test_given_tokens_are_compared_by_id() -> None:
    training = [given_tokens([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])]
    assert check([given_tokens([1, 2], [0, 0])], training).prompt_in_training == 1
    assert check([given_tokens([1, 2, 3, 4, 9], [0, 0, 0, 0, 1])], training).prompt_in_training == 1
    assert check([given_tokens([1, 3], [0, 0])], training).kept == (0,)


exchange_lists = st.lists(
    st.builds(Exchange, st.sampled_from("abcdef"), st.lists(st.sampled_from(["x", "y"]), max_size=12).map(tuple))
)


@given(exchange_lists, exchange_lists)
def test_counts_add_up_and_nothing_kept_was_seen(held_out: list[Exchange], training: list[Exchange]) -> None:
    result: Any = deduplicate(held_out, training)
    gone = result.repeated + result.prompt_in_training + result.answer_in_training
    assert len(result.kept) + gone == len(held_out)
    kept = [held_out[place].prompt for place in result.kept]
    assert len(set(kept)) == len(kept)
    assert not set(kept) & {exchange.prompt for exchange in training}
