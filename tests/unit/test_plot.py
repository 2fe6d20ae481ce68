"""The line chart: well-formed, inside its frame, and telling the truth about where points lie."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from launch.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, line_chart, smooth

NUMBERS = st.floats(-1e6, 1e6)


def curves(svg: str) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline")
    return [[tuple(map(float, point.split(","))) for point in line.get("points", "").split()] for line in lines]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=30), st.dictionaries(st.text(max_size=5), NUMBERS))
def test_every_point_lies_inside_the_frame(points, levels):
    levels = {"".join(letter for letter in name if letter.isprintable()): level for name, level in levels.items()}
    for line in curves(line_chart("t", "x", points, levels)):
        for x, y in line:
            assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1
            assert TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1


def test_the_lowest_and_highest_points_lie_on_the_frame():
    *_, curve = curves(line_chart("loss", "step", [(0, 4.0), (5, 1.0), (10, 2.0)], {}))
    assert curve == [(LEFT, TOP), ((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM), (WIDTH - RIGHT, curve[2][1])]
    assert TOP < curve[2][1] < HEIGHT - BOTTOM


def test_names_are_escaped():
    assert "a &lt;b&gt; &amp; c" in line_chart("a <b> & c", "x", [(0, 0)], {})


def test_smoothing_keeps_length_and_means_the_last_values():
    assert smooth([1.0, 2.0, 3.0, 5.0], share=0.5) == ([1.0, 1.5, 2.5, 4.0], 2)
    assert smooth([]) == ([], 1)
