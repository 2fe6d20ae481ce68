"""From measured parts to the tokens/s of one split, and to what limits it. Pure.

With P = producers x rate (each capped by its link) and C = tokens / time of the steps, where a step takes as long as
its slowest rank, its blocks cut for so many ranks as the plan cuts them, then the reduction and the optimiser:

    own GPUs      min(P, C), or less where the ring has too few slots for the unevenness of blocks (launch/pipeline.py)
    shared GPUs   1 / (1/P + 1/C)

An all-reduce over n ranks moves 2 (n - 1) / n of the gradients, so that what n ranks took says what others take.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from launch.measurements import Measurements, ProducerRate
from launch.pipeline import makespan_s
from protocol.packing import DRAFT_TOKEN_COST, BlockSpec, Item, cut

Limit = Literal["producers", "link", "trainers", "ranks", "all-reduce", "ring", "sharing", "memory"]

# Below this share of what both sides would do alone, the ring is what limits.
RING_COSTS = 0.97
# Below this share of so many times one rank, it is not the ranks' own speed that limits the trainers.
RANKS_COST = 0.85
# How far off a prediction may be beside the spread of what was measured: what the model leaves out.
MODEL_ERROR = 0.05
# The simulated stretch has so many times the ring's blocks.
RINGS_FULL = 8


class Split(NamedTuple):
    """GPUs of each side; `shared`: both roles on the same ones."""

    producers: int
    consumers: int
    tensor_parallel: int = 1
    shared: bool = False


class Rates(NamedTuple):
    """Tokens/s of a split, of each side alone, and of so many times one rank."""

    tokens_per_s: float
    producers: float
    trainers: float
    trainers_ideal: float
    limited_by: Limit


class Model:
    """Of one set of measurements; `faster` scales both sides' speed."""

    def __init__(self, measured: Measurements, faster: float = 1.0) -> None:
        self._measured, self._faster = measured, faster
        self._cuts: dict[int, list[list[BlockSpec]]] = {}
        self._alone: dict[int, float] = {}

    def rates(self, split: Split, slots: int) -> Rates:
        """Of a split with so many slots in its ring; `split.tensor_parallel` must have been measured."""
        rate = self._producer(split.tensor_parallel)
        replicas = split.producers // split.tensor_parallel
        producers = replicas * rate
        trainers, ideal = self.trainers(split.consumers), split.consumers * self.trainers(1)
        if split.shared:
            return Rates(1 / (1 / producers + 1 / trainers), producers, trainers, ideal, "sharing")
        together = min(producers, trainers)
        reached = min(together, self._through(split.consumers, replicas, rate, slots))
        return Rates(reached, producers, trainers, ideal, self._limit(split, reached, producers, trainers, ideal))

    def trainers(self, ranks: int) -> float:
        """Tokens/s of so many ranks whose blocks are always there."""
        if ranks not in self._alone:
            seconds = sum(self._step_s(blocks, ranks) for blocks in self._cut(ranks))
            self._alone[ranks] = min(self._tokens / seconds, ranks * self._link)
        return self._alone[ranks]

    def reduction_s(self, ranks: int) -> float:
        """Of one step's gradients; 0 where none was measured."""
        known = self._measured.reductions
        if ranks < 2 or not known:
            return 0.0
        nearest = min(known, key=lambda each: (abs(each.ranks - ranks), each.ranks))
        return nearest.seconds * _moved(ranks) / _moved(nearest.ranks) / self._faster

    # --- inside ---

    @cached_property
    def _tokens(self) -> int:
        return sum(tokens for step in self._measured.work.steps for tokens, _ in step)

    @cached_property
    def _link(self) -> float:
        """Tokens/s of one GPU's link."""
        link = self._measured.room.link_bytes_per_s
        return link * self._faster / self._measured.work.bytes_per_token if link is not None else float("inf")

    def _producer(self, tensor_parallel: int) -> float:
        return min(rate_of(self._measured.producers, tensor_parallel).tokens_per_s * self._faster, self._link)

    def _cut(self, ranks: int) -> list[list[BlockSpec]]:
        if ranks not in self._cuts:
            work = self._measured.work
            bounds = (work.microbatch_tokens, work.microbatch_draft_tokens)
            steps = [[Item(place, *sizes) for place, sizes in enumerate(step)] for step in work.steps]
            self._cuts[ranks] = [cut(number, items, ranks, *bounds) for number, items in enumerate(steps)]
        return self._cuts[ranks]

    def _block_s(self, block: BlockSpec) -> float:
        trainer = self._measured.trainer
        cost = block.tokens + DRAFT_TOKEN_COST * block.draft_tokens
        return (trainer.block_s + trainer.cost_s * cost) / self._faster

    def _finish_s(self, ranks: int) -> float:
        own_s = (self._measured.trainer.finish_s + self._measured.work.stall_s) / self._faster
        return own_s + self.reduction_s(ranks)

    def _step_s(self, blocks: Sequence[BlockSpec], ranks: int) -> float:
        busy = [0.0] * ranks
        for block in blocks:
            busy[block.rank] += self._block_s(block) if block.samples else 0.0
        return max(busy) + self._finish_s(ranks)

    def _through(self, ranks: int, replicas: int, rate: float, slots: int) -> float:
        """Tokens/s of both sides together, the ring between them."""
        steps = self._cut(ranks)
        times = max(1, -(-RINGS_FULL * slots // sum(len(blocks) for blocks in steps)))
        finish_s = self._finish_s(ranks)
        spent_s = makespan_s(
            steps * times, ranks, self._block_s, finish_s, replicas, lambda block: block.tokens / rate, slots
        )
        return self._tokens * times / spent_s

    def _limit(self, split: Split, reached: float, producers: float, trainers: float, ideal: float) -> Limit:
        if reached < RING_COSTS * min(producers, trainers):
            return "ring"
        if producers <= trainers:
            measured = rate_of(self._measured.producers, split.tensor_parallel).tokens_per_s * self._faster
            return "link" if measured > self._link else "producers"
        if trainers >= RANKS_COST * ideal:
            return "trainers"
        reduced_s = self.reduction_s(split.consumers)
        step_s = self._tokens / trainers / len(self._measured.work.steps)
        lost_s = step_s - self._tokens / ideal / len(self._measured.work.steps)
        return "all-reduce" if reduced_s > lost_s / 2 else "ranks"


def rate_of(producers: Sequence[ProducerRate], tensor_parallel: int) -> ProducerRate:
    """The measured rate of a producer on so many GPUs."""
    return next(rate for rate in producers if rate.tensor_parallel == tensor_parallel)


def _moved(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks
