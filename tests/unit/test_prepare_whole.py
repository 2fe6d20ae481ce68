"""The token dataset as a whole: workers, interruption, weights, the automatic length limit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer import chunks, pool, spooling
from producer.config import DataConfig, SourceConfig
from producer.prepare import prepare, report_of
from producer.preparing import describe
from producer.unspool import auto_length
from protocol.dataset import TokenDataset
from protocol.errors import RequestError, RunError

FACTS = {"vocab_size": 400, "eos_token_id": 3}
FILES = ("tokens.bin", "mask.bin", "offsets.npy", "anchors.npy", "places.npy", "meta.json")


def chat(question: str, *answers: str) -> dict[str, Any]:
    turns = [turn for answer in answers for turn in (("user", question), ("assistant", answer))]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write(path: Path, rows: list[Any]) -> SourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(path))


def content(dataset: TokenDataset) -> list[bytes]:
    return [(dataset.folder / name).read_bytes() for name in FILES]


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    """H5: 20 rows of some 40,000 tokens and 20 short ones, with the model library imported, by 1 and by 4 processes."""
    import transformers  # noqa: F401

    answer = "hello world how are you today " * 5_600
    rows = [chat(f"question {row}", answer if row % 2 else f"short {row}") for row in range(40)]
    source = write(tmp_path / "chats.jsonl", [*rows, "bad"])
    data = DataConfig(train=[source], max_length=65_536)
    made = [prepare(data, make_tokenizer(), FACTS, tmp_path / str(n), workers=n) for n in (1, 4)]
    assert len(made[0]) == 40
    assert (made[0].lengths[1::2] > 32_768).all()
    assert (made[0].lengths[::2] < 100).all()
    assert content(made[0]) == content(made[1])
    assert report_of(made[1]).skipped == {"not a JSON object": 1}


def test_a_worker_that_dies_is_named(
    tmp_path: Path, make_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_COMMAND", (sys.executable, "-c", "import sys; sys.exit(9)"))
    data = DataConfig(train=[write(tmp_path / "chats.jsonl", [chat("q", "the fox")])])
    with pytest.raises(RunError, match="a tokenising process died"):
        prepare(data, make_tokenizer(), FACTS, tmp_path / "d", workers=2)


@pytest.mark.parametrize("max_length", [64, "auto"])
def test_interrupted_work_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path, make_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, max_length: Any
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 7)
    monkeypatch.setattr(spooling, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(spooling, "SAY_EVERY_S", 0.0)
    rows = [chat(f"question {row}", "the fox " * (1 + row % 9)) if row % 11 else {"odd": 1} for row in range(100)]
    data = DataConfig(train=[write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows[:30])],
                      max_length=max_length)  # fmt: skip
    whole = prepare(data, make_tokenizer(), FACTS, tmp_path / "whole")
    real, seen = spooling.tokenised, []

    def stops(*arguments: Any) -> Any:
        for count, pair in enumerate(real(*arguments)):
            if count == 9:
                raise KeyboardInterrupt
            yield pair

    def counts(*arguments: Any) -> Any:
        for pair in real(*arguments):
            seen.append(pair[0])
            yield pair

    monkeypatch.setattr(spooling, "tokenised", stops)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, make_tokenizer(), FACTS, tmp_path / "d")
    assert not (tmp_path / "d").exists()
    with (tmp_path / "d.work" / "tokens.bin").open("ab") as stream:
        stream.write(b"half a row")
    monkeypatch.setattr(spooling, "tokenised", counts)
    said: list[str] = []
    dataset = prepare(data, make_tokenizer(), FACTS, tmp_path / "d", said.append)
    assert content(dataset) == content(whole)
    assert len(seen) == 20 - 9
    assert said[0] == "prepare: going on behind 63 rows that an interrupted attempt has done"
    assert said[1].startswith("prepare: 77 %, 70 rows, 63 kept, ")
    assert said[1].endswith(" tokens/s, left: not known yet")  # nothing of this attempt to judge by
    assert said[2].startswith("prepare: 77 %, 77 rows")
    assert any(line.startswith("  skipped 13: unknown row format") for line in describe(report_of(dataset)))
    assert not (tmp_path / "d.work").exists()


def test_other_data_begins_anew(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    from producer.spool import Spool

    left = Spool(tmp_path / "d.work", "another fingerprint")
    left.append(np.ones(3, np.int32), np.ones(3, np.uint8), np.asarray([[3, 0, 1, 1]]))
    left.save({"report": {}, "files": [], "chunks": 5})
    left.close()
    source = write(tmp_path / "a.jsonl", [chat("q", "the fox")])
    assert len(prepare(DataConfig(train=[source]), make_tokenizer(), FACTS, tmp_path / "d")) == 1


def test_weights_repeat_and_thin_out(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    names = {"a": 1.0, "b": 2.5, "c": 0.25}
    rows = {name: [chat(f"{name} {n}", "the fox") for n in range(1000)] for name in names}
    sources = [write(tmp_path / f"{name}.jsonl", rows[name]) for name in names]
    train = [SourceConfig(path=s.path, weight=w) for s, w in zip(sources, names.values(), strict=True)]
    dataset = prepare(DataConfig(train=train), make_tokenizer(), FACTS, tmp_path / "d")
    report = report_of(dataset)
    assert report.rows == 3000 == report.kept + report.unused + sum(report.skipped.values())
    a, b, c = report.sources
    assert (a.samples, b.kept, c.rows) == (1000, 1000, 1000)
    assert abs(b.samples - 2500) < 80
    assert abs(c.samples - 250) < 70
    assert c.unused == 1000 - c.kept == 1000 - c.samples
    files, rows = dataset.meta["files"], np.load(dataset.folder / "places.npy")
    times = np.bincount(rows[rows[:, 0] == files.index(b.path)][:, 1])[1:]
    assert set(times.tolist()) == {2, 3}
    assert f"{c.path}: {c.kept} rows kept, {c.samples} samples, {c.tokens:,} tokens" in "\n".join(describe(report))
    again = prepare(DataConfig(train=train), make_tokenizer(), FACTS, tmp_path / "again", workers=1)
    assert content(again) == content(dataset)


def test_automatic_length_keeps_98_percent(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    rows = [chat("q", "fox " * (10 + n)) for n in range(100)] + [chat("q", "fox " * 3000), chat("fox " * 3000, "dog")]
    source = write(tmp_path / "a.jsonl", rows)
    dataset = prepare(DataConfig(train=[source], max_length="auto"), make_tokenizer(), FACTS, tmp_path / "d")
    whole = prepare(DataConfig(train=[source], max_length=10**6), make_tokenizer(), FACTS, tmp_path / "w")
    report, limit = report_of(dataset), dataset.meta["max_length"]
    assert limit == dataset.lengths.max() == report.max_length
    assert limit < whole.lengths.max()
    assert report.supervised_tokens >= 0.98 * report_of(whole).supervised_tokens
    assert report.supervised_tokens + report.cut_supervised_tokens == report_of(whole).supervised_tokens
    assert report.tokens + report.cut_tokens == report_of(whole).tokens
    assert report.rows == report.kept + sum(report.skipped.values())
    fixed = prepare(DataConfig(train=[source], max_length=int(limit)), make_tokenizer(), FACTS, tmp_path / "f")
    assert [content(fixed)[n] for n in range(5)] == [content(dataset)[n] for n in range(5)]
    assert report_of(fixed).skipped == report.skipped


def test_automatic_length_of_known_masks() -> None:
    mask = np.zeros(300, np.uint8)
    mask[:98] = mask[128:130] = 1
    whole = (mask, np.asarray([300]))
    assert auto_length(iter([whole])) == (128, 100)  # 98 of 100 end at 98
    assert auto_length(iter([(mask[:100], np.asarray([100]))])) == (100, 98)
    ten = (np.tile(mask[:100], 10), np.full(10, 100))  # in pieces: the masks of all count
    assert auto_length(iter([whole, ten])) == (128, 1080)
    assert auto_length(iter([ten, whole])) == (128, 1080)


def test_samples_of_the_limit_and_no_more(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    """`max_samples` counts samples, not rows; the report ends with the last row that was looked at."""
    path = write(tmp_path / "a.jsonl", [chat("q", "the fox", "lazy dog") for _ in range(5)]).path
    data = DataConfig(train=[SourceConfig(path=path, turns="each")], max_samples=3)
    dataset = prepare(data, make_tokenizer(), FACTS, tmp_path / "d")
    assert len(dataset) == 3
    assert report_of(dataset).rows == report_of(dataset).kept == 2


def test_strict_names_the_first_bad_row_whatever_the_workers_do(
    tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    source = write(tmp_path / "a.jsonl", [chat("q", "the fox")] * 600 + [1, 2])
    with pytest.raises(RequestError, match=r"a\.jsonl:601: not a JSON object"):
        prepare(DataConfig(train=[source], strict=True), make_tokenizer(), FACTS, tmp_path / "d", workers=2)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("d.")] == ["d.lock"]
