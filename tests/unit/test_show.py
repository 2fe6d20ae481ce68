"""`draftwire prepare --show`: what is learned stands out, in colour or between marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from producer.config import DataConfig, SourceConfig
from producer.prepare import prepare
from producer.show import show_samples


def code(arguments: list[str]) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code or 0


@pytest.mark.parametrize(("colour", "begin", "end"), [(True, "\x1b[32m", "\x1b[0m"), (False, "«", "»")])
def test_supervised_tokens_stand_out(
    tmp_path: Path,
    make_tokenizer: Callable[..., Any],
    make_chats: Callable[..., Path],
    colour: bool,
    begin: str,
    end: str,
) -> None:
    path, tokenizer = make_chats(9), make_tokenizer()
    data = DataConfig(train=[SourceConfig(path=str(path))])
    dataset = prepare(data, tokenizer, {"vocab_size": 400, "eos_token_id": 3}, tmp_path / "d")
    lines = show_samples(dataset, tokenizer, 2, colour)
    assert len(lines) == 4
    head, text = lines[:2]
    row = int(head.partition(":")[2].partition(",")[0])
    answer = json.loads(path.read_text().splitlines()[row - 1])["messages"][1]["content"]
    assert f"<|im_start|>assistant\n{begin}{answer}<|im_end|>{end}" in text
    assert text.count(begin) == 1
    assert len(show_samples(dataset, tokenizer, 99, colour)) == 18


def test_the_command_writes_to_a_pipe_without_colour(
    tmp_path: Path,
    make_folder: Callable[..., Path],
    make_chats: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats, target = make_chats(5), make_folder()
    config = tmp_path / "c.toml"
    config.write_text(
        f'[run]\ndir = "{tmp_path}/runs"\n[target]\nmodel = "{target}"\n[data]\ntrain = [{{ path = "{chats.name}" }}]\n'
    )
    assert code(["prepare", str(config), "--show", "1", "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "--- sample " in shown
    assert "«" in shown
    assert "\x1b" not in shown
    assert code(["prepare", str(config), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"rows", "kept", "skipped", "tokens", "supervised_tokens"} <= report.keys()
    assert report["sources"][0]["formats"] == {"messages": 5}
    assert code(["prepare", str(config), "--json", "--show", "1"]) == 2
