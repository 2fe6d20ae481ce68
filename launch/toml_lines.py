"""On which line of a TOML text each key, table and list element stands, for messages that point at them.

Only text that `tomllib` has accepted: the syntax is not checked again.
"""

from __future__ import annotations

import re
from collections import Counter

Place = tuple[str | int, ...]

# Strings and comments whole, marks one by one, everything else up to the next of these.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{}=,.\n]"
    r"""|[^\s\[\]{}=,."'#]+""",
    re.DOTALL,
)


def toml_lines(text: str) -> dict[Place, int]:
    """1-based line of every place: ("train", "lr"), or ("data", "train", 0, "path") inside a list."""
    return _Scan(text).lines


def place_of(dotted: str) -> Place:
    """ "data.train[0].path" as a place."""
    return tuple(int(index) if index else key for index, key in re.findall(r"\[(\d+)\]|([\w-]+)", dotted))


class _Scan:
    def __init__(self, text: str) -> None:
        self.lines: dict[Place, int] = {}
        self._tokens: list[tuple[str, int]] = []
        line, at = 1, 0
        for match in _TOKEN.finditer(text):
            line, at = line + text.count("\n", at, match.start()), match.start()
            if not match[0].startswith("#"):
                self._tokens.append((match[0], line))
        self._tokens.reverse()  # the next one is the last
        self._table: Place = ()
        self._entries: Counter[Place] = Counter()  # of each list of tables
        while self._tokens:
            if self._next() == "\n":
                self._tokens.pop()
            elif self._next() == "[":
                self._header()
            else:
                self._entry(self._table)

    def _next(self) -> str:
        return self._tokens[-1][0]

    def _keys(self, end: str) -> Place:
        keys: list[str] = []
        while (token := self._tokens.pop()[0]) != end:
            if token != ".":
                keys.append(token.strip("\"'"))
        return tuple(keys)

    def _header(self) -> None:
        line = self._tokens.pop()[1]
        of_list = self._next() == "["
        if of_list:
            self._tokens.pop()
        self._table = self._keys("]")
        self._note(self._table, line)
        if of_list:
            self._tokens.pop()
            self._entries[self._table] += 1
            self._table = (*self._table, self._entries[self._table] - 1)
            self._note(self._table, line)

    def _entry(self, table: Place) -> None:
        line = self._tokens[-1][1]
        place = (*table, *self._keys("="))
        self._note(place, line)
        self._value(place)

    def _value(self, place: Place) -> None:
        if self._next() == "[":
            self._list(place)
        elif self._next() == "{":
            self._tokens.pop()
            while self._next() != "}":
                if self._next() in (",", "\n"):
                    self._tokens.pop()
                else:
                    self._entry(place)
            self._tokens.pop()
        else:
            while self._tokens and self._next() not in (",", "]", "}", "\n"):
                self._tokens.pop()

    def _list(self, place: Place) -> None:
        self._tokens.pop()
        index = 0
        while self._next() != "]":
            if self._next() in (",", "\n"):
                index += self._tokens.pop()[0] == ","
            else:
                element = (*place, index)
                self._note(element, self._tokens[-1][1])
                self._value(element)
        self._tokens.pop()

    def _note(self, place: Place, line: int) -> None:
        """Of a place and what it lies in, the first line counts."""
        for depth in range(1, len(place) + 1):
            self.lines.setdefault(place[:depth], line)
