"""The plan: epoch -> steps (sample sets) -> blocks. A pure function of lengths, anchors and parameters.

A step's sample set follows from (dataset, seed, epoch, batch_tokens) and from nothing else: the samples in the
epoch's keyed order, taken until the next one would push the step over `batch_tokens`. A step has at least one
sample; the last one of an epoch may be short and is neither dropped nor carried over.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict

import numpy as np
from msgspec import Struct, json
from numpy.typing import NDArray

from protocol import keyed
from protocol.errors import RequestError
from protocol.packing import BlockSpec, Item, cut

EPOCH_ORDER = 1  # sets the draw of an epoch's order apart from every other draw with the same seed and epoch
_CACHED_EPOCHS = 2  # leases run on across the end of an epoch, so two orders are in use at once
_CACHED_STEPS = 64


class PlanParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What shapes a plan. `anchors` is per sample, `block_size` the draft tokens of one anchor.

    `microbatch_tokens` and `microbatch_draft_tokens` bound each block; `consumers` is the number of ranks.
    """

    seed: int
    epochs: int
    batch_tokens: int
    anchors: int
    block_size: int
    microbatch_tokens: int
    microbatch_draft_tokens: int
    consumers: int
    max_steps: int | None = None


class Plan:
    """All steps and blocks of a run, computed when asked for.

    `lengths` int64 `[n]` are the tokens of each sample and `eligible` int64 `[n]` its eligible anchors. Raises
    RequestError when a parameter is not positive, there is no sample, or a sample alone is over a block's bound.
    """

    def __init__(
        self, lengths: NDArray[np.int64], eligible: NDArray[np.int64], params: PlanParams, dataset_fingerprint: str
    ) -> None:
        self.params = params
        self._lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        self._draft_tokens = np.minimum(params.anchors, np.asarray(eligible, dtype=np.int64)) * params.block_size
        _check_params(params)
        _check_samples(self._lengths, self._draft_tokens, params)
        data = hashlib.blake2b(self._lengths.astype("<i8").tobytes(), digest_size=16)
        self.step_hash = _digest("steps", dataset_fingerprint, data.hexdigest(), params.seed, params.batch_tokens)
        data.update(self._draft_tokens.astype("<i8").tobytes())
        bounds = (params.microbatch_tokens, params.microbatch_draft_tokens, params.consumers)
        self.hash = _digest("blocks", self.step_hash, data.hexdigest(), params.anchors, params.block_size, *bounds)
        self._ends: list[NDArray[np.int64]] = []  # per epoch: where each step ends in the epoch's order
        self._first_step: list[int] = [0]  # per epoch, and one more: the first step of the next epoch
        self._orders: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._blocks: OrderedDict[int, list[BlockSpec]] = OrderedDict()

    @property
    def total_samples(self) -> int:
        """Samples of the dataset, quarantined ones included."""
        return len(self._lengths)

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run; the first call cuts every epoch that the run reaches."""
        limit = self.params.max_steps
        while len(self._ends) < self.params.epochs and (limit is None or self._first_step[-1] < limit):
            self._cut_epoch()
        return self._first_step[-1] if limit is None else min(limit, self._first_step[-1])

    def locate(self, step: int) -> tuple[int, int]:
        """`(epoch, step in epoch)` of a step. Raises IndexError for a step that the plan does not have."""
        epoch = self.epoch_at(step)
        limit = self.params.max_steps
        if not 0 <= step < self._first_step[-1] or (limit is not None and step >= limit):
            raise IndexError(f"the plan has no step {step}: it has {self.total_steps}")
        return epoch, step - self._first_step[epoch]

    def epoch_at(self, step: int) -> int:
        """The epoch that starts at or goes on at the boundary before `step`, whatever `max_steps` is."""
        while step >= self._first_step[-1] and len(self._ends) < self.params.epochs:
            self._cut_epoch()
        return bisect_right(self._first_step, step) - 1

    def samples(self, step: int) -> tuple[int, ...]:
        """Sample ids of a step, in the order of its epoch."""
        epoch, inside = self.locate(step)
        ends = self._ends[epoch]
        first = int(ends[inside - 1]) if inside else 0
        return tuple(self._order(epoch)[first : int(ends[inside])].tolist())

    def sizes(self, step: int) -> list[tuple[int, int]]:
        """Tokens and draft tokens of a step's samples, in their order."""
        samples = list(self.samples(step))
        return list(zip(self._lengths[samples].tolist(), self._draft_tokens[samples].tolist(), strict=True))

    def blocks(self, step: int) -> list[BlockSpec]:
        """The k x consumers blocks of a step, by index: block j is micro-step j div N of rank j mod N."""
        if step not in self._blocks:
            params = self.params
            items = [Item(sample, *size) for sample, size in zip(self.samples(step), self.sizes(step), strict=True)]
            bounds = (params.microbatch_tokens, params.microbatch_draft_tokens)
            self._blocks[step] = cut(step, items, params.consumers, *bounds)
            if len(self._blocks) > _CACHED_STEPS:
                self._blocks.popitem(last=False)
        return self._blocks[step]

    def micro_steps(self, step: int) -> int:
        """How many micro-steps every rank runs in a step."""
        return len(self.blocks(step)) // self.params.consumers

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            self._orders[epoch] = keyed.permutation(len(self._lengths), self.params.seed, epoch, EPOCH_ORDER)
            if len(self._orders) > _CACHED_EPOCHS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(epoch)
        return self._orders[epoch]

    def _cut_epoch(self) -> None:
        """Cut the next epoch into steps: where a step starting at i would end, for every i at once, then hop."""
        taken = np.cumsum(self._lengths[self._order(len(self._ends))])
        before = np.concatenate((np.zeros(1, np.int64), taken[:-1]))
        over = np.searchsorted(taken, before + self.params.batch_tokens, side="right")
        next_start = np.maximum(over, np.arange(1, len(taken) + 1)).tolist()
        ends: list[int] = []
        start = 0
        while start < len(next_start):
            start = next_start[start]
            ends.append(start)
        self._ends.append(np.array(ends, dtype=np.int64))
        self._first_step.append(self._first_step[-1] + len(ends))


def _digest(*parts: str | int) -> str:
    return hashlib.blake2b(json.encode(parts), digest_size=16).hexdigest()


def _check_params(params: PlanParams) -> None:
    settings = {
        "train.epochs": params.epochs,
        "train.max_steps": params.max_steps,
        "train.batch_tokens": params.batch_tokens,
        "train.anchors": params.anchors,
        "drafter.block_size": params.block_size,
        "train.microbatch_tokens": params.microbatch_tokens,
        "train.microbatch_draft_tokens": params.microbatch_draft_tokens,
        "the number of consumers": params.consumers,
    }
    for name, value in settings.items():
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}: it must be at least 1")


def _check_samples(lengths: NDArray[np.int64], draft_tokens: NDArray[np.int64], params: PlanParams) -> None:
    if len(lengths) == 0:
        raise RequestError("the dataset has no sample: check data.train and what `draftwire prepare` skipped")
    if len(lengths) != len(draft_tokens):
        raise RequestError(
            f"the dataset has {len(lengths)} lengths but {len(draft_tokens)} anchor counts: prepare it again"
        )
    shortest, longest, widest = int(lengths.argmin()), int(lengths.argmax()), int(draft_tokens.argmax())
    if lengths[shortest] < 1:
        raise RequestError(f"sample {shortest} has {lengths[shortest]} tokens: prepare the dataset again")
    if lengths[longest] > params.microbatch_tokens:
        raise RequestError(
            f"sample {longest} has {lengths[longest]} tokens, over train.microbatch_tokens = "
            f"{params.microbatch_tokens}: raise train.microbatch_tokens or lower data.max_length"
        )
    if draft_tokens[widest] > params.microbatch_draft_tokens:
        raise RequestError(
            f"sample {widest} ({lengths[widest]} tokens) makes {draft_tokens[widest]} draft tokens, over "
            f"train.microbatch_draft_tokens = {params.microbatch_draft_tokens}: raise "
            f"train.microbatch_draft_tokens or lower train.anchors (now {params.anchors} per sample)"
        )
