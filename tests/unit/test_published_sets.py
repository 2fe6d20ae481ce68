"""The sets that users mix go in unchanged: guessed format, right tokens, right masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.config import DataConfig, SourceConfig
from producer.masks import Tokenised
from producer.prepare import prepare, report_of
from producer.preparing import describe
from producer.rows import SkipRow
from producer.samples import Item, SampleMaker

FOLDER = Path(__file__).parents[1] / "data_samples"
# Qwen's way, reduced: reasoning and calls in tags, results as user turns, reasoning kept behind the last question.
TOOLS = """
{%- if tools %}<|im_start|>system
{{ messages[0].content ~ '\n' if messages[0].role == 'system' else '' }}<tools>
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and tools %}{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}<tool_call>
{{ '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}' }}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
EXPECTED: dict[str, tuple[str, list[list[str]]]] = {
    "open_orca": ("pairs", [["Yes, it is quick."], ["It is lazy."]]),
    "evol_codealpaca": ("alpaca", [["def add(a, b):\n    return a + b"]]),
    "alpaca": ("alpaca", [["Hund"], ["hello"]]),
    "magicoder_oss": ("pairs", [["```python\nx = 1\n```"]]),
    "magicoder_evol": ("pairs", [["l[::-1]"]]),
    "agentic": (
        "messages",
        [
            [
                'I look first.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
                '<tool_call>\n{"name": "edit", "arguments": {"path": "setup.py"}}\n</tool_call>',
                "It is fixed.",
            ]
        ],
    ),
    "swe_agent": ("messages", [["DISCUSSION\nLook around.\n```\nls\n```", "DISCUSSION\nDone.\n```\nsubmit\n```"]]),
    "glaive_v2": (
        "glaive",
        [
            [
                "I can only tell rates.",
                '<tool_call>\n{"name": "get_exchange_rate", "arguments": {"base": "it\'s USD"}}\n</tool_call>',
                "The rate is 0.85.",
            ],
            ["hello"],
        ],
    ),
    "hermes_tools": (
        "sharegpt",
        [
            [
                f"<think>\nask\n</think>\n\n{WEATHER}\n{CLOCK}",
                "It is sunny at noon.",
            ]
        ],
    ),
    "sharegpt_tools": ("sharegpt", [[WEATHER, "It is sunny."]]),
}
PROMPTS = {
    "open_orca": ["<|im_start|>system\nYou are an AI assistant.<|im_end|>\n<|im_start|>user\nIs the fox quick?"],
    "alpaca": ["<|im_start|>user\nTranslate to German.\n\ndog<|im_end|>", "<|im_start|>user\nSay hello.<|im_end|>"],
    "agentic": [
        '"name": "bash"',
        '"name": "edit"',
        "<|im_start|>user\nFix the test.",
        "<tool_response>\nsetup.py\n",
    ],
    "glaive_v2": ['"name": "get_exchange_rate"', "Use them if required\n<tools>", '<tool_response>\n{"rate": 0.85}'],
    "hermes_tools": ["<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>\nnoon"],
    "sharegpt_tools": ["Be kind.", '"name": "weather"', "<tool_response>\nsunny\n</tool_response>"],
}


def learned(tokenizer: Any, sample: Tokenised) -> list[str]:
    """The decoded runs of supervised tokens, without their end tokens, which must be there."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], sample.mask, [0]))))
    texts = [tokenizer.decode(sample.ids[start:end]) for start, end in edges.reshape(-1, 2)]
    assert all(text.endswith("<|im_end|>") for text in texts)
    return [text.removesuffix("<|im_end|>") for text in texts]


@pytest.fixture(scope="module")
def maker(make_tokenizer: Callable[..., Any]) -> SampleMaker:
    return SampleMaker(make_tokenizer(TOOLS), 400, None)


def test_every_file_of_samples_is_expected() -> None:
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_published_rows(maker: SampleMaker, name: str) -> None:
    kind, answers = EXPECTED[name]
    items = list(maker.items([SourceConfig(path=str(FOLDER / f"{name}.jsonl"))]))
    assert all(isinstance(item, Item) for item in items), items
    good = [item for item in items if isinstance(item, Item)]
    assert {item.kind for item in good} == {kind}
    made = maker.samples(good)
    assert not [one for one in made if isinstance(one, SkipRow)], made
    samples = [sample for one in made if not isinstance(one, SkipRow) for sample in one.samples]
    assert [learned(maker.tokenizer, sample) for sample in samples] == answers
    text = "".join(maker.tokenizer.decode(sample.ids) for sample in samples)
    for part in PROMPTS.get(name, []):
        assert part in text
    for sample, item in zip(samples, good, strict=True):
        assert item.conversation is not None
        template, _ = maker.template("keep")
        whole = template.render(item.conversation.messages, item.conversation.tools)
        assert maker.tokenizer.decode(sample.ids) == whole
        assert "endoftext" not in whole
        assert "'type'" not in whole


def test_the_guess_is_printed(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    data = DataConfig(train=[SourceConfig(path=str(FOLDER))], max_length=4096)
    facts = {"vocab_size": 400, "eos_token_id": 3}
    dataset = prepare(data, make_tokenizer(TOOLS), facts, tmp_path / "d")
    report = report_of(dataset)
    assert report.sources[0].formats == {"pairs": 4, "alpaca": 3, "messages": 2, "glaive": 2, "sharegpt": 2}
    assert f"{FOLDER}: pairs, 4 of 13 rows" in describe(report)
    assert [Path(file).stem for file in dataset.meta["files"]] == sorted(EXPECTED)


def test_a_template_without_places_keeps_tags_as_text(make_tokenizer: Callable[..., Any]) -> None:
    """What the row wrote into the text stays there, word for word; definitions that have no place are a named skip."""
    maker = SampleMaker(make_tokenizer(), 400, None)
    path = FOLDER / "hermes_tools.jsonl"
    (item,) = maker.items([SourceConfig(path=str(path))])
    assert isinstance(item, Item)
    (made,) = maker.samples([item])
    assert isinstance(made, SkipRow)
    assert made.reason == "template has no place for tools"
    assert item.conversation is not None
    assert item.conversation.messages[2]["content"].startswith("<think>\nask\n</think>\n\n<tool_call>")
