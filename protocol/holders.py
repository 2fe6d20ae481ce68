"""Who can fill blocks, and who has failed which: a failed block goes to somebody else where there is one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct

from protocol.grants import Key


class History(Struct):
    """What went wrong with a block so far: kept through rewinds until it is released or its content changes."""

    tries: int = 0
    deaths: int = 0
    avoid: set[str] = set()


class Holders:
    """Live producers by kind, those lost for good, and the history of every block that failed."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self._live: defaultdict[str, set[str]] = defaultdict(set)
        self._history: dict[Key, History] = {}

    def join(self, holder: str, kind: str) -> None:
        """A producer of this kind is there, unless its name was lost."""
        if holder not in self.lost:
            self._live[kind].add(holder)

    def leave(self, holder: str) -> None:
        """It is there no more."""
        for holders in self._live.values():
            holders.discard(holder)

    def should_leave(self, key: Key, holder: str, kind: str) -> bool:
        """Whether this holder failed the block before and another live one of its kind has not."""
        past = self._history.get(key)
        return past is not None and holder in past.avoid and not self._live[kind] <= past.avoid

    def history(self, key: Key) -> History:
        """The block's history; a fresh one when nothing went wrong."""
        return self._history.get(key, History())

    def failed(self, key: Key, holders: set[str]) -> int:
        """A try failed in the hands of `holders`. Returns the tries so far."""
        past = self._history.setdefault(key, History())
        past.tries += 1
        past.avoid |= holders
        return past.tries

    def died(self, key: Key) -> None:
        """A holder of the block died. That is counted but is no try: whoever kills producers poisons no sample."""
        self._history.setdefault(key, History()).deaths += 1

    def forget_blocks(self, keys: Iterable[Key]) -> None:
        """These blocks were released, or hold other samples now."""
        for key in keys:
            self._history.pop(key, None)

    def forget_before(self, key: Key) -> None:
        """Blocks before `key` are behind the run."""
        self._history = {held: past for held, past in self._history.items() if held >= key}
