"""Which kind of producer fills which sample of a block: replay what the cache holds, the target the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.cache import Cache
from protocol.dataset import TokenDataset
from protocol.job import Job


class Parts:
    """`held` `[n]`: the samples of the dataset that are in the cache. Called by the ledger."""

    def __init__(self, held: NDArray[np.bool_]) -> None:
        self._held = held

    def __call__(self, samples: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        parts: dict[str, tuple[int, ...]] = {}
        for kind, wanted in (("replay", True), ("model", False)):
            if mine := tuple(sample for sample in samples if bool(self._held[sample]) is wanted):
                parts[kind] = mine
        return parts

    def learn(self, samples: tuple[int, ...]) -> None:
        """These are in the cache from here on."""
        self._held[list(samples)] = True

    def forget(self, samples: tuple[int, ...]) -> None:
        """These cannot be had from the cache."""
        self._held[list(samples)] = False


def parts_of(job: Job, dataset: TokenDataset) -> Parts:
    """How the blocks of a run are cut: by what its cache held when it began."""
    if job.cached is None:
        return Parts(np.zeros(len(dataset), np.bool_))
    cache = Cache.open(Path(job.cached))
    cache.close()
    return Parts(cache.held(dataset))
