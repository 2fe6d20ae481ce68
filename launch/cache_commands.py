"""`draftwire cache ls`, `verify` and `prune`: what a disk cache holds, whether it is sound, and making room in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from protocol.cache import Cache, in_use
from protocol.cache_verify import verify_shards
from protocol.shard_writer import remove_fragments
from protocol.shards import index_path
from protocol.units import show_bytes

PRUNE_LOG = "pruned.log"
SAY_EVERY_S = 2.0

Say = Callable[[str], None]
Answer = tuple[dict[str, Any], list[str]]


def list_cache(folder: Path) -> Answer:
    """What the cache holds; the report and the same as lines. Raises RequestError when there is none."""
    cache = Cache.open(folder)
    tokens = sum(sample.tokens for _, sample in cache.samples.values())
    report = {
        "samples": len(cache.samples),
        "tokens": tokens,
        "bytes": cache.nbytes,
        "shards": len(cache.shards),
        "fingerprints": [cache.manifest.fingerprint],
    }
    made = [f"  {name} = {value}" for name, value in cache.manifest.fingerprint.items()]
    head = f"{folder}: {len(cache.samples)} samples, {tokens} tokens, {show_bytes(cache.nbytes)} in "
    return report, [f"{head}{len(cache.shards)} shards", "made with", *made]


def verify_cache(folder: Path, say: Say) -> Answer:
    """Compares every byte with its checksum. The report's `damaged` is empty when all is sound."""
    report, lines = list_cache(folder)
    manifest = Cache.open(folder).manifest
    said_s = time.monotonic()

    def progress(done: int, shards: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"{done} of {shards} shards read")

    with in_use(folder):
        damaged = verify_shards(folder, manifest, progress)
    told = [f"{each.shard}{f', sample {each.sample}' if each.sample else ''}: {each.problem}" for each in damaged]
    report["damaged"] = msgspec.to_builtins(damaged)
    if not damaged:
        return report, [lines[0], "every checksum agrees"]
    shards = len({each.shard for each in damaged})
    advice = f"{shards} shards are damaged: delete them with their .json and `draftwire cache build` computes them anew"
    return report, [*told, advice]


def prune_cache(folder: Path, max_bytes: int | None, unused_s: float | None, say: Say) -> Answer:
    """Deletes shards that nobody has used for `unused_s` seconds, and of the others the longest unused ones until at
    most `max_bytes` are left. Only shards that this cache's indexes name are touched, and what fragments of interrupted
    writers there are. Raises RequestError when the cache is in use."""
    with in_use(folder, alone=True):
        cache = Cache.open(folder)
        used = sorted((index_path(folder / name).stat().st_mtime, name) for name in cache.shards)
        oldest_s = time.time() - unused_s if unused_s is not None else 0.0
        left_bytes, removed = cache.nbytes, []
        for at, name in used:
            if at >= oldest_s and (max_bytes is None or left_bytes <= max_bytes):
                break
            removed.append(name)
            left_bytes -= cache.shards[name].nbytes
        with (folder / PRUNE_LOG).open("a", encoding="utf-8") as log:
            for name in removed:
                line = f"removed {name}: {len(cache.shards[name].samples)} samples, {cache.shards[name].nbytes} bytes"
                log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
                say(line)
                # A shard without an index is a fragment: interrupted here, the rest goes the next time.
                index_path(folder / name).unlink()
                (folder / name).unlink(missing_ok=True)
            for path in remove_fragments(folder):
                log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} removed {path.name}: unfinished\n")
                say(f"removed {path.name}: unfinished")
    report, lines = list_cache(folder)
    return report | {"removed": removed}, [f"{len(removed)} shards removed", lines[0]]
