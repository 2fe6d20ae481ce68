"""Measures both sides of a configuration on this machine, each alone, by the processes and the plan of a run.

The producers' rate is that of one producer beside a rank that trains nothing (consumer/sink.py), the trainers' that of
one rank without any producer (consumer/alone.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from launch.advice import sampled_steps
from launch.config import Config
from launch.disk import measure_disk
from launch.live import Screen
from launch.machine import Gpu, describe_machine, free_memory_bytes
from launch.measurements import Measurements, ProducerRate, Reduction, Room, Work
from launch.placement import GpusConfig, place
from launch.runfolder import RunLock
from launch.setting_up import one_off, set_up, write_json
from launch.signals import Signals
from launch.split_model import Model, Split
from launch.start import Outline, make_job, make_plan, outline
from launch.trained import inherited
from launch.trainer_fit import fit_trainer
from launch.tune_runs import Rate, run_for, train_alone
from producer.checked import padding_mask_of
from producer.config import EMBEDDED
from producer.locate import locate_target
from protocol.block import CARRIERS
from protocol.cache_config import CacheConfig
from protocol.dataset import TokenDataset
from protocol.errors import RequestError, RunError
from protocol.job import Job
from protocol.plan import Plan
from protocol.units import parse_bytes, show_bytes

SINK = {"consumer": "consumer.sink"}
# Steps of the plan that say how steps divide among ranks.
SAMPLED_STEPS = 48
# Of writing to the disk of the cache.
DISK_S = 3.0
# A plan must not end before the measurement does: it has so many tokens at least, in at most so many epochs.
LEAST_TOKENS = 100_000_000
MOST_EPOCHS = 1000


class Bench:
    """A configuration set up in a folder of its own, ready for short runs with any split."""

    def __init__(self, config: Config, gpus: Sequence[Gpu], signals: Signals, screen: Screen) -> None:
        self.run_dir = Path(config.run.dir) / "tune" / config.run.name
        self._gpus, self._signals, self._screen = gpus, signals, screen
        self._lock = RunLock(self.run_dir)
        try:
            if config.target.model == EMBEDDED:
                one_off("convert", "producer.embedded", [], self.run_dir, signals, screen)
            self._target_dir = locate_target(config.target, screen.say)
            # Known until training begins, as in a run.
            self._config, self._trained = inherited(for_trial(config), self._target_dir, None, screen.say)
            self.outline = self._outline(_first_split(config, len(gpus)))
            self.dataset: TokenDataset = set_up(
                self._config, self.outline, None, self.run_dir, self._signals, self._screen
            )
            self._config = _endless(self._config, int(self.dataset.lengths.sum()))
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        self._lock.release()

    def measure(self, config: Config, seconds: float) -> Measurements:
        """All parts; `config` is the one to measure for. Raises RunError, Interrupted."""
        say, size = self._screen.say, config.target.tensor_parallel
        producers = [self._produced(size, self.outline, seconds), *self._otherwise_divided(size, seconds)]
        alone = train_alone(self._job(self.outline), self.run_dir, 1, seconds, self._signals, self._screen)
        trainer = fit_trainer(alone, self.outline.consumer_need.total)
        own = make_plan(config, self.outline, self.dataset)
        found = Measurements(
            machine=describe_machine(self._gpus),
            config=f"{config.run.name}: {config.target.model}, {config.drafter.layers} layers",
            producers=producers,
            trainer=trainer,
            reductions=self._reductions(),
            work=_work(config, self.outline, self.dataset, own, alone),
            room=self._room(config, alone),
        )
        say(f"one rank alone: {Model(found).trainers(1):,.0f} tokens/s (spread {trainer.spread:.1%})")
        return found

    def try_split(self, split: Split, seconds: float) -> Rate:
        """A real run with this split, for so many seconds of steps. Raises RequestError, RunError, Interrupted."""
        job = self._job(self._outline(_config_of(split)))
        what = f"{len(job.producers)}:{len(job.consumers)} for real"
        return run_for(job, self.run_dir, seconds, what, self._signals, self._screen, {})

    # --- inside ---

    def _produced(self, size: int, found: Outline, seconds: float) -> ProducerRate:
        what = "one producer alone" if size == 1 else f"one producer on {size} devices alone"
        rate = run_for(self._job(found), self.run_dir, seconds, what, self._signals, self._screen, SINK)
        self._screen.say(f"{what}: {rate.tokens_per_s:,.0f} tokens/s (spread {rate.spread:.1%})")
        return ProducerRate(tensor_parallel=size, need_bytes=found.producer_need.total, **rate._asdict())

    def _otherwise_divided(self, own: int, seconds: float) -> list[ProducerRate]:
        """Producers on other numbers of GPUs than target.tensor_parallel says, as far as the target divides and fits; a
        number that fails is said and left out."""
        asked, rates = self._config, []
        for size in other_sizes(own, len(self._gpus)):
            self._config = replace(asked, target=replace(asked.target, tensor_parallel=size))
            try:
                rates.append(self._produced(size, self._outline(_split_of(size)), seconds))
            except (RequestError, RunError) as error:
                self._screen.say(f"target.tensor_parallel = {size} is left out: {error}")
            finally:
                self._config = asked
        return rates

    def _outline(self, gpus: GpusConfig) -> Outline:
        self._config = replace(self._config, gpus=gpus)
        placement = place(gpus, len(self._gpus), self._config.target.tensor_parallel)
        free_bytes = free_memory_bytes()
        return outline(self._config, self._target_dir, placement, self._gpus, free_bytes, None, self._trained)

    def _job(self, found: Outline) -> Job:
        plan = make_plan(self._config, found, self.dataset)
        mask = padding_mask_of(self.run_dir)
        job, _ = make_job(self._config, found, self.dataset, plan, None, mask)
        write_json(self.run_dir / "config.resolved.json", msgspec.to_builtins(self._config))
        return job

    def _reductions(self) -> list[Reduction]:
        """That of as many ranks as there are GPUs, if there are several."""
        ranks = len(self._gpus)
        if ranks < 2:
            return []
        job = self._job(self.outline)
        job = replace(job, consumers=tuple(f"cuda:{index}" for index in range(ranks)))
        found = train_alone(job, self.run_dir, ranks, 0.0, self._signals, self._screen)
        taken: list[float] = found["reductions_s"]
        seconds = sorted(taken)[len(taken) // 2]
        self._screen.say(f"{ranks} ranks reduce the gradients of a step in {seconds:.3f} s")
        return [Reduction(ranks=ranks, seconds=seconds)]

    def _room(self, config: Config, alone: dict[str, Any]) -> Room:
        disk, budget = measure_disk(config.cache.folder, DISK_S), config.cache.budget
        if disk is not None:
            write, read = show_bytes(disk.write_bytes_per_s), show_bytes(disk.read_bytes_per_s)
            self._screen.say(f"the disk of {config.cache.folder} writes {write}/s and reads {read}/s")
        return Room(
            gpu_bytes=min(gpu.free_bytes for gpu in self._gpus) if self._gpus else None,
            host_bytes=free_memory_bytes(),
            slot_bytes=self.outline.ring.slot_bytes,
            ring_bytes=None if config.ring.bytes == "auto" else parse_bytes(config.ring.bytes, "ring.bytes"),
            checkpoint_bytes=self.outline.checkpoint_bytes,
            link_bytes_per_s=alone["copy_bytes_per_s"] if self._gpus else None,
            disk_bytes=min(disk.free_bytes, budget or disk.free_bytes) if disk is not None else None,
            disk_write_bytes_per_s=disk.write_bytes_per_s if disk is not None else None,
            disk_read_bytes_per_s=disk.read_bytes_per_s if disk is not None else None,
        )


def other_sizes(own: int, gpus: int) -> list[int]:
    """Numbers of GPUs for one producer beside `own`: powers of two that leave a GPU to a consumer."""
    return [size for size in (1, 2, 4, 8) if size != own and size < gpus]


def for_trial(config: Config) -> Config:
    """The configuration without a cache, with next to no evaluation; its data is the same, so that the dataset is."""
    evaluation = replace(config.eval, every=0, prompts=1, max_new_tokens=2)
    train = replace(config.train, max_steps=None, max_hours=None)
    return replace(config, eval=evaluation, train=train, cache=CacheConfig())


def _endless(config: Config, tokens: int) -> Config:
    epochs = max(config.train.epochs, min(-(-LEAST_TOKENS // tokens), MOST_EPOCHS))
    return replace(config, train=replace(config.train, epochs=epochs))


def _first_split(config: Config, gpus: int) -> GpusConfig:
    """One producer and one rank, each on its own GPU where that is possible."""
    return GpusConfig(split="shared") if gpus == 1 else _split_of(config.target.tensor_parallel)


def _split_of(tensor_parallel: int) -> GpusConfig:
    return GpusConfig(split=f"{tensor_parallel}:1")


def _config_of(split: Split) -> GpusConfig:
    return GpusConfig(split="shared" if split.shared else f"{split.producers}:{split.consumers}")


def _work(config: Config, found: Outline, dataset: TokenDataset, plan: Plan, alone: dict[str, Any]) -> Work:
    return Work(
        steps=[plan.sizes(step) for step in sampled_steps(plan, SAMPLED_STEPS)],
        tokens_per_epoch=int(dataset.lengths.sum()),
        epochs=config.train.epochs,
        microbatch_tokens=found.partition.tokens,
        microbatch_draft_tokens=found.partition.draft_tokens,
        anchors=config.train.anchors,
        bytes_per_token=found.width * CARRIERS[found.dtype].itemsize,
        # The step loop waits for one copy of a checkpoint's state.
        stall_s=found.checkpoint_bytes / alone["copy_bytes_per_s"] / config.train.checkpoint_every,
    )
