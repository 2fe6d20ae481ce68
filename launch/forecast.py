"""Hours of a planned run and of every way to split its GPUs: `launch.hours` asked for a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.config import Config
from launch.corpus import Corpus
from launch.hours import Hours, by_split, forward_flop, hours
from launch.machine import Gpu
from launch.start import Outline
from producer.locate import read_config


def hours_of(
    config: Config, found: Outline, gpus: Sequence[Gpu], folder: Path, corpus: Corpus, passes: float
) -> Hours | None:
    """Of `passes` over the corpus where the run is placed; None where they are not known."""
    placement = found.placement
    if "cpu" in placement.producers or not _in_16_bits(config, found):
        return None
    producers, consumers = (
        [gpus[int(device.partition(":")[2])] for device in devices]
        for devices in (placement.producers, placement.consumers)
    )
    shared = bool(set(placement.producers) & set(placement.consumers))
    forward = _forward(found, folder, corpus)
    return hours(corpus, passes, forward, found.shape, config.train.anchors, producers, consumers, shared)


def hours_by_split(
    config: Config, found: Outline, gpus: Sequence[Gpu], folder: Path, corpus: Corpus
) -> dict[str, float]:
    """Of one pass with each "P:C" of the GPUs, the quickest first; empty where they are not known."""
    if not gpus or not _in_16_bits(config, found):
        return {}
    forward, parallel = _forward(found, folder, corpus), config.target.tensor_parallel
    order = by_split(corpus, 1, forward, found.shape, config.train.anchors, gpus, parallel)
    return {split: needed.total for split, needed in order}


def _forward(found: Outline, folder: Path, corpus: Corpus) -> tuple[float, float] | None:
    return forward_flop(found.facts, read_config(folder), max(found.shape.target_layer_ids), corpus.mean_context)


def _in_16_bits(config: Config, found: Outline) -> bool:
    """The peaks of cards are those of bf16."""
    return found.dtype != "float32" and config.train.precision != "fp32"
