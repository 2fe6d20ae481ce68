"""What a running run says about its split: which side is short, by how much, and what another one would do. Pure.

What each side could do alone follows from what it did and how long it was at it: a producer its tokens over the seconds
of its work, the ranks theirs over the seconds that were no waiting. Other numbers of ranks scale as the plan's own
steps do when they are cut for them (launch/split_model.py); reductions and fixed costs count as part of the blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from launch.measurements import Measurements, ProducerRate, Room, TrainerRate, Work
from launch.split_model import Model
from protocol.job import Job
from protocol.plan import Plan

# Fewer steps, or seconds of them, say more about the start than about the run.
LEAST_STEPS = 20
LEAST_S = 20.0
# Sides that differ by less are as fast as each other, and a split that gains less is not worth a restart.
ALIKE = 0.05
# So many steps of the plan, evenly over an epoch, say how steps divide.
SAMPLED_STEPS = 8


class Done(NamedTuple):
    """What a start of a run has done: tokens produced and seconds of all producers at it, tokens trained, seconds of
    the steps and of waiting in them."""

    produced_tokens: int
    producing_s: float
    steps: int
    trained_tokens: int
    steps_s: float
    waited_s: float


class Advisor:
    """Of one start of a run. It has nothing to say of GPUs that both roles share: there each waits for the other."""

    def __init__(self, job: Job, plan: Plan) -> None:
        devices = {*job.producers, *job.consumers}
        # Without producers everything comes from a cache, and there is no split.
        self._silent = not job.producers or bool(set(job.producers) & set(job.consumers) - {"cpu"})
        self._word = "processes" if devices == {"cpu"} else "GPUs"
        self._producers, self._consumers = len(job.producers), len(job.consumers)
        self._divided = job.tensor_parallel
        self._model = Model(_of_plan(plan))

    def advise(self, done: Done) -> dict[str, Any] | None:
        """short ("producers", "consumers" or None), producers_alone and consumers_alone and the best split's tokens/s,
        and the same as `text`; None while it is too early to tell."""
        working_s = done.steps_s - done.waited_s
        early = done.steps < LEAST_STEPS or done.steps_s < LEAST_S
        if self._silent or early or min(done.producing_s, working_s, done.produced_tokens, done.trained_tokens) <= 0:
            return None
        replicas = self._producers // self._divided
        one = done.produced_tokens / done.producing_s
        consumers = done.trained_tokens / working_s
        producers = one * replicas
        alike = abs(producers - consumers) <= ALIKE * min(producers, consumers)
        short = None if alike else "producers" if producers < consumers else "consumers"
        total = self._producers + self._consumers
        rates = {
            count: min(one * (count // self._divided), consumers * self._scale(total - count))
            for count in range(self._divided, total, self._divided)
        }
        own = rates[self._producers]
        best = max(rates, key=lambda count: (rates[count], -abs(count - self._producers)))
        if rates[best] <= own * (1 + ALIKE):
            best = self._producers
        found = {
            "short": short,
            "producers_alone": producers,
            "consumers_alone": consumers,
            "best": {"producers": best, "consumers": total - best, "tokens_per_s": rates[best]},
        }
        return found | {"text": self._text(short, producers, consumers, best, rates[best] / own - 1)}

    def _scale(self, ranks: int) -> float:
        """What so many ranks reach, over what this run's do."""
        return self._model.trainers(ranks) / self._model.trainers(self._consumers)

    def _text(self, short: str | None, producers: float, consumers: float, best: int, gain: float) -> str:
        total = self._producers + self._consumers
        if short is None:
            said = f"both sides are as fast as each other: alone {producers:,.0f} and {consumers:,.0f} tokens/s"
        else:
            other, low, high = "consumers", producers, consumers
            if short == "consumers":
                other, low, high = "producers", consumers, producers
            said = (
                f"the {short} are short by {1 - low / high:.0%}: alone they reach {low:,.0f} tokens/s, "
                f"the {other} {high:,.0f}"
            )
        if best == self._producers:
            return f"{said}; no other split of these {total} {self._word} would gain {ALIKE:.0%}"
        return f"{said}; {best}:{total - best} would reach {1 + gain:.2f} times as much"


def sampled_steps(plan: Plan, most: int) -> list[int]:
    """At most so many steps, evenly over the first epoch."""
    last = max(plan.total_steps // plan.params.epochs, 1) - 1
    return sorted(set(np.linspace(0, last, most).astype(int).tolist()))


def _of_plan(plan: Plan) -> Measurements:
    """Measurements whose trainer takes a second for each unit of cost, and of the plan nothing but its steps."""
    params = plan.params
    work = Work(
        steps=[plan.sizes(step) for step in sampled_steps(plan, SAMPLED_STEPS)],
        tokens_per_epoch=1,
        epochs=params.epochs,
        microbatch_tokens=params.microbatch_tokens,
        microbatch_draft_tokens=params.microbatch_draft_tokens,
        anchors=params.anchors,
        bytes_per_token=1,
    )
    room = Room(gpu_bytes=None, host_bytes=1, slot_bytes=1)
    return Measurements(producers=[ProducerRate(tokens_per_s=1)], trainer=TrainerRate(cost_s=1), work=work, room=room)
