"""Reading a whole cache against its checksums: safetensors by itself does not notice a flipped bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from protocol.cache import Manifest, read_index, shards_of
from protocol.shards import Index, Sample, index_path, sample_key

_PIECE_BYTES = 16 << 20
THREADS = 8


class Damage(msgspec.Struct, frozen=True):
    """`sample` is the key of one, or empty when the shard as such is meant."""

    shard: str
    sample: str
    problem: str


def verify_shards(folder: Path, manifest: Manifest, say: Callable[[int, int], None]) -> list[Damage]:
    """What is damaged in the cache `folder` of this manifest, by shard. `say` hears how many shards are read, of how
    many. An index without its shard counts too."""
    shards = sorted({*shards_of(folder), *(path.with_suffix(".safetensors") for path in folder.glob("shard-*.json"))})
    found: dict[Path, list[Damage]] = {}
    # The checksum and the reading both let other threads run.
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        reading = {pool.submit(partial(_verify, path, manifest)): path for path in shards}
        for done, future in enumerate(as_completed(reading), start=1):
            found[reading[future]] = future.result()
            say(done, len(shards))
    return [damage for path in shards for damage in found[path]]


def _verify(shard: Path, manifest: Manifest) -> list[Damage]:
    index = read_index(shard)
    if index is None:
        what = "its index is damaged" if index_path(shard).exists() else "it has no index: its writer was interrupted"
        return [Damage(shard.name, "", what)]
    try:
        with shard.open("rb", buffering=0) as stream:
            return _compare(shard.name, stream.fileno(), index, manifest)
    except FileNotFoundError:
        return [Damage(shard.name, "", "the shard is missing")]
    except OSError as error:
        return [Damage(shard.name, "", f"it cannot be read: {error.strerror}")]


def _compare(name: str, fd: int, index: Index, manifest: Manifest) -> list[Damage]:
    found = []
    size = os.fstat(fd).st_size
    if size != index.nbytes:
        found.append(Damage(name, "", f"it has {size} bytes, not {index.nbytes}"))
    if _sum(fd, (0, index.header_bytes)) != index.header:
        found.append(Damage(name, "", "its header is damaged, or another shard's"))
    for sample in index.samples:
        if problem := _problem(fd, sample, manifest, size):
            found.append(Damage(name, sample.key, problem))
    return found


def _problem(fd: int, sample: Sample, manifest: Manifest, size: int) -> str:
    ids = sample.token_ids_at, sample.tokens * 4
    small = ids, (sample.loss_mask_at, sample.tokens)
    features = [(sample.features_at, sample.tokens * manifest.features_bytes)]
    if manifest.scales:
        features.append((sample.scales_at, sample.tokens * manifest.scales_bytes))
    if max(at + nbytes for at, nbytes in (*features, *small)) > size:
        return "it is cut off"
    wrong = [
        name
        for name, ranges, expected in (
            ("features", features, sample.features),
            ("token ids and mask", small, sample.small),
        )
        if _sum(fd, *ranges) != expected
    ]
    if wrong:
        return f"{' and '.join(wrong)} differ from the checksum"
    # The index has no checksum of its own; its keys are those of the token ids.
    at, nbytes = ids
    key = sample_key(np.frombuffer(os.pread(fd, nbytes, at), "<i4"))
    return "" if key == sample.key else f"its token ids are those of {key}"


def _sum(fd: int, *ranges: tuple[int, int]) -> int:
    digest = xxhash.xxh3_64()
    for at, nbytes in ranges:
        place, end = at, at + nbytes
        while place < end and (piece := os.pread(fd, min(_PIECE_BYTES, end - place), place)):
            digest.update(piece)
            place += len(piece)
    return digest.intdigest()
