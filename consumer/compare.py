"""Whether one drafter is accepted more than another: paired over the same prompts. Pure numpy."""

from __future__ import annotations

import msgspec
import numpy as np

from consumer.walk import Acceptance, bootstrap_interval, per_prompt_means
from protocol.errors import RunError


class Paired(msgspec.Struct, frozen=True):
    """The second drafter's acceptance length less the first's, prompt by prompt.

    difference: mean over `prompts`; interval: 95 % percentile bootstrap over prompts. better, worse: prompts on which
    the second is ahead or behind; what is left is equal.
    """

    difference: float
    interval: tuple[float, float]
    prompts: int
    better: int
    worse: int

    @property
    def verdict(self) -> str:
        """One line. The interval decides: what may as well be nothing is no difference."""
        low, high = self.interval
        text = f"{self.difference:+.3f} (95 % interval {low:+.3f} to {high:+.3f})"
        counts = f"; better on {self.better} prompts, worse on {self.worse}, of {self.prompts}"
        if low > 0:
            return f"B is accepted more than A: {text}{counts}"
        if high < 0:
            return f"B is accepted less than A: {text}{counts}"
        return f"no difference can be told on these prompts: {text}{counts}"


def paired(first: Acceptance, second: Acceptance, seed: int = 0) -> Paired:
    """Of two drafters on the same rows. Raises RunError when they were not walked over the same prompts."""
    one, other = per_prompt_means(first), per_prompt_means(second)
    drafted = ~np.isnan(one)
    if len(one) != len(other) or (drafted != ~np.isnan(other)).any():
        raise RunError("the two drafters were measured on different prompts")
    gains = (other - one)[drafted]
    return Paired(
        difference=float(gains.mean()),
        interval=bootstrap_interval(gains, seed),
        prompts=len(gains),
        better=int((gains > 0).sum()),
        worse=int((gains < 0).sum()),
    )
