"""Rows of Glaive's function-calling sets: a system text that lists functions, and one text that holds all turns.

    system   SYSTEM: ... functions. Use them if required -, then one JSON object for each function
    chat     USER: ..., ASSISTANT: ... <|endoftext|>, FUNCTION RESPONSE: {...}; a call is written as
             <functioncall> {"name": "f", "arguments": '{...}'} <|endoftext|>

A turn begins where its name stands at the start of a line. The functions become tool definitions, calls become tool
calls, and `<|endoftext|>`, the end token of another tokenizer, goes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from producer.rows import SkipRow

_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_TURN = re.compile(r"^(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]*", re.MULTILINE)
_CALL = re.compile(r"<functioncall>\s*(\{.*\})\s*(?:</functioncall>)?\s*$", re.DOTALL)
_QUOTED = re.compile(r"(\"arguments\"\s*:\s*)'(.*)'(\s*\}\s*)$", re.DOTALL)
_END = "<|endoftext|>"


def glaive_messages(row: dict[str, Any]) -> dict[str, Any]:
    """`messages`, `system` and `tools` of a row. Raises SkipRow with the reason."""
    chat = row.get("chat")
    if not isinstance(chat, str):
        raise SkipRow("chat is not text", f"it is a {type(chat).__name__}")
    found = list(_TURN.finditer(chat))
    if not found or chat[: found[0].start()].strip():
        raise SkipRow("chat does not begin with a turn", chat[:40])
    ends = [*(match.start() for match in found[1:]), len(chat)]
    turns = [_turn(match[1], chat[match.end() : end], place)
             for place, (match, end) in enumerate(zip(found, ends, strict=True))]  # fmt: skip
    system, tools = _system(row.get("system"))
    return {"messages": turns, "system": system, "tools": tools}


def _turn(name: str, text: str, place: int) -> dict[str, Any]:
    role = _ROLES[name]
    text = text.strip().removesuffix(_END).strip()
    call = _CALL.search(text) if role == "assistant" else None
    if call is None:
        return {"role": role, "content": text}
    written = _QUOTED.sub(lambda match: match[1] + _unquoted(match[2]) + match[3], call[1])
    try:
        wanted = json.loads(written)
    except ValueError:
        raise SkipRow("function call is not JSON", f"turn {place}") from None
    return {"role": role, "content": text[: call.start()].strip(), "tool_calls": [wanted]}


def _unquoted(arguments: str) -> str:
    """The arguments as an object: what stands between single quotes is JSON, with single quotes inside escaped."""
    return arguments.replace("\\'", "'")


def _system(text: Any) -> tuple[str, list[dict[str, Any]]]:
    if text is None:
        return "", []
    if not isinstance(text, str):
        raise SkipRow("system is not text", f"it is a {type(text).__name__}")
    text = text.removeprefix("SYSTEM:").strip()
    start = text.find("{")
    if start < 0:
        return text, []
    decoder, tools, at = json.JSONDecoder(), [], start
    while at < len(text):
        try:
            tool, at = decoder.raw_decode(text, at)
        except ValueError:
            return text, []  # braces in plain words: no list of functions
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
    return text[:start].rstrip(" \n-"), tools
