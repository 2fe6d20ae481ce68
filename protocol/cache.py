"""A disk cache of features: a folder of shards (protocol/shards.py) with a manifest of what decides the features.

    manifest.json  target_io.safetensors  eval-*.safetensors  shard-*.safetensors  shard-*.json  .lock  .writing

Who reads or writes holds `.lock` shared and `prune` holds it alone; a writer holds `.writing` alone.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.dataset import TokenDataset
from protocol.direct import write_durably
from protocol.errors import DraftwireError, RequestError
from protocol.shards import SCALE_BYTES, SHARD_NAME, STORED, Index, Sample, index_path, sample_key

MANIFEST = "manifest.json"
FORMAT = 1


class Manifest(msgspec.Struct, frozen=True):
    """`fingerprint`: every setting that decides the features of given token ids, by its name. `dtype` is that of the
    features in the shards, `width` of them a token; of quantised ones a token has `scales` beside them."""

    format: int
    width: int
    dtype: str
    fingerprint: dict[str, str | int]
    scales: int = 0

    @property
    def features_bytes(self) -> int:
        """Bytes of a token's features."""
        return self.width * STORED[self.dtype][1].itemsize

    @property
    def scales_bytes(self) -> int:
        """Bytes of a token's scales."""
        return self.scales * SCALE_BYTES


class Damaged(DraftwireError):
    """A shard does not hold what its index says."""


class Cache:
    """The whole shards of a cache as they were when it was opened. `samples`: key -> (shard's name, place in it)."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.nbytes = 0
        self.samples: dict[str, tuple[str, Sample]] = {}
        self.shards: dict[str, Index] = {}
        self._fds: dict[str, int] = {}
        self._opening = threading.Lock()
        for path in shards_of(folder):
            self.take_in(path)

    @classmethod
    def open(cls, folder: Path) -> Cache:
        """Raises RequestError when `folder` is no cache, naming what is missing."""
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        except FileNotFoundError:
            raise RequestError(f"{folder} is no cache: `draftwire cache build CONFIG` makes one") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise RequestError(f"{folder / MANIFEST}: {error}") from None
        if manifest.format != FORMAT:
            raise RequestError(f"{folder}: a cache of format {manifest.format}; this draftwire reads {FORMAT}")
        return cls(folder, manifest)

    @classmethod
    def create(cls, folder: Path, manifest: Manifest) -> Cache:
        """Opens the cache for features of `manifest`, and makes it if there is none. Raises RequestError, with the name
        of the field and both values, when it holds features of other making."""
        if not (folder / MANIFEST).exists():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_durably(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
            except OSError as error:
                raise RequestError(f"cache.dir: {folder}: {error.strerror}") from None
        cache = cls.open(folder)
        cache.refuse_other(manifest)
        return cache

    def take_in(self, shard: Path) -> None:
        """Reads the index of a shard, which may have come since the cache was opened; nothing when it is not whole."""
        if (index := read_index(shard)) is not None:
            self.shards[shard.name] = index
            self.nbytes += index.nbytes
            self.samples |= {sample.key: (shard.name, sample) for sample in index.samples}

    def refuse_other(self, manifest: Manifest) -> None:
        """Raises RequestError unless this cache holds features that `manifest` describes."""
        mine, asked = self.manifest.fingerprint, manifest.fingerprint
        for name in asked | mine:
            if mine.get(name) != asked.get(name):
                raise RequestError(
                    f"{self.folder} was made with {name} = {mine.get(name)}, this configuration has {asked.get(name)}: "
                    "restore it, or name another cache.dir"
                )

    def held(self, dataset: TokenDataset) -> NDArray[np.bool_]:
        """`[n]`: which samples of a dataset are here."""
        return np.array([sample_key(dataset.tokens(at)) in self.samples for at in range(len(dataset))], np.bool_)

    def read_into(self, key: str, features: NDArray[np.generic], scales: NDArray[np.float32] | None = None) -> None:
        """Reads a sample's features into a contiguous array `[L, width]`, and into `scales` `[L, n]` what belongs to
        quantised ones; several threads may. Raises Damaged, naming the shard, and KeyError for a sample that is not
        here."""
        name, sample = self.samples[key]
        rooms = [(features.data.cast("B"), sample.features_at)]
        if scales is not None:
            rooms.append((scales.data.cast("B"), sample.scales_at))
        digest, whole = xxhash.xxh3_64(), True
        try:
            for room, at in rooms:
                whole = whole and _read(self._fd(name), room, at) == len(room)
                digest.update(room)
        except OSError as error:
            raise Damaged(f"{name}: {error}") from None
        if not whole or digest.intdigest() != sample.features:
            raise Damaged(f"{name}: sample {key} is damaged")

    def strike(self, keys: set[str]) -> None:
        """Takes damaged samples out of the indices of their shards: from here on they are not there. For who holds the
        lock of writers; the bytes stay. Raises OSError."""
        names = {self.samples.pop(key)[0] for key in keys}
        for name in names:
            whole = [sample for sample in self.shards[name].samples if sample.key not in keys]
            self.shards[name] = msgspec.structs.replace(self.shards[name], samples=whole)
            write_durably(index_path(self.folder / name), msgspec.json.encode(self.shards[name]))

    def touch(self, shards: set[str]) -> None:
        """Notes that these shards were used: `prune --unused-since` goes by that."""
        for name in shards:
            path = index_path(self.folder / name)
            if path.exists():
                os.utime(path)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _fd(self, name: str) -> int:
        with self._opening:
            if name not in self._fds:
                self._fds[name] = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
            return self._fds[name]


def shards_of(folder: Path) -> list[Path]:
    """The files in a folder that have the name of a shard, sorted."""
    return sorted(path for path in folder.iterdir() if SHARD_NAME.fullmatch(path.name))


def read_index(shard: Path) -> Index | None:
    """A shard's index; None when there is none that can be read."""
    try:
        return msgspec.json.decode(index_path(shard).read_bytes(), type=Index)
    except (OSError, msgspec.MsgspecError):
        return None


def _read(fd: int, room: memoryview, at: int) -> int:
    done = 0
    while done < len(room) and (more := os.preadv(fd, [room[done:]], at + done)):
        done += more
    return done


@contextmanager
def in_use(folder: Path, name: str = ".lock", alone: bool = False) -> Iterator[None]:
    """Holds one of a cache's locks. Raises RequestError when another process has it."""
    fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            doing = "another run writes to it" if name == ".writing" else "it is in use"
            raise RequestError(f"{folder}: {doing}; wait for its end, or name another cache.dir") from None
        yield
    finally:
        os.close(fd)
