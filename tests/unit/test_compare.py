"""Two drafters on the same prompts: the difference is paired, and its interval decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from consumer.checkpoint import Snapshot, write_checkpoint
from consumer.compare import paired
from consumer.export import export
from consumer.state import capture_weights
from consumer.walk import Acceptance
from launch.cli import main
from protocol.errors import RunError

LENGTHS = st.lists(st.lists(st.integers(1, 8), max_size=4), min_size=1, max_size=12).filter(any)


def acceptance(lengths: list[list[int]]) -> Acceptance:
    return Acceptance(tuple(map(tuple, lengths)), 0.0, (0.0, 0.0), 0.0, (), 0, 0)


def test_every_prompt_counts_once_whatever_its_length() -> None:
    first = acceptance([[1, 3], [4], [], [2, 2, 2]])
    second = acceptance([[3, 3], [3], [], [2, 2]])
    found = paired(first, second)
    assert (found.difference, found.prompts, found.better, found.worse) == (0.0, 3, 1, 1)
    assert found.interval[0] < 0 < found.interval[1]
    assert found.verdict.startswith("no difference can be told")


def test_a_small_gain_everywhere_is_told_among_prompts_that_differ_much() -> None:
    base = [[1] * 4, [8] * 4, [3] * 4, [6] * 4, [2] * 4]
    found = paired(acceptance(base), acceptance([[*one[:3], one[3] + 1] for one in base]))
    assert (found.difference, found.interval) == (0.25, (0.25, 0.25))
    assert found.verdict == (
        "B is accepted more than A: +0.250 (95 % interval +0.250 to +0.250); better on 5 prompts, worse on 0, of 5"
    )


@given(LENGTHS, st.data())
def test_the_other_way_round_is_the_opposite(lengths: list[list[int]], data: st.DataObject) -> None:
    other = [[length + data.draw(st.integers(0, 3)) for length in one] for one in lengths]
    there, back = paired(acceptance(lengths), acceptance(other)), paired(acceptance(other), acceptance(lengths))
    assert there.difference == pytest.approx(-back.difference)
    assert (there.better, there.worse) == (back.worse, back.better)
    assert there.interval[0] <= there.difference + 1e-9
    assert there.difference <= there.interval[1] + 1e-9
    same = paired(acceptance(lengths), acceptance(lengths))
    assert (same.difference, same.interval, same.better + same.worse) == (0.0, (0.0, 0.0), 0)


@pytest.mark.parametrize("other", [[[1]], [[1], []]])
def test_other_prompts_are_refused(other: list[list[int]]) -> None:
    with pytest.raises(RunError, match="different prompts"):
        paired(acceptance([[1], [2]]), acceptance(other))


@pytest.fixture
def make_run(tmp_path: Path, make_snapshot: Callable[..., Snapshot]) -> Callable[..., Path]:
    """A run folder with two checkpoints, an evaluation shard of three prompts and the target's ends."""

    def make(name: str, shard: str = "shard") -> Path:
        run_dir = tmp_path / name
        for step in (10, 20):
            write_checkpoint(run_dir / "checkpoints", make_snapshot(step, seed=step))
        (run_dir / "config.resolved.json").write_text(json.dumps({"eval": {"max_new_tokens": 9}}))
        config = {"num_layers": 6, "hidden_size": 16, "vocab_size": 40}
        ends = {"embed_tokens": torch.randn(40, 16, generator=torch.Generator().manual_seed(1))}
        metadata = {"config": json.dumps(config), "fingerprint": "f", "tied": "true"}
        save_file(ends, run_dir / "target_io.safetensors", metadata=metadata)
        draw = np.random.default_rng(0)
        rows = {
            "token_ids": torch.from_numpy(draw.integers(0, 39, 36).astype(np.int32)),
            "offsets": torch.tensor([0, 12, 24, 36]),
            "prompt_lengths": torch.tensor([3, 4, 5], dtype=torch.int32),
            "features": torch.from_numpy(draw.standard_normal((36, 32))).float(),
        }
        metadata = {"taps": "[1, 3]", "max_new_tokens": "9", "fingerprint": shard}
        save_file(rows, run_dir / "eval.safetensors", metadata=metadata)
        return run_dir

    return make


def test_the_command_prints_a_table_and_a_verdict(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = make_run("one"), make_run("other")
    with pytest.raises(SystemExit, match="0"):
        main(["compare", f"{one}@10", str(other)])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines] == ["  ", "A ", "B ", lines[-1][:2]]
    assert "95 % interval" in lines[-1]
    with pytest.raises(SystemExit, match="0"):
        main(["compare", f"{one}@20", str(other), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["difference"], report["prompts"], report["better"], report["worse"]) == (0.0, 3, 0, 0)
    assert report["a"]["acceptance_mean"] == report["b"]["acceptance_mean"] >= 1.0
    assert report["b"]["folder"].endswith("step-000020")


def test_a_drafter_s_folder_is_measured_on_the_run_s_prompts(
    make_run: Callable[..., Path], make_drafter: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("one")
    drafter = make_drafter(20, "bfloat16")
    export(capture_weights(drafter), drafter.shape, tmp_path / "out", {})
    with pytest.raises(SystemExit, match="0"):
        main(["compare", str(tmp_path / "out"), f"{run}@20", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["difference"], report["worse"]) == (0.0, 0)  # the same weights
    with pytest.raises(SystemExit, match="2"):
        main(["compare", str(tmp_path / "out"), str(tmp_path / "out")])
    assert "one of the two must be a RUN" in capsys.readouterr().err


def test_runs_with_other_prompts_are_refused(make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make_run("one"), make_run("other", shard="another")
    with pytest.raises(SystemExit, match="2"):
        main(["compare", str(one), str(other)])
    assert "(shard against another)" in capsys.readouterr().err
    (other / "eval.safetensors").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(["compare", str(one), str(other)])
    assert "not a readable eval shard" in capsys.readouterr().err
