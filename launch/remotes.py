"""Producers of other hosts, as far as the coordinator minds them: how many there may be, and whose silence has been too
long. Pure: the clock is handed in.

No launcher reaps them, so silence stands for death. That is safe whatever they still do: only ingest writes the ring
for them, and it is told before their slots go to anyone else.
"""

from __future__ import annotations

# They beat every two seconds; a network that swallows so many beats has most likely been cut.
REMOTE_SILENCE_S = 30.0


class Remotes:
    """Who is joined from other hosts, at most `most` at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heard: dict[str, float] = {}

    def refusal(self, name: str) -> str | None:
        """Why `name` cannot join besides those who are there; one that is there already may come anew."""
        if len(self._heard.keys() - {name}) < self._most:
            return None
        return f"{self._most} producers of other hosts are here already: raise hosts.producers"

    def heard(self, name: str, now: float) -> None:
        """It has joined, or said something."""
        self._heard[name] = now

    def left(self, name: str) -> None:
        self._heard.pop(name, None)

    def silent(self, now: float) -> list[str]:
        """Those of whom nothing was heard for REMOTE_SILENCE_S."""
        return [name for name, heard in self._heard.items() if now - heard > REMOTE_SILENCE_S]
