from __future__ import annotations

import json
from pathlib import Path

import pytest

from producer.inputs import read_rows
from producer.rows import SkipRow, Skips
from protocol.errors import RequestError

GOOD = json.dumps({"messages": [{"role": "user", "content": "caf\u00e9"}]}, ensure_ascii=False).encode()


def test_dressed_lines_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD + b"\r\n" + b"  \r\n\n" + GOOD)
    rows = list(read_rows(path))
    assert [row.line for row in rows] == [1, 2, 5]
    assert all(row.bad is None and row.value == json.loads(GOOD) for row in rows)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"messages": [', "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b"7", "not a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_line_costs_one_row(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    first, bad, last = read_rows(path)
    assert first.bad is None
    assert last.bad is None
    assert bad.bad is not None
    assert (bad.bad.reason, bad.line, bad.place) == (reason, 2, f"{path}:2")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere\.jsonl.*No such file"):
        list(read_rows(tmp_path / "nowhere.jsonl"))


def test_skips_count_by_reason_and_keep_few_examples() -> None:
    skips = Skips(strict=False, examples=2)
    for line in range(5):
        skips.add(f"f:{line}", SkipRow("odd", f"number {line}"))
    assert skips.counts == {"odd": 5}
    assert skips.examples == {"odd": ["f:0: number 0", "f:1: number 1"]}


def test_strict_names_file_line_and_reason() -> None:
    with pytest.raises(RequestError, match=r"chats\.jsonl:12: odd: very"):
        Skips(strict=True).add("chats.jsonl:12", SkipRow("odd", "very"))
