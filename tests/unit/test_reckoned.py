"""gpus.split = "auto" before anything is measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from launch.cards import card
from launch.config import Config, load_config
from launch.machine import Gpu
from launch.placement import GpusConfig, place
from launch.reckoned import reckoned, undecided
from protocol.dataset import TokenDataset, write_dataset

FOLDER = Path(__file__).parents[1] / "fixtures" / "qwen3.6-27b"
H200 = card("h200")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "big.toml"
    path.write_text(f'[target]\nmodel = "{FOLDER}"\n[data]\ntrain = [{{ path = "no" }}]\n[train]\nepochs = 6\n')
    return load_config(path, ())


def samples_of(folder: Path, tokens: int) -> TokenDataset:
    ids, mask = np.zeros(tokens, np.int32), np.ones(tokens, np.uint8)
    return write_dataset(folder, [(ids, mask)] * 20, {"fingerprint": str(tokens)})


def test_it_is_asked_for_only_where_there_is_a_choice() -> None:
    assert undecided(GpusConfig(), 3)
    assert not undecided(GpusConfig(), 2)
    assert not undecided(GpusConfig(), 0)
    assert not undecided(GpusConfig(split="1:2"), 3)
    assert not undecided(GpusConfig(producers=[0], consumers=[1, 2]), 3)


def test_short_and_long_samples_divide_the_same_gpus_otherwise(tmp_path: Path, config: Config) -> None:
    lines: list[str] = []
    for tokens, split in ((335, "2:6"), (3000, "4:4")):
        dataset = samples_of(tmp_path / str(tokens), tokens)
        found = reckoned(config, [H200] * 8, FOLDER, None, dataset, lines.append)
        assert found == GpusConfig(split=split)
        assert len(place(found, 8).consumers) == int(split[-1])
    assert 'gpus.split: "auto" means 2:6, by arithmetic (2:6 ' in lines[0]
    assert "`draftwire tune` measures" in lines[0]


def test_what_is_not_known_is_left_half_and_half(tmp_path: Path, config: Config) -> None:
    dataset = samples_of(tmp_path / "data", 335)
    lines: list[str] = []
    other = Gpu("Another GPU", 1 << 40, 1 << 40)
    assert reckoned(config, [other] * 8, FOLDER, None, dataset, lines.append) == config.gpus
    fixed = msgspec.structs.replace(config, target=msgspec.structs.replace(config.target, tensor_parallel=8))
    assert reckoned(fixed, [H200] * 8, FOLDER, None, dataset, lines.append) == config.gpus
    assert lines == []
