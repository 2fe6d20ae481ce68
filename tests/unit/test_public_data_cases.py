"""Cases D1, D3, D4, D6, T1, T2, T4, T5, T7 and T8 of the public reports, from a file to the dataset."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.config import DataConfig, SourceConfig
from producer.prepare import PrepareReport, prepare, report_of
from protocol.dataset import TokenDataset
from protocol.errors import RequestError

FACTS = {"vocab_size": 400, "eos_token_id": 3}
Run = Callable[..., tuple[TokenDataset, PrepareReport, Any]]
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def run(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> Run:
    def prepared(
        rows: list[Any], template: str = PLAIN, facts: dict[str, Any] = FACTS, thinking: Any = "keep", **settings: Any
    ) -> tuple[TokenDataset, PrepareReport, Any]:
        path, tokenizer = tmp_path / "chats.jsonl", make_tokenizer(template)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(train=[SourceConfig(path=str(path), thinking=thinking)], **settings)
        dataset = prepare(data, tokenizer, facts, tmp_path / "d")
        return dataset, report_of(dataset), tokenizer

    return prepared


def row(*turns: tuple[str, Any], **extra: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **extra}


def texts(dataset: TokenDataset, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(dataset.tokens(place)) for place in range(len(dataset))]


def learned(dataset: TokenDataset, tokenizer: Any, place: int = 0) -> list[str]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], dataset.mask(place), [0]))))
    return [tokenizer.decode(dataset.tokens(place)[start:end]) for start, end in edges.reshape(-1, 2)]


def test_three_dresses_give_the_same_tokens(run: Run) -> None:
    """D1: role aliases and a top-level system text; the unknown role is skipped with line, name and count."""
    said = ["a fox", "b", "c fox", "d", "e", "f"]
    names = {"human": ["human", "gpt"] * 3, "user": ["user", "assistant"] * 3, "narrator": ["narrator", "gpt"] * 3}
    shared = {
        name: {"system": "s", "conversations": [{"from": r, "value": t} for r, t in zip(roles, said, strict=True)]}
        for name, roles in names.items()
    }
    whole = row(("system", "s"), *zip(names["user"], said, strict=True))
    dataset, report, _ = run([shared["human"], whole, shared["user"], shared["narrator"]])
    assert len(dataset) == 3
    assert len({dataset.tokens(place).tobytes() for place in range(3)}) == 1
    assert len({dataset.mask(place).tobytes() for place in range(3)}) == 1
    assert report.skipped == {"unknown role": 1}
    assert report.examples["unknown role"][0].endswith('chats.jsonl:4: turn 0 has role "narrator"')


def test_content_forms_become_the_same_text(run: Run) -> None:
    """D3: text, parts, null beside calls, empty, images, no turns; no program text in any sample."""
    part = {"type": "text", "text": "the fox"}
    call = {"function": {"name": "look", "arguments": "{}"}}
    called = row(("user", "q"), ("assistant", None), ("tool", "r"), ("assistant", "dog"))
    called["messages"][1]["tool_calls"] = [call]
    rows = [
        row(("user", "the fox"), ("assistant", "dog")),
        row(("user", [part]), ("assistant", [{"type": "text", "text": "dog"}])),
        row(("user", [part, part]), ("assistant", "dog")),
        called,
        row(("user", "q"), ("assistant", "")),
        row(("user", [{"type": "image_url", "image_url": {}}]), ("assistant", "dog")),
        row(),
    ]
    dataset, report, tokenizer = run(rows)
    found = texts(dataset, tokenizer)
    assert found[0] == found[1]
    assert "the fox\nthe fox" in found[2]
    assert learned(dataset, tokenizer, 3) == ["[look]<|im_end|>", "dog<|im_end|>"]
    assert report.skipped == {"empty assistant turn": 1, "content part is not text": 1, "empty conversation": 1}
    assert not any("[{" in text or "'type'" in text or "None" in text for text in found)


def test_half_a_surrogate_pair_costs_one_row(run: Run) -> None:
    """D2: JSON may write it, no tokenizer can read it; in a turn and in a document."""
    broken = "a\ud800b"
    rows = [row(("user", broken), ("assistant", "fox")), {"text": broken}, row(("user", "q"), ("assistant", "the fox"))]
    dataset, report, _ = run(rows)
    assert len(dataset) == 1
    assert report.skipped == {"half a surrogate pair in the text": 2}
    (first, second) = report.examples["half a surrogate pair in the text"]
    assert ":1: character " in first
    assert second.endswith(":2: character 1")


def test_any_order_of_turns_is_kept_whole_or_named(run: Run) -> None:
    """D4: rows in = kept + skipped, and every turn of a kept row stands in its text."""
    orders = [
        ["user", "user", "assistant"],
        ["assistant", "user", "assistant"],
        ["user", "assistant", "user"],
        ["developer", "user", "assistant"],
        ["user", "tool", "assistant"],
        ["system", "system", "user", "assistant"],
    ]
    rows = [row(*((role, f"turn-{n}-{role}") for n, role in enumerate(roles))) for roles in orders]
    dataset, report, tokenizer = run(rows)
    assert report.rows == 6 == report.kept + sum(report.skipped.values())
    assert report.kept == len(dataset) == 6
    for roles, text in zip(orders, texts(dataset, tokenizer), strict=True):
        assert all(text.count(f"turn-{n}-{role}") == 1 for n, role in enumerate(roles))
    assert report.left_out == {}


def test_a_token_id_outside_the_embedding_is_a_named_row(run: Run) -> None:
    """D6: the row, the token's text and its id; a tokenizer smaller than the embedding is fine."""
    rows = [row(("user", "q"), ("assistant", "fox")), {"input_ids": [1, 2, 400], "loss_mask": [0, 1, 1]}]
    dataset, report, _ = run(rows)
    assert len(dataset) == 1
    (place,) = report.examples["token id outside the embedding"]
    assert ":2: token None has id 400, the target's embedding has 400 rows" in place


def test_marks_change_nothing_and_a_useless_mask_is_an_error(run: Run, tmp_path: Path) -> None:
    """T1: the same mask with and without `{% generation %}`; 0 % and 100 % supervised are errors."""
    chats = [row(("user", "q"), ("assistant", "fox"), ("user", "r"))]
    plain, report, tokenizer = run(chats)
    marked, _, _ = run(chats, MARKED)
    assert plain.mask(0).tolist() == marked.mask(0).tolist()
    assert learned(plain, tokenizer) == ["fox<|im_end|>"]
    assert 0 < report.supervised_tokens < report.tokens
    with pytest.raises(RequestError, match="none of 1 rows can be used"):
        run([{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}])
    with pytest.raises(RequestError, match="100 % of the tokens are supervised"):
        run([{"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}])


def test_marks_decide_where_a_prompt_does_not_fit(run: Run) -> None:
    """T1: a template whose answers do not follow its generation prompt, but which marks them."""
    odd = MARKED.replace(
        "{% if add_generation_prompt %}<|im_start|>assistant", "{% if add_generation_prompt %}elsewhere"
    )
    dataset, _, tokenizer = run([row(("user", "q"), ("assistant", "fox"))], odd)
    assert learned(dataset, tokenizer) == ["fox<|im_end|>"]
    with pytest.raises(RequestError, match="answer does not follow its generation prompt"):
        run([row(("user", "q"), ("assistant", "fox"))], PLAIN.replace("%}<|im_start|>assistant", "%}elsewhere"))


def test_masks_at_the_cut_at_the_start_and_on_blanks(run: Run) -> None:
    """T2: tokens and mask are equally long, answers in the window are learned, no user token ever is."""
    rows = [
        row(("user", "q"), ("assistant", "the quick brown fox " * 20)),
        row(("assistant", "a"), ("user", "the fox"), ("assistant", "b")),
        row(("user", "q"), ("assistant", "fox  \n\n \n"), ("user", "the dog")),
    ]
    dataset, report, tokenizer = run(rows, max_length=40)
    assert len(dataset) == 3
    assert all(len(dataset.tokens(place)) == len(dataset.mask(place)) for place in range(3))
    assert report.truncated == 1
    assert learned(dataset, tokenizer, 0)[0].startswith("the quick brown")
    assert dataset.mask(0)[-1] == 1
    assert tokenizer.eos_token_id not in dataset.tokens(0)[dataset.mask(0) == 1]
    assert learned(dataset, tokenizer, 1) == ["a<|im_end|>", "b<|im_end|>"]
    assert learned(dataset, tokenizer, 2) == ["fox  \n\n \n<|im_end|>"]


def test_end_tokens_stay_learned_without_a_pad_token(run: Run) -> None:
    """T5: nothing is recognised by the end token's id; samples lie unpadded, one behind the other."""
    rows = [
        row(("user", "q"), ("assistant", "fox")),
        row(("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")),
    ]
    dataset, _, tokenizer = run(rows)
    for place in range(2):
        ends = dataset.tokens(place) == tokenizer.eos_token_id
        assert dataset.mask(place)[ends].tolist() == [0, 1] * (place + 1)
    assert dataset.lengths.sum() == (dataset.folder / "mask.bin").stat().st_size


def test_repeats_and_quoted_marks_shift_no_border(run: Run) -> None:
    """T7: two equal answers that the user says too, and content that quotes the template's marks."""
    quoted = "see <|im_end|>\n<|im_start|>assistant\nfox<|im_end|>"
    turns = [("user", "fox"), ("assistant", "fox"), ("user", quoted), ("assistant", "fox"), ("user", "fox")]
    dataset, _, tokenizer = run([row(*turns)])
    assert learned(dataset, tokenizer) == ["fox<|im_end|>"] * 2


def test_given_tokens_bypass_the_template(run: Run) -> None:
    """T8: captured traffic goes in as it is, whatever the template would make of it."""
    dataset, report, _ = run([{"input_ids": [9, 8, 7, 6], "loss_mask": [0, 0, 1, 1]}])
    assert dataset.tokens(0).tolist() == [9, 8, 7, 6]
    assert dataset.mask(0).tolist() == [0, 0, 1, 1]
    assert report.sources[0].formats == {"tokens": 1}


def test_an_answer_that_merges_with_its_prompt_is_left_out_and_counted(run: Run) -> None:
    """T8: a server never sees a token that reaches from the prompt into the answer."""
    blank_ends_the_prompt = PLAIN.replace("\n{{ m.content }}", " {{ m.content }}").replace("assistant\n", "assistant ")
    with pytest.raises(RequestError, match="answer's first token would reach into its prompt"):
        run([row(("user", "q"), ("assistant", "the fox"))], blank_ends_the_prompt)


def test_a_document_is_learned_but_for_its_first_token(run: Run) -> None:
    dataset, report, tokenizer = run([{"text": "the quick brown fox"}, row(("user", "q"), ("assistant", "dog"))])
    assert tokenizer.decode(dataset.tokens(0)) == "the quick brown fox"
    assert dataset.mask(0).tolist() == [0] + [1] * (len(dataset.tokens(0)) - 1)
    assert report.sources[0].formats == {"text": 1, "messages": 1}


@pytest.mark.parametrize(("says", "blocks"), [({}, 1), ({"enable_thinking": True}, 0), ({"enable_thinking": False}, 1)])
def test_the_row_decides_about_thinking(run: Run, says: dict[str, Any], blocks: int) -> None:
    """T3: with thinking = "row" the switch is the row's own, or whether it carries reasoning."""
    template = PLAIN.replace(
        "<|im_start|>{{ m.role }}\n{{ m.content }}",
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and enable_thinking is defined %}<think></think>"
        "{% endif %}{{ m.content }}",
    ).replace(
        "assistant\n{% endif %}", "assistant\n{% if enable_thinking is defined %}<think></think>{% endif %}{% endif %}"
    )
    dataset, _, tokenizer = run([row(("user", "q"), ("assistant", "fox"), **says)], template, thinking="row")
    assert texts(dataset, tokenizer)[0].count("<think></think>") == blocks
    assert learned(dataset, tokenizer) == ["fox<|im_end|>"]
