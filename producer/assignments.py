"""What the coordinator wants of a producer: leases in order, less those that it takes back."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from protocol.messages import AnyMessage, Flush, Lease, Revoke, Spill, Stop


class Assignments:
    """Reads a peer's inbox, for one thread. `spill` is handed what is to be kept, as soon as it is read."""

    def __init__(
        self, inbox: queue.Queue[AnyMessage], spill: Callable[[Spill | Flush], None] = lambda order: None
    ) -> None:
        self._inbox, self._spill = inbox, spill
        self._leases: deque[Lease] = deque()
        self._revoked: set[int] = set()
        self._stop: Stop | None = None

    def next(self) -> Lease | Stop:
        """The next lease, as soon as there is one; STOP overtakes leases."""
        while not self._leases and self._stop is None:
            self._note(self._inbox.get())
        if self._stop is not None:
            return self._stop
        lease = self._leases.popleft()
        # Attempts only grow, so what was taken back before this one will not be asked for again.
        self._revoked = {attempt for attempt in self._revoked if attempt >= lease.attempt}
        return lease

    def wanted(self, lease: Lease) -> bool:
        """Whether there is still a use for this lease, as far as is known by now."""
        while True:
            try:
                self._note(self._inbox.get_nowait())
            except queue.Empty:
                return self._stop is None and lease.attempt not in self._revoked

    def _note(self, message: AnyMessage) -> None:
        match message:
            case Lease():
                self._leases.append(message)
            case Revoke(attempt=attempt):
                self._revoked.add(attempt)
            case Spill() | Flush():
                self._spill(message)
            case Stop():
                self._stop = message
