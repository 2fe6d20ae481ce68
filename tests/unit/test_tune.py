"""`draftwire tune --from`: the table for people and scripts, and the split in the config file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.measurements import (
    Measurements,
    ProducerRate,
    Room,
    TrainerRate,
    Work,
    read_measurements,
    write_measurements,
)
from launch.split_writer import with_split
from protocol.errors import RequestError

CONFIG = '[target]\nmodel = "embedded"\n[data]\ntrain = [{ path = "a.jsonl" }]\n'


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """1,000 tokens/s of a producer, 600 of a rank."""
    path = tmp_path / "measurements.json"
    work = {"tokens_per_epoch": 10**9, "epochs": 6, "microbatch_tokens": 100, "microbatch_draft_tokens": 100}
    measured = Measurements(
        machine="made up",
        producers=[ProducerRate(tokens_per_s=1000, spread=0.02)],
        trainer=TrainerRate(cost_s=1 / 600 / 7),
        work=Work(steps=[[(100, 50)] * 840] * 2, anchors=64, bytes_per_token=10, **work),
        room=Room(gpu_bytes=10**11, host_bytes=10**11, slot_bytes=10**6),
    )
    write_measurements(path, measured)
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *arguments, "--json"])
    assert ended.value.code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("gpus", "best"), [(8, (3, 5)), (16, (6, 10)), (64, (24, 40))])
def test_measurements_are_replayed_for_any_number_of_gpus(
    kept: Path, capsys: pytest.CaptureFixture[str], gpus: int, best: tuple[int, int]
) -> None:
    found = answer(capsys, "--from", str(kept), "--gpus", str(gpus))
    assert (found["best"]["producers"], found["best"]["consumers"]) == best
    assert found["best"]["tokens_per_s"] == pytest.approx(375 * gpus)
    assert [(each["producers"], each["consumers"]) for each in found["splits"] if not each["shared"]] == [
        (count, gpus - count) for count in range(1, gpus)
    ]
    assert {each["limited_by"] for each in found["splits"]} == {"producers", "trainers", "sharing"}
    assert found["verified"] == []


def test_the_table_names_best_second_limits_and_what_would_help(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--from", str(kept), "--gpus", "7"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "7 GPUs, measured on: made up"
    assert next(line for line in lines if line.startswith("5:2 ")).endswith("  the trainers")
    assert next(line for line in lines if line.startswith("2:5 ")).endswith("  the producers")
    assert any(line.startswith("best: 3:4, 2,400 tokens/s (") for line in lines)
    assert any(line.startswith("6 epochs, streamed: ") and line.endswith(" with 3:4") for line in lines)
    assert any("the disk was not measured" in line for line in lines)


def test_spare_trainers_are_offered_anchors_for_nothing(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1:2 makes 1,000 of the 1,200 tokens/s that are trained: 1.2 times the cost, six sevenths of which are anchors."""
    found = answer(capsys, "--from", str(kept), "--gpus", "3")
    assert (found["best"]["producers"], found["best"]["limited_by"]) == (1, "producers")
    assert "1.20 times the tokens, that is up to 1.23 times as many anchors (train.anchors = 64)" in found["advice"][0]


def test_unsteady_measurements_are_called_that(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("quiet machine" in line for line in answer(capsys, "--from", str(kept), "--gpus", "8")["advice"])
    kept.write_text(kept.read_text().replace('"spread": 0.02', '"spread": 0.25'))
    found = answer(capsys, "--from", str(kept), "--gpus", "8")
    assert "differed by 25%" in found["advice"][-1]
    assert found["best"]["low"] < 0.76 * found["best"]["tokens_per_s"]


def test_write_puts_the_best_split_into_the_config(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "my.toml"
    config.write_text(CONFIG + '\n[gpus] # who runs where\nsplit = "auto" # tune writes it\n')
    config.chmod(0o640)
    answer(capsys, str(config), "--from", str(kept), "--gpus", "8", "--write")
    assert config.read_text() == CONFIG + '\n[gpus] # who runs where\nsplit = "3:5" # tune writes it\n'
    assert config.stat().st_mode & 0o777 == 0o640
    again = answer(capsys, str(config), "--from", str(kept), "--gpus", "8", "--write")
    assert again["written"].endswith("already")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a = 1 # x\r\n", 'a = 1 # x\r\n\r\n[gpus]\r\nsplit = "3:5"\r\n'),
        ("a = 1", 'a = 1\n\n[gpus]\nsplit = "3:5"\n'),
        ("", '\n[gpus]\nsplit = "3:5"\n'),
        ("[gpus]\n# none yet\n[a]\n", '[gpus]\nsplit = "3:5"\n# none yet\n[a]\n'),
        ("[ gpus ]", '[ gpus ]\nsplit = "3:5"\n'),
        ("gpus.split = 'shared'\n", 'gpus.split = "3:5"\n'),
        ('gpus = { split = "1:1" } # s\n', 'gpus = { split = "3:5" } # s\n'),
        ('[gpus]\n"split" = "1:1"', '[gpus]\n"split" = "3:5"'),
        ('b = "\u2028"\n[gpus]\nsplit="auto"', 'b = "\u2028"\n[gpus]\nsplit="3:5"'),
        ('[gpus]\nsplit="3:5"  # as it is', '[gpus]\nsplit="3:5"  # as it is'),
    ],
)
def test_only_the_split_changes(before: str, after: str) -> None:
    assert with_split(before, "3:5", "c.toml") == after


@pytest.mark.parametrize(
    "text",
    [
        "[gpus]\nproducers = [0]\nconsumers = [1]\n",
        "gpus = {}\n",
        '[gpus]\nsplit = """1:1"""\n',
        '[gpus]\nsplit = "\\u0031:1"\n',
        'gpus = { split = "1:1" } # not split = "2:2"\n',
    ],
)
def test_what_cannot_be_edited_alone_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"c\.toml: "):
        with_split(text, "3:5", "c.toml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"tokens_per_s": 1000', '"tokens_per_s": -1'), "tokens/s"),
        (('"spread": 0.02', '"spread": 1.5'), "spread"),
        (('"format": 1', '"format": 9'), "format 9"),
        (('"anchors": 64', '"anchor": 64'), "anchor"),
        (('"microbatch_tokens": 100', '"microbatch_tokens": 99'), "over a block's bounds"),
    ],
)
def test_a_file_that_cannot_be_true_is_refused_by_name(kept: Path, change: tuple[str, str], said: str) -> None:
    text = kept.read_text()
    assert change[0] in text
    kept.write_text(text.replace(*change))
    with pytest.raises(RequestError, match=rf"measurements\.json: .*{said}"):
        read_measurements(kept)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a config"),
        (["--from", "nowhere.json", "--gpus", "8"], "nowhere.json"),
        (["--from", "x", "--write"], "name the config"),
    ],
)
def test_wrong_requests_say_what_to_write(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_best_split_for_another_tensor_parallel_is_not_written(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "my.toml"
    config.write_text(CONFIG)
    text = kept.read_text().replace('"tensor_parallel": 1', '"tensor_parallel": 2')
    kept.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["tune", str(config), "--from", str(kept), "--gpus", "8", "--write"])
    assert ended.value.code == 2
    assert "target.tensor_parallel = 2" in capsys.readouterr().err
    assert config.read_text() == CONFIG
