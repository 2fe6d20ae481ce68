"""Counters and rates of a run, as a person wants to see them. Pure: the clock is handed in."""

from __future__ import annotations

from collections import deque
from typing import Any

from launch.balance import Balance
from launch.conductor import Conductor
from launch.flops import Costs
from protocol.job import Job
from protocol.messages import AnyMessage, Lease, Message, Report, Rewind, Want

# Rates are means over this long: short enough to show a stall, long enough to be read.
RATE_WINDOW_S = 30.0
FIGURES = ("loss", "accuracy")
# Events that a person who watches is told.
TOLD = ("init_from", "skipped", "cooldown", "finish", "cache full", "cache damaged", "cache lost", "cache complete")
NEWS_AT_ONCE = 10


class Tally:
    """Follows the messages of one start of a run; `costs` says what its work is in arithmetic, `balance` how it falls
    on the ranks."""

    def __init__(self, job: Job, costs: Costs, balance: Balance) -> None:
        self._job, self._costs, self._balance = job, costs, balance
        # What fills blocks from a cache beside a target is not counted among the producers.
        self._kind = "model" if job.producers else "replay"
        self._local = len(job.computing_names) or 1
        self._step: dict[str, Any] = {"step": job.start_step}
        self._eval: dict[str, Any] = {}
        self._first_want_s: float | None = None
        self._step_s = self._wait_s = 0.0
        self._steps_here = 0
        self._producing_s = 0.0  # of all producers together, since the first asked for work
        self._producing_until_s = 0.0
        self._history: deque[tuple[float, int, int, float]] = deque()
        self._trained_tokens = 0
        self._trained_flop = 0.0
        self._restarts = self._failed_checkpoints = self._skipped = 0
        self._checkpoint_problem: str | None = None
        self._news: deque[str] = deque(maxlen=NEWS_AT_ONCE)
        self._news_count = 0

    def note(self, message: AnyMessage | Message, now: float) -> None:
        """A message that passed through the coordinator at monotonic time `now`."""
        if isinstance(message, Want | Lease) and message.kind == self._kind and self._first_want_s is None:
            self._first_want_s = self._producing_until_s = now
        if isinstance(message, Report) and message.kind == "step":
            self._skipped += message.row["skipped"]
            # What was not finite, or of no anchor, is no figure of the training.
            learned = message.row["anchors"] and not message.row["skipped"]
            self._step = message.row if learned else message.row | {key: self._step.get(key) for key in FIGURES}
            self._steps_here += 1
            self._step_s += message.row["step_s"]
            self._wait_s += message.row["wait_s"]
            self._trained_tokens += message.row["tokens"]
            self._trained_flop += self._costs.step_flop(message.row["tokens"], message.row["anchors"])
        if isinstance(message, Report) and message.kind == "eval":
            self._eval = message.row
        if isinstance(message, Report) and message.kind == "rank":
            self._balance.note(message.row)
        if isinstance(message, Rewind):
            self._step = {"step": message.step}
            self._balance.rewind()

    @property
    def trained(self) -> tuple[int, int, float, float]:
        """Of this start: steps, their tokens, their seconds, and how many of those were waits."""
        return self._steps_here, self._trained_tokens, self._step_s, self._wait_s

    def step_mfu(self, row: dict[str, Any]) -> float | None:
        """That of the consumers in one step, waits included; None: not known."""
        return self._costs.consumer_mfu(self._costs.step_flop(row["tokens"], row["anchors"]) / row["step_s"])

    def event(self, row: dict[str, Any]) -> None:
        """A row of kind "event" that was written."""
        self._restarts += row["what"] in ("gone", "rewind")
        if row["what"] in TOLD:
            self._news.append(row["text"])
            self._news_count += 1
        if row["what"] == "checkpoint failed":
            self._failed_checkpoints += 1
            self._checkpoint_problem = row["text"]

    def news(self) -> dict[str, Any]:
        """What happened that a person should hear of, in this start: how much of it, and the newest lines."""
        return {"news_count": self._news_count, "news": list(self._news)}

    def _cache(self, conductor: Conductor) -> dict[str, Any] | None:
        """What a spilling run has of its cache; None for any other."""
        state = conductor.spilling.state()
        return state and state | {"replayed_tokens": conductor.replayed_tokens}

    def state(self, conductor: Conductor, now: float) -> dict[str, Any]:
        """The snapshot that the live view, `metrics.jsonl` and `status` share; waits are shares of each side's time."""
        produced = conductor.produced_tokens
        self._history.append((now, produced, self._trained_tokens, self._trained_flop))
        while self._history[0][0] < now - RATE_WINDOW_S and len(self._history) > 2:
            self._history.popleft()
        then, produced_then, trained_then, flop_then = self._history[0]
        span_s = max(now - then, 1e-9)
        if self._first_want_s is not None:
            # Those of other hosts come and go.
            producers = self._local + len(conductor.remotes)
            self._producing_s += (now - self._producing_until_s) * producers
            self._producing_until_s = now
        running_s = self._producing_s
        done = int(self._step["step"])
        last_step, left_s = conductor.pace.last_step, conductor.pace.left_s
        eta_s = self._step_s / self._steps_here * (last_step - done) if self._steps_here else None
        counts = conductor.ledger.counts
        producer_tokens_per_s = (produced - produced_then) / span_s
        return {
            "step": done,
            "steps": last_step,
            "loss": self._step.get("loss"),
            "accuracy": self._step.get("accuracy") or [],
            "acceptance": self._eval.get("acceptance_mean"),
            "acceptance_per_position": self._eval.get("acceptance_per_position", []),
            "producer_tokens_per_s": producer_tokens_per_s,
            "consumer_tokens_per_s": (self._trained_tokens - trained_then) / span_s,
            # What other hosts' devices could do is not known here.
            "producer_mfu": None if conductor.remotes else self._costs.producer_mfu(producer_tokens_per_s),
            "consumer_mfu": self._costs.consumer_mfu((self._trained_flop - flop_then) / span_s),
            "producer_wait_share": max(0.0, 1 - conductor.busy_s / running_s) if running_s else 0.0,
            "consumer_wait_share": self._wait_s / self._step_s if self._step_s else 0.0,
            "remote_producers": conductor.remotes,
            "ring": counts,
            "ring_slots": self._job.slots,
            "bytes_streamed": conductor.streamed_bytes,
            "cache": self._cache(conductor),
            "quarantined": len(conductor.ledger.quarantined),
            "restarts": self._restarts,
            "filled": dict(conductor.filled),
            "checkpoint_problem": self._checkpoint_problem,
            "checkpoints_failed": self._failed_checkpoints,
            "numerics_changed": conductor.numerics_changed,
            "skipped": self._skipped,
            "eta_s": eta_s if left_s is None or (eta_s is not None and eta_s < left_s) else left_s,
        } | self._balance.state()
