"""Samples and masks on the chat templates of the promised families (tests/templates says which are published ones)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.chat import Conversation, conversation_of
from producer.fidelity import Fidelity
from producer.masks import Masker, Tokenised
from producer.rows import SkipRow
from producer.template import Template
from producer.turns import drafts_of

FOLDER = Path(__file__).parents[1] / "templates"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
MARKS = [
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<end_of_turn>"),
    *("<start_of_turn>", "<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<think>"),
]
END = {"llama3": "<|eot_id|>", "gemma2": "<end_of_turn>", "gpt_oss": "<|return|>", "mistral": "</s>"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
USER, AGAIN = {"role": "user", "content": "hello"}, {"role": "user", "content": "again"}
FOX, DOG = {"role": "assistant", "content": "the fox"}, {"role": "assistant", "content": "lazy dog"}
RESULT = {"role": "tool", "content": "sunny"}


@pytest.fixture(scope="module")
def tokenizers(make_tokenizer: Callable[..., Any]) -> dict[str, Any]:
    made = {}
    for family in FAMILIES:
        made[family] = make_tokenizer((FOLDER / f"{family}.jinja").read_text())
        made[family].add_tokens([*MARKS, "</s>"], special_tokens=True)
        if family == "mistral":
            made[family].eos_token = "</s>"
    return made


def reasoned(turn: dict[str, Any], reasoning: str) -> dict[str, Any]:
    return {**turn, "reasoning_content": reasoning}


def samples(
    tokenizer: Any, *turns: dict[str, Any], thinking: Any = "keep", tools: Any = (), each: bool = False
) -> list[Tokenised]:
    """The samples of a conversation; each answer's tokens follow the exact tokens of a generation prompt."""
    conversation = conversation_of({"messages": list(turns), "tools": list(tools)}, "messages")
    template = Template(tokenizer, thinking)
    Fidelity(template).check(conversation)
    drafts = drafts_of(template, conversation, "each" if each else "auto")
    assert not drafts.left_out
    made = Masker(tokenizer).tokenise(drafts.texts)
    answers = [place for place, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    prompts = [
        Template(tokenizer, switch).prompt_ids(Conversation(conversation.messages[:place], conversation.tools)).tolist()
        for place in answers
        for switch in ({"keep", "off"} if thinking == "keep" else {thinking})
    ]
    edges = [(one, np.flatnonzero(np.diff(one.mask.astype(int)) == 1)) for one in made]
    before = [one.ids[: start + 1].tolist() for one, starts in edges for start in starts]
    assert len(before) == len(answers)
    assert all(ids in prompts for ids in before)
    assert not any(one.left_out for one in made)
    return made


def learned(tokenizer: Any, made: list[Tokenised]) -> list[list[str]]:
    """Per sample the decoded supervised runs."""
    found = []
    for sample in made:
        edges = np.flatnonzero(np.diff(np.concatenate(([0], sample.mask, [0]))))
        found.append([tokenizer.decode(sample.ids[start:end]) for start, end in edges.reshape(-1, 2)])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_one_question(tokenizers: dict[str, Any], family: str) -> None:
    tokenizer = tokenizers[family]
    before = "<|channel|>final<|message|>" if family == "gpt_oss" else ""
    before = " " if family == "mistral" else before  # which is the answer's there: the prompt ends with [/INST]
    made = samples(tokenizer, USER, FOX)
    assert learned(tokenizer, made) == [[before + "the fox" + END.get(family, "<|im_end|>")]]
    starts = tokenizer.decode(made[0].ids).count("<s>")
    assert starts == (1 if family in ("llama3", "mistral", "gemma2") else 0)


@pytest.mark.parametrize("family", ["smollm2", "llama3", "gemma2", "mistral"])
def test_a_template_that_changes_nothing_makes_one_sample(tokenizers: dict[str, Any], family: str) -> None:
    end, blank = END.get(family, "<|im_end|>"), " " * (family == "mistral")
    made = samples(tokenizers[family], USER, FOX, AGAIN, DOG)
    assert learned(tokenizers[family], made) == [[f"{blank}the fox{end}", f"{blank}lazy dog{end}"]]
    made = samples(tokenizers[family], USER, FOX, AGAIN, DOG, each=True)
    assert learned(tokenizers[family], made) == [[f"{blank}the fox{end}"], [f"{blank}lazy dog{end}"]]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_stripped_reasoning_makes_one_sample_a_question(tokenizers: dict[str, Any], family: str) -> None:
    tokenizer = tokenizers[family]
    made = samples(tokenizer, USER, reasoned(FOX, "hmm"), AGAIN, reasoned(DOG, "well"))
    opened = "<think>\n" if family == "qwen3" else ""  # which the prompt of the later family supplies
    assert learned(tokenizer, made) == [
        [f"{opened}hmm\n</think>\n\nthe fox<|im_end|>"],
        [f"{opened}well\n</think>\n\nlazy dog<|im_end|>"],
    ]
    assert "hmm" not in tokenizer.decode(made[1].ids)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("thinking", ["keep", "off"])
def test_empty_blocks_are_supplied_by_the_prompt(tokenizers: dict[str, Any], family: str, thinking: str) -> None:
    """T3: what the generation prompt supplies is never learned, and the switch reaches the template."""
    tokenizer = tokenizers[family]
    made = samples(tokenizer, USER, FOX, AGAIN, DOG, thinking=thinking)
    assert learned(tokenizer, made) == [["the fox<|im_end|>"], ["lazy dog<|im_end|>"]]
    assert all(tokenizer.decode(one.ids).count("<think>\n\n</think>\n\n") == 1 for one in made)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_round_of_tools_is_one_sample(tokenizers: dict[str, Any], family: str) -> None:
    """D5 on real templates: definitions and results are shown and not learned, reasoning between calls stays."""
    tokenizer = tokenizers[family]
    called = reasoned({"role": "assistant", "content": "", "tool_calls": [CALL]}, "ask")
    made = samples(tokenizer, USER, called, RESULT, reasoned(FOX, "so"), tools=[TOOL])
    ((call, answer),) = learned(tokenizer, made)
    assert "ask\n</think>\n\n<tool_call>\n" in call
    assert call.endswith("</tool_call><|im_end|>")
    assert answer.endswith("so\n</think>\n\nthe fox<|im_end|>")
    assert tokenizer.decode(made[0].ids).index('"weather"') < tokenizer.decode(made[0].ids).index("hello")


def test_llama_tools(tokenizers: dict[str, Any]) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    made = samples(tokenizers["llama3"], USER, called, RESULT, FOX, tools=[TOOL])
    call = '{"name": "weather", "parameters": {"town": "Ulm"}}<|eot_id|>'
    assert learned(tokenizers["llama3"], made) == [[call, "the fox<|eot_id|>"]]
    with pytest.raises(SkipRow, match="only supports single tool-calls"):
        samples(tokenizers["llama3"], USER, {**called, "tool_calls": [CALL, CALL]}, RESULT, FOX, tools=[TOOL])


def test_mistral_moves_the_tools_and_drops_a_system_text(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["mistral"]
    made = samples(tokenizer, USER, FOX, AGAIN, DOG, tools=[TOOL])
    assert learned(tokenizer, made) == [[" the fox</s>"], [" lazy dog</s>"]]
    shown = [tokenizer.decode(one.ids).index("[AVAILABLE_TOOLS]") for one in made]
    assert shown == [3, len("<s>[INST] hello[/INST] the fox</s>")]
    numbered = {**CALL, "id": "abcdefghi"}
    called = {"role": "assistant", "content": "", "tool_calls": [numbered]}
    made = samples(tokenizer, USER, called, {**RESULT, "tool_call_id": "abcdefghi"}, FOX, tools=[TOOL])
    assert learned(tokenizer, made)[-1][-1] == " the fox</s>"
    assert '[TOOL_CALLS] [{"name": "weather"' in learned(tokenizer, made)[0][0]
    with pytest.raises(SkipRow, match="Tool call IDs should be alphanumeric strings with length 9"):
        samples(tokenizer, USER, {**called, "tool_calls": [CALL]}, RESULT, FOX, tools=[TOOL])
    with pytest.raises(SkipRow, match=r"template drops a turn: turn 0 \(system\)"):
        samples(tokenizer, {"role": "system", "content": "be kind"}, USER, FOX)


def test_gemma_refuses_a_system_text(tokenizers: dict[str, Any]) -> None:
    """T6: a skip with the template's own words, never a traceback."""
    with pytest.raises(SkipRow, match="template refuses the conversation: System role not supported"):
        samples(tokenizers["gemma2"], {"role": "system", "content": "be kind"}, USER, FOX)


def test_gpt_oss_channels(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["gpt_oss"]
    made = samples(tokenizer, USER, reasoned(FOX, "hmm"), AGAIN, reasoned(DOG, "well"))
    assert learned(tokenizer, made) == [
        ["<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>final<|message|>the fox<|return|>"],
        ["<|channel|>analysis<|message|>well<|end|><|start|>assistant<|channel|>final<|message|>lazy dog<|return|>"],
    ]
    called = reasoned({"role": "assistant", "content": "", "tool_calls": [CALL]}, "ask")
    made = samples(tokenizer, USER, called, RESULT, FOX, tools=[TOOL])
    assert learned(tokenizer, made)[0] == [
        "<|channel|>analysis<|message|>ask<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
        '<|message|>{"town": "Ulm"}<|call|>'
    ]
    assert learned(tokenizer, made)[1] == ["<|channel|>final<|message|>the fox<|return|>"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("thinking", ["keep", "off"])
def test_marks_of_published_templates_change_no_answer(
    make_tokenizer: Callable[..., Any], tokenizers: dict[str, Any], family: str, thinking: str
) -> None:
    """T1: the same answers are learned with `{% generation %}` marks as without, behind the same prompts; the marked
    Qwen templates keep earlier reasoning, so one sample holds what two do without."""
    marked = make_tokenizer((FOLDER / "marked" / f"{family}.jinja").read_text())
    marked.add_tokens([*MARKS, "</s>"], special_tokens=True)
    assert Template(marked).marked
    assert not Template(tokenizers[family]).marked
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    rows: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [([USER, FOX, AGAIN, DOG], {})]
    if thinking == "keep":
        rows.append(([USER, reasoned(FOX, "hmm"), AGAIN, reasoned(DOG, "well")], {}))
        rows.append(([USER, reasoned(called, "ask"), RESULT, reasoned(FOX, "so")], {"tools": [TOOL]}))
    for turns, options in rows:
        found = []
        for tokenizer in (tokenizers[family], marked):
            made = samples(tokenizer, *turns, thinking=thinking, **options)
            found.append([answer for sample in learned(tokenizer, made) for answer in sample])
        assert found[0] == found[1]
        assert len(found[0]) == 2


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
def test_each_turn_is_a_sample_that_shows_its_own_reasoning_alone(tokenizers: dict[str, Any], family: str) -> None:
    tokenizer = tokenizers[family]
    made = samples(tokenizer, USER, reasoned(FOX, "hmm"), AGAIN, reasoned(DOG, "well"), each=True)
    assert [len(runs) for runs in learned(tokenizer, made)] == [1, 1]
    assert ["hmm" in tokenizer.decode(one.ids) for one in made] == [True, False]
    assert ["well" in tokenizer.decode(one.ids) for one in made] == [False, True]


def test_qwen3_5_writes_calls_in_its_own_tags(tokenizers: dict[str, Any]) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    made = samples(tokenizers["qwen3_5"], USER, called, RESULT, FOX, tools=[TOOL])
    call = "<tool_call>\n<function=weather>\n<parameter=town>\nUlm\n</parameter>\n</function>\n</tool_call><|im_end|>"
    assert learned(tokenizers["qwen3_5"], made) == [[call, "the fox<|im_end|>"]]
