"""What a signal means: the first asks for an orderly end, a second interrupt for an immediate one."""

from __future__ import annotations

import signal


class Interrupted(Exception):
    """A second interrupt: end at once."""


class Signals:
    """Counts the wishes to end. TERM, INT, USR1 and HUP ask for an orderly end; INT again for an immediate one."""

    def __init__(self) -> None:
        self.wishes = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self.wishes += 1 if number == signal.SIGINT or not self.wishes else 0
