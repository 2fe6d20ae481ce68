"""A line chart as an SVG text: enough to see a curve in a report, with no plotting library to install. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 32, 40
TICKS = 5
INK, PALE = "#1f6fb4", "#888"

Point = tuple[float, float]


def line_chart(title: str, x_name: str, curve: Sequence[Point], levels: Mapping[str, float]) -> str:
    """An SVG of `curve`, with `levels` (name -> value) as dashed horizontal lines. Axes span all of them."""
    x_low, x_high = _span([x for x, _ in curve])
    y_low, y_high = _span([*(y for _, y in curve), *levels.values()])

    def across(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(WIDTH / 2, 18, title, "middle"), _text(WIDTH / 2, HEIGHT - 6, x_name, "middle")]
    for tick in range(TICKS):
        share = tick / (TICKS - 1)
        x, y = x_low + share * (x_high - x_low), y_low + share * (y_high - y_low)
        parts.append(_text(across(x), HEIGHT - BOTTOM + 16, f"{round(x):,}", "middle"))
        parts.append(_text(LEFT - 6, down(y) + 4, f"{y:.3g}", "end"))
        parts.append(_line([(LEFT, down(y)), (WIDTH - RIGHT, down(y))], 'stroke="#ddd"'))
    for name, level in levels.items():
        parts.append(
            _line([(LEFT, down(level)), (WIDTH - RIGHT, down(level))], f'stroke="{PALE}" stroke-dasharray="5 4"')
        )
        parts.append(_text(WIDTH - RIGHT, down(level) - 4, name, "end"))
    placed = [(across(x), down(y)) for x, y in curve]
    parts.append(_line(placed, f'stroke="{INK}" stroke-width="1.5"'))
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{INK}"/>' for x, y in placed if len(placed) <= 20]
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    paper, body = '<rect width="100%" height="100%" fill="white"/>', "\n".join(parts)
    return f'<svg {box} font-family="sans-serif" font-size="12">\n{paper}\n{body}\n</svg>\n'


def smooth(values: Sequence[float], share: float = 0.02) -> tuple[list[float], int]:
    """A running mean over the last `share` of all values (at least one), so that a noisy curve can be read; and how
    many values it is over."""
    width = max(1, round(len(values) * share))
    return [sum(values[max(0, end - width) : end]) / min(end, width) for end in range(1, len(values) + 1)], width


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _line(points: Sequence[Point], style: str) -> str:
    placed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{placed}" fill="none" {style}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333">{escape(text)}</text>'
