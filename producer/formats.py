"""What a row is, told by its keys, and the shapes that are no list of turns: pairs, Alpaca, Glaive.

The first that fits of this list:

    tokens     input_ids or token_ids, with loss_mask or labels
    messages   messages
    sharegpt   conversations or conversation
    glaive     chat, with or without system: one text with USER:, ASSISTANT: and FUNCTION RESPONSE:
    alpaca     instruction, output, and input where there is some: it follows the instruction behind an empty line
    pairs      a question and its answer under the names of `_PAIRS`; system or system_prompt come first
    text       text: a document
"""

from __future__ import annotations

from typing import Any

from producer.glaive import glaive_messages
from producer.rows import SkipRow

ID_KEYS = ("input_ids", "token_ids")
_QUESTIONS = ("prompt", "question", "query", "problem", "instruction", "input")
_ANSWERS = ("response", "completion", "answer", "solution", "output")
_SYSTEM = ("system", "system_prompt")
# Keys that belong to any shape and are handed on as they are.
_SHARED = ("tools", "finish_reason", "enable_thinking", "chat_template_kwargs")


def kind_of(row: dict[str, Any]) -> str:
    """The format of a row. Raises SkipRow when no format fits."""
    if any(key in row for key in ID_KEYS):
        return "tokens"
    if "messages" in row:
        return "messages"
    if "conversations" in row or "conversation" in row:
        return "sharegpt"
    if isinstance(row.get("chat"), str):
        return "glaive"
    if "instruction" in row and "output" in row:
        return "alpaca"
    if _pair(row) is not None:
        return "pairs"
    if isinstance(row.get("text"), str):
        return "text"
    raise SkipRow("unknown row format", f"it has the keys {', '.join(sorted(row))[:80] or 'none'}")


def as_turns(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """A row with a list of turns under `messages`, whatever its format. Raises SkipRow with the reason."""
    if kind == "messages":
        return row
    shared = {key: row[key] for key in _SHARED if key in row}
    if kind == "sharegpt":
        key = "conversations" if "conversations" in row or "conversation" not in row else "conversation"
        if not isinstance(row.get(key), list):
            raise SkipRow(f"no list under {key!r}")
        return {**shared, "messages": row[key], "system": _system(row)}
    if kind == "glaive":
        return {**shared, **glaive_messages(row)}
    if kind == "alpaca":
        given = row.get("input")
        asked = _text(row, "instruction") + (f"\n\n{given}" if isinstance(given, str) and given.strip() else "")
        turns: list[Any] = [{"role": "user", "content": asked}, {"role": "assistant", "content": _text(row, "output")}]
        return {**shared, "messages": turns, "system": _system(row)}
    names = _pair(row)
    if names is None:
        raise SkipRow("no question and answer", f"it has the keys {', '.join(sorted(row))[:80] or 'none'}")
    return {**shared, "messages": [*_turns(row, names[0], "user"), *_turns(row, names[1], "assistant")],
            "system": _system(row)}  # fmt: skip


def _pair(row: dict[str, Any]) -> tuple[str, str] | None:
    question = next((key for key in _QUESTIONS if key in row), None)
    answer = next((key for key in _ANSWERS if key in row), None)
    return (question, answer) if question is not None and answer is not None else None


def _turns(row: dict[str, Any], key: str, role: str) -> list[Any]:
    """One turn, or the turns themselves where a pair is made of lists of messages."""
    value = row[key]
    return value if isinstance(value, list) else [{"role": role, "content": _text(row, key)}]


def _text(row: dict[str, Any], key: str) -> str:
    if not isinstance(row.get(key), str):
        raise SkipRow(f"{key} is not text", f"it is a {type(row.get(key)).__name__}")
    return str(row[key])


def _system(row: dict[str, Any]) -> Any:
    return next((row[key] for key in _SYSTEM if row.get(key)), None)
