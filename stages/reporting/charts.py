"""Charts as inline SVG: no script, no network, legible on a phone (drawn 400 units wide) and in print.

Colours come from the page's style sheet (classes s0, s1, …), so they follow light and dark; series differ in dash as
well as in colour. Coordinates are rounded, so equal figures give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 14, 24, 38


@dataclass(frozen=True)
class Series:
    """A named line; `style` is its class in the style sheet. low and high, where given, are drawn as whiskers."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    bounds: Sequence[tuple[float, float]] = ()
    dots: bool = False


@dataclass(frozen=True)
class Interval:
    """A figure with its interval, and the least that was asked of it."""

    name: str
    value: float
    low: float
    high: float
    least: float | None = None
    note: str = ""


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if span / (step * m) <= count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """A tick's text: no needless digits, thousands apart."""
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.6g}"


def lines(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    percent: bool = False,
    from_zero: bool = False,
    steps: Sequence[float] = (),
    mark: tuple[float, str] | None = None,
    level: tuple[float, str] | None = None,
    height: int = 250,
) -> Markup:
    """Lines over a common x.

    Args:
        steps: x values set at equal distances (1, 2, 4, 8, 16); without them x is a scale.
        mark: an x, between two steps too, marked by an upright line and words.
        level: a y, marked by a level line and words.
    """
    shown = [s for s in series if s.points]
    if not shown:
        return Markup("")
    ys = [y for s in shown for _, y in s.points] + [b for s in shown for pair in s.bounds for b in pair]
    ys += [level[0]] if level else []
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys))
    xs = [x for s in shown for x, _ in s.points]
    x_ticks = list(steps) or ticks(min(xs), max(xs), 4)
    if not steps:
        x_ticks = [t for t in x_ticks if t <= max(xs) or t == x_ticks[0]]
    scale = _Scale(x_ticks if steps else (), min([*xs, *x_ticks]), max(xs), y_ticks[0], y_ticks[-1], height)
    body = [_grid(scale, x_ticks, y_ticks, percent), _labels(scale, x_label, y_label)]
    if level:
        y = scale.y(level[0])
        body.append(f'<line class="level" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        body.append(_text(WIDTH - _RIGHT, y - 4, level[1], "note", "end"))
    if mark:
        x = scale.x(mark[0])
        body.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP}" y2="{scale.bottom}"/>')
        right = x > WIDTH * 0.55
        body.append(_text(x - 5 if right else x + 5, _TOP + 9, mark[1], "note strong", "end" if right else "start"))
    body += [_line(s, scale) for s in shown]
    return _svg(title, height, "".join(body))


class _Scale:
    def __init__(
        self, steps: Sequence[float], x_low: float, x_high: float, y_low: float, y_high: float, height: int
    ) -> None:
        self.steps, self.x_low, self.x_high, self.y_low, self.y_high = list(steps), x_low, x_high, y_low, y_high
        self.bottom = height - _BOTTOM

    def x(self, value: float) -> float:
        inset = 14 if self.steps else 0
        return round(_LEFT + inset + self._share(value) * (WIDTH - _LEFT - _RIGHT - 2 * inset), 1)

    def _share(self, value: float) -> float:
        if not self.steps:
            return (value - self.x_low) / ((self.x_high - self.x_low) or 1)
        if len(self.steps) == 1:
            return 0.5
        at = sum(s <= value for s in self.steps) - 1
        if at < 0 or at >= len(self.steps) - 1:
            return 0.0 if at < 0 else 1.0
        inside = (value - self.steps[at]) / (self.steps[at + 1] - self.steps[at])
        return (at + inside) / (len(self.steps) - 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1)
        return round(self.bottom - share * (self.bottom - _TOP), 1)


def _grid(scale: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], percent: bool) -> str:
    parts: list[str] = []
    for tick in y_ticks:
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(_LEFT - 7, y + 4, f"{tick * 100:g} %" if percent else number(tick), "tick", "end"))
    for tick in x_ticks:
        parts.append(_text(scale.x(tick), scale.bottom + 15, number(tick), "tick", "middle"))
    return "".join(parts)


def _labels(scale: _Scale, x_label: str, y_label: str) -> str:
    x = _text((_LEFT + WIDTH - _RIGHT) / 2, scale.bottom + 32, x_label, "label", "middle")
    return x + (_text(0, 9, y_label, "label", "start") if y_label else "")


def _line(series: Series, scale: _Scale) -> str:
    at = [(scale.x(x), scale.y(y)) for x, y in series.points]
    parts: list[str] = []
    for (x, _), (low, high) in zip(at, series.bounds, strict=False):
        parts.append(f'<line class="whisker" x1="{x}" x2="{x}" y1="{scale.y(low)}" y2="{scale.y(high)}"/>')
    if len(at) > 1:
        parts.append(f'<path class="line" d="M{" L".join(f"{x} {y}" for x, y in at)}"/>')
    if series.dots or len(at) == 1:
        parts += [f'<circle cx="{x}" cy="{y}" r="2.6"/>' for x, y in at]
    return f'<g class="{escape(series.style)}">{"".join(parts)}</g>'


def intervals(rows: Sequence[Interval], *, title: str, x_label: str, origin: float = 1.0) -> Markup:
    """One line a row: name, bar from `origin` to the value, its interval, the least asked for as a tick."""
    if not rows:
        return Markup("")
    left, right, step = 84, 46, 30
    high = max([r.high for r in rows] + [r.value for r in rows] + [r.least or origin for r in rows])
    x_ticks = ticks(origin, max(high, origin + 0.1), 4)
    height = _TOP + step * len(rows) + 34

    def x(value: float) -> float:
        return round(left + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - left - right), 1)

    bottom = height - 34
    parts = [f'<line class="grid" x1="{x(t)}" x2="{x(t)}" y1="{_TOP - 6}" y2="{bottom}"/>' for t in x_ticks]
    parts += [_text(x(t), bottom + 15, f"{t:g}", "tick", "middle") for t in x_ticks]
    parts.append(_text((left + WIDTH - right) / 2, bottom + 31, x_label, "label", "middle"))
    for i, row in enumerate(rows):
        y = _TOP + step * i + step / 2 - 3
        parts.append(_text(0, y + 4, row.name, "name", "start"))
        parts.append(
            f'<rect class="bar" x="{x(origin)}" y="{y - 6}" width="{max(x(row.value) - x(origin), 0):.1f}" height="12"/>'
        )
        parts.append(f'<line class="whisker" x1="{x(row.low)}" x2="{x(row.high)}" y1="{y}" y2="{y}"/>')
        if row.least is not None:
            parts.append(f'<line class="least" x1="{x(row.least)}" x2="{x(row.least)}" y1="{y - 9}" y2="{y + 9}"/>')
        parts.append(_text(WIDTH, y + 4, f"{row.value:.2f}", "value", "end"))
    return _svg(title, height, "".join(parts))


def layers(points: Sequence[int], count: int) -> Markup:
    """The target as a strip of layers, its captured points marked: 0 is the embedding, `count` the last state."""
    left, right = 12, 12

    def x(point: int) -> float:
        return round(left + point / count * (WIDTH - left - right), 1)

    gap = (WIDTH - left - right) / count
    parts = [
        f'<rect class="layer" x="{x(i) + min(1.0, gap / 8):.1f}" y="26" width="{gap - min(2.0, gap / 4):.1f}" height="12" rx="1"/>'
        for i in range(count)
    ]
    for point in (*points, count):
        parts.append(f'<line class="point" x1="{x(point)}" x2="{x(point)}" y1="20" y2="44"/>')
        if point != count:
            parts.append(_text(x(point), 13, str(point), "value", "middle"))
    parts.append(_text(left, 58, "embedding", "tick", "start"))
    parts.append(_text(WIDTH - right, 58, f"last state, {count} layers", "tick", "end"))
    return _svg(f"Points {', '.join(map(str, points))} and the last state of {count} layers", 64, "".join(parts))


def _text(x: float, y: float, text: str, style: str, anchor: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: int, body: str) -> Markup:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return Markup(f"{head}<title>{escape(title)}</title>{body}</svg>")  # every text above was escaped
