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
        self.samples, self.held = len(held), int(np.count_nonzero(held))

    @classmethod
    def none(cls, samples: int) -> Parts:
        """Without a cache the target computes everything."""
        return cls(np.zeros(samples, np.bool_))

    @property
    def complete(self) -> bool:
        """Whether every sample is in the cache."""
        return self.held == self.samples

    def __call__(self, samples: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        parts: dict[str, tuple[int, ...]] = {}
        for kind, wanted in (("replay", True), ("model", False)):
            if mine := tuple(sample for sample in samples if bool(self._held[sample]) is wanted):
                parts[kind] = mine
        return parts

    def learn(self, samples: tuple[int, ...]) -> None:
        """These are in the cache from here on."""
        self._mark(samples, True)

    def forget(self, samples: tuple[int, ...]) -> None:
        """These cannot be had from the cache."""
        self._mark(samples, False)

    def forget_all(self) -> None:
        """Nothing can be had from the cache any more."""
        self._held[:] = False
        self.held = 0

    def _mark(self, samples: tuple[int, ...], held: bool) -> None:
        for sample in samples:
            self.held += held - bool(self._held[sample])
            self._held[sample] = held


def parts_of(job: Job, dataset: TokenDataset) -> Parts:
    """How the blocks of a run are cut: by what its cache held when it began."""
    if job.cached is None:
        return Parts.none(len(dataset))
    cache = Cache.open(Path(job.cached))
    cache.close()
    return Parts(cache.held(dataset))
