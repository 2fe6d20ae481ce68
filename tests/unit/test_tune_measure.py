"""From raw timings to measurements, and where they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.config import Config, load_config
from launch.kept import kept, kept_path, split_to_use
from launch.machine import Gpu, describe_machine
from launch.measurements import Measurements, ProducerRate, Room, TrainerRate, Work, write_measurements
from launch.placement import GpusConfig
from launch.trainer_fit import fit_trainer
from launch.tune_measure import for_trial, other_sizes
from launch.tune_runs import rate_of_steps
from protocol.cache_config import CacheConfig
from protocol.errors import RunError
from protocol.job import write_job


def measurements(p: float, c: float, tensor_parallel: int = 1) -> Measurements:
    work = {"tokens_per_epoch": 1, "epochs": 1, "microbatch_tokens": 9, "microbatch_draft_tokens": 9, "anchors": 1}
    return Measurements(
        producers=[ProducerRate(tokens_per_s=p, tensor_parallel=tensor_parallel)],
        trainer=TrainerRate(cost_s=1 / c),
        work=Work(steps=[[(1, 0)] * 840], bytes_per_token=1, **work),
        room=Room(gpu_bytes=10**11, host_bytes=10**11, slot_bytes=1000),
    )


def timings(block_s: float, cost_s: float, finish_s: float, scale: float = 1.0) -> dict[str, Any]:
    costs = [100.0, 300.0, 200.0, 500.0]
    return {
        "costs": costs,
        "blocks_s": [block_s + cost_s * cost for cost in costs],
        "finishes_s": [finish_s, finish_s, 9 * finish_s],
        "steps": [
            {"cost": cost, "blocks": 2, "seconds": scale * (2 * block_s + cost_s * cost + finish_s)}
            for cost in (400.0, 700.0, 200.0, 900.0)
        ],
    }


@pytest.mark.parametrize(("block_s", "cost_s"), [(0.5, 0.01), (0.0, 0.01), (0.5, 0.0)])
def test_the_parts_of_a_step_are_found_again(block_s: float, cost_s: float) -> None:
    fitted = fit_trainer(timings(block_s, cost_s, 2.0), 7)
    assert (fitted.block_s, fitted.cost_s) == (pytest.approx(block_s, abs=1e-9), pytest.approx(cost_s, abs=1e-9))
    assert (fitted.finish_s, fitted.need_bytes, fitted.spread) == (pytest.approx(2.0), 7, pytest.approx(0, abs=1e-9))


def test_whole_steps_that_overlap_their_parts_scale_all_of_them() -> None:
    fitted = fit_trainer(timings(0.5, 0.01, 2.0, scale=0.8), 0)
    assert (fitted.block_s, fitted.cost_s, fitted.finish_s) == pytest.approx((0.4, 0.008, 1.6))


def test_larger_blocks_that_took_no_longer_have_no_slope_and_equal_ones_no_offset() -> None:
    falling = timings(0.5, 0.0, 0.0) | {"blocks_s": [0.6, 0.5, 0.5, 0.4]}
    assert fit_trainer(falling, 0).cost_s == 0
    equal = timings(0.0, 0.01, 0.0) | {"costs": [200.0] * 4, "blocks_s": [2.0] * 4}
    assert fit_trainer(equal, 0).block_s == 0


def test_the_first_steps_do_not_count_and_the_spread_is_that_of_parts() -> None:
    rows = [{"tokens": 1000, "step_s": 0.001}] * 2 + [{"tokens": 10, "step_s": 1.0}] * 4
    assert rate_of_steps(rows) == (10.0, 0.0)
    uneven = rows[:2] + [{"tokens": 10, "step_s": seconds} for seconds in (1.0, 1.0, 0.5, 0.5)]
    assert rate_of_steps(uneven) == (pytest.approx(40 / 3), pytest.approx(5 / (40 / 3)))
    with pytest.raises(RunError, match="too few"):
        rate_of_steps(rows[:5])


def test_measurements_are_kept_by_machine_and_by_what_the_work_depends_on(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text(
        f'[run]\ndir = "{tmp_path}/runs"\n[target]\nmodel = "m"\n[data]\ntrain = [{{ path = "a.jsonl" }}]\n'
    )
    loaded, gpu = load_config(config), Gpu("NVIDIA H200", 1, 1)
    path = kept_path(loaded, [gpu])
    assert path.parent == tmp_path / "runs" / "tune"
    assert kept_path(load_config(config, ["train.anchors=7"]), [gpu]) != path
    assert kept_path(load_config(config, ["gpus.split=1:1", "run.name=other"]), [gpu]) == path
    assert kept_path(loaded, [gpu, gpu]) != path
    assert describe_machine([gpu, gpu]).startswith("2 x NVIDIA H200, ")
    assert kept(loaded, [gpu]) is None
    measured = measurements(1, 1)
    write_measurements(path, measured)
    assert kept(loaded, [gpu]) == measured
    write_measurements(path, msgspec.structs.replace(measured, format=99))
    assert kept(loaded, [gpu]) is None


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "a.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/runs"\n[target]\nmodel = "m"\n[data]\ntrain = [{{ path = "a.jsonl" }}]')
    return load_config(path)


GPUS = [Gpu("NVIDIA H200", 1, 1)] * 8


def test_auto_takes_what_was_measured_here_and_says_so(config: Config, tmp_path: Path) -> None:
    said: list[str] = []
    assert split_to_use(config, GPUS, tmp_path, said.append) == config.gpus
    write_measurements(kept_path(config, GPUS), measurements(1000, 600))
    found = split_to_use(config, GPUS, tmp_path, said.append)
    assert (found.split, len(said)) == ("3:5", 1)
    assert "3:5" in said[0]
    assert "3,000 tokens/s" in said[0]
    for gpus in (GpusConfig(split="4:4"), GpusConfig(producers=[0], consumers=[1])):
        asked = msgspec.structs.replace(config, gpus=gpus)
        assert split_to_use(asked, GPUS, tmp_path, said.append) == gpus
    assert split_to_use(config, GPUS[:4], tmp_path, said.append) == config.gpus  # another machine


def test_auto_is_not_what_was_measured_for_targets_divided_otherwise(config: Config, tmp_path: Path) -> None:
    write_measurements(kept_path(config, GPUS), measurements(1000, 600, tensor_parallel=2))
    assert split_to_use(config, GPUS, tmp_path, pytest.fail) == config.gpus


def test_auto_takes_the_best_of_those_that_divide_the_target_as_asked(config: Config, tmp_path: Path) -> None:
    single, pair = measurements(1000, 600), measurements(2400, 600, tensor_parallel=2)
    both = msgspec.structs.replace(single, producers=[*single.producers, *pair.producers])
    write_measurements(kept_path(config, GPUS), both)
    assert split_to_use(config, GPUS, tmp_path, lambda line: None).split == "3:5"


def test_producers_are_measured_on_as_many_gpus_as_leave_one_to_a_consumer() -> None:
    assert [other_sizes(1, gpus) for gpus in (0, 1, 2, 3, 5, 8, 16)] == [[], [], [], [2], [2, 4], [2, 4], [2, 4, 8]]
    assert other_sizes(4, 8) == [1, 2]


def test_a_run_that_goes_on_keeps_its_split_on_the_same_gpus(config: Config, tmp_path: Path, make_job: Any) -> None:
    """Measured after it had begun: the ranks of a run stay what they were."""
    devices = tuple(f"cuda:{index}" for index in range(8))
    (tmp_path / "checkpoints" / "step-000010").mkdir(parents=True)
    write_job(tmp_path, make_job({"consumers": 6}, producers=devices[:2], consumers=devices[2:]))
    write_measurements(kept_path(config, GPUS), measurements(1000, 600))
    assert split_to_use(config, GPUS, tmp_path, pytest.fail).split == "2:6"
    fewer = GPUS[:4]
    write_measurements(kept_path(config, fewer), measurements(1000, 340))
    assert split_to_use(config, fewer, tmp_path, lambda line: None).split == "1:3"


def test_a_start_in_which_every_gpu_trained_says_nothing_of_a_split(
    config: Config, tmp_path: Path, make_job: Any
) -> None:
    """Its cache was complete; a shard of it was found damaged, say."""
    (tmp_path / "checkpoints" / "step-000010").mkdir(parents=True)
    devices = tuple(f"cuda:{index}" for index in range(8))
    write_job(tmp_path, make_job({"consumers": 8}, producers=(), consumers=devices))
    assert split_to_use(config, GPUS, tmp_path, lambda line: None) == config.gpus


def test_what_is_measured_is_never_read_from_a_cache(config: Config) -> None:
    cached = msgspec.structs.replace(config, cache=CacheConfig(mode="spill"))
    assert for_trial(cached).cache == CacheConfig()
