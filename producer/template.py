"""The target's own chat template: conversations as text, with tools and the thinking switch, as a server renders them.

Which characters of a text are learned is decided in turns.py, which tokens in masks.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers.utils import chat_template_utils

from producer.chat import Conversation, Message
from producer.config import Thinking
from producer.quiet import hush
from producer.rows import SkipRow
from producer.tagged import Shows
from protocol.errors import RequestError

# Stands for a turn's text in renders that only look for borders; no data contains it.
SENTINEL = "\ufdd0draftwire-border\ufdd1"
_THINKING_OFF = {"enable_thinking": False, "thinking": False}
# What a template's text says about the name that it has for reasoning.
_REASONING_KEYS = (
    ("reasoning_content", "reasoning_content"),
    ("message.thinking", "thinking"),
    ("message['thinking']", "thinking"),
    ("message.reasoning", "reasoning"),
    ("message['reasoning']", "reasoning"),
)
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer. Raises RequestError when it cannot report character offsets."""
    hush()
    loader: Any = transformers.AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RequestError(f"{folder}: no usable tokenizer: {' '.join(str(error).split())[:300]}") from None
    if not tokenizer.is_fast:
        raise RequestError(f"{folder}: only a slow tokenizer; loss masks need a tokenizer.json with offsets")
    return tokenizer


class Template:
    """The chat template of a tokenizer at one thinking setting."""

    def __init__(self, tokenizer: Any, thinking: Thinking = "keep") -> None:
        """Raises RequestError when the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise RequestError("the target's tokenizer has no chat template; give pre-tokenised rows (ids and mask)")
        self.tokenizer = tokenizer
        self.thinking = thinking
        self._options = _THINKING_OFF if thinking == "off" else {}
        text = str(tokenizer.chat_template)
        # gpt-oss calls reasoning `thinking`, others `reasoning_content` or `reasoning`.
        self._reasoning_key = next((key for sign, key in _REASONING_KEYS if sign in text), "reasoning_content")
        added = tokenizer.added_tokens_decoder.values()
        named = {token.content for token in added if token.special} | set(tokenizer.special_tokens_map.values())
        self.specials = tuple(sorted((name for name in named if isinstance(name, str)), key=len, reverse=True))
        self.marked = _MARK.search(text) is not None
        self._named_tokens = dict(tokenizer.special_tokens_map)
        self._compiled: Any = None
        self._compiled = self._compile()
        self._off_supplies = self._supplied_when_off() if thinking == "keep" else None

    def has_switch(self) -> bool:
        """Whether the generation prompt is another one when thinking is off."""
        question = [{"role": "user", "content": "q"}]
        try:
            return self.render(question, ask=True, options={}) != self.render(question, ask=True, options=_THINKING_OFF)
        except SkipRow:
            return False

    def shows(self) -> Shows:
        """Which parts of a conversation this template has a place for, found by trying."""
        call = {"type": "function", "function": {"name": SENTINEL, "arguments": {}}}
        question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
        tool = {"type": "function", "function": {"name": SENTINEL, "description": "d", "parameters": {}}}
        return Shows(
            reasoning=self._tried([question, {**answer, "reasoning_content": SENTINEL}]),
            calls=self._tried([question, {**answer, "content": "", "tool_calls": [call]}]),
            tools=self._tried([question], [tool]),
        )

    def _tried(self, messages: list[Message], tools: Sequence[dict[str, Any]] = ()) -> bool:
        try:
            return SENTINEL in self.render(messages, tools)
        except SkipRow:
            return False

    def _supplied_when_off(self) -> str | None:
        """What the generation prompt supplies beyond its usual end when thinking is off: an empty reasoning block, say.
        "" when it supplies nothing; None when the two prompts differ otherwise and must be rendered each time."""
        if not any(name in str(self.tokenizer.chat_template) for name in _THINKING_OFF):
            return ""
        question = [{"role": "user", "content": "q"}]
        try:
            asked = self.render(question, ask=True)
            off = self.render(question, ask=True, options=_THINKING_OFF)
        except SkipRow:
            return None
        return off.removeprefix(asked) if off.startswith(asked) else None

    def prompt_ends(self, conversation: Conversation, turn: int, text: str) -> int | None:
        """Where in `text` the generation prompt of an assistant turn ends: behind everything that either thinking mode
        supplies. None when `text` does not begin with that prompt."""
        before, tools = conversation.messages[:turn], conversation.tools
        asked = self.render(before, tools, ask=True)
        fits = len(asked) if text.startswith(asked) else None
        if self.thinking != "keep":
            return fits
        if self._off_supplies is not None:
            supplied = fits is not None and text.startswith(self._off_supplies, fits)
            return len(self._off_supplies) + fits if fits is not None and supplied else fits
        off = self.render(before, tools, ask=True, options=_THINKING_OFF)
        return max(fits or 0, len(off)) if text.startswith(off) else fits

    def marked_spans(self, conversation: Conversation) -> list[tuple[int, int]]:
        """The character spans that the template itself marks with `{% generation %}`."""
        render: Any = chat_template_utils.render_jinja_template
        spans: list[list[tuple[int, int]]]
        _, spans = render(
            [[self._dressed(message) for message in conversation.messages]],
            tools=list(conversation.tools) or None,
            chat_template=self.tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
            **self._options,
        )
        return [(int(start), int(end)) for start, end in spans[0]]

    def _dressed(self, message: Message) -> Message:
        if "reasoning_content" not in message or self._reasoning_key == "reasoning_content":
            return message
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        return {**rest, self._reasoning_key: message["reasoning_content"]}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        ask: bool = False,
        options: dict[str, Any] | None = None,
    ) -> str:
        """The conversation as text; with `ask` the generation prompt follows. Raises SkipRow when the template
        refuses it (a system role it does not know, an order it does not allow), or when it is no text (`encodable`)."""
        options = self._options if options is None else options
        try:
            if self._compiled is not None and not any("reasoning_content" in message for message in messages):
                return encodable(self._directly(messages, tools, ask, options))
            return encodable(self._by_the_library(messages, tools, ask, options))
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise SkipRow("template refuses the conversation", (str(error).splitlines() or ["?"])[0]) from None

    def _by_the_library(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], ask: bool, options: dict[str, Any]
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [self._dressed(message) for message in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=ask,
            **options,
        )
        return text

    def _directly(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], ask: bool, options: dict[str, Any]
    ) -> str:
        """What the library renders, without the copies that it makes of everything on the way: twice as fast."""
        return str(
            self._compiled.render(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=ask,
                **self._named_tokens,
                **options,
            )
        )

    def _compile(self) -> Any:
        """The library's own compiled template, where it is one text and gives what the library gives."""
        compiler = getattr(chat_template_utils, "_compile_jinja_template", None)
        if compiler is None or not isinstance(self.tokenizer.chat_template, str):
            return None
        self._compiled = compiler(self.tokenizer.chat_template)
        turns = [{"role": "user", "content": " q\n"}, {"role": "assistant", "content": " a\n"}]
        for ask in (False, True):
            shown = [_outcome(way, turns[: 1 if ask else 2], ask) for way in (self._directly, self._by_the_library)]
            if shown[0] != shown[1]:
                return None
        return self._compiled

    def prompt_ids(self, conversation: Conversation) -> NDArray[np.int32]:
        """Ids of a conversation followed by the generation prompt, int32 `[P]`: what a server would feed the target."""
        text = self.render(conversation.messages, conversation.tools, ask=True)
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def answer_message(self, asked: Conversation, text: str, cut: bool) -> Message:
        """The assistant turn that says `text`, the target's raw answer to `asked` without its end token.

        Reasoning that this template shows apart goes under `reasoning_content`, so that rendering the turn gives
        `text` again; an answer that was `cut` before its reasoning ended has no content.
        """
        plain = {"role": "assistant", "content": text}
        prompt = self.render(asked.messages, asked.tools, ask=True)
        try:
            marked = {**plain, "content": SENTINEL, "reasoning_content": SENTINEL}
            shown = self.render([*asked.messages, marked], asked.tools)
        except SkipRow:
            return plain
        parts = shown.removeprefix(prompt).split(SENTINEL)
        if not shown.startswith(prompt) or len(parts) != 3 or not parts[1].strip() or not text.startswith(parts[0]):
            return plain
        opening, closing, _ = parts
        reasoning, closed, content = text.removeprefix(opening).partition(closing)
        inside = cut and not content and (bool(closed) or closing.strip() not in text)
        if not reasoning or not ((content and closed) or inside):
            return plain
        return {"role": "assistant", "content": content, "reasoning_content": reasoning}


def encodable(text: str) -> str:
    """`text` itself. Raises SkipRow for half a surrogate pair, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SkipRow("half a surrogate pair in the text", f"character {error.start}") from None
    return text


def _outcome(way: Callable[..., str], messages: list[Message], ask: bool) -> str | None:
    """What a way of rendering makes of messages; None when the template refuses them."""
    try:
        return way(messages, (), ask, {})
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError):
        return None
