"""Which turns of a conversation are answered anew, and what becomes of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from producer.chat import Conversation, Message
from producer.config import SourceConfig
from producer.decoding import Decoding
from producer.dialogue import dialogue, questions
from producer.rows import Row, SkipRow
from producer.samples import Item

EACH = Decoding(turns="each")


def messages(roles: str) -> tuple[Message, ...]:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return tuple({"role": names[letter], "content": f"{letter}{at}"} for at, letter in enumerate(roles))


def item(roles: str, **more: Any) -> Item:
    said = tuple({**message, **(more if message["role"] == "assistant" else {})} for message in messages(roles))
    return Item(Row(Path("f"), 1, {}), SourceConfig(path="f"), Conversation(said), None)


@pytest.mark.parametrize(
    ("roles", "asked"),
    [
        ("ua", ["u0"]),
        ("suaua", ["s0 u1", "u3"]),
        ("uau", ["u0", "u2"]),
        ("aua", ["a0 u1"]),
        ("uata", ["u0 a1 t2"]),  # the call stays with its result
        ("uaaua", ["u0", "a2 u3"]),
        ("uuaa", ["u0 u1"]),
    ],
)
def test_questions_of_each_turn(roles: str, asked: list[str]) -> None:
    assert [" ".join(each["content"] for each in group) for group in questions(messages(roles))] == asked


def test_answers_take_the_places_of_the_old_ones() -> None:
    found = dialogue(0, item("uaua"), EACH)
    found.take({"role": "assistant", "content": "new"}, False)
    assert [message["content"] for message in found.question.messages] == ["u0", "new", "u2"]
    found.take({"role": "assistant", "content": "newer"}, False)
    assert not found.open
    assert [message["content"] for message in found.said] == ["u0", "new", "u2", "newer"]


def test_the_last_turn_alone_keeps_what_was_before() -> None:
    found = dialogue(0, item("uaua"), Decoding())
    found.take({"role": "assistant", "content": "new"}, False)
    assert not found.open
    assert [message["content"] for message in found.said] == ["u0", "a1", "u2", "new"]


def test_nothing_is_asked_behind_a_cut_answer_or_an_end() -> None:
    cut, ended = dialogue(0, item("uaua"), EACH), dialogue(0, item("uauata"), EACH)
    cut.take({"role": "assistant", "content": "new"}, True)
    assert (cut.open, cut.cut, len(cut.said)) == (False, True, 2)
    ended.take({"role": "assistant", "content": "new"}, False)
    ended.end()
    assert (ended.open, [message["content"] for message in ended.said]) == (False, ["u0", "new"])


def test_without_thinking_earlier_reasoning_is_left_out() -> None:
    found = dialogue(0, item("uaua", reasoning_content="hm"), Decoding(thinking="off"))
    assert found.item.source.thinking == "off"
    assert not any("reasoning_content" in message for message in found.said)
    kept = dialogue(0, item("uaua", reasoning_content="hm"), Decoding(thinking="on"))
    assert kept.said[1]["reasoning_content"] == "hm"


def test_a_row_without_a_question_is_skipped() -> None:
    with pytest.raises(SkipRow, match="no prompt"):
        dialogue(0, item("sa"), EACH)
