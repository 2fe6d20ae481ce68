"""T8: ten conversations become the token ids that a serving engine made of them (tests/golden/README.md says how)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from producer.config import SourceConfig
from producer.rows import row_of
from producer.samples import SampleMaker, Samples

TESTS = Path(__file__).parents[1]
CASES = [json.loads(line) for line in (TESTS / "golden" / "engine" / "sglang.jsonl").read_text().splitlines()]
# The order gives the ids.
MARKS = [
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<end_of_turn>"),
    *("<start_of_turn>", "<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<think>"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["family"])
def test_ids_are_those_of_the_engine(make_tokenizer: Callable[..., Any], case: dict[str, Any]) -> None:
    """The stored prompt is what the last answer follows, and what `generate` would ask with."""
    tokenizer = make_tokenizer((TESTS / "templates" / f"{case['family']}.jinja").read_text())
    tokenizer.add_tokens([*MARKS, "</s>"], special_tokens=True)
    if case["family"] == "mistral":
        tokenizer.eos_token = "</s>"
    maker = SampleMaker(tokenizer, len(tokenizer), None)
    thinking = "row" if "enable_thinking" in case["row"] else "keep"
    source = SourceConfig(path="engine", thinking=thinking)
    item = maker.item(row_of(Path("engine"), 1, json.dumps(case["row"]).encode()), source)
    (made,) = maker.samples([item])
    assert isinstance(made, Samples)
    sample, prompt = made.samples[-1], case["prompt_ids"]
    assert sample.ids[: len(prompt)].tolist() == prompt == maker.prompt(item).tolist()
    assert sample.mask[len(prompt)] == 1 > sample.mask[len(prompt) - 1]
    assert made.left_out == {}


def test_ten_conversations_of_six_families() -> None:
    assert len(CASES) == 10
    assert len({case["family"] for case in CASES}) == 6
