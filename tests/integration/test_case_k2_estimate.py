"""Case K2 of the public failure reports: the size is known before anything is written, and compared with the disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from launch import plan_command
from launch.config import load_config
from launch.plan_command import Request, plan_run
from launch.plan_table import describe
from launch.start import dataset_folder
from producer.config import TargetConfig
from producer.target import load_target
from protocol.dataset import TokenDataset

TAPS = (0, 2, 3)


@pytest.fixture
def config(make_folder: Callable[..., Path], tmp_path: Path) -> Any:
    """Rows sorted by length, short ones first: what made the first files of a real run look so small."""
    make_folder("qwen3")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    with (tmp_path / "sorted.jsonl").open("w") as file:
        for row in range(400):
            text = " ".join(words[(row + place) % 9] for place in range(1 + row // 4))
            turns = [{"role": "user", "content": f"{row}?"}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/runs"\n[target]\nmodel = "target"\ndtype = "bfloat16"\n'
        '[data]\ntrain = [{ path = "sorted.jsonl" }]\nmax_length = 200\n'
        f"[drafter]\ntaps = {list(TAPS)}\n[train]\nbatch_tokens = 4096\nanchors = 20\n"
    )
    return load_config(path)


def dumped_bytes(config: Any, folder: Path) -> int:
    """What a dump of all features really takes on a disk: every sample through the target, one file each."""
    dataset = TokenDataset.open(dataset_folder(config))
    target = load_target(Path(config.target.model), TargetConfig(dtype="bfloat16"), "cpu")
    folder.mkdir()
    for sample in range(len(dataset)):
        ids = torch.as_tensor(dataset.tokens(sample).astype("int64"))[None]
        with torch.inference_mode():
            states = target.text(input_ids=ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1)
        save_file({"features": features}, folder / f"{sample}.safetensors")
    return sum(path.stat().st_size for path in folder.iterdir())


def test_case_k2_the_estimate_is_within_5_percent_of_the_true_size(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = plan_run(config, Request(), lambda line: None)
    true = dumped_bytes(config, tmp_path / "dump")
    assert exact["full_dump_bytes"] == pytest.approx(true, rel=0.05)
    assert exact["basis"] == "prepared"
    # A third of the rows, drawn at random, though the file is sorted.
    drawn = plan_run(config, Request(estimate=130), lambda line: None)
    assert drawn["full_dump_bytes"] == pytest.approx(true, rel=0.05)
    low, high = drawn["full_dump_interval"]
    assert low < exact["full_dump_bytes"] < high
    assert drawn["tokens_interval"][0] < exact["tokens"] < drawn["tokens_interval"][1]
    assert drawn["steps"] == pytest.approx(exact["steps"], rel=0.1)
    assert drawn["anchor_coverage"] == pytest.approx(exact["anchor_coverage"], rel=0.1)
    # Against the free disk, before anything is written.
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(plan_command, "disk_of", lambda folder: usage._replace(free=true // 3))
    text = "\n".join(describe(plan_run(config, Request(), lambda line: None)))
    assert "33 % of it would fit" in text or "34 % of it would fit" in text


def test_an_estimate_of_all_rows_is_the_count(config: Any) -> None:
    counted, drawn = (plan_run(config, Request(estimate=each), lambda line: None) for each in (None, 4000))
    for key in ("samples", "tokens", "full_dump_bytes", "eligible_anchors", "anchors_per_epoch"):
        assert drawn[key] == counted[key]
    assert drawn["tokens_interval"] == (counted["tokens"], counted["tokens"])


def test_an_estimate_ends_where_the_samples_do(config: Any) -> None:
    import msgspec

    first = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, max_samples=100))
    drawn, exact = (plan_run(first, Request(estimate=each), lambda line: None) for each in (60, None))
    assert exact["samples"] == drawn["samples"] == 100
    assert drawn["tokens"] == pytest.approx(exact["tokens"], rel=0.2)
