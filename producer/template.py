"""Conversations to token ids and loss masks through the target's own chat template.

The ids are exactly those of one whole-conversation render, as a serving engine makes them. The mask is found by
rendering beginnings of the conversation with and without the generation prompt, and mapped to tokens through their
character offsets; text is never searched for, so answers may repeat and content may quote the template's own markers.

Supervised: the text of every assistant turn (reasoning and tool calls included) and its end token. Not supervised:
everything that the generation prompt supplies, an empty reasoning block of non-thinking prompts included, and the
white space that a template writes after the end token. Marks such as `{% generation %}` are not needed.

A conversation whose last answer was cut by a token limit ends with that answer's text: what the template writes behind
it, the end token first of all, was never said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from jinja2 import TemplateError
from numpy.typing import NDArray

from producer.chat import Conversation, Message
from producer.config import Thinking
from producer.quiet import hush
from producer.rows import SkipRow
from protocol.errors import RequestError

# Stands for a turn's text in renders that only look for borders; no data contains it.
SENTINEL = "\ufdd0draftwire-border\ufdd1"
_THINKING_OFF = {"enable_thinking": False, "thinking": False}


@dataclass(frozen=True)
class Tokenised:
    """Token ids int32 `[L]` and loss mask uint8 `[L]`; `truncated` when the conversation was longer."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    truncated: bool


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
        self._has_switch = any(name in str(tokenizer.chat_template) for name in _THINKING_OFF)
        added = tokenizer.added_tokens_decoder.values()
        named = {token.content for token in added if token.special} | set(tokenizer.special_tokens_map.values())
        self._specials = tuple(sorted((name for name in named if isinstance(name, str)), key=len, reverse=True))
        self._border_end = self._end_between_turns()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        ask: bool = False,
        options: dict[str, Any] | None = None,
    ) -> str:
        """The conversation as text; with `ask` the generation prompt follows. Raises SkipRow when the template
        refuses it (a system role it does not know, an order it does not allow)."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=ask,
                **(self._options if options is None else options),
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise SkipRow("template refuses the conversation", (str(error).splitlines() or ["?"])[0]) from None
        return text

    def tokenise(self, conversation: Conversation, max_length: int) -> Tokenised:
        """Ids and mask of a conversation, its first `max_length` tokens. Raises SkipRow with the reason.

        A cut answer keeps its tokens up to the cut supervised; its end token lies behind the cut, so a cut answer
        is never learned as ended.
        """
        if conversation.cut:
            conversation = _through_last_answer(conversation)
        text = self.render(conversation.messages, conversation.tools)
        spans = self.answer_spans(conversation, text)
        if conversation.cut:
            text = text[: self._text_end(conversation, text)]
            spans = [*spans[:-1], (spans[-1][0], len(text))]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        mask = self._token_mask(text, ids, encoded["offset_mapping"], spans)
        return Tokenised(ids[:max_length], mask[:max_length], len(ids) > max_length)

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

    def answer_spans(self, conversation: Conversation, text: str) -> list[tuple[int, int]]:
        """Character spans `[start, end)` of `text` (the whole render) that are supervised, one per assistant turn."""
        messages = conversation.messages
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for turn in turns:
            start = self._start(conversation, turn, text)
            end = self._end(conversation, turn, text, start)
            written = text[start:end].rstrip()
            spans.append((start, start + len(written) if written.endswith(self._specials) else end))
        return spans

    def _start(self, conversation: Conversation, turn: int, text: str) -> int:
        before, tools = conversation.messages[:turn], conversation.tools
        # A prompt of the other thinking mode counts too: an empty reasoning block that it supplies is no answer.
        switches = [self._options, _THINKING_OFF] if self._has_switch and self.thinking == "keep" else [self._options]
        asked = [self.render(before, tools, ask=True, options=options) for options in switches] if before else [""]
        fitting = [len(prompt) for prompt in asked if text.startswith(prompt)]
        if fitting and before:
            return max(fitting)
        # The template shows these turns differently once later ones follow: look where the text of this one begins.
        return self._border(conversation, turn, len(conversation.messages), text)

    def _end(self, conversation: Conversation, turn: int, text: str, start: int) -> int:
        messages = conversation.messages
        if turn == len(messages) - 1:
            return len(text)
        closed = self.render(messages[: turn + 1], conversation.tools)
        if len(closed) > start and text.startswith(closed):
            return len(closed)
        # Between here and the text of the next turn stand this answer, its end token and the next turn's header, so
        # the last end token there is the template's own whatever the answer quotes.
        border = self._border(conversation, turn + 1, turn + 2, text)
        place = text.rfind(self._border_end, start, border) if self._border_end else -1
        if place < 0:
            raise SkipRow("no mask can be derived from the chat template", f"turn {turn} has no visible end")
        return place + len(self._border_end)

    def _text_end(self, conversation: Conversation, text: str) -> int:
        """Where in `text` the last turn's own text ends, from what the template writes behind a sentinel."""
        last = conversation.messages[-1]
        part = "content" if last["content"] else "reasoning_content"
        rendered = self.render([*conversation.messages[:-1], {**last, part: SENTINEL}], conversation.tools)
        _, found, behind = rendered.rpartition(SENTINEL)
        if not found or not text.endswith(behind):
            raise SkipRow("no mask can be derived from the chat template", "the cut answer has no visible end")
        return len(text) - len(behind)

    def _border(self, conversation: Conversation, turn: int, until: int, text: str) -> int:
        """Where in `text` the content of a turn begins, from a render in which a sentinel stands for it."""
        marked = [*conversation.messages[:until]]
        marked[turn] = {**marked[turn], "content": SENTINEL}
        rendered = self.render(marked, conversation.tools)
        border = rendered.find(SENTINEL)
        if border < 0 or not text.startswith(rendered[:border]):
            raise SkipRow("no mask can be derived from the chat template", f"turn {turn} has no visible border")
        return border

    def _end_between_turns(self) -> str:
        """The special token that the template writes after an answer when another turn follows, "" if there is none."""
        turns = [("user", "q"), ("assistant", SENTINEL), ("user", SENTINEL)]
        try:
            text = self.render([{"role": role, "content": content} for role, content in turns])
        except SkipRow:
            return ""
        after = text.partition(SENTINEL)[2].lstrip()
        return next((name for name in self._specials if after.startswith(name)), "")

    def _token_mask(
        self, text: str, ids: NDArray[np.int32], offsets: Sequence[tuple[int, int]], spans: list[tuple[int, int]]
    ) -> NDArray[np.uint8]:
        bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        starts, ends = bounds[:, 0], bounds[:, 1]
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, end in spans:
            # Byte-level tokenizers trim blanks off the offsets, so a token of blanks has no width.
            inside = (ends > start) & (ends <= end) & ((starts >= start) | (starts == ends))
            first = int(np.argmax(inside)) if inside.any() else -1
            if first > 0 and self._reaches_back(text, int(ids[first]), int(ends[first - 1]), int(starts[first]), start):
                inside[first] = False
            mask[inside] = 1
        return mask

    def _reaches_back(self, text: str, token: int, previous_end: int, token_start: int, start: int) -> bool:
        """Whether a token also covers blanks before `start`: a prompt that ends there would be tokenised otherwise."""
        if previous_end >= start or text[previous_end:token_start].strip():
            return False
        return str(self.tokenizer.convert_ids_to_tokens(token)).startswith(("\u0120", "\u2581"))


def _through_last_answer(conversation: Conversation) -> Conversation:
    roles = [message["role"] for message in conversation.messages]
    behind = len(roles) - roles[::-1].index("assistant")
    return Conversation(conversation.messages[:behind], conversation.tools, conversation.cut)
