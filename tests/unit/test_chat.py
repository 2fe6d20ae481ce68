from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.chat import ROLE_OF, conversation_of
from producer.rows import SkipRow

USER = {"role": "user", "content": "q"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def chat(*turns: Any, **extra: Any) -> dict[str, Any]:
    return {"messages": list(turns), **extra}


def test_three_dresses_of_one_conversation_are_equal() -> None:
    texts = ["a", "b", "c", "d", "e", "f"]
    roles = ["user", "assistant"] * 3
    plain = chat(
        {"role": "system", "content": "s"}, *({"role": r, "content": t} for r, t in zip(roles, texts, strict=True))
    )
    names = ["human", "gpt"] * 3
    sharegpt = {"system": "s", "conversations": [{"from": n, "value": t} for n, t in zip(names, texts, strict=True)]}
    mixed = {"system": "s", "conversations": [{"from": r, "value": t} for r, t in zip(roles, texts, strict=True)]}
    expected = conversation_of(plain, "messages")
    assert len(expected.messages) == 7
    assert conversation_of(sharegpt, "sharegpt") == expected
    assert conversation_of(mixed, "sharegpt") == expected


@given(st.sampled_from(sorted(ROLE_OF)), st.text(min_size=1))
def test_role_aliases_ignore_case_and_keep_the_text(alias: str, text: str) -> None:
    if alias == "function_call":
        return
    turn = conversation_of(chat({"from": alias.upper(), "value": text}), "messages").messages[0]
    assert turn == {"role": ROLE_OF[alias], "content": text}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("one", "one"),
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ([], ""),
        ("", ""),
    ],
)
def test_content_forms(content: Any, text: str) -> None:
    assert conversation_of(chat({"role": "user", "content": content}), "messages").messages[0]["content"] == text


def test_null_content_with_tool_calls_is_empty_text_and_arguments_are_objects() -> None:
    row = chat(USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, tools='[{"name": "f"}]')
    conversation = conversation_of(row, "messages")
    turn = conversation.messages[1]
    assert turn["content"] == ""
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert conversation.tools == ({"name": "f"},)


def test_function_call_turn_of_sharegpt() -> None:
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f"}'}]}
    call = conversation_of(row, "sharegpt").messages[1]["tool_calls"][0]
    assert call["function"] == {"name": "f", "arguments": {}}


def test_reasoning_is_kept_under_one_name() -> None:
    turn = {"role": "assistant", "content": "a", "reasoning": "because"}
    assert conversation_of(chat(USER, turn), "messages").messages[1]["reasoning_content"] == "because"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "no list under 'messages'"),
        ({"messages": []}, "empty conversation"),
        (chat("plain text"), "turn is not an object"),
        (chat({"role": "narrator", "content": "x"}), "unknown role"),
        (chat({"content": "x"}), "unknown role"),
        (chat({"role": "user", "content": None}), "null content"),
        (chat({"role": "user", "content": {"a": 1}}), "content is neither text nor parts"),
        (chat({"role": "user", "content": [{"type": "image_url"}]}), "content part is not text"),
        (chat(USER, {"role": "assistant", "content": ""}), "empty assistant turn"),
        (chat(USER, {"role": "assistant", "content": None}), "empty assistant turn"),
        (chat(USER, {"role": "assistant", "tool_calls": [{}]}), "tool call without a function name"),
        (
            chat(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}),
            "tool call arguments are not a JSON object",
        ),
        (chat(USER, tools="{"), "tools are not JSON"),
        (chat(USER, system=["s"]), "system is not text"),
        (chat(USER, {"role": "assistant", "content": "x"}, finish_reason=1), "finish_reason is not text"),
        (chat(USER, {"role": "assistant", "reasoning_content": "r"}, finish_reason="stop"), "empty assistant turn"),
        (chat(USER, {"role": "assistant", "content": ""}, finish_reason="length"), "empty assistant turn"),
        (
            chat(USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}, finish_reason="length"),
            "tool calls cut by a token limit",
        ),
    ],
)
def test_unusable_rows_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(SkipRow) as caught:
        conversation_of(row, "messages")
    assert caught.value.reason == reason


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "content_filter", None])
def test_only_a_token_limit_cuts_an_answer(reason: str | None) -> None:
    answer = {"role": "assistant", "content": "a"}
    assert not conversation_of(chat(USER, answer), "messages").cut
    assert not conversation_of(chat(USER, answer, finish_reason=reason), "messages").cut
    cut = conversation_of(chat(USER, answer, finish_reason="length"), "messages")
    assert cut.cut
    assert not cut.prompt().cut


def test_sharegpt_rows_may_be_cut_too() -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert conversation_of({"conversations": turns, "finish_reason": "length"}, "sharegpt").cut


def test_answer_cut_inside_its_reasoning_has_no_text() -> None:
    turn = {"role": "assistant", "content": None, "reasoning_content": "because"}
    found = conversation_of(chat(USER, turn, finish_reason="length"), "messages")
    assert found.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "because"}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_any_json_is_a_conversation_or_a_named_skip(value: Any) -> None:
    for row in ({"messages": value}, {"messages": [value]}, {"messages": [{"role": "assistant", "content": value}]}):
        with contextlib.suppress(SkipRow):
            assert conversation_of(row, "messages").messages


def test_prompt_drops_only_a_final_answer() -> None:
    answer = {"role": "assistant", "content": "a"}
    assert conversation_of(chat(USER, answer), "messages").prompt().messages == (USER,)
    assert len(conversation_of(chat(USER, answer, USER), "messages").prompt().messages) == 3
    with pytest.raises(SkipRow):
        conversation_of(chat(answer), "messages").prompt()
