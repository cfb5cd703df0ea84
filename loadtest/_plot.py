"""The report's plots, as SVG: curves of points, and values with whiskers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
Ranged = tuple[float, tuple[float, float] | None]  # a value and its interval

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 420, 260, 64, 34, 44  # of a panel, in pixels
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")


@dataclass(frozen=True)
class Curves:
    """A panel with a line for each name, through its points in their order."""

    title: str
    x: str
    y: str
    lines: dict[str, list[Point]]


@dataclass(frozen=True)
class Whiskers:
    """A panel with a group for each label, and in it a value with its interval for each name."""

    title: str
    y: str
    values: dict[str, dict[str, Ranged]]  # by name and label


def curves(panels: Sequence[Curves]) -> str:
    """The SVG's text."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    return _page([_curves(panel, names) for panel in panels], names, len(panels))


def whiskers(panels: Sequence[Whiskers], columns: int) -> str:
    """The SVG's text."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.values))
    return _page([_whiskers(panel, names) for panel in panels], names, columns)


def _page(panels: Sequence[list[str]], names: Sequence[str], columns: int) -> str:
    rows = -(-len(panels) // columns)
    width, height = max(columns * _WIDTH, 480), rows * _HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for i, name in enumerate(names):
        x = _LEFT + 90 * i
        parts.append(f'<circle cx="{x}" cy="14" r="4" fill="{_colour(names, name)}"/>')
        parts.append(f'<text x="{x + 9}" y="18">{escape(name)}</text>')
    for i, panel in enumerate(panels):
        x, y = i % columns * _WIDTH, 30 + i // columns * _HEIGHT
        parts += [f'<g transform="translate({x},{y})">', *panel, "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _colour(names: Sequence[str], name: str) -> str:
    return _COLOURS[names.index(name) % len(_COLOURS)]


def _curves(panel: Curves, names: Sequence[str]) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    to_x, x_ticks = _axis([x for x, _ in points], _LEFT, _WIDTH - 14)
    to_y, y_ticks = _axis([y for _, y in points], _HEIGHT - _BOTTOM, _TOP)
    parts = [*_frame(panel.title, panel.y, to_y, y_ticks)]
    for tick in x_ticks:
        parts.append(f'<text x="{to_x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(panel.x)}</text>')
    for name, line in panel.lines.items():
        colour = _colour(names, name)
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3.5" fill="{colour}"/>' for x, y in line]
    return parts


def _whiskers(panel: Whiskers, names: Sequence[str]) -> list[str]:
    shown = [ranged for by_label in panel.values.values() for ranged in by_label.values()]
    highest = [value for value, _ in shown] + [between[1] for _, between in shown if between]
    to_y, ticks = _axis(highest, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_frame(panel.title, panel.y, to_y, ticks)]
    labels = list(dict.fromkeys(label for by_label in panel.values.values() for label in by_label))
    group = (_WIDTH - 14 - _LEFT) / max(1, len(labels))
    for i, label in enumerate(labels):
        middle = _LEFT + group * (i + 0.5)
        parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(label)}</text>')
        for j, name in enumerate(names):
            if label not in panel.values.get(name, {}):
                continue
            value, between = panel.values[name][label]
            x, colour = middle + (j - (len(names) - 1) / 2) * min(16.0, group / (len(names) + 1)), _colour(names, name)
            if between:
                low, high = (to_y(end) for end in between)
                parts.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-width="1.5"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{to_y(value):.1f}" r="3.5" fill="{colour}"/>')
    return parts


def _frame(title: str, unit: str, to_y: Callable[[float], float], ticks: Sequence[float]) -> list[str]:
    right, bottom = _WIDTH - 14, _HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="{_TOP - 12}" font-weight="bold">{escape(title)} ({escape(unit)})</text>']
    for tick in ticks:
        parts.append(f'<path d="M{_LEFT} {to_y(tick):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{to_y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#888"/>')
    return parts


def _axis(values: Sequence[float], low: float, high: float) -> tuple[Callable[[float], float], list[float]]:
    """From nought to the largest value: the place of a value in pixels, and the ticks."""
    most = max(values, default=0.0) or 1.0
    power = 10.0 ** (len(f"{most:.0f}") - 1) if most >= 1 else 10.0 ** -(len(f"{1 / most:.0f}"))
    step = next(size * power for size in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if most / (size * power) <= 5.5)
    top = most * 1.05
    ticks = [step * i for i in range(int(top / step) + 1)]
    return (lambda value: low + (high - low) * value / top), ticks
