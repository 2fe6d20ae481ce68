"""A conversation that the target answers, its last turn or each of them, one answer after the other. Pure.

An assistant turn is answered anew when a user or a tool spoke before it and no tool result follows: another call would
leave that result without its question. Other assistant turns stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from producer.chat import Conversation, Message
from producer.decoding import Decoding
from producer.samples import Item


@dataclass
class Dialogue:
    """Usable row number `number` on its way: what was said so far, `answered` messages of it up to the last of
    `answers`, and what comes before each further one."""

    number: int
    item: Item
    said: list[Message]
    waiting: list[list[Message]] = field(default_factory=list)
    answers: int = 0
    answered: int = 0
    cut: bool = False
    open: bool = True

    @property
    def question(self) -> Conversation:
        """What the target is asked next."""
        tools = self.item.conversation.tools if self.item.conversation is not None else ()
        return Conversation(tuple(self.said), tools)

    @property
    def asking(self) -> Item:
        """The same as an item for `SampleMaker.prompt`; a row of token ids as it is."""
        return self.item if self.item.conversation is None else replace(self.item, conversation=self.question)

    def take(self, answer: Message, cut: bool) -> None:
        """The target's answer; `cut` when a limit ended it, after which nothing more is asked."""
        self.said.append(answer)
        self.answered = len(self.said)
        self.answers += 1
        self.cut = cut
        self.open = bool(self.waiting) and not cut
        if self.open:
            self.said += self.waiting.pop(0)

    def end(self) -> None:
        """Nothing more is asked, though something waits: what was said after the last answer is left out."""
        del self.said[self.answered :]
        self.open = False


def dialogue(number: int, item: Item, decoding: Decoding) -> Dialogue:
    """The dialogue of an item. Raises SkipRow when nothing in it can be answered."""
    item = with_thinking(item, decoding)
    if item.conversation is None:
        return Dialogue(number, item, [])
    last = item.conversation.prompt()  # also refuses what has no question
    if decoding.turns == "last":
        return Dialogue(number, item, list(last.messages))
    first, *waiting = questions(item.conversation.messages)
    return Dialogue(number, item, first, waiting)


def questions(messages: tuple[Message, ...]) -> list[list[Message]]:
    """What is said before each turn that is answered anew, one after the other."""
    found: list[list[Message]] = []
    pending: list[Message] = []
    for place, message in enumerate(messages):
        follows = messages[place + 1]["role"] if place + 1 < len(messages) else ""
        asked = bool(pending) and pending[-1]["role"] in ("user", "tool")
        if message["role"] == "assistant" and asked and follows != "tool":
            found.append(pending)
            pending = []
        else:
            pending.append(message)
    if pending and pending[-1]["role"] in ("user", "tool"):
        found.append(pending)
    return found


def with_thinking(item: Item, decoding: Decoding) -> Item:
    """The item at the thinking setting of the command; off also takes earlier reasoning out, which a row without
    thinking cannot carry."""
    if decoding.thinking is None:
        return item
    off = decoding.thinking == "off"
    source = msgspec.structs.replace(item.source, thinking="off" if off else "keep")
    conversation = item.conversation
    if off and conversation is not None:
        conversation = replace(conversation, messages=tuple(map(_without_reasoning, conversation.messages)))
    return replace(item, source=source, conversation=conversation)


def _without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}
