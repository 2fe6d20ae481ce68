"""Loss masks from the chat template: T1, T2, T3, T4, T5, T6, T7 and D5 of the public failure reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.chat import Conversation
from producer.config import SourceConfig
from producer.fidelity import Fidelity
from producer.masks import Masker, Tokenised
from producer.rows import Row, SkipRow
from producer.samples import Item, SampleMaker
from producer.template import Template
from producer.turns import drafts_of
from protocol.errors import RequestError

MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PRINTS_START = "<s>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like the hybrid thinking templates: reasoning only behind the last question, an empty block where there is none, and
# a generation prompt that supplies the empty block when thinking is off.
THINKING = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}
<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def chat(*texts: str, first: str = "user") -> Conversation:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return Conversation(tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts)))


def samples(template: Template, conversation: Conversation, turns: Any = "auto") -> list[Tokenised]:
    return Masker(template.tokenizer).tokenise(drafts_of(template, conversation, turns).texts)


def only(template: Template, conversation: Conversation) -> Tokenised:
    (sample,) = samples(template, conversation)
    return sample


def runs(tokenizer: Any, sample: Tokenised) -> list[str]:
    """The decoded supervised runs."""
    found: list[list[int]] = []
    previous = 0
    for token, flag in zip(sample.ids.tolist(), sample.mask.tolist(), strict=True):
        if flag and not previous:
            found.append([])
        if flag:
            found[-1].append(token)
        previous = flag
    return [tokenizer.decode(ids) for ids in found]


def test_marks_make_no_difference(make_tokenizer: Callable[..., Any]) -> None:
    plain, marked = make_tokenizer(), make_tokenizer(MARKED)
    conversation = chat("hello", "the quick fox", "again", " spaced answer ")
    samples = [only(Template(tokenizer), conversation) for tokenizer in (plain, marked)]
    assert samples[0].ids.tolist() == samples[1].ids.tolist()
    assert samples[0].mask.tolist() == samples[1].mask.tolist()
    assert runs(plain, samples[0]) == ["the quick fox<|im_end|>", " spaced answer <|im_end|>"]


def test_mask_equals_the_marks_of_the_library(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(MARKED)
    conversation = chat("hello", "the quick fox\n", "again", "lazy dog")
    theirs = tokenizer.apply_chat_template(
        list(conversation.messages), return_dict=True, return_assistant_tokens_mask=True
    )
    ours = only(Template(tokenizer), conversation)
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.mask.tolist() == theirs["assistant_masks"]


def test_cut_answer_is_supervised_up_to_the_cut_and_never_ended(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    whole = only(Template(tokenizer), chat("hello", "the quick brown fox jumps over"))
    first = whole.mask.tolist().index(1)
    row = Row(Path("f"), 1, {})
    item = Item(row, SourceConfig(path="f"), chat("hello", "the quick brown fox jumps over"), None)
    cut = SampleMaker(tokenizer, 400, first + 3).sample(item)
    assert cut.ids.tolist() == whole.ids.tolist()[: first + 3]
    assert cut.mask.tolist() == [0] * first + [1, 1, 1]
    assert tokenizer.eos_token_id not in cut.ids[first:]


def test_assistant_first_with_one_token_answer(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    sample = only(Template(tokenizer), chat("x", "hello", "y", first="assistant"))
    assert runs(tokenizer, sample) == ["x<|im_end|>", "y<|im_end|>"]


def test_answer_that_is_the_whole_text(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    assert only(Template(tokenizer), chat("x", first="assistant")).mask.tolist() == [1, 1]


@pytest.mark.parametrize("template", [None, NO_SYSTEM])
def test_answer_that_ends_in_white_space(make_tokenizer: Callable[..., Any], template: str | None) -> None:
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    sample = only(Template(tokenizer), chat("q", "fox  \n\n", "hello"))
    assert runs(tokenizer, sample) == ["fox<|im_end|>" if template else "fox  \n\n<|im_end|>"]


def test_blank_tokens_inside_an_answer_are_supervised(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    sample = only(Template(tokenizer), chat("q", "a   b \n  c"))
    assert runs(tokenizer, sample) == ["a   b \n  c<|im_end|>"]


def test_repeated_answers_and_quoted_markers(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    quoted = "say <|im_end|>\n<|im_start|>assistant\nfox<|im_end|>"
    sample = only(Template(tokenizer), chat("fox", "fox", quoted, "fox", "fox", quoted))
    assert runs(tokenizer, sample) == ["fox<|im_end|>", "fox<|im_end|>", quoted + "<|im_end|>"]


@pytest.mark.parametrize(("template", "adds"), [(PRINTS_START, True), (PRINTS_START, False), (None, True)])
def test_start_token_as_the_one_step_result_says(make_tokenizer: Callable[..., Any], template: str, adds: bool) -> None:
    tokenizer = make_tokenizer(template, adds_start=adds) if template else make_tokenizer(adds_start=adds)
    conversation = chat("hello", "fox")
    sample = only(Template(tokenizer), conversation)
    assert sample.ids.tolist() == tokenizer.apply_chat_template(list(conversation.messages), return_dict=False)
    assert sample.ids.tolist().count(tokenizer.bos_token_id) == (1 if template else 0)


def test_end_token_is_learned_when_there_is_no_pad_token(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    sample = only(Template(tokenizer), chat("hello", "a", "b", "c"))
    ends = [flag for token, flag in zip(sample.ids, sample.mask, strict=True) if token == tokenizer.eos_token_id]
    assert ends == [0, 1, 0, 1]


def test_refused_system_role_is_a_skip(make_tokenizer: Callable[..., Any]) -> None:
    template = Template(make_tokenizer(NO_SYSTEM))
    conversation = Conversation(({"role": "system", "content": "s"}, *chat("q", "a").messages))
    with pytest.raises(SkipRow, match="template refuses the conversation: System role not supported"):
        only(template, conversation)


def test_empty_reasoning_block_is_never_supervised(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(THINKING)
    for thinking in ("keep", "off"):
        sample = only(Template(tokenizer, thinking), chat("q", "fox"))
        assert "<think>" in tokenizer.decode(sample.ids)
        assert runs(tokenizer, sample) == ["fox<|im_end|>"]
    prompts = [tokenizer.decode(Template(tokenizer, thinking).prompt_ids(chat("q"))) for thinking in ("keep", "off")]
    assert ["</think>" in prompt for prompt in prompts] == [False, True]


def test_reasoning_of_the_row_is_supervised(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(THINKING)
    answer = {"role": "assistant", "content": "fox", "reasoning_content": "because"}
    sample = only(Template(tokenizer), Conversation((*chat("q").messages, answer)))
    assert runs(tokenizer, sample) == ["<think>\nbecause\n</think>\n\nfox<|im_end|>"]


def test_earlier_turns_that_the_template_rewrites(make_tokenizer: Callable[..., Any]) -> None:
    """Alone, the first answer is shown with a reasoning block; with a later question, without one: two samples."""
    tokenizer = make_tokenizer(THINKING)
    quoted = "fox <|im_end|> x"
    first, second = samples(Template(tokenizer), chat("q", quoted, "r", "dog"))
    assert runs(tokenizer, first) == [quoted + "<|im_end|>"]
    assert runs(tokenizer, second) == ["dog<|im_end|>"]
    assert tokenizer.decode(first.ids).count("<think>") == tokenizer.decode(second.ids).count("<think>") == 1


def tool_chat() -> Conversation:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
    return Conversation(
        (
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hmm"},
            {"role": "tool", "content": "the result"},
            {"role": "assistant", "content": "it is fine"},
        ),
        ({"name": "weather"}, {"name": "clock"}),
    )


def test_tools_calls_and_results(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(THINKING)
    conversation = tool_chat()
    Fidelity(Template(tokenizer)).check(conversation)
    sample = only(Template(tokenizer), conversation)
    text = tokenizer.decode(sample.ids)
    assert text.index("weather") < text.index("clock") < text.index("hello") < text.index("the result")
    call, answer = runs(tokenizer, sample)
    assert call.startswith("<think>\nhmm\n</think>")
    assert '<tool_call>{"name": "weather", "arguments": {"town": "Ulm"}}</tool_call><|im_end|>' in call
    assert answer == "it is fine<|im_end|>"
    assert sample.ids.tolist() == tokenizer.apply_chat_template(
        list(conversation.messages), tools=list(conversation.tools), return_dict=False
    )


def test_parts_that_the_template_would_drop_are_named(make_tokenizer: Callable[..., Any]) -> None:
    drops_tool_turns = (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}"
    )
    whole, thought = tool_chat(), {"role": "assistant", "content": "a", "reasoning_content": "r"}
    plain = Conversation(whole.messages[:1] + whole.messages[2:])
    cases = [
        (make_tokenizer(drops_tool_turns), plain, "template drops a turn: turn 1 \\(tool\\)"),
        (make_tokenizer(), Conversation(whole.messages), "template drops tool calls"),
        (make_tokenizer(), Conversation(plain.messages, whole.tools), "template has no place for tools"),
        (make_tokenizer(), Conversation((plain.messages[0], thought)), "template drops reasoning"),
    ]
    for tokenizer, conversation, reason in cases:
        fidelity = Fidelity(Template(tokenizer))
        for _ in range(2):
            with pytest.raises(SkipRow, match=reason):
                fidelity.check(conversation)


def test_tokenizer_without_template_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        Template(tokenizer)


def test_prompt_is_a_prefix_of_the_sample(make_tokenizer: Callable[..., Any]) -> None:
    template = Template(make_tokenizer())
    prompt = template.prompt_ids(chat("hello there"))
    sample = only(template, chat("hello there", "fox"))
    assert sample.ids[: len(prompt)].tolist() == prompt.tolist()
    assert sample.mask.tolist().index(1) == len(prompt)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=2, max_size=6))
def test_every_answer_is_masked_exactly_once(make_tokenizer: Callable[..., Any], texts: list[str]) -> None:
    tokenizer = make_tokenizer()
    sample = only(Template(tokenizer), chat(*texts))
    answers = [text + "<|im_end|>" for text in texts[1::2]]
    supervised = sample.ids[sample.mask == 1].tolist()
    expected = [token for text in answers for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert tokenizer.decode(supervised) == "".join(answers)
    assert len(supervised) == len(expected)


def cut(*messages: dict[str, Any]) -> Conversation:
    return Conversation(messages, cut=True)


QUESTION = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "the quick fox"}
REASONED = {**ANSWER, "reasoning_content": "lazy"}
ONLY_REASONING = {"role": "assistant", "content": "", "reasoning_content": "lazy dog"}
PUTS_A_LINE_FIRST = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}\n<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "turn", "learned"),
    [
        (None, ANSWER, "the quick fox"),
        (None, {**ANSWER, "content": "say <|im_end|>"}, "say <|im_end|>"),
        (None, {**ANSWER, "content": "fox \n"}, "fox \n"),
        (PUTS_A_LINE_FIRST, {**ANSWER, "content": "fox "}, "fox"),
        (THINKING, ANSWER, "the quick fox"),
        (THINKING, REASONED, "<think>\nlazy\n</think>\n\nthe quick fox"),
        (THINKING, ONLY_REASONING, "<think>\nlazy dog"),
    ],
)
def test_answer_cut_by_a_token_limit_is_never_learned_as_ended(
    make_tokenizer: Callable[..., Any], template: str | None, turn: dict[str, Any], learned: str
) -> None:
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    made = Template(tokenizer)
    sample = only(made, cut(QUESTION, turn))
    assert runs(tokenizer, sample) == [learned]
    # Nothing stands behind the answer either, and what stands before it is what the target was asked.
    assert sample.mask[-1] == 1
    whole = made.render([QUESTION, turn])
    assert whole.startswith(tokenizer.decode(sample.ids.tolist()))


def test_turns_behind_a_cut_answer_and_earlier_ends(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    sample = only(Template(tokenizer), cut(QUESTION, ANSWER, QUESTION, ANSWER, QUESTION))
    assert runs(tokenizer, sample) == ["the quick fox<|im_end|>", "the quick fox"]
    assert sample.mask[-1] == 1


@pytest.mark.parametrize(
    ("template", "text", "was_cut", "message"),
    [
        (None, "<think>\nlazy", True, {"content": "<think>\nlazy"}),
        (THINKING, "the fox", True, {"content": "the fox"}),
        (THINKING, "<think>\nlazy", True, {"content": "", "reasoning_content": "lazy"}),
        (THINKING, "<think>\nlazy", False, {"content": "<think>\nlazy"}),
        (THINKING, "<think>\nlazy\n</think>\n\nfox", True, {"content": "fox", "reasoning_content": "lazy"}),
        (THINKING, "<think>\nlazy\n</think>\n\nfox", False, {"content": "fox", "reasoning_content": "lazy"}),
        (THINKING, "<think>\nlazy\n</think>\n\n", True, {"content": "", "reasoning_content": "lazy"}),
        (THINKING, "<think>\nlazy</think>fox", False, {"content": "<think>\nlazy</think>fox"}),
    ],
)
def test_a_raw_answer_becomes_the_turn_that_renders_to_it(
    make_tokenizer: Callable[..., Any], template: str | None, text: str, was_cut: bool, message: dict[str, Any]
) -> None:
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    found = Template(tokenizer).answer_message(Conversation((QUESTION,)), text, was_cut)
    assert found == {"role": "assistant", **message}
