"""The disk part of benchmarks/cache.py: shards written and read beside the same bytes past the page cache.

Beside each rate stands the CPU time that it took, all threads, against the time in which the disk by itself moves as
much: that ratio is how many cores keep this disk busy.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jobs import DTYPE, TOKENS, WIDTH
from numpy.typing import NDArray
from report import row

from producer.quantise import quantise_rows
from producer.replay import THREADS, read_features
from protocol.block import checksum
from protocol.cache import FORMAT, Cache, Manifest
from protocol.direct import BUFFER_BYTES
from protocol.shard_writer import ShardWriter
from protocol.shards import FP8, sample_key

TAPS = 5
GB = 1e9
WRITTEN, READ = "direct, written by one thread", f"direct, read by {THREADS} threads"
Words = NDArray[np.uint16]
Clock = tuple[float, float]
Note = Callable[[str, int, Clock], None]
Say = Callable[[str], None]


def disk_rows(folder: Path, nbytes: int, repeats: int, say: Say) -> list[dict[str, Any]]:
    """Rates of caches in `folder` for `nbytes` of features in bf16, and the disk's own. Nothing is left behind."""
    count = max(nbytes // (TOKENS * WIDTH * 2), 2)
    draw = np.random.default_rng(0)
    # Numbers about one, each sample's own: a disk that packs what it is given finds nothing to pack.
    samples = [draw.integers(0x3C00, 0x4080, (TOKENS, WIDTH), np.uint16) for _ in range(count)]
    taken: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, nbytes: int, started: Clock) -> None:
        ended = clock()
        spent = tuple((after - before) / nbytes * GB for before, after in zip(started, ended, strict=True))
        taken.setdefault(name, []).append((spent[0], spent[1]))
        say(f"{name}: {1 / spent[0]:.2f} GB/s, CPU {spent[1]:.2f} s/GB")

    passes: list[Callable[[], None]] = [
        lambda: _direct(folder / "direct", count * samples[0].nbytes, note),
        lambda: _shards(folder / "bf16", samples, False, note),
        lambda: _shards(folder / "fp8", samples, True, note),
    ]
    for _ in range(repeats):
        for each in random.sample(passes, len(passes)):
            folder.mkdir(parents=True, exist_ok=True)
            each()
            shutil.rmtree(folder)
    rates = {name: 1 / median(spent_s for spent_s, _ in each) for name, each in taken.items()}
    rows = []
    for name, each in taken.items():
        own = rates[WRITTEN if "written" in name else READ]
        rows += [row(name, rates[name], "GB/s", own)]
        if name not in (WRITTEN, READ):
            rows += [row(f"{name}: CPU", median(cpu_s for _, cpu_s in each), "s/GB", 1 / own)]
    return rows


def clock() -> Clock:
    """Seconds by the clock, and of this process on CPUs."""
    return time.perf_counter(), time.process_time()


def _direct(path: Path, nbytes: int, note: Note) -> None:
    """A file of about `nbytes` in pieces of the writer's buffer, with O_DIRECT."""
    pieces = -(-nbytes // BUFFER_BYTES)
    buffers = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(THREADS)]
    buffers[0][:] = np.random.default_rng(1).bytes(BUFFER_BYTES)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o666)
    except OSError as error:
        raise SystemExit(f"{path.parent}: no direct I/O there ({error.strerror}): name another --folder") from None
    try:
        started = clock()
        for at in range(pieces):
            os.pwrite(fd, buffers[0], at * BUFFER_BYTES)
        os.fsync(fd)
        note(WRITTEN, pieces * BUFFER_BYTES, started)

        def read(thread: int) -> None:
            for at in range(thread, pieces, THREADS):
                os.preadv(fd, [buffers[thread]], at * BUFFER_BYTES)

        started = clock()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, range(THREADS)))
        note(READ, pieces * BUFFER_BYTES, started)
    finally:
        os.close(fd)


def _shards(folder: Path, samples: list[Words], quantised: bool, note: Note) -> None:
    """Samples into shards and back. Rates are of bytes on the disk, so that they compare with the disk's own."""
    kept = "fp8" if quantised else "bf16"
    manifest = Manifest(FORMAT, WIDTH, FP8 if quantised else DTYPE, {}, scales=TAPS if quantised else 0)
    cache = Cache.create(folder, manifest)
    ids = [np.full(TOKENS, at, np.int32) for at in range(len(samples))]
    mask = np.ones(TOKENS, np.uint8)
    forms = [quantise_rows(each, DTYPE, TAPS) if quantised else (each, None) for each in samples]
    nbytes = len(samples) * TOKENS * (manifest.features_bytes + manifest.scales_bytes)
    started = clock()
    writer = ShardWriter(cache)
    for each, form in zip(ids, forms, strict=True):
        writer.add(each, mask, *form)
    writer.close()
    note(f"shards of {kept}, written", nbytes, started)
    del forms
    _forget(folder)
    cache = Cache.open(folder)
    room = np.ones((THREADS, TOKENS, WIDTH), np.uint16)  # touched, as a ring's slots are

    def read(thread: int) -> None:
        for at in range(thread, len(ids), THREADS):
            read_features(cache, sample_key(ids[at]), room[thread], DTYPE)
            checksum(room[thread])

    started = clock()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, range(THREADS)))
    note(f"shards of {kept}, read and checked", nbytes, started)
    cache.close()


def _forget(folder: Path) -> None:
    """Drops a cache's shards from the page cache."""
    for path in folder.glob("shard-*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
