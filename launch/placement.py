"""[gpus]: which device each producer and consumer runs on. Pure: it is told what devices there are."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from launch.machine import Gpu
from protocol.errors import RequestError

# Without a GPU a split is for trying things out; each process has a target or a drafter of its own.
MOST_CPU_PROCESSES = 64


class GpusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[gpus] — `split` is "auto", "P:C" (producers:consumers) or "shared" (both roles on one GPU).

    `producers` and `consumers` name devices by their index among the visible ones, instead of a split.
    """

    split: str = "auto"
    producers: list[int] | None = None
    consumers: list[int] | None = None


class Placement(msgspec.Struct, frozen=True):
    """One entry a process: "cpu" or "cuda:i", i counting the visible devices."""

    producers: tuple[str, ...]
    consumers: tuple[str, ...]


def place(config: GpusConfig, gpus: int) -> Placement:
    """Devices for a machine with `gpus` visible GPUs (0: everything on the CPU).

    Raises RequestError when the split asks for what is not there, or gives a role nothing.
    """
    if config.producers is not None or config.consumers is not None:
        return _named(config, gpus)
    if config.split == "shared" or (config.split == "auto" and gpus == 1):
        device = "cuda:0" if gpus else "cpu"
        return Placement((device,), (device,))
    counts = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", config.split)
    if config.split == "auto":
        # Unmeasured, so even: `consumers` gets the odd one, since a drafter step costs more than a forward pass
        # for the short samples that most chat data consists of.
        producers, consumers = (gpus // 2, gpus - gpus // 2) if gpus else (1, 1)
    elif counts:
        producers, consumers = int(counts[1]), int(counts[2])
    else:
        raise RequestError(f"gpus.split: {config.split!r} is not understood; write auto, shared or e.g. 3:5")
    if min(producers, consumers) < 1:
        raise RequestError(f"gpus.split: {config.split} leaves one role without a process")
    if gpus and producers + consumers > gpus:
        raise RequestError(f"gpus.split: {config.split} needs {producers + consumers} GPUs, {gpus} are visible")
    if not gpus and producers + consumers > MOST_CPU_PROCESSES:
        raise RequestError(
            f"gpus.split: {config.split} asks for {producers + consumers} processes on the CPU, where "
            f"{MOST_CPU_PROCESSES} are the most: write a smaller one"
        )
    if not gpus:
        return Placement(("cpu",) * producers, ("cpu",) * consumers)
    return Placement(
        tuple(f"cuda:{index}" for index in range(producers)),
        tuple(f"cuda:{producers + index}" for index in range(consumers)),
    )


def show_placement(placement: Placement, gpus: Sequence[Gpu]) -> str:
    """Who runs where, by the index that the config counts in and by the machine's own names."""
    shared = set(placement.producers) & set(placement.consumers) - {"cpu"}
    sides = [
        f"{side} on " + ", ".join(_device(device, gpus) for device in devices)
        for side, devices in (("producers", placement.producers), ("consumers", placement.consumers))
    ]
    return "; ".join(sides) + ("; both roles share " + ", ".join(sorted(shared)) if shared else "")


def _device(device: str, gpus: Sequence[Gpu]) -> str:
    if device == "cpu":
        return device
    gpu = gpus[int(device.partition(":")[2])]
    # The first group of a UUID tells the GPUs of a machine apart, and CUDA takes it.
    return f"{device} (GPU {gpu.index}, {gpu.name}, UUID {'-'.join(gpu.uuid.split('-')[:2])})"


def _named(config: GpusConfig, gpus: int) -> Placement:
    if config.split != "auto":
        raise RequestError(
            f"gpus.split = {config.split!r} and the lists gpus.producers and gpus.consumers both place the processes: "
            "remove one of them"
        )
    producers, consumers = config.producers or [], config.consumers or []
    if not producers or not consumers:
        raise RequestError("gpus: name devices for both gpus.producers and gpus.consumers, or use gpus.split")
    for role, devices in (("producers", producers), ("consumers", consumers)):
        wrong = [index for index in devices if not 0 <= index < gpus]
        if wrong or len(set(devices)) < len(devices):
            counted = f": they count from 0 to {gpus - 1}, whatever their numbers on the machine are" if gpus else ""
            raise RequestError(f"gpus.{role}: {devices} is not a set of devices among the {gpus} visible ones{counted}")
    shared = sorted(set(producers) & set(consumers))
    if shared and (producers, consumers) != (shared, shared):
        raise RequestError(f'gpus: device {shared[0]} is in both roles; give each role its own, or split = "shared"')
    return Placement(tuple(f"cuda:{index}" for index in producers), tuple(f"cuda:{index}" for index in consumers))
