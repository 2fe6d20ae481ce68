"""What the self-check of the target found (producer/selfcheck.py makes it); no torch here, so the launcher reads it.

It decides, once for a run and all its producers, whether padded batches need their mask: without it attention is 3 to
16 % faster, and rounds differently, so that producers must agree.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from protocol.errors import RequestError

FILE_NAME = "selfcheck.json"
LEAST_COSINE = 0.999
# An error of a batch may be this many times the floor's: floors of few samples scatter.
FLOOR_FACTOR = 4.0
# Relative to the tap's root mean square; below it an error is rounding of fp32 at most.
LEAST_FLOOR = 1e-4


class TapCheck(msgspec.Struct, frozen=True):
    """One tap over all tokens of the samples alone: `mean`, `deviation`, share of exact zeros; and how the padded batch
    compares: mean cosine over tokens, error as the 99th percentile over the tap's root mean square. `floor_cosine` and
    `floor` are the same of the noise floor."""

    tap: int
    mean: float
    deviation: float
    zeros: float
    cosine: float
    error: float
    floor: float
    floor_cosine: float = 1.0

    @property
    def sound(self) -> bool:
        """Whether the batch equals the samples alone, but for rounding."""
        return self.cosine >= self.least_cosine and self.error <= FLOOR_FACTOR * max(self.floor, LEAST_FLOOR)

    @property
    def least_cosine(self) -> float:
        """LEAST_COSINE, unless rounding alone turns the states further than that."""
        return LEAST_COSINE if self.floor_cosine >= LEAST_COSINE else 1 - FLOOR_FACTOR * (1 - self.floor_cosine)

    def __str__(self) -> str:
        floor = f"{self.floor:.2e}" + (f", cosine {self.floor_cosine:.6f}" if self.floor_cosine < LEAST_COSINE else "")
        return (
            f"tap {self.tap}: mean {self.mean:.3g}, deviation {self.deviation:.3g}, zeros {self.zeros:.1%}; batched "
            f"against alone: cosine {self.cosine:.6f}, error {self.error:.2e} (noise floor {floor})"
        )


class SelfCheck(msgspec.Struct, frozen=True):
    """`fingerprint` names target, data, software and device; `padding_mask`: whether batches are run with it."""

    fingerprint: str
    padding_mask: bool
    taps: list[TapCheck]


def read_self_check(run_dir: Path) -> SelfCheck | None:
    """The run's self-check, or None when there is none that can be read."""
    try:
        return msgspec.json.decode((run_dir / FILE_NAME).read_bytes(), type=SelfCheck)
    except (OSError, msgspec.MsgspecError):
        return None


def padding_mask_of(run_dir: Path) -> bool:
    """Raises RequestError when the set-up left no self-check."""
    found = read_self_check(run_dir)
    if found is None:
        raise RequestError(f"{run_dir / FILE_NAME}: no self-check of the target there; start with --resume to make it")
    return found.padding_mask
