"""One training rank: `python -P -m consumer.worker RUN_DIR RANK RING_FD`, started by the launcher.

Exit codes: 0 the plan is done, or the run was told to finish; 75 stopped at a step boundary after a checkpoint; 1 and 2
as everywhere.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from consumer.beginning import begin
from consumer.busy import Busy, memory_bytes
from consumer.checkpointer import Checkpointer, postponement
from consumer.config import DrafterConfig, EvalConfig, TrainConfig
from consumer.drafter import Drafter
from consumer.evaluator import Evaluator, held_out_rows
from consumer.export import export
from consumer.facts import export_facts
from consumer.feed import Feed
from consumer.gpu_step import masks_for
from consumer.memory import saying_what_to_lower
from consumer.outcome import Pending, StepResult
from consumer.precision import compute_dtype
from consumer.prefetch import pinned_ring
from consumer.rank_peer import RankPeer
from consumer.reduce import join_ranks, leave_ranks
from consumer.saver import Saver
from consumer.schedule import Pace
from consumer.shape import DrafterShape
from consumer.skips import Skips, skipped_row
from consumer.state import capture_weights
from consumer.target_ends import TargetEnds, read_target_ends
from consumer.trainer import Trainer
from consumer.warm_start import first_measure
from consumer.warm_up import warm_up
from protocol.arena import Arena
from protocol.child import run_child
from protocol.cursor import Cursor, cursor_at
from protocol.dataset import TokenDataset
from protocol.errors import FinalError, RunError
from protocol.job import Job, read_job, read_section
from protocol.messages import Checkpointed, Go, Reached, Report
from protocol.plan import Plan

STOPPED = 75
# Every rank says what so many steps took it at once: a message a step and rank would be a fifth of all messages.
BUSY_STEPS = 10


class Rank:
    """Everything that one rank holds while it trains."""

    def __init__(self, run_dir: Path, rank: int, arena: Arena) -> None:
        self.run_dir, self.rank = run_dir, rank
        self.job: Job = read_job(run_dir)
        self.config = read_section(run_dir, "train", TrainConfig)
        self.device = torch.device(self.job.consumers[rank])
        self.dataset = TokenDataset.open(Path(self.job.dataset_dir))
        self.plan = Plan(self.dataset.lengths, self.dataset.eligible, self.job.plan, self.dataset.fingerprint)
        if self.plan.hash != self.job.plan_hash:  # else this rank would end, or reduce, when others do not
            raise RunError(f"{self.job.dataset_dir} holds another dataset than the run was planned with")
        self.ends: TargetEnds = read_target_ends(run_dir / "target_io.safetensors", self.device)
        rows = held_out_rows(run_dir, rank)
        self.shape = msgspec.convert(self.job.shape, DrafterShape)
        self.drafter = Drafter(self.shape, compute_dtype(self.config.precision, self.device)).to(self.device)
        params, ends, steps = self.job.plan, self.ends, self.plan.total_steps
        masks = masks_for(self.drafter, params.microbatch_tokens, params.microbatch_draft_tokens)
        self.trainer = Trainer(self.drafter, ends.embedding, ends.head, self.config, steps, masks)
        cursor, best = begin(run_dir, self.job, self.drafter, self.trainer.optimiser, self.ends, self.config.seed)
        self.samples_trained = cursor.samples_trained if cursor is not None else 0
        self.tokens_trained = cursor.tokens_trained if cursor is not None else 0
        # That of the newest GO, and what of it the disk already knows.
        self.cooldown_step = self.saved_cooldown = cursor.cooldown_step if cursor is not None else None
        evaluation = read_section(run_dir, "eval", EvalConfig)
        self.evaluator = Evaluator(self.drafter, self.ends, rows, evaluation, best, self.report)
        self.open_step: tuple[int, Pending, float] | None = None  # whose outcome nobody has asked for yet
        self.settled_s = time.monotonic()
        self.skips, self.busy = Skips(self.config.skip_limit), Busy(self.device)
        self.busy_s: list[float] = []  # of the newest steps, not reported yet
        self.saver = Saver(
            run_dir / "checkpoints",
            self.config.keep_checkpoints,
            durable=self._say_durable,
            failed=lambda reason: self.report("event", {"what": "checkpoint failed", "text": reason}),
        )
        self.checkpointer = self._make_checkpointer()
        if masks is not None:
            warm_up(self.trainer, self.job, int(self.dataset.lengths.max()), self.device)
        self.peer = RankPeer(self.job, rank)
        self.feed = Feed(self.peer, arena, self.device, len(self.job.taps), rows=self.dataset)
        self.feed.quarantined = dict(self.job.quarantined)

    def run(self) -> int:
        """Trains until the plan, the coordinator or a stop ends it; returns the exit code."""
        step = self.job.start_step
        if step == 0:
            self.evaluator.baselines(self.dataset)
            self.evaluator.evaluate(0)
            init_from = read_section(self.run_dir, "drafter", DrafterConfig).init_from
            if init_from is not None and self.evaluator.last is not None:
                self.report("event", first_measure(init_from, self.evaluator.last))
        self._arrive(step)
        self.settled_s = time.monotonic()
        while step < self.plan.total_steps:
            go = self._micro_steps(step)
            if go.stop:
                self._settle()
                return self._finish(step) if go.finish else self._stop(step)
            step += 1
            busy = self._has_work_at(step)
            if not busy:  # said before the reduction, so that GO is there when it is done
                self._arrive(step)
            outcome = self.trainer.finish_step(step - 1, self._pace(go))
            self._settle()  # the step before: by now the device has this one's work
            self.open_step = step, outcome, self.feed.waited_s
            self.feed.waited_s = 0.0
            if busy or outcome.known:
                self._settle()
            if busy:
                self._at_boundary(step)
                self._arrive(step)
        self._settle()
        return self._finish(step)

    def report(self, kind: str, row: dict[str, Any]) -> None:
        """A row for metrics.jsonl."""
        self.peer.send(Report(kind=kind, row=row))

    # --- inside ---

    def _micro_steps(self, step: int) -> Go:
        """All micro-steps of a step, unless the run is to stop before it; the last GO for it."""
        micro_step, micro_steps = 0, 1
        while micro_step < micro_steps:
            block = self.feed.next(step, micro_step)
            if micro_step == 0:
                self._note_cooldown(step)
            if block is None:
                break
            with self.busy:
                self.trainer.micro_step(block)
            micro_step, micro_steps = micro_step + 1, block.micro_steps
        return self.peer.orders.pop(step)

    def _note_cooldown(self, step: int) -> None:
        """A cool-down that begins here is in a checkpoint of this very boundary: it must outlive this start, and the
        weights before it are worth keeping."""
        ordered = self.peer.orders[step].cooldown_step
        self.cooldown_step = None if ordered < 0 else ordered
        if self.cooldown_step == step != self.saved_cooldown and self.checkpointer is not None:
            self._settle()
            self.checkpointer.scheduled(step, self._cursor(step), self.evaluator.best, again=True)
            self.saved_cooldown = step

    def _pace(self, go: Go) -> Pace:
        hours = self.config.max_hours
        return Pace(go.trained_s / (hours * 3600) if hours is not None else 0.0, self.cooldown_step)

    def _settle(self) -> None:
        """Waits for the newest step, counts it and says what it came to."""
        if self.open_step is None:
            return
        (step, outcome, wait_s), self.open_step = self.open_step, None
        result = outcome.result()
        self.samples_trained += result.samples
        self.tokens_trained += result.tokens
        self.peer.progress = step
        before_s, self.settled_s = self.settled_s, time.monotonic()
        self._report_step(step, result, self.settled_s - before_s, wait_s)

    def _report_step(self, step: int, result: StepResult, step_s: float, wait_s: float) -> None:
        """What every rank says of its own work, and the first of all ranks'. Raises FinalError when too many steps were
        skipped."""
        self.busy_s.append(self.busy.take())
        if step == self.job.start_step + 1 or len(self.busy_s) == BUSY_STEPS:
            on_gpu, on_host = memory_bytes(self.device)
            memory = {"gpu_memory_bytes": on_gpu, "rss_bytes": on_host}
            self.report("rank", {"rank": self.rank, "step": step, "busy_s": self.busy_s} | memory)
            self.busy_s = []
        # Without any anchor there was nothing to learn, and so nothing that could be wrong.
        skipped = result.skipped and result.anchors > 0
        if self.rank == 0:
            trained = {"samples_trained": self.samples_trained, "tokens_trained": self.tokens_trained}
            work = {"draft_tokens": result.anchors * self.shape.block_size, "tokens_per_s": result.tokens / step_s}
            clock = {"step_s": step_s, "wait_s": wait_s}
            row = {"step": step, "epoch": self.plan.locate(step - 1)[0]} | result.row() | {"skipped": skipped}
            self.report("step", row | trained | work | clock)
            if skipped:
                samples = [sample for sample in self.plan.samples(step - 1) if str(sample) not in self.feed.quarantined]
                self.report("event", skipped_row(step, result.loss, result.grad_norm, samples))
        try:
            self.skips.note(skipped)
        except FinalError:
            self.saver.wait()
            self.peer.close()
            raise

    def _arrive(self, step: int) -> None:
        """Lets the coordinator count this rank in for `step`: no rank enters a reduction that another is not at."""
        self.peer.send(Reached(step=step))

    def _has_work_at(self, step: int) -> bool:
        """Whether this rank evaluates or saves at the boundary before `step`: only the first does."""
        if self.checkpointer is None:
            return False
        return step == self.plan.total_steps or self.evaluator.due(step) or self.checkpointer.due(step)

    def _at_boundary(self, step: int) -> None:
        if self.evaluator.due(step) and self.evaluator.evaluate(step):
            self._checkpoint(step, is_best=True)
        elif self.checkpointer is not None and self.checkpointer.due(step) and step < self.plan.total_steps:
            self.checkpointer.scheduled(step, self._cursor(step), self.evaluator.best)

    def _checkpoint(self, step: int, is_best: bool = False) -> None:
        """One that cannot be postponed."""
        if self.checkpointer is not None:
            self.checkpointer.take(step, self._cursor(step), self.evaluator.best, is_best, again=is_best)

    def _cursor(self, step: int) -> Cursor:
        quarantined = {int(sample): reason for sample, reason in self.feed.quarantined.items()}
        trained = self.samples_trained, self.tokens_trained, round(self.peer.trained_s(), 3)
        return cursor_at(self.plan, step, quarantined, *trained, self.cooldown_step)

    def _say_durable(self, step: int, stall_s: float, write_s: float) -> None:
        self.peer.send(Checkpointed(next_step=step, stall_s=round(stall_s, 6), write_s=round(write_s, 6)))

    def _stop(self, step: int) -> int:
        self._checkpoint(step)
        return self._leave(STOPPED)

    def _finish(self, step: int) -> int:
        """The run is done: evaluation, checkpoint, export."""
        if self.rank == 0:
            measured = self.evaluator.evaluated_step == step
            self._checkpoint(step, is_best=not measured and self.evaluator.evaluate(step))
            self.saver.wait()
            if not self.saver.last_error:
                facts = export_facts(self.run_dir, self._cursor(step)) | {"acceptance_length": self.evaluator.last}
                export(capture_weights(self.drafter), self.shape, self.run_dir / "export", facts)
        return self._leave(0)

    def _leave(self, code: int) -> int:
        self.saver.wait()
        self.peer.close()
        leave_ranks()
        if self.saver.last_error:
            raise FinalError(self.saver.last_error)
        return code

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
    arena = Arena(ring_fd, job.slots, job.slot_bytes)
    with saying_what_to_lower(job.plan), pinned_ring(arena, device):
        code = Rank(run_dir, rank, arena).run()
    if code:
        sys.exit(code)


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    run_child(f"consumer-{arguments[1]}", lambda: main(*arguments))
