"""gpus.split = "auto" where nothing was measured: the quickest split by arithmetic, if cards and target are known.

What each side computes follows from the data and the two models, and of equal cards only the ratio of both counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from consumer.shape import DrafterShape, resolve_shape
from launch.config import Config
from launch.corpus import counted
from launch.hours import by_split, forward_flop
from launch.machine import Gpu
from launch.placement import GpusConfig
from producer.locate import read_config, read_target_facts
from protocol.dataset import TokenDataset
from protocol.units import show_seconds


def undecided(config: GpusConfig, gpus: int) -> bool:
    """Whether there are several ways to divide the GPUs and the configuration leaves the choice."""
    return config.split == "auto" and config.producers is None and config.consumers is None and gpus > 2


def reckoned(
    config: Config,
    gpus: Sequence[Gpu],
    target_dir: Path,
    trained: DrafterShape | None,
    dataset: TokenDataset,
    say: Callable[[str], None],
) -> GpusConfig:
    """[gpus] with the quickest split over a prepared dataset, which a line says; as it is where nothing is known."""
    facts = read_target_facts(target_dir)
    shape = resolve_shape(config.drafter, facts, range(facts["vocab_size"]), trained)
    corpus = counted(dataset, config.train.anchors)
    forward = forward_flop(facts, read_config(target_dir), max(shape.target_layer_ids), corpus.mean_context)
    parallel = config.target.tensor_parallel
    found = by_split(corpus, config.train.epochs, forward, shape, config.train.anchors, gpus, parallel)
    if not found:
        return config.gpus
    said = ", ".join(f"{split} {show_seconds(hours.total * 3600)}" for split, hours in found[:3])
    say(f'gpus.split: "auto" means {found[0][0]}, by arithmetic ({said}); `draftwire tune` measures')
    return GpusConfig(split=found[0][0])
