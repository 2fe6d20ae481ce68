"""What a signal means: the first asks for an orderly end, a second interrupt for an immediate one.

USR2 asks for a cool-down and then the end.
"""

from __future__ import annotations

import signal


class Interrupted(Exception):
    """A second interrupt: end at once."""


class Signals:
    """Counts the wishes to end. TERM, INT, USR1 and HUP ask for an orderly end; INT again for an immediate one.
    `cooldown`: whether USR2 has asked for a cool-down."""

    def __init__(self) -> None:
        self.wishes = 0
        self.cooldown = False
        signal.signal(signal.SIGUSR2, self._note_cooldown)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self.wishes += 1 if number == signal.SIGINT or not self.wishes else 0

    def _note_cooldown(self, _number: int, _frame: object) -> None:
        self.cooldown = True


def end_at_once() -> list[int]:
    """From here on INT, TERM, HUP and USR1 raise Interrupted, for work that loses nothing by it; the list that is
    returned then holds the signal's number."""
    asked: list[int] = []

    def end(number: int, _frame: object) -> None:
        asked.append(number)
        raise Interrupted

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, end)
    return asked
