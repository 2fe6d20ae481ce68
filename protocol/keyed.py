"""Keyed randomness: every draw is a pure function of its key, never of what was drawn before.

A shuffle keyed by (seed, epoch) or an anchor choice keyed by (seed, epoch, sample) is the same on every
platform, in every process and after every restart, so no random state has to be saved or agreed on.
Philox is used as a keyed hash (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def words(count: int, *key: int) -> NDArray[np.uint64]:
    """`count` uniform 64-bit words `[count]` that depend on nothing but `key`."""
    digest = hashlib.blake2b(b"".join(int(part).to_bytes(8, "little", signed=True) for part in key), digest_size=16)
    philox = np.random.Philox(key=int.from_bytes(digest.digest(), "little"))
    return np.asarray(philox.random_raw(count), dtype=np.uint64)


def permutation(count: int, *key: int) -> NDArray[np.int64]:
    """A permutation of `range(count)`, int64 `[count]`."""
    return np.argsort(words(count, *key), kind="stable").astype(np.int64)


def choose(count: int, wanted: int, *key: int) -> NDArray[np.int64]:
    """A uniformly drawn subset of `range(count)`, sorted, int64 `[min(count, wanted)]`."""
    if wanted >= count:
        return np.arange(count, dtype=np.int64)
    return np.sort(permutation(count, *key)[:wanted])
