"""How much of an epoch a disk cache holds, how much it may hold once a run has filled it, and what that saves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np

from launch.config import Config
from launch.disk import existing
from protocol.cache import Cache
from protocol.cache_config import CacheConfig
from protocol.dataset import TokenDataset
from protocol.errors import RequestError
from protocol.shard_writer import spare_bytes
from protocol.shards import FP8, SCALE_BYTES, STORED
from protocol.units import show_bytes

# Token ids and the loss mask.
SMALL_BYTES_A_TOKEN = 5


class CacheRoom(msgspec.Struct, frozen=True, kw_only=True):
    """`held` of `samples` are in the cache, `held_bytes` of `epoch_bytes`; `room_bytes` more may be written there."""

    folder: str
    samples: int
    held: int
    held_bytes: int
    epoch_bytes: int
    room_bytes: int

    @property
    def share(self) -> float:
        """How much of an epoch need not be computed again, once a run has kept what fits."""
        return min(self.held_bytes + self.room_bytes, self.epoch_bytes) / max(self.epoch_bytes, 1)

    def __str__(self) -> str:
        return (
            f"{self.held:,} of the {self.samples:,} samples are in {self.folder}; with the "
            f"{show_bytes(self.room_bytes)} that it may grow by it holds {self.share:.0%} of an epoch of "
            f"{show_bytes(self.epoch_bytes)}, and later ones need {1 - self.share:.0%} of the target's work"
        )


def kept_form(config: CacheConfig, dtype: str, taps: int) -> tuple[str, int]:
    """(dtype, scales a token) in which features of `dtype` with so many taps are kept."""
    return (FP8, taps) if config.dtype == "fp8" else (dtype, 0)


def row_bytes_of(width: int, dtype: str, scales: int) -> int:
    """What a token takes in a cache of features `width` wide, but for headers."""
    return width * STORED[dtype][1].itemsize + scales * SCALE_BYTES + SMALL_BYTES_A_TOKEN


def room_of(
    config: Config,
    row_bytes: int,
    samples: int,
    tokens: int,
    cache: Cache | None = None,
    data: TokenDataset | None = None,
) -> CacheRoom:
    """For so many samples and tokens; without `cache`, or without the `data` that would tell, nothing is held yet."""
    disk = disk_of(config.cache.folder)
    room_bytes = max(disk.free - spare_bytes(disk.total), 0)
    if config.cache.budget is not None:
        room_bytes = min(room_bytes, max(config.cache.budget - (cache.nbytes if cache is not None else 0), 0))
    held = cache.held(data) if cache is not None and data is not None else np.zeros(samples, np.bool_)
    held_tokens = int(data.lengths[held].sum()) if data is not None else 0
    return CacheRoom(
        folder=str(config.cache.folder),
        samples=samples,
        held=int(np.count_nonzero(held)),
        held_bytes=held_tokens * row_bytes,
        epoch_bytes=tokens * row_bytes,
        room_bytes=room_bytes,
    )


def cache_of(folder: Path, width: int, dtype: str, taps: tuple[int, ...]) -> Cache | None:
    """The cache in `folder` if it may be one of such features; whether it is that, only a run can tell."""
    try:
        cache = Cache.open(folder)
    except RequestError:
        return None
    alike = (cache.manifest.width, cache.manifest.dtype, cache.manifest.fingerprint.get("taps"))
    return cache if alike == (width, dtype, json.dumps(list(taps))) else None


def disk_of(folder: Path) -> shutil._ntuple_diskusage:
    """The disk of a folder that need not be there yet."""
    return shutil.disk_usage(existing(folder))
