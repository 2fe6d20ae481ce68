"""The normal form of a conversation: what every accepted row format becomes before the chat template sees it.

Rules, stated once:
- Roles have aliases (human -> user, gpt -> assistant, ...); `developer` is the newer name of `system`.
- A top-level `system` text is the first turn.
- Content parts must be text; several are joined with a newline, as serving engines do.
- Null content is allowed only beside tool calls, and is the empty text. An assistant turn with neither text nor tool
  calls makes the row unusable: there is nothing to learn from it.
- Tool-call arguments become an object, whichever way they were written.
- Reasoning, tool calls and results in tags become fields where the target's template shows such fields (tagged.py).
- Tool definitions that a system text already lists in `<tools>` are not given a second time.
- `finish_reason` "length" says that a token limit cut the last assistant turn; anything else, or nothing, that it ended
  by itself. A turn cut inside its reasoning has no text yet, and is usable all the same.
A row is kept whole or skipped with a reason; nothing inside a kept row is dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from producer.formats import as_turns
from producer.rows import SkipRow
from producer.tagged import Shows, results, split_calls, split_reasoning

_ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "function_call"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response"),
}
ROLE_OF = {alias: role for role, aliases in _ROLES.items() for alias in aliases}
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MESSAGE_KEYS = ("name", "tool_call_id")
_SWITCHES = ("enable_thinking", "thinking")
EVERYTHING = Shows()

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages with the keys `role` and `content` (text), and where they apply `reasoning_content`, `tool_calls`,
    `name`, `tool_call_id`; `tools` are the tool definitions that the target was shown. `cut`: a token limit ended the
    last assistant turn, so what a template writes behind its text was never said. `thinks`: whether the row says that
    the target was asked to think; None when it does not say."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    cut: bool = False
    thinks: bool | None = None

    @property
    def reasons(self) -> bool:
        """Whether any answer carries reasoning."""
        return any("reasoning_content" in message for message in self.messages)

    @property
    def calls(self) -> bool:
        """Whether any answer calls a tool."""
        return any("tool_calls" in message for message in self.messages)

    def prompt(self) -> Conversation:
        """What the target was asked: the conversation without its last turn when that is the assistant's.

        Raises SkipRow when nothing is left that could be answered.
        """
        turns = self.messages[:-1] if self.messages[-1]["role"] == "assistant" else self.messages
        if not turns or turns[-1]["role"] not in ("user", "tool"):
            raise SkipRow("no prompt to answer", "the conversation has no user turn before its last answer")
        return Conversation(turns, self.tools, thinks=self.thinks)


def conversation_of(row: dict[str, Any], kind: str, shows: Shows = EVERYTHING) -> Conversation:
    """The normal form of a row in a format of turns (`formats.kind_of`), for a template that shows these parts.

    Raises SkipRow with the reason.
    """
    row = as_turns(row, kind)
    turns = row.get("messages")
    if not isinstance(turns, list):
        raise SkipRow("no list under 'messages'", f"it is {json.dumps(turns, default=str)[:60]}")
    if not turns:
        raise SkipRow("empty conversation")
    messages = [message for place, turn in enumerate(turns) for message in _messages(turn, place, shows)]
    cut = _is_cut(row.get("finish_reason"))
    _refuse_empty(messages, cut)
    system = row.get("system")
    if isinstance(system, str) and system:
        messages.insert(0, {"role": "system", "content": system})
    elif system:
        raise SkipRow("system is not text", f"it is a {type(system).__name__}")
    listed = any(message["role"] == "system" and "<tools>" in message["content"] for message in messages)
    return Conversation(tuple(messages), () if listed else _tools(row.get("tools")), cut, _thinks(row))


def _thinks(row: dict[str, Any]) -> bool | None:
    options = row.get("chat_template_kwargs")
    named = options if isinstance(options, dict) else row
    return next((named[key] for key in _SWITCHES if isinstance(named.get(key), bool)), None)


def _is_cut(finish_reason: Any) -> bool:
    if finish_reason is not None and not isinstance(finish_reason, str):
        raise SkipRow("finish_reason is not text", f"it is a {type(finish_reason).__name__}")
    return bool(finish_reason == "length")


def _refuse_empty(messages: list[Message], cut: bool) -> None:
    """An assistant turn without text has nothing to learn, unless it is the one that was cut inside its reasoning."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if cut and answers and "tool_calls" in messages[answers[-1]]:
        raise SkipRow("tool calls cut by a token limit", f"turn {answers[-1]}")
    for place in answers:
        message = messages[place]
        unfinished = cut and place == answers[-1] and "reasoning_content" in message
        if not (message["content"] or "tool_calls" in message or unfinished):
            raise SkipRow("empty assistant turn", f"turn {place}")


def _messages(turn: Any, place: int, shows: Shows) -> list[Message]:
    """A turn in normal form; one that answers several calls at once becomes as many."""
    message = _message(turn, place)
    content = message["content"]
    if message["role"] == "tool" and shows.calls:
        return [{**message, "content": result} for result in results(content)]
    if message["role"] == "assistant":
        if shows.reasoning and "reasoning_content" not in message:
            reasoning, content = split_reasoning(content)
            message |= {"reasoning_content": reasoning} if reasoning.strip() else {}
        if shows.calls and "tool_calls" not in message:
            calls, content = split_calls(content)
            message |= {"tool_calls": [_tool_call(call, place) for call in calls]} if calls else {}
        message["content"] = content
    return [message]


def _message(turn: Any, place: int) -> Message:
    if not isinstance(turn, dict):
        raise SkipRow("turn is not an object", f"turn {place} is a {type(turn).__name__}")
    named = turn.get("role", turn.get("from"))
    role = ROLE_OF.get(named.strip().lower()) if isinstance(named, str) else None
    if role is None:
        raise SkipRow("unknown role", f"turn {place} has role {json.dumps(named, default=str)[:60]}")
    content: Any = next((turn[key] for key in ("content", "value", "text") if key in turn), None)
    if named == "function_call":
        return {"role": role, "content": "", "tool_calls": [_tool_call(_loaded(content, place), place)]}
    message: Message = {"role": role, "content": _text(content, place)}
    message.update({key: turn[key] for key in _MESSAGE_KEYS if isinstance(turn.get(key), str)})
    if role == "assistant":
        reasoning = next((turn[key] for key in _REASONING_KEYS if turn.get(key)), None)
        if reasoning is not None:
            message["reasoning_content"] = _text(reasoning, place)
        if turn.get("tool_calls"):
            calls = turn["tool_calls"]
            if not isinstance(calls, list):
                raise SkipRow("tool_calls is not a list", f"turn {place}")
            message["tool_calls"] = [_tool_call(call, place) for call in calls]
    elif content is None:
        raise SkipRow("null content", f"turn {place} ({role})")
    return message


def _text(content: Any, place: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise SkipRow("content is neither text nor parts", f"turn {place} has a {type(content).__name__}")
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise SkipRow("content part is not text", f"turn {place} has a part of type {json.dumps(kind)[:40]}")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SkipRow("tool call without a function name", f"turn {place}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loaded(arguments or "{}", place)
    if not isinstance(arguments, dict):
        raise SkipRow("tool call arguments are not a JSON object", f"turn {place}")
    result: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    return result


def _loaded(text: Any, place: int) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        raise SkipRow("tool call arguments are not a JSON object", f"turn {place}") from None


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise SkipRow("tools are not JSON") from None
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SkipRow("tools are not a list of objects")
    return tuple(tools)
