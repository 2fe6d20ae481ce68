"""Greedy answers and the resumable job on a tiny random target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from producer.answer_lines import GenerateReport
from producer.config import DataConfig, SourceConfig, TargetConfig
from producer.decoding import Decoding, Sampling
from producer.generate import generate_answers, greedy_answers
from producer.prepare import prepare, report_of
from producer.samples import SampleMaker
from producer.target import Target, load_target
from producer.template import load_tokenizer
from protocol.errors import RequestError

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 16]]


@pytest.fixture
def folder(make_folder: Callable[..., Path]) -> Path:
    return make_folder("qwen3")


@pytest.fixture
def target(folder: Path) -> Target:
    return load_target(folder, TargetConfig(dtype="float32"), "cpu")


def by_hand(model: Any, prompt: list[int], steps: int, stops: frozenset[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(steps):
        with torch.inference_mode():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def test_answers_are_the_argmax_of_each_prompt_alone(target: Target) -> None:
    free = greedy_answers(target, PROMPTS, max_new_tokens=8, stop_ids=frozenset({399}), batch_rows=3)
    assert free == [by_hand(target.model, prompt, 8, frozenset({399})) for prompt in PROMPTS]
    # Stop at a token that really comes, early in one answer.
    stops = frozenset({free[0][2]})
    stopped = greedy_answers(target, PROMPTS, max_new_tokens=8, stop_ids=stops, batch_rows=4)
    assert stopped == [by_hand(target.model, prompt, 8, stops) for prompt in PROMPTS]
    assert stopped[0][-1] in stops
    assert len(stopped[0]) <= 3


def test_settings_that_ship_with_the_model_do_not_matter(target: Target) -> None:
    plain = greedy_answers(target, PROMPTS, max_new_tokens=6, stop_ids=frozenset())
    shipped = target.model.generation_config
    shipped.repetition_penalty, shipped.do_sample, shipped.temperature = 5.0, True, 3.0
    shipped.eos_token_id = plain[0][0]
    assert greedy_answers(target, PROMPTS, max_new_tokens=6, stop_ids=frozenset()) == plain
    assert target.model.generation_config is shipped


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"hello {i}" * (i % 3 + 1)}, {"role": "assistant", "content": "old"}]}
        for i in range(count)
    ]


@pytest.fixture
def job(tmp_path: Path, folder: Path, target: Target) -> Callable[..., GenerateReport]:
    source = tmp_path / "in.jsonl"
    lines = [json.dumps(row) for row in rows(9)]
    lines[1] = json.dumps({**rows(9)[1], "source": "a corpus"})
    source.write_text("\n".join([*lines[:4], "not json", *lines[4:]]) + "\n")
    maker = SampleMaker(load_tokenizer(folder), 400, 200)

    def run(max_new_tokens: int = 5, with_tokens: bool = True, decoding: Any = None, **settings: Any) -> GenerateReport:
        data = DataConfig(train=[SourceConfig(path=str(source))], **settings)
        return generate_answers(
            data,
            target,
            maker,
            tmp_path / "out.jsonl",
            stop_ids=frozenset({3}),
            decoding=Decoding(max_new_tokens=max_new_tokens, with_tokens=with_tokens, **(decoding or {})),
            weights="w",
            batch_rows=1,
        )

    return run


def test_every_row_is_answered_in_order_with_its_exact_tokens(
    tmp_path: Path, folder: Path, target: Target, job: Callable[..., GenerateReport]
) -> None:
    report = job()
    assert (report.rows, report.answered, report.resumed, report.skipped) == (10, 9, 0, {"not JSON": 1})
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    places = [line["source"].rpartition(":")[2] for line in lines]
    assert places == ["1", "a corpus", "3", "4", "6", "7", "8", "9", "10"]
    for line, row in zip(lines, rows(9), strict=True):
        assert line["messages"][:-1] == row["messages"][:-1]
        split = line["loss_mask"].index(1)
        answer = by_hand(target.model, line["input_ids"][:split], 5, frozenset({3}))
        assert line["input_ids"][split:] == answer
        assert line["finish_reason"] == ("stop" if answer[-1] == 3 else "length")
    assert report.unfinished == sum(line["finish_reason"] == "length" for line in lines) > 0


def test_lines_are_slim_unless_the_tokens_are_asked_for(tmp_path: Path, job: Callable[..., GenerateReport]) -> None:
    report = job(with_tokens=False)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {tuple(line) for line in lines} == {("messages", "finish_reason", "source", "sampling")}
    # A random target's tokens are rarely those of their own text, and the report says of how many that is so.
    (tmp_path / "out.jsonl").unlink()
    job()
    exact = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["messages"] for line in exact] == [line["messages"] for line in lines]
    assert 0 < report.inexact <= 9


def test_slim_lines_of_cut_answers_are_learned_without_an_end(
    tmp_path: Path, folder: Path, target: Target, job: Callable[..., GenerateReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(folder)
    said = tokenizer("the quick brown fox", add_special_tokens=False)["input_ids"]
    answers = [[*said, 3], said]

    def answer(model: Any, prompts: Any, **options: Any) -> list[list[int]]:
        return [answers[place % 2] for place in range(len(prompts))]

    monkeypatch.setattr("producer.generate.greedy_answers", answer)
    report = job(with_tokens=False)
    assert (report.unfinished, report.inexact) == (4, 0)
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "out.jsonl"))])
    dataset = prepare(data, tokenizer, {"vocab_size": 400, "eos_token_id": 3}, tmp_path / "d")
    learned = [dataset.tokens(row)[dataset.mask(row) == 1].tolist() for row in range(8)]
    assert learned == [answers[0], answers[1]] * 4
    assert dataset.tokens(1).tolist()[-1] == said[-1]


def test_how_answers_were_made_is_told_once(tmp_path: Path, job: Callable[..., GenerateReport]) -> None:
    job(max_samples=1)
    told = json.loads((tmp_path / "out.jsonl.provenance.json").read_text())
    assert told["weights"] == "w"
    assert told["max_new_tokens"] == 5
    digest = hashlib.sha256((tmp_path / "in.jsonl").read_bytes()).hexdigest()
    assert [source["sha256"] for source in told["data"]] == [digest]
    # Other releases and places are told, not refused.
    told |= {"transformers": "0", "data": [{**told["data"][0], "path": "elsewhere"}]}
    (tmp_path / "out.jsonl.provenance.json").write_text(json.dumps(told))
    assert job(max_samples=2).resumed == 1


def test_what_was_written_is_training_data(tmp_path: Path, folder: Path, job: Callable[..., GenerateReport]) -> None:
    job()
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "out.jsonl"))])
    facts = {"vocab_size": 400, "eos_token_id": 3}
    dataset = prepare(data, load_tokenizer(folder), facts, tmp_path / "d")
    assert report_of(dataset).kept == 9
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert dataset.tokens(0).tolist() == first["input_ids"]
    assert dataset.mask(0).tolist() == first["loss_mask"]


@pytest.mark.parametrize("cut", [0, 40])
def test_interrupted_work_goes_on_where_it_stopped(
    tmp_path: Path, job: Callable[..., GenerateReport], cut: int
) -> None:
    job()
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:5]) + lines[5][:cut])
    report = job()
    assert (report.resumed, report.answered, report.rows, report.skipped) == (5, 4, 10, {"not JSON": 1})
    assert out.read_bytes() == whole
    assert job().answered == 0


def test_other_settings_do_not_mix_into_one_file(tmp_path: Path, job: Callable[..., GenerateReport]) -> None:
    job(max_samples=3)
    with pytest.raises(RequestError, match="another max_new_tokens, tokens;"):
        job(max_new_tokens=6, with_tokens=False)
    source = tmp_path / "in.jsonl"
    source.write_text(source.read_text() + json.dumps(rows(1)[0]) + "\n")
    with pytest.raises(RequestError, match="another data"):
        job()


@pytest.mark.parametrize("damage", ["lost", "cut", "list"])
def test_output_without_its_provenance_is_left_alone(
    tmp_path: Path, job: Callable[..., GenerateReport], damage: str
) -> None:
    out, beside = tmp_path / "out.jsonl", tmp_path / "out.jsonl.provenance.json"
    job(max_samples=2)
    written = out.read_bytes()
    beside.unlink() if damage == "lost" else beside.write_text("{" if damage == "cut" else "[]")
    with pytest.raises(RequestError, match=r"out\.jsonl\.provenance\.json"):
        job()
    assert out.read_bytes() == written


def test_foreign_lines_are_named(tmp_path: Path, job: Callable[..., GenerateReport]) -> None:
    job(max_samples=2)
    with (tmp_path / "out.jsonl").open("a") as stream:
        stream.write('{"messages": []}\n')
    with pytest.raises(RequestError, match=r"out\.jsonl:3: not a line"):
        job()


def test_max_samples_counts_over_restarts(tmp_path: Path, job: Callable[..., GenerateReport]) -> None:
    assert job(max_samples=3).answered == 3
    assert job(max_samples=6).answered == 3
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 6


def test_prompts_may_be_arrays(target: Target) -> None:
    arrays = [np.asarray(prompt, dtype=np.int32) for prompt in PROMPTS]
    assert greedy_answers(target, arrays, max_new_tokens=3, stop_ids=frozenset()) == greedy_answers(
        target, PROMPTS, max_new_tokens=3, stop_ids=frozenset()
    )


def test_sampled_answers_are_keyed_by_row_whatever_runs_beside_it(
    tmp_path: Path, job: Callable[..., GenerateReport]
) -> None:
    out, sampled = tmp_path / "out.jsonl", {"sampling": Sampling(temperature=1.5, seed=4)}
    job(decoding=sampled)
    whole = out.read_bytes()
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:4]))
    assert job(decoding=sampled).resumed == 4
    assert out.read_bytes() == whole
    first = json.loads(whole.splitlines()[0])
    assert first["sampling"] == {"max_new_tokens": 5, "temperature": 1.5, "top_p": 1.0, "top_k": 0, "seed": 4}
    with pytest.raises(RequestError, match="another decoding"):
        job(decoding={"sampling": Sampling(temperature=1.5, seed=5)})
    out.unlink()
    job()
    assert json.loads(out.read_text().splitlines()[0])["input_ids"] != first["input_ids"]


def test_each_turn_is_answered_on_top_of_the_new_ones(
    tmp_path: Path, folder: Path, target: Target, job: Callable[..., GenerateReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    job(max_samples=1)  # writes nothing that matters; the input is replaced
    (tmp_path / "out.jsonl").unlink()
    turns = [{"role": role, "content": f"{role} {at}"} for at, role in enumerate(["user", "assistant"] * 2)]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    tokenizer = load_tokenizer(folder)
    said = [[*tokenizer(text, add_special_tokens=False)["input_ids"], 3] for text in ("hello", "world")]
    asked: list[str] = []

    def answer(model: Any, prompts: Any, **options: Any) -> list[list[int]]:
        asked.append(tokenizer.decode(prompts[0]))
        return [said[len(asked) - 1]]

    monkeypatch.setattr("producer.generate.greedy_answers", answer)
    report = job(with_tokens=False, decoding={"turns": "each"})
    (line,) = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [message["content"] for message in line["messages"]] == ["user 0", "hello", "user 2", "world"]
    assert "hello" in asked[1]
    assert (report.answered, report.inexact, report.shortened) == (1, 0, 0)
