"""A rank's line to the coordinator, which keeps what GO says beside the micro-step."""

from __future__ import annotations

import time

from protocol.job import Job, run_token
from protocol.messages import AnyMessage, Go
from protocol.peer import Peer, hello


class RankPeer(Peer):
    """`orders` holds the newest GO of each step that has not been taken from it."""

    def __init__(self, job: Job, rank: int) -> None:
        self.orders: dict[int, Go] = {}
        self._trained_s, self._heard_s = job.trained_s, time.monotonic()
        greeting = hello("consumer", f"consumer-{rank}", rank, run_token(), job.schema)
        super().__init__(job.address, job.run_id, greeting, job.hang_s)

    def trained_s(self) -> float:
        """Seconds that the run has trained by now: what the newest GO said, and the time since."""
        return self._trained_s + time.monotonic() - self._heard_s

    def _hand_over(self, message: AnyMessage) -> None:
        # Before the training loop can learn of it: a stop may overtake the step that is under way.
        if isinstance(message, Go):
            self._trained_s, self._heard_s = message.trained_s, time.monotonic()
            self.orders[message.step] = message
        super()._hand_over(message)
