"""X4 of the public reports: an export says what it was trained on, an evaluation where the drafter is good."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from consumer.acceptance_parts import parts, row_facts, show_parts
from consumer.facts import data_facts
from consumer.walk import Acceptance
from producer.config import DataConfig, SourceConfig
from producer.prepare import prepare
from producer.rows import row_of
from producer.samples import SampleMaker
from protocol.dataset import write_dataset
from protocol.errors import RequestError

SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}[]{% endif %}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


def chat(answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer, **more}]}


def test_the_record_says_what_rows_and_lengths_there_were(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    """X4: shares of rows with reasoning and tool calls, percentiles and the longest sample."""
    rows = [chat("fox " * (1 + n)) for n in range(98)]
    rows += [chat("so", reasoning_content="hmm"), chat("", tool_calls=[CALL])]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train=[SourceConfig(path=str(path))])
    facts = {"vocab_size": 400, "eos_token_id": 3}
    dataset = prepare(data, make_tokenizer(SWITCHED), facts, tmp_path / "d")
    found = data_facts(dataset)
    assert (found["rows_with_reasoning"], found["rows_with_tool_calls"]) == (0.01, 0.01)
    assert found["longest_sample_tokens"] == dataset.lengths.max() > found["sample_tokens_p50"]
    assert found["sample_tokens_p50"] == round(float(np.median(dataset.lengths)))
    assert found["max_length"] == 3072
    bare = write_dataset(tmp_path / "bare", [(np.ones(5, np.int32), np.ones(5, np.uint8))], {"fingerprint": "f"})
    assert data_facts(bare)["rows_with_reasoning"] is None


def test_a_held_out_prompt_knows_whether_it_asks_for_thinking(make_tokenizer: Callable[..., Any]) -> None:
    maker, plain = (SampleMaker(make_tokenizer(*template), 400, None) for template in ((SWITCHED,), ()))
    row = row_of(Path("a"), 1, json.dumps(chat("fox")).encode())
    by_row = SourceConfig(path="a", thinking="row")
    assert maker.thinking(maker.item(row, SourceConfig(path="a"))) == "on"
    assert maker.thinking(maker.item(row, by_row)) == "off"
    assert plain.thinking(plain.item(row, by_row)) == ""


def test_acceptance_is_told_by_length_and_by_thinking(tmp_path: Path) -> None:
    """X4: mean over the prompts of each part; a prompt that nothing was drafted for is in none."""
    found = Acceptance(((4, 2), (1,), (5,), ()), 3.0, (2.0, 4.0), 3.0, (0.5,), 3, 12)
    offsets = np.cumsum([0, 100, 600, 40_000, 3])
    metadata = {"thinking": json.dumps(["on", "off", "off", "on"])}
    save_file({"offsets": offsets.astype(np.int64)}, tmp_path / "eval.safetensors", metadata)
    divided = parts(found, *row_facts(tmp_path / "eval.safetensors"))
    assert divided["by_length"] == [
        {"up_to_tokens": 512, "prompts": 1, "acceptance_mean": 3.0},
        {"up_to_tokens": 1024, "prompts": 1, "acceptance_mean": 1.0},
        {"up_to_tokens": None, "prompts": 1, "acceptance_mean": 5.0},
    ]
    assert divided["by_thinking"] == [
        {"thinking": "on", "prompts": 1, "acceptance_mean": 3.0},
        {"thinking": "off", "prompts": 2, "acceptance_mean": 3.0},
    ]
    assert show_parts(divided) == [
        "by tokens of prompt and answer: up to 512 3.000 (1), up to 1,024 1.000 (1), longer 5.000 (1)",
        "by thinking: on 3.000 (1), off 3.000 (2)",
    ]
    save_file({"offsets": offsets.astype(np.int64)}, tmp_path / "old.safetensors", {})
    assert row_facts(tmp_path / "old.safetensors")[1] == [""] * 4
    with pytest.raises(RequestError, match="not a readable eval shard"):
        row_facts(tmp_path / "none.safetensors")
