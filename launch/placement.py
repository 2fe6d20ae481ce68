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
    """[gpus] — `split` is "auto", "P:C" (GPUs of producers:consumers) or "shared" (both roles on one GPU).

    `producers` and `consumers` name devices by their index among the visible ones, instead of a split. Each producer
    takes `target.tensor_parallel` devices in a row, each consumer one.
    """

    split: str = "auto"
    producers: list[int] | None = None
    consumers: list[int] | None = None


class Placement(msgspec.Struct, frozen=True):
    """One entry a process: "cpu" or "cuda:i", i counting the visible devices. A producer is `tensor_parallel` processes
    in a row, which share one target. `alone`: everything comes from a cache and every device trains; `producers` are
    those where a target is loaded if something must be made from it first."""

    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    tensor_parallel: int = 1
    alone: bool = False

    @property
    def by_producer(self) -> list[tuple[str, ...]]:
        """The devices of each producer."""
        starts = range(0, len(self.producers), self.tensor_parallel)
        return [self.producers[start : start + self.tensor_parallel] for start in starts]

    @property
    def peers(self) -> int:
        """Producers and consumers, however many devices each has."""
        return len(self.by_producer) + len(self.consumers)


def place(config: GpusConfig, gpus: int, tensor_parallel: int = 1, alone: bool = False) -> Placement:
    """Devices for a machine with `gpus` visible GPUs (0: everything on the CPU); `alone`: no target is needed.

    Raises RequestError when the split asks for what is not there, or gives a role nothing.
    """
    if alone and gpus > 1 and config == GpusConfig():
        devices = tuple(f"cuda:{index}" for index in range(gpus))
        return Placement(devices[:tensor_parallel], devices, tensor_parallel, alone=True)
    placement = _placed(config, gpus, tensor_parallel)
    if odd := len(placement.producers) % tensor_parallel:
        key = "gpus.split" if config.producers is None else "gpus.producers"
        count = len(placement.producers)
        raise RequestError(
            f"{key}: {count} {'GPUs' if gpus else 'processes'} for producers of {tensor_parallel} each "
            f"(target.tensor_parallel): write a multiple, {count - odd or tensor_parallel} for example"
        )
    return msgspec.structs.replace(placement, tensor_parallel=tensor_parallel)


def _placed(config: GpusConfig, gpus: int, tensor_parallel: int) -> Placement:
    if config.producers is not None or config.consumers is not None:
        placement = _named(config, gpus)
        if tensor_parallel > 1 and (both := sorted(set(placement.producers) & set(placement.consumers))):
            raise RequestError(
                f"gpus: {', '.join(both)} in both roles: what is divided (target.tensor_parallel = {tensor_parallel}) "
                "shares no device; give each role its own"
            )
        return placement
    if gpus and tensor_parallel > 1 and (config.split == "shared" or gpus <= tensor_parallel):
        raise RequestError(
            f"gpus.split: {config.split} with {gpus} visible: a producer takes {tensor_parallel} GPUs "
            "(target.tensor_parallel) and a consumer one of its own"
        )
    if config.split == "shared" or (config.split == "auto" and gpus == 1):
        device = "cuda:0" if gpus else "cpu"
        return Placement((device,) * tensor_parallel, (device,))
    counts = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", config.split)
    if config.split == "auto":
        # Unmeasured, so even: `consumers` gets the odd one, since a drafter step costs more than a forward pass
        # for the short samples that most chat data consists of.
        producers = max(gpus // 2 // tensor_parallel, 1) * tensor_parallel
        consumers = max(gpus - producers, 1)
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


def split_text(placement: Placement) -> str:
    """A placement as gpus.split has it."""
    if set(placement.producers) & set(placement.consumers) - {"cpu"}:
        return "shared"
    return f"{len(placement.producers)}:{len(placement.consumers)}"


def idle(producers: Sequence[str], consumers: Sequence[str]) -> str:
    """What to say of GPUs that have nothing to do once no target is needed, "" when there are none."""
    own = {*producers} - {*consumers, "cpu"}
    how = "`draftwire stop`, then the same `draftwire run` with `--resume --set gpus.split=auto`, lets them train"
    return f"; producers' GPUs are idle ({', '.join(sorted(own))}): {how}" if own else ""


def show_placement(placement: Placement, gpus: Sequence[Gpu]) -> str:
    """Who runs where, by the index that the config counts in and by the machine's own names."""
    if placement.alone:
        return "nothing is computed; consumers on " + ", ".join(_device(each, gpus) for each in placement.consumers)
    shared = set(placement.producers) & set(placement.consumers) - {"cpu"}
    consumers = [(device,) for device in placement.consumers]
    sides = [
        f"{side} on " + ", ".join(" with ".join(_device(device, gpus) for device in each) for each in groups)
        for side, groups in (("producers", placement.by_producer), ("consumers", consumers))
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
