"""Reasoning, calls and results that rows write as tags inside the text, taken apart for templates that have a place
for them.

    <think> ... </think>                    at the start of an answer: its reasoning
    <tool_call> {JSON} </tool_call>         at the end of an answer, any number of them: its tool calls
    <tool_response> ... </tool_response>    around a tool's result

A template that shows these parts writes the tags (or its own marks) itself, so text that keeps them would have them
twice, or would be refused. Where a template has no such place the text stays as it is.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_CALL = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>\s*", re.DOTALL)
_RESPONSE = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)


@dataclass(frozen=True)
class Shows:
    """Which parts a chat template has a place for."""

    reasoning: bool = True
    calls: bool = True
    tools: bool = True


def split_reasoning(content: str) -> tuple[str, str]:
    """Reasoning and the rest of an answer; no reasoning where it does not begin with a closed tag."""
    found = _THINK.match(content)
    if found is None:
        return "", content
    return found[1].strip("\n"), content[found.end() :]


def split_calls(content: str) -> tuple[list[dict[str, Any]], str]:
    """The tool calls that end an answer and the text before them; none where a tag does not hold a call."""
    start = content.find("<tool_call>")
    if start < 0:
        return [], content
    calls, at = [], start
    while at < len(content):
        found = _CALL.match(content, at)
        call = _object(found[1]) if found else None
        if found is None or call is None or not isinstance(call.get("name"), str):
            return [], content
        calls.append(call)
        at = found.end()
    return calls, content[:start].rstrip()


def results(content: str) -> list[str]:
    """The results in a tool turn, without their tags: several where several calls are answered at once."""
    found, at = [], 0
    while at < len(content) and (match := _RESPONSE.match(content, at)):
        found.append(match[1])
        at = match.end()
    return found if found and at == len(content) else [content]


def _object(text: str) -> dict[str, Any] | None:
    """JSON, or the Python notation that some published sets have instead."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return None
