"""Lines of TOML: the places that tomllib finds, no others, each where it stands."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from launch.toml_lines import Place, place_of, toml_lines

TEXT = r'''# [no.table] = 1
top = "a # [b] = { \"c }"
dotted . key = 1979-05-27 07:32:00
'single' = 'C:\'
[ first ] # x
"quoted" = """
[not.a.table]
x = 1 \""" """
numbers = [ 1.5, [ 2, 3 ],
  "]", # ],
  { in = [
    4 ], out.side = true }, ]
empty = []
[first.sub]
many_lines = """
a = "b" """
after = -1e-3
[[many]]
x = 1
[[many]]

x = { y = 2 }
[deep.er]'''
LINES = {
    "top": 2,
    "dotted.key": 3,
    "single": 4,
    "first": 5,
    "first.quoted": 6,
    "first.numbers": 9,
    "first.numbers[1][1]": 9,
    "first.numbers[2]": 10,
    "first.numbers[3]": 11,
    "first.numbers[3].in[0]": 12,
    "first.numbers[3].out.side": 12,
    "first.empty": 13,
    "first.sub": 14,
    "first.sub.after": 17,
    "many": 18,
    "many[0].x": 19,
    "many[1]": 20,
    "many[1].x.y": 22,
    "deep.er": 23,
}


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Every place of parsed TOML."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*here, key)
        yield from places(inner, (*here, key))


def test_the_places_are_those_of_tomllib() -> None:
    assert set(toml_lines(TEXT)) == set(places(tomllib.loads(TEXT)))
    assert toml_lines("") == {}


@pytest.mark.parametrize("dotted", LINES)
def test_a_place_stands_on_its_line(dotted: str) -> None:
    assert toml_lines(TEXT)[place_of(dotted)] == LINES[dotted]
    assert toml_lines(TEXT.replace("\n", "\r\n"))[place_of(dotted)] == LINES[dotted]


def test_a_place_is_read_as_it_is_written() -> None:
    assert place_of("data.train[0].path") == ("data", "train", 0, "path")
