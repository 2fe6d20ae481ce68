"""[cache]: whether features are kept on a disk and read from there, and within which budget."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from protocol.errors import RequestError
from protocol.units import parse_bytes


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[cache] — `mode` "off": everything is computed; "spill": what is in `dir` is read, the rest is computed and kept;
    "only": everything is read from `dir`, and no target is loaded. `max_bytes`: what the shards in `dir` may take
    together, else all of the disk but a reserve. `dtype` "bf16" keeps features as they stream, "fp8" a byte of each,
    with a scale for each token and tap."""

    mode: Literal["off", "spill", "only"] = "off"
    dir: str = "cache"
    max_bytes: str | int | None = None
    dtype: Literal["bf16", "fp8"] = "bf16"

    @property
    def folder(self) -> Path:
        return Path(self.dir)

    @property
    def budget(self) -> int | None:
        """`max_bytes` in bytes; None: no bound but the disk."""
        return None if self.max_bytes is None else parse_bytes(self.max_bytes, "cache.max_bytes")


def check(config: CacheConfig) -> None:
    """Raises RequestError for what cannot be done."""
    if not config.dir.strip():
        raise RequestError("cache.dir is empty: name a folder")
    if config.budget == 0:
        raise RequestError("cache.max_bytes is 0: write a size, or leave it out")
