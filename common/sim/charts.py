"""Line charts as SVG and a page around them, standing alone: no script, nothing to load.

Knows numbers and names only. Called by plan.py and the benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 320, 64, 48, 34, 16
_COLOURS = ("#1f6fb2", "#c2571a", "#3a8a3a", "#8a3a8a", "#777777")
_NUM_TICKS = 6
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
)


@dataclass(frozen=True, slots=True)
class Series:
    """One line; `is_dots` shows its points alone."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dots: bool = False


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """An SVG element. The y axis starts at zero, so that sizes may be compared by eye."""
    points = [p for s in series for p in s.points]
    x_ticks = _ticks(min(p[0] for p in points), max(p[0] for p in points))
    y_ticks = _ticks(0.0, max(p[1] for p in points))
    x_range, y_range = (x_ticks[0], x_ticks[-1]), (0.0, y_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / (x_range[1] - x_range[0]) * (_WIDTH - _LEFT - _RIGHT)
        return round(_LEFT + across, 1), round(_HEIGHT - _BOTTOM - y / y_range[1] * (_HEIGHT - _BOTTOM - _TOP), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="12">',
        f'<text x="{_WIDTH / 2}" y="18" text-anchor="middle" font-size="14">{escape(title)}</text>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(14 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for tick in x_ticks:
        x, y = place(tick, 0)
        out.append(
            f'<path d="M{x} {y}v4" stroke="#333"/><text x="{x}" y="{y + 17}" text-anchor="middle">{tick:g}</text>'
        )
    for tick in y_ticks:
        x, y = place(x_range[0], tick)
        out.append(f'<path d="M{x} {y}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for n, one in enumerate(series):
        out.extend(_drawn([place(*p) for p in one.points], one, _COLOURS[n % len(_COLOURS)]))
        colour, y = _COLOURS[n % len(_COLOURS)], _TOP + 14 * n + 6
        out.append(
            f'<text x="{_WIDTH - _RIGHT - 4}" y="{y}" text-anchor="end" fill="{colour}">{escape(one.name)}</text>'
        )
    return "\n".join([*out, "</svg>"])


def _drawn(places: Sequence[tuple[float, float]], series: Series, colour: str) -> list[str]:
    if series.is_dots:
        return [f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>' for x, y in places]
    path = "L".join(f"{x} {y}" for x, y in places)
    return [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>']


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose the range."""
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** len(str(int(span))) if span >= 1 else 1.0
    while span / step < _NUM_TICKS / 2:
        step /= 2 if f"{step:e}"[0] in "12" else 2.5
    first = step * (low // step)
    ticks = [first]
    while ticks[-1] < high - 1e-9 * span:
        ticks.append(ticks[-1] + step)
    if len(ticks) == 1:
        ticks.append(first + step)
    return [round(t, 9) for t in ticks]


def html_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table element."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def page(title: str, parts: Sequence[str]) -> str:
    """A whole HTML document of parts that are HTML already."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>{''.join(parts)}</html>\n"
    )
