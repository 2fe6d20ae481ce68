"""Acceptance length during training, on the first rank: before the first step, every so often, and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from consumer.acceptance import EvalRows, load_eval_rows, measure
from consumer.baselines import baseline_acceptance, fit
from consumer.config import EvalConfig
from consumer.drafter import Drafter, load
from consumer.state import capture_weights
from consumer.target_ends import TargetEnds
from consumer.walk import acceptance_row
from protocol.dataset import TokenDataset
from protocol.job import read_section

# Tokens that the n-gram baselines are fitted on at most: counting more takes minutes and changes little.
BASELINE_TOKENS = 5_000_000


class _HeldOut(msgspec.Struct):
    """Of [data], the one thing that a consumer asks: whether there are prompts to evaluate on."""

    eval: list[Any]


def held_out_rows(run_dir: Path, rank: int) -> EvalRows | None:
    """The rows that the first rank measures on. The configuration decides whether there are any, not the disk: a file
    that went missing is an error, and one that an earlier configuration left is no reason to evaluate."""
    if rank != 0 or not read_section(run_dir, "data", _HeldOut).eval:
        return None
    return load_eval_rows(run_dir / "eval.safetensors")


class Evaluator:
    """Measures `drafter` on `rows` and reports (kind, row); without rows it does nothing. `best` is the highest
    acceptance length that the run has measured after a step (0: none), `last` the newest."""

    def __init__(
        self,
        drafter: Drafter,
        ends: TargetEnds,
        rows: EvalRows | None,
        config: EvalConfig,
        best: float,
        report: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.best = best
        self.last: float | None = None
        self.evaluated_step: int | None = None
        self._drafter, self._ends, self._rows, self._config, self._report = drafter, ends, rows, config, report

    def due(self, step: int) -> bool:
        """Whether the boundary before `step` is one at which it measures, the last one of the run aside."""
        return self._config.every > 0 and step % self._config.every == 0

    def evaluate(self, step: int) -> bool:
        """Measures and reports; whether these weights are the best so far."""
        if self._rows is None:
            return False
        started = time.monotonic()
        # The weights as they are saved and served, norms rounded too: what is measured is what is exported.
        served = Drafter(self._drafter.shape, self._drafter.compute_dtype).to(self._ends.embedding.device)
        load(served, capture_weights(self._drafter))
        limit = self._config.max_new_tokens
        found = measure(served, self._ends.embedding, self._ends.head, self._rows, max_new_tokens=limit)
        self._report("eval", {"step": step, "seconds": time.monotonic() - started} | acceptance_row(found))
        self.last, self.evaluated_step = found.mean, step
        # What has not been trained is not saved, so it cannot be the best checkpoint.
        improved = step > 0 and found.mean > self.best
        self.best = found.mean if improved else self.best
        return improved

    def baselines(self, dataset: TokenDataset) -> None:
        """Reports what token statistics of the training data alone would be accepted."""
        if self._rows is None:
            return
        enough = int((dataset.lengths.cumsum() <= BASELINE_TOKENS).sum())
        ngrams = fit((dataset.tokens(row), dataset.mask(row)) for row in range(max(enough, 1)))
        found = baseline_acceptance(
            ngrams,
            self._rows.answers,
            block_size=self._drafter.shape.block_size,
            max_new_tokens=self._config.max_new_tokens,
        )
        self._report("baseline", {name: acceptance_row(acceptance) for name, acceptance in found.items()})
