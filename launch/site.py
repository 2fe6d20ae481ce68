"""The machine that a plan is for: this one, one of named cards, or one without limits. And what would fit instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launch.cards import MOST_CARDS, card, larger_cards
from launch.config import Config
from launch.machine import Gpu, free_memory_bytes, visible_gpus
from launch.placement import GpusConfig, place
from launch.start import Outline, outline
from producer.locate import feature_dtype
from protocol.block import CARRIERS
from protocol.errors import RequestError
from protocol.units import parse_bytes

UNBOUNDED_BYTES = 1 << 60
# How many more of the same card are tried.
COUNTS = (2, 4, 8)


class Site(msgspec.Struct, frozen=True):
    """GPUs and free host memory; `here` when they are this machine's."""

    gpus: tuple[Gpu, ...]
    free_bytes: int
    here: bool


def site_of(gpu: str | None, count: int | None, memory: str | None, config: GpusConfig) -> Site:
    """This machine, or `count` cards of the short name `gpu` in a host with `memory` free. Raises RequestError."""
    if gpu is None:
        if count is not None or memory is not None:
            raise RequestError(f"{'--gpus' if count is not None else '--memory'} goes with --gpu")
        return Site(tuple(visible_gpus()), free_memory_bytes(), True)
    count = asked_gpus(config) if count is None else count
    if not 1 <= count <= MOST_CARDS:
        raise RequestError(f"--gpus {count}: write 1 to {MOST_CARDS}")
    free_bytes = UNBOUNDED_BYTES if memory is None else parse_bytes(memory, "--memory")
    return Site((card(gpu),) * count, free_bytes, False)


def anywhere(config: GpusConfig) -> Site:
    """A machine without limits, with a GPU for each role or as many as `config` asks for."""
    count = max(asked_gpus(config), 1 if config.split == "shared" else 2)
    return Site((Gpu("any GPU", UNBOUNDED_BYTES, UNBOUNDED_BYTES),) * count, UNBOUNDED_BYTES, False)


def asked_gpus(config: GpusConfig) -> int:
    """The GPUs that a placement counts on; 1 where it leaves that open."""
    if config.producers is not None or config.consumers is not None:
        return max([0, *(config.producers or []), *(config.consumers or [])]) + 1
    counts = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", config.split)
    return int(counts[1]) + int(counts[2]) if counts else 1


def fit(config: Config, folder: Path, facts: dict[str, Any], parameters: int, site: Site) -> Outline:
    """The outline of a run on `site`, for a target of `parameters` whose weights need not be there. Raises
    RequestError."""
    parts = config.target.tensor_parallel
    placement = place(config.gpus, len(site.gpus), parts)
    dtype = feature_dtype(config.target, facts, placement.producers[0])
    # Embedding and head are whole on each GPU of a producer; of layers a little is too, which no plan needs to know.
    ends = int(facts["vocab_size"]) * int(facts["hidden_size"]) * (1 if facts["tied"] else 2)
    held = parameters if parts == 1 else ends + (parameters - ends) // parts
    weight_bytes = held * CARRIERS[dtype].itemsize
    return outline(config, folder, placement, site.gpus, site.free_bytes, weight_bytes=weight_bytes)


def what_would_fit(config: Config, site: Site, fits: Callable[[Config, Site], bool]) -> str:
    """Other machines that would do: more of these cards, or the same number of the next larger ones; "" for none."""
    found, count = [], len(site.gpus)
    open_split = msgspec.structs.replace(config, gpus=GpusConfig())
    for more in (number for number in COUNTS if number > count):
        bigger = Site((site.gpus[0],) * more, UNBOUNDED_BYTES, False)
        if fits(open_split, bigger):
            found.append(f"{more} x {site.gpus[0].name}" + _with_split(config, more))
            break
    for name, gpu in larger_cards(site.gpus[0].total_bytes):
        if fits(config, Site((gpu,) * count, UNBOUNDED_BYTES, False)):
            found.append(f"{count} x {name}")
            break
    return f"what would fit: {', or '.join(found)}" if found else ""


def _with_split(config: Config, gpus: int) -> str:
    return "" if config.gpus == GpusConfig() else f' (gpus.split = "{gpus // 2}:{gpus - gpus // 2}")'


def roles(found: Outline, gpus: Sequence[Gpu]) -> list[dict[str, object]]:
    """Each device of a placement with who runs there, what that needs at most and what is free."""
    rows: list[dict[str, object]] = []
    for device in dict.fromkeys((*found.placement.producers, *found.placement.consumers)):
        gpu = gpus[int(device.partition(":")[2])] if device != "cpu" else None
        needs = {
            role: need.total
            for role, need, devices in (
                ("producer", found.producer_need, found.placement.producers),
                ("consumer", found.consumer_need, found.placement.consumers),
            )
            if device in devices
        }
        free = gpu.free_bytes if gpu is not None and gpu.free_bytes < UNBOUNDED_BYTES else None
        rows.append({"device": device, "name": gpu.name if gpu else "cpu", "needs": needs, "free_bytes": free})
    return rows
