from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.config import DataConfig, SourceConfig, TargetConfig, check
from producer.prepare import prepare, report_of
from producer.samples import SampleMaker, tokenizer_fingerprint
from producer.unspool import unused_special_ids
from protocol.dataset import TokenDataset
from protocol.errors import RequestError

FACTS = {"vocab_size": 400, "eos_token_id": 3}


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")
    return path


def data(path: Path, **settings: Any) -> DataConfig:
    return DataConfig(train=[SourceConfig(path=str(path))], **settings)


@pytest.fixture
def run(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> Callable[..., TokenDataset]:
    def prepared(rows: list[Any], facts: dict[str, Any] = FACTS, **settings: Any) -> TokenDataset:
        path = write(tmp_path / "chats.jsonl", rows)
        return prepare(data(path, **settings), make_tokenizer(), facts, tmp_path / "dataset")

    return prepared


def messy_rows() -> list[Any]:
    """D2: 93 usable lines, three of them oddly dressed, and seven bad ones."""
    rows: list[Any] = [chat(f"question {i}", f"the answer {i}") for i in range(90)]
    rows[0] = b"\xef\xbb\xbf" + json.dumps(rows[0]).encode()
    rows[1] = json.dumps(rows[1]).encode() + b"\r"
    rows.insert(2, b"")
    bad: list[Any] = [b'{"messages": [', [1], 7, {"conversations": None}, {"conversations": []}]
    bad += [{"messages": ["text"]}, b'{"messages": "\xff"}']
    return rows[:50] + bad + rows[50:]


def test_every_row_is_kept_or_counted(run: Callable[..., TokenDataset]) -> None:
    dataset = run(messy_rows())
    report = report_of(dataset)
    assert (report.rows, report.kept, len(dataset)) == (97, 90, 90)
    assert report.rows == report.kept + sum(report.skipped.values())
    lines = sorted(int(place.split(":")[1]) for places in report.examples.values() for place in places)
    assert lines == [51, 52, 53, 54, 55, 56, 57]
    assert report.tokens == dataset.lengths.sum() == dataset.meta["tokens"]
    assert 0 < report.supervised_tokens < report.tokens


def test_strict_stops_at_the_first_bad_row(run: Callable[..., TokenDataset], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"chats\.jsonl:51: not JSON"):
        run(messy_rows(), strict=True)
    assert not (tmp_path / "dataset").exists()


def test_same_request_is_not_done_twice(run: Callable[..., TokenDataset], tmp_path: Path) -> None:
    rows = [chat("q", "the fox"), chat("r", "lazy dog")]
    first = run(rows)
    stamp = (tmp_path / "dataset" / "meta.json").stat().st_mtime_ns
    assert run(rows).fingerprint == first.fingerprint
    assert (tmp_path / "dataset" / "meta.json").stat().st_mtime_ns == stamp
    changed = [run([*rows, chat("s", "more")]), run(rows, max_length=20), run(rows, max_samples=1)]
    assert len({first.fingerprint, *(dataset.fingerprint for dataset in changed)}) == 4
    assert len(changed[2]) == 1


def test_damaged_dataset_is_written_anew(run: Callable[..., TokenDataset], tmp_path: Path) -> None:
    rows = [chat("q", "the fox")]
    tokens = run(rows).tokens(0).tolist()
    (tmp_path / "dataset" / "tokens.bin").write_bytes(b"")
    assert run(rows).tokens(0).tolist() == tokens


def test_given_tokens_are_taken_as_they_are(run: Callable[..., TokenDataset]) -> None:
    dataset = run(
        [
            {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]},
            {"token_ids": [7, 8, 9], "labels": [-100, 8, 9]},
            {"input_ids": [1], "loss_mask": [1, 1]},
            {"input_ids": [7, 8], "loss_mask": [1, 2]},
            {"input_ids": [7, 8.5], "loss_mask": [1, 1]},
            {"input_ids": [7, 8]},
            {"input_ids": [7, 8], "loss_mask": [1, 1], "tokenizer": "another"},
        ]
    )
    assert [dataset.tokens(i).tolist() for i in range(len(dataset))] == [[7, 8, 9], [7, 8, 9]]
    assert [dataset.mask(i).tolist() for i in range(len(dataset))] == [[0, 1, 1], [0, 1, 1]]
    assert sum(report_of(dataset).skipped.values()) == 5
    assert "token ids of another tokenizer" in report_of(dataset).skipped


def test_ids_outside_the_embedding_are_named(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    added = tokenizer.convert_tokens_to_ids("<extra>")
    rows = [chat("q", "the fox"), chat("q", "an <extra> token"), {"input_ids": [-1, 2], "loss_mask": [1, 1]}]
    path = write(tmp_path / "chats.jsonl", rows)
    report = report_of(prepare(data(path), tokenizer, {**FACTS, "vocab_size": added}, tmp_path / "d"))
    assert report.skipped == {"token id outside the embedding": 2}
    assert f"'<extra>' has id {added}, the target's embedding has {added} rows" in str(report.examples)


def test_all_or_nothing_supervised_is_an_error(run: Callable[..., TokenDataset]) -> None:
    with pytest.raises(RequestError, match="100 % of the tokens"):
        run([{"input_ids": [7, 8, 9], "loss_mask": [1, 1, 1]}])
    with pytest.raises(RequestError, match=r"none of 1 rows.*no assistant turn.*chats\.jsonl:1"):
        run([{"messages": [{"role": "user", "content": "q"}]}])


def test_cut_rows_are_counted_and_rows_cut_before_the_answer_skipped(run: Callable[..., TokenDataset]) -> None:
    dataset = run([chat("q", "the quick brown fox " * 9), chat("a very long question " * 9, "fox")], max_length=40)
    report = report_of(dataset)
    assert (report.kept, report.truncated, dataset.lengths.tolist()) == (1, 1, [40])
    assert report.skipped == {"no two supervised tokens in a row within max_length": 1}


def test_thinking_off_skips_rows_with_reasoning(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    row = chat("q", "the fox")
    row["messages"][1]["reasoning_content"] = "hmm"
    path = write(tmp_path / "chats.jsonl", [row, chat("q", "fox")])
    config = DataConfig(train=[SourceConfig(path=str(path), thinking="off")])
    report = report_of(prepare(config, make_tokenizer(), FACTS, tmp_path / "d"))
    assert report.skipped == {"reasoning in a row of a source with thinking off": 1}


def test_mask_token_candidates(run: Callable[..., TokenDataset], make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(pad=True)
    spare, size = tokenizer.convert_tokens_to_ids("<|spare|>"), len(tokenizer)
    seen = np.zeros(size + 2, dtype=np.bool_)
    seen[tokenizer.convert_tokens_to_ids("<|im_start|>")] = True
    assert unused_special_ids(tokenizer, size + 2, seen, [3]) == [size, size + 1, spare]
    seen[spare] = True
    assert unused_special_ids(tokenizer, size, seen[:size], 3) == []
    dataset = run([chat("q", "the fox")])
    assert not set(dataset.meta["unused_special_ids"]) & set(dataset.occurring_ids().tolist())
    assert spare in dataset.meta["unused_special_ids"]


def test_missing_file_is_named(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match=r"\[data\] .*none\.jsonl: cannot be read"):
        prepare(data(tmp_path / "none.jsonl"), make_tokenizer(), FACTS, tmp_path / "d")


def test_tokenizer_fingerprint_ignores_how_it_was_saved(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    from producer.template import load_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(load_tokenizer(tmp_path)) == tokenizer_fingerprint(tokenizer)
    tokenizer.add_tokens(["<extra>"])
    assert tokenizer_fingerprint(load_tokenizer(tmp_path)) != tokenizer_fingerprint(tokenizer)


def test_prompt_of_given_tokens_ends_before_the_last_answer(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    path = write(tmp_path / "t.jsonl", [{"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 1]}])
    maker = SampleMaker(make_tokenizer(), 400, 100)
    (item,) = maker.items([SourceConfig(path=str(path))])
    assert not isinstance(item, tuple)
    assert maker.prompt(item).tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("target", "settings", "key"),
    [
        ({"model": " "}, {}, r"target\.model"),
        ({"model": "embedded", "revision": "x"}, {}, r"target\.revision"),
        ({}, {"train": []}, r"data\.train"),
        ({}, {"train": [SourceConfig(path="")]}, r"data\.train\[0\]\.path"),
        ({}, {"max_length": 1}, r"data\.max_length"),
        ({}, {"max_samples": 0}, r"data\.max_samples"),
    ],
)
def test_config_check_names_the_key(target: dict[str, Any], settings: dict[str, Any], key: str) -> None:
    with pytest.raises(RequestError, match=key):
        check(TargetConfig(**target), DataConfig(**{"train": [SourceConfig(path="a")], **settings}))
