"""Does the chat template show every part of a conversation? Templates drop what they do not know without a word.

The answer depends on the shape of a conversation (roles, which parts are there), not on its texts, so each shape is
tried once with sentinels in place of the texts.
"""

from __future__ import annotations

from typing import Any

from producer.chat import Conversation, Message
from producer.rows import SkipRow
from producer.template import Template

Shape = tuple[Any, ...]


class Fidelity:
    """Refuses conversations of which the template would leave something out; remembers shapes it has tried."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._known: dict[Shape, SkipRow | None] = {}

    def check(self, conversation: Conversation) -> None:
        """Raises SkipRow, naming the part, when the template does not show all turns, tools, tool calls and the
        reasoning of the last answer. Reasoning of earlier answers may go: templates drop it by design."""
        shape = _shape(conversation)
        if shape not in self._known:
            self._known[shape] = self._try(conversation)
        refused = self._known[shape]
        if refused is not None:
            raise SkipRow(refused.reason, refused.detail)

    def _try(self, conversation: Conversation) -> SkipRow | None:
        marked = [_marked(message, turn) for turn, message in enumerate(conversation.messages)]
        text = self._template.render(marked, conversation.tools)
        last = len(marked) - 1
        for turn, message in enumerate(marked):
            role = message["role"]
            if message["content"] and message["content"] not in text:
                return SkipRow("template drops a turn", f"turn {turn} ({role})")
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in text:
                    return SkipRow("template drops tool calls", f"turn {turn}")
            if turn == last and message.get("reasoning_content", "") not in text:
                return SkipRow("template drops reasoning", f"turn {turn}")
        if conversation.tools and text == self._template.render(marked):
            return SkipRow("template has no place for tools")
        return None


def _marked(message: Message, turn: int) -> Message:
    marked = {**message, "content": f"content-{turn}-end" if message["content"] else ""}
    if "reasoning_content" in message:
        marked["reasoning_content"] = f"reasoning-{turn}-end"
    if "tool_calls" in message:
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": f"call_{turn}_{place}_end"}}
            for place, call in enumerate(message["tool_calls"])
        ]
    return marked


def _shape(conversation: Conversation) -> Shape:
    turns = (
        (m["role"], bool(m["content"]), "reasoning_content" in m, len(m.get("tool_calls", ())), "name" in m)
        for m in conversation.messages
    )
    return (bool(conversation.tools), *turns)
