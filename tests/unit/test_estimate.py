"""A random sample of rows says what `prepare` would make of all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from producer.config import DataConfig, SourceConfig
from producer.estimate import draw_rows
from producer.prepare import prepare

FACTS = {"vocab_size": 400, "eos_token_id": 3}


@pytest.mark.parametrize("weight", [1.0, 2.0, 1.5])
def test_all_rows_drawn_are_what_is_prepared(
    make_tokenizer: Callable[..., Any], make_chats: Callable[..., Path], tmp_path: Path, weight: float
) -> None:
    data = DataConfig(train=[SourceConfig(path=str(make_chats(200)), weight=weight)], max_length=24)
    drawn, rows = draw_rows(data, make_tokenizer(), FACTS, 1000)
    dataset = prepare(data, make_tokenizer(), FACTS, tmp_path / "data", lambda line: None)
    assert rows == 200
    lengths = sorted(length for row in drawn for length, _ in row)
    if weight == 1.5:  # which rows count once more is drawn
        assert len(lengths) == pytest.approx(300, abs=40)
    else:
        assert lengths == sorted(dataset.lengths.tolist())
        assert sum(eligible for row in drawn for _, eligible in row) == dataset.eligible.sum()
