"""Filling a cache: samples into shards, whole or not at all.

A shard has another name until it is on the disk, and counts only once its index is there too. Writing is idempotent: a
sample that is there is passed over, so a rewound run writes nothing twice. Nothing is ever evicted.
"""

from __future__ import annotations

import errno
import os
import shutil
from itertools import accumulate, chain
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.cache import Cache, shards_of
from protocol.direct import DirectFile, sync_folder, write_durably
from protocol.shards import (
    PART_SUFFIX,
    SHARD_NAME,
    STORED,
    Index,
    Limits,
    Sample,
    header_of,
    index_path,
    sample_key,
    shard_name,
)
from protocol.units import show_bytes

# The disk of a cache is left with at least so much room, for checkpoints among others.
FREE_SHARE, MOST_FREE_BYTES = 0.02, 10 << 30


def spare_bytes(disk_bytes: int) -> int:
    """What is kept free on a disk of this size."""
    return min(MOST_FREE_BYTES, int(disk_bytes * FREE_SHARE))


class Full(Exception):
    """Nothing more fits: the budget is used up, or the disk is. Whole shards stay."""


class ShardWriter:
    """Adds samples to the cache at `cache.folder`; `max_bytes` bounds the shards of all writers together, of which
    there are `writers`. Call `close` to keep what the open shard holds."""

    def __init__(
        self, cache: Cache, max_bytes: int | None = None, writers: int = 1, limits: Limits | None = None
    ) -> None:
        self._folder, self._manifest = cache.folder, cache.manifest
        limits = limits or Limits()
        self._limits = msgspec.structs.replace(limits, tensors=4) if cache.manifest.scales else limits
        self._keys = set(cache.samples)
        self._budget = None if max_bytes is None else max(max_bytes - cache.nbytes, 0) // writers
        self.samples, self.nbytes = 0, 0  # kept by this writer, in whole shards
        self._file: DirectFile | None = None
        self._path = Path()
        self._small: list[tuple[bytes, ...]] = []  # of each sample its scales, token ids and mask
        self._open: list[Sample] = []
        self._completed: list[Path] = []

    def add(
        self,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        features: NDArray[np.generic],
        scales: NDArray[np.float32] | None = None,
    ) -> bool:
        """Adds a sample: token ids and mask `[L]`, features `[L, width]` in the manifest's dtype (the bytes of fp8 as
        uint8) and, of quantised ones, `scales` `[L, n]`. False when it is there already. Raises ValueError for features
        of another dtype, Full; other OSErrors are the disk's."""
        self._check_form(features, scales)
        key = sample_key(token_ids)
        if key in self._keys:
            return False
        ids, mask = np.ascontiguousarray(token_ids, "<i4").tobytes(), np.ascontiguousarray(loss_mask).tobytes()
        scaled = b"" if scales is None else np.ascontiguousarray(scales, "<f4").tobytes()
        payload = np.ascontiguousarray(features).data.cast("B")
        try:
            self.require(len(payload) + len(scaled) + len(ids) + len(mask))
            if self._file is None:
                self._path = self._folder / (shard_name() + PART_SUFFIX)
                self._file = DirectFile(self._path, self._limits.head_bytes)
            at = self._file.size
            self._file.append(payload)
        except OSError as error:
            self._abandon()
            raise _as_full(error) from error
        digest = xxhash.xxh3_64(payload)
        digest.update(scaled)
        sums = digest.intdigest(), xxhash.xxh3_64_intdigest(ids + mask)
        self._open.append(Sample(key, len(token_ids), at, 0, 0, *sums))
        self._small.append((scaled, ids, mask))
        self._keys.add(key)
        if len(self._open) == self._limits.samples or self._file.size >= self._limits.nbytes:
            self.close()
        return True

    def close(self) -> None:
        """Completes the open shard; the writer may go on. Raises Full when that was what did not fit."""
        if self._file is None:
            return
        try:
            self._complete(self._file)
        except OSError as error:
            self._abandon()
            raise _as_full(error) from error
        self._open, self._small = [], []

    def lacks(self, key: str) -> bool:
        """Whether `add` would write this sample."""
        return key not in self._keys

    def forget(self, key: str) -> None:
        """A sample that was there is there no more, and may be added again."""
        self._keys.discard(key)

    def take_completed(self) -> list[Path]:
        """The shards that were completed since the last call."""
        taken, self._completed = self._completed, []
        return taken

    def _complete(self, file: DirectFile) -> None:
        samples = self._open
        for each, place in enumerate(("scales_at", "token_ids_at", "loss_mask_at")):
            pieces = [small[each] for small in self._small]
            starts = accumulate(map(len, pieces), initial=file.size)
            samples = [
                msgspec.structs.replace(sample, **{place: at}) for sample, at in zip(samples, starts, strict=False)
            ]
            file.append(memoryview(b"".join(pieces)))
        manifest, head_bytes = self._manifest, self._limits.head_bytes
        told = {"format": "pt"} | {name: str(value) for name, value in manifest.fingerprint.items()}
        head = header_of(samples, manifest.width, manifest.dtype, manifest.scales, told, head_bytes)
        nbytes = file.size
        file.finish(head)
        file.close()
        self._file = None
        shard = self._path.with_name(self._path.name.removesuffix(PART_SUFFIX))
        self._path.rename(shard)
        sync_folder(self._folder)
        index = Index(nbytes, head_bytes, xxhash.xxh3_64_intdigest(head), samples)
        write_durably(index_path(shard), msgspec.json.encode(index))
        self.samples += len(samples)
        self.nbytes += nbytes
        self._completed.append(shard)

    def _check_form(self, features: NDArray[np.generic], scales: NDArray[np.float32] | None) -> None:
        kept, width, columns = self._manifest.dtype, self._manifest.width, 0 if scales is None else scales.shape[1]
        if features.dtype != STORED[kept][1] or features.shape[1] != width or columns != self._manifest.scales:
            raise ValueError(
                f"a cache of {kept} with {width} features and {self._manifest.scales} scales a token takes no "
                f"{features.dtype} with {features.shape[1]} and {columns}"
            )

    def _abandon(self) -> None:
        """The open shard could not be written: nothing of it stays."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._path.unlink(missing_ok=True)
        self._keys.difference_update(sample.key for sample in self._open)
        self._open, self._small = [], []

    def require(self, more_bytes: int) -> None:
        """Completes the open shard and raises Full when `more_bytes` are too many."""
        pending = self._file.size + sum(map(len, chain.from_iterable(self._small))) if self._file else 0
        pending = pending or self._limits.head_bytes
        disk = shutil.disk_usage(self._folder)
        spare = spare_bytes(disk.total)
        reason = ""
        if self._budget is not None and self.nbytes + pending + more_bytes > self._budget:
            reason = "cache.max_bytes is used up"
        elif disk.free < spare + more_bytes + (0 if self._file else pending):
            reason = f"the disk has {show_bytes(disk.free)} left, of which {show_bytes(spare)} are kept free"
        if reason:
            self.close()
            raise Full(reason)


def _as_full(error: OSError) -> Exception:
    """A full disk or quota as Full, any other error as itself."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Full(f"the disk is full ({os.strerror(error.errno)})")
    return error


def remove_fragments(folder: Path) -> list[Path]:
    """Deletes what a writer that died has left: unfinished shards, and whole ones whose index never came. For who holds
    the lock of writers. Returns what was there; foreign files are never touched."""
    left = [
        path
        for path in folder.iterdir()
        if _unfinished(path.name) or (path in shards_of(folder) and not index_path(path).exists())
    ]
    for path in left:
        path.unlink()
    return left


def _unfinished(name: str) -> bool:
    stem = name.removesuffix(PART_SUFFIX)
    return stem != name and SHARD_NAME.fullmatch(stem.replace(".json", ".safetensors")) is not None
