"""From a conversation to training texts: each is a prefix and answers that a server would really have seen and said.

A template may show earlier turns in another way than it did when they were the last ones: reasoning goes, an end token
becomes another, a system text moves. An answer is learned only in a text that holds its generation prompt and the
answer word for word as they were then. So

- `turns` "auto" makes one text of all turns that stand in it that way, beginning with the whole conversation, and
  further texts, each ending with the last answer that is not learned yet. With a template that changes nothing that is
  one text a conversation; with one that strips reasoning one for each question.
- "each" makes one text per answer, with that answer alone to be learned; "last" one with the last answer.

Where even a text that ends with an answer shows what came before it otherwise, the prompt itself is taken, with the
answer behind it.

Learned are an answer's characters from the end of its generation prompt to its end token: reasoning and tool calls
count, an empty reasoning block that the prompt supplies does not, nor does white space behind the end token. Borders
come from renders of beginnings of the conversation, text is never searched for, so answers may repeat and content may
quote the template's marks. A template with `{% generation %}` marks is asked for them where no prompt fits.

A conversation whose last answer was cut by a token limit ends with that answer's text: what the template writes behind
it, the end token first of all, was never said.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from producer.chat import Conversation
from producer.config import Turns
from producer.rows import SkipRow
from producer.template import SENTINEL, Template

NO_PROMPT = "answer does not follow its generation prompt"


@dataclass(frozen=True)
class Span:
    """Characters `[start, end)` of a text that are learned; `asked`: a generation prompt ends at `start`."""

    start: int
    end: int
    asked: bool = True


@dataclass(frozen=True)
class Draft:
    """A text with the spans of it that are learned, in order."""

    text: str
    spans: list[Span]


@dataclass
class Drafts:
    """The texts of a conversation, the earliest last answer first, and why answers are in none of them."""

    texts: list[Draft] = field(default_factory=list)
    left_out: list[SkipRow] = field(default_factory=list)


def drafts_of(template: Template, conversation: Conversation, turns: Turns = "auto") -> Drafts:
    """The training texts of a conversation. Raises SkipRow when the template refuses it or nothing can be learned."""
    roles = [message["role"] for message in conversation.messages]
    answers = [place for place, role in enumerate(roles) if role == "assistant"]
    if not answers:
        raise SkipRow("no assistant turn")
    end = answers[-1] + 1 if conversation.cut else len(roles)
    found = Drafts()
    open_turns = answers[-1:] if turns == "last" else answers
    while open_turns:
        # Turns behind the last answer stay in the text where they do not change it.
        for until in sorted({end, open_turns[-1] + 1}, reverse=True):
            draft, learned = _draft(template, conversation, until, open_turns[-1:] if turns == "each" else open_turns)
            if open_turns[-1] in learned:
                found.texts.append(draft)
                break
        else:
            draft, learned = _otherwise(template, conversation, open_turns[-1:] if turns == "each" else open_turns)
            if open_turns[-1] in learned:
                found.texts.append(draft)
            else:
                learned = open_turns[-1:]
                found.left_out.append(SkipRow(NO_PROMPT, f"turn {learned[0]}"))
        open_turns = [turn for turn in open_turns if turn not in learned]
        end = open_turns[-1] + 1 if open_turns else 0
    found.texts.reverse()
    if not found.texts:
        raise found.left_out[0]
    return found


def _otherwise(template: Template, conversation: Conversation, wanted: list[int]) -> tuple[Draft, list[int]]:
    """The same for a text up to the last of the `wanted` answers, which does not begin with that one's prompt: the
    prompt with the answer behind it, or what the template's own marks say."""
    alone = _alone(template, conversation, wanted[-1])
    if alone is not None:
        return alone, wanted[-1:]
    return _draft(template, conversation, wanted[-1] + 1, wanted, marks=True)


def _draft(
    template: Template, conversation: Conversation, until: int, wanted: list[int], marks: bool = False
) -> tuple[Draft, list[int]]:
    """The text of the first `until` turns and which of the `wanted` answers are learned in it: those that follow their
    prompt there, or those that the template marks."""
    part = Conversation(conversation.messages[:until], conversation.tools)
    text = template.render(part.messages, part.tools)
    if marks:
        spans = _marked(template, part, wanted)
    else:
        spans = {turn: span for turn in wanted if (span := _span(template, part, turn, text)) is not None}
    if until - 1 in spans and _is_cut(conversation, until - 1):
        text = text[: _text_end(template, part, text)]
        spans[until - 1] = Span(spans[until - 1].start, len(text), spans[until - 1].asked)
    return Draft(text, [spans[turn] for turn in sorted(spans)]), sorted(spans)


def _marked(template: Template, part: Conversation, wanted: list[int]) -> dict[int, Span]:
    marks = template.marked_spans(part) if template.marked else []
    answers = [place for place, message in enumerate(part.messages) if message["role"] == "assistant"]
    if len(marks) != len(answers):
        return {}
    return {turn: Span(*mark, asked=False) for turn, mark in zip(answers, marks, strict=True) if turn in wanted}


def _alone(template: Template, conversation: Conversation, turn: int) -> Draft | None:
    """The generation prompt of an answer with the answer behind it, for a template that shows the turns before an
    answer otherwise once it is there. How it writes the answer is seen behind a plain question. None when the answer
    does not follow a prompt there either."""
    if turn == 0:
        return None
    question = {"role": "user", "content": "q"}
    small = Conversation((question, conversation.messages[turn]), conversation.tools)
    text = template.render(small.messages, small.tools)
    span = _span(template, small, 1, text)
    if span is None:
        return None
    end = _text_end(template, small, text) if _is_cut(conversation, turn) else span.end
    prompt = template.render(conversation.messages[:turn], conversation.tools, ask=True)
    asked = template.render([question], small.tools, ask=True)
    text = prompt + text[len(asked) : end]
    return Draft(text, [Span(len(prompt) + span.start - len(asked), len(text))])


def _is_cut(conversation: Conversation, turn: int) -> bool:
    behind = conversation.messages[turn + 1 :]
    return conversation.cut and all(message["role"] != "assistant" for message in behind)


def _span(template: Template, part: Conversation, turn: int, text: str) -> Span | None:
    last = turn == len(part.messages) - 1
    closed = text if last else template.render(part.messages[: turn + 1], part.tools)
    if not text.startswith(closed):
        return None
    start = template.prompt_ends(part, turn, text) if turn else _border(template, part, turn, text)
    if start is None or start >= len(closed):
        return None
    written = closed[start:].rstrip()
    end = start + len(written) if written.endswith(template.specials) else len(closed)
    return Span(start, end, asked=turn > 0)


def _border(template: Template, part: Conversation, turn: int, text: str) -> int | None:
    """Where in `text` the content of the first turn begins, from a render in which a sentinel stands for it: nothing
    was asked before it."""
    first = {**part.messages[turn], "content": SENTINEL}
    rendered = template.render([first, *part.messages[turn + 1 :]], part.tools)
    border = rendered.find(SENTINEL)
    return border if border >= 0 and text.startswith(rendered[:border]) else None


def _text_end(template: Template, part: Conversation, text: str) -> int:
    """Where in `text` the last turn's own text ends, from what the template writes behind a sentinel."""
    last = part.messages[-1]
    key = "content" if last["content"] else "reasoning_content"
    rendered = template.render([*part.messages[:-1], {**last, key: SENTINEL}], part.tools)
    _, found, behind = rendered.rpartition(SENTINEL)
    if not found or not text.endswith(behind):
        raise SkipRow("no mask can be derived from the chat template", "the cut answer has no visible end")
    return len(text) - len(behind)
