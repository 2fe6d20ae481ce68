"""One training rank: `python -P -m consumer.worker RUN_DIR RANK RING_FD`, started by the launcher.

Exit codes: 0 the plan is done, 75 stopped at a step boundary after a checkpoint, 1 and 2 as everywhere.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from consumer.acceptance import EvalRows, load_eval_rows, measure
from consumer.baselines import baseline_acceptance, fit
from consumer.checkpoint import read_state
from consumer.checkpointer import Checkpointer
from consumer.checkpoints import read_cursor, read_manifest
from consumer.config import DrafterConfig, EvalConfig, TrainConfig
from consumer.drafter import Drafter, initialise, load
from consumer.export import export
from consumer.facts import export_facts
from consumer.feed import Feed
from consumer.reduce import join_ranks, leave_ranks
from consumer.saver import Saver
from consumer.shape import DrafterShape
from consumer.state import capture_weights, restore_state
from consumer.target_ends import TargetEnds, read_target_ends
from consumer.target_init import copy_target_layers
from consumer.trainer import Trainer
from consumer.walk import acceptance_row
from consumer.warm_start import warm_start
from protocol.arena import Arena
from protocol.child import run_child
from protocol.cpu import cpu_has_bfloat16
from protocol.cursor import Cursor, cursor_at
from protocol.dataset import TokenDataset
from protocol.errors import FinalError, RunError
from protocol.job import Job, read_job, read_section, run_token
from protocol.messages import Checkpointed, Reached, Report
from protocol.peer import Peer, hello
from protocol.plan import Plan

STOPPED = 75
# Tokens that the n-gram baselines are fitted on at most: counting more takes minutes and changes little.
BASELINE_TOKENS = 5_000_000

log = logging.getLogger(__name__)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """bf16 where the machine multiplies it in hardware, unless the config says otherwise."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" or cpu_has_bfloat16() else torch.float32
    return torch.float32 if precision == "fp32" else torch.bfloat16


def postponement(step: int) -> dict[str, Any]:
    """The row for a checkpoint that is not taken at its step."""
    text = f"checkpoint at step {step} is postponed: the one before is still being written"
    return {"what": "checkpoint postponed", "text": text, "step": step}


class _HeldOut(msgspec.Struct):
    """Of [data], the one thing that a consumer asks: whether there are prompts to evaluate on."""

    eval: list[Any]


class Rank:
    """Everything that one rank holds while it trains."""

    def __init__(self, run_dir: Path, rank: int, ring_fd: int) -> None:
        self.run_dir, self.rank = run_dir, rank
        self.job: Job = read_job(run_dir)
        self.config = read_section(run_dir, "train", TrainConfig)
        self.evaluation = read_section(run_dir, "eval", EvalConfig)
        self.device = torch.device(self.job.consumers[rank])
        self.dataset = TokenDataset.open(Path(self.job.dataset_dir))
        self.plan = Plan(self.dataset.lengths, self.dataset.eligible, self.job.plan, self.dataset.fingerprint)
        if self.plan.hash != self.job.plan_hash:  # else this rank would end, or reduce, when others do not
            raise RunError(f"{self.job.dataset_dir} holds another dataset than the run was planned with")
        self.ends: TargetEnds = read_target_ends(run_dir / "target_io.safetensors", self.device)
        self.eval_rows = self._eval_rows()
        self.shape = msgspec.convert(self.job.shape, DrafterShape)
        self.drafter = Drafter(self.shape, compute_dtype(self.config.precision, self.device)).to(self.device)
        self.trainer = Trainer(self.drafter, self.ends.embedding, self.ends.head, self.config, self.plan.total_steps)
        self.samples_trained = self.tokens_trained = 0
        self.best = 0.0
        self.last: float | None = None
        self._start_from()
        self.saver = Saver(
            run_dir / "checkpoints",
            self.config.keep_checkpoints,
            durable=self._say_durable,
            failed=lambda reason: self.report("event", {"what": "checkpoint failed", "text": reason}),
        )
        self.checkpointer = self._make_checkpointer()
        self.peer = Peer(self.job.address, self.job.run_id, self._hello(), self.job.hang_s)
        arena = Arena(ring_fd, self.job.slots, self.job.slot_bytes)
        self.feed = Feed(self.peer, arena, self.device, len(self.job.taps), rows=self.dataset)
        self.feed.quarantined = dict(self.job.quarantined)

    def run(self) -> int:
        """Trains to the end of the plan or to a stop; returns the exit code."""
        step = self.job.start_step
        if step == 0:
            self._evaluate_baselines()
            self._evaluate(0)
        self._arrive(step)
        while step < self.plan.total_steps:
            started = time.monotonic()
            self.feed.waited_s = 0.0
            if not self._micro_steps(step):
                self._checkpoint(step)
                return self._leave(STOPPED)
            step += 1
            busy = self._has_work_at(step)
            if not busy:  # said before the reduction, so that GO is there when it is done
                self._arrive(step)
            result = self.trainer.finish_step(step - 1)
            self.samples_trained += result.samples
            self.tokens_trained += result.tokens
            self.peer.progress = step
            if self.rank == 0:
                clock = {"step_s": time.monotonic() - started, "wait_s": self.feed.waited_s}
                trained = {"samples_trained": self.samples_trained, "tokens_trained": self.tokens_trained}
                epoch = self.plan.locate(step - 1)[0]
                self.report("step", {"step": step, "epoch": epoch} | result.row() | trained | clock)
            if busy:
                self._at_boundary(step)
                self._arrive(step)
        self.saver.wait()
        if not self.saver.last_error:
            self._export(step)
        return self._leave(0)

    def report(self, kind: str, row: dict[str, Any]) -> None:
        """A row for metrics.jsonl."""
        self.peer.send(Report(kind=kind, row=row))

    # --- inside ---

    def _micro_steps(self, step: int) -> bool:
        """All micro-steps of a step; False when the run is to stop before it."""
        micro_step, micro_steps = 0, 1
        while micro_step < micro_steps:
            block = self.feed.next(step, micro_step)
            if block is None:
                return False
            self.trainer.micro_step(block)
            micro_step, micro_steps = micro_step + 1, block.micro_steps
        return True

    def _arrive(self, step: int) -> None:
        """Lets the coordinator count this rank in for `step`: no rank enters a reduction that another is not at."""
        self.peer.send(Reached(step=step))

    def _evaluates_at(self, step: int) -> bool:
        every = self.evaluation.every
        return step == self.plan.total_steps or (every > 0 and step % every == 0)

    def _has_work_at(self, step: int) -> bool:
        """Whether this rank evaluates or saves at the boundary before `step`: only the first does."""
        return self.checkpointer is not None and (self._evaluates_at(step) or self.checkpointer.due(step))

    def _at_boundary(self, step: int) -> None:
        improved = self._evaluates_at(step) and self._evaluate(step)
        if improved or step == self.plan.total_steps:
            self._checkpoint(step, improved)
        elif self.checkpointer is not None and self.checkpointer.due(step):
            self.checkpointer.scheduled(step, self._cursor(step), self.best)

    def _checkpoint(self, step: int, is_best: bool = False) -> None:
        """One that cannot be postponed."""
        if self.checkpointer is not None:
            self.checkpointer.take(step, self._cursor(step), self.best, is_best)

    def _cursor(self, step: int) -> Cursor:
        quarantined = {int(sample): reason for sample, reason in self.feed.quarantined.items()}
        return cursor_at(self.plan, step, quarantined, self.samples_trained, self.tokens_trained)

    def _say_durable(self, step: int, stall_s: float, write_s: float) -> None:
        self.peer.send(Checkpointed(next_step=step, stall_s=round(stall_s, 6), write_s=round(write_s, 6)))

    def _evaluate(self, step: int) -> bool:
        """Measures and reports acceptance on rank 0; whether it is the best so far."""
        if self.rank != 0 or self.eval_rows is None:
            return False
        started = time.monotonic()
        limit = self.evaluation.max_new_tokens
        # The weights as they are saved and served, norms rounded too: what is measured is what is exported.
        served = Drafter(self.shape, self.drafter.compute_dtype).to(self.device)
        load(served, capture_weights(self.drafter))
        found = measure(served, self.ends.embedding, self.ends.head, self.eval_rows, max_new_tokens=limit)
        self.report("eval", {"step": step, "seconds": time.monotonic() - started} | acceptance_row(found))
        # What has not been trained is not saved, so it cannot be the best checkpoint.
        self.last = found.mean
        improved = step > 0 and found.mean > self.best
        self.best = found.mean if improved else self.best
        return improved

    def _evaluate_baselines(self) -> None:
        if self.rank != 0 or self.eval_rows is None:
            return
        enough = int((self.dataset.lengths.cumsum() <= BASELINE_TOKENS).sum())
        ngrams = fit((self.dataset.tokens(row), self.dataset.mask(row)) for row in range(max(enough, 1)))
        found = baseline_acceptance(
            ngrams,
            self.eval_rows.answers,
            block_size=self.shape.block_size,
            max_new_tokens=self.evaluation.max_new_tokens,
        )
        self.report("baseline", {name: acceptance_row(acceptance) for name, acceptance in found.items()})

    def _export(self, step: int) -> None:
        if self.rank == 0:
            facts = export_facts(self.run_dir, self._cursor(step)) | {"acceptance_length": self.last}
            export(capture_weights(self.drafter), self.shape, self.run_dir / "export", facts)

    def _leave(self, code: int) -> int:
        self.saver.wait()
        self.peer.close()
        leave_ranks()
        if self.saver.last_error:
            raise FinalError(self.saver.last_error)
        return code

    def _start_from(self) -> None:
        """The checkpoint to resume from, the export to start from, or fresh weights."""
        config = read_section(self.run_dir, "drafter", DrafterConfig)
        if self.job.checkpoint is not None:
            checkpoint = Path(self.job.checkpoint)
            cursor = read_cursor(checkpoint)
            self.samples_trained, self.tokens_trained = cursor.samples_trained, cursor.tokens_trained
            self.best = read_manifest(checkpoint).best_acceptance
            restore_state(self.drafter, self.trainer.optimiser, read_state(checkpoint))
        elif config.init_from is not None:
            warm_start(self.drafter, self.trainer.optimiser, Path(config.init_from), config.init_optimiser)
        else:
            initialise(self.drafter, self.config.seed)
            if config.init == "target":
                copy_target_layers(self.drafter, self.run_dir / "drafter_init.safetensors")

    def _make_checkpointer(self) -> Checkpointer | None:
        """The first rank's, with the memory that it needs; the others save nothing."""
        if self.rank != 0:
            return None
        return Checkpointer(
            self.saver,
            self.drafter,
            self.trainer.optimiser,
            self.ends.fingerprint,
            self.config.checkpoint_every,
            saved_step=self.job.start_step if self.job.checkpoint is not None else -1,
            postponed=lambda step: self.report("event", postponement(step)),
        )

    def _eval_rows(self) -> EvalRows | None:
        """The rows that the first rank measures on. The configuration decides whether there are any, not the disk: a
        file that went missing is an error, and one that an earlier configuration left is no reason to evaluate."""
        if self.rank != 0 or not read_section(self.run_dir, "data", _HeldOut).eval:
            return None
        return load_eval_rows(self.run_dir / "eval.safetensors")

    def _hello(self) -> Any:
        return hello("consumer", f"consumer-{self.rank}", self.rank, run_token(), self.job.schema)


def main(run_dir: Path, rank: int, ring_fd: int) -> None:
    job = read_job(run_dir)
    device = torch.device(job.consumers[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if job.consumer_bytes:
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(job.consumer_bytes / total_bytes, device)
    else:
        torch.use_deterministic_algorithms(True)
    join_ranks(device)
    code = Rank(run_dir, rank, ring_fd).run()
    if code:
        sys.exit(code)


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    run_child(f"consumer-{arguments[1]}", lambda: main(*arguments))
