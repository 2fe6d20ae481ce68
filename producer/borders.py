"""Which tokens of an encoding lie between two characters, without a list of all offsets where two look-ups do.

Offsets ascend. Byte-level tokenizers trim blanks off them, so a token of blanks has no width and no character is its;
a character that takes several tokens is that of each of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Borders:
    """Of one encoding of the `tokenizers` library, `count` tokens long."""

    def __init__(self, encoding: Any, count: int) -> None:
        self._encoding, self._count = encoding, count
        self._all_ends: NDArray[np.int64] | None = None

    def inside(self, start: int, end: int) -> tuple[int, int]:
        """The tokens `[first, last)` that end behind character `start` and not behind character `end`."""
        if start >= end:
            return 0, 0
        first, last = self._encoding.char_to_token(start), self._encoding.char_to_token(end - 1)
        if first is None or last is None:
            first, last = self._ends().searchsorted((start, end), side="right").tolist()
            return first, last
        while last < self._count and self._encoding.token_to_chars(last)[1] <= end:
            last += 1
        return first, last

    def start(self, token: int) -> int:
        """The character that a token begins with."""
        return int(self._encoding.token_to_chars(token)[0])

    def _ends(self) -> NDArray[np.int64]:
        if self._all_ends is None:
            self._all_ends = np.asarray([end for _, end in self._encoding.offsets], dtype=np.int64)
        return self._all_ends
