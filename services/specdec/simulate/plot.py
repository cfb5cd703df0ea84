"""One run over time, as an SVG: tokens a second above, the step count below."""

from collections.abc import Sequence
from html import escape

import numpy as np

from specdec.simulate.run import Hindsight, Run
from specdec.simulate.scenario import TICK_S, Array, Scenario

_WIDTH, _HEIGHT, _LEFT, _GAP = 960, 220, 70, 40
_SMOOTH_S = 1.0
_COLOURS = {"auto": "#d62728", "k = 0": "#1f77b4", "best k of each phase": "#2ca02c", "k": "#d62728"}


def draw(scenario: Scenario, hindsight: Hindsight, run: Run) -> str:
    """The SVG's text."""
    best = np.empty(scenario.ticks)
    n = scenario.phase_ticks
    for a in range(0, scenario.ticks, n):
        b = min(a + n, scenario.ticks)
        first = hindsight.tokens[:, a - 1] if a else np.zeros(len(hindsight.tokens))
        k = int((hindsight.tokens[:, b - 1] - first).argmax())
        best[a:b] = np.diff(hindsight.tokens[k, :b], prepend=0.0)[a:]
    lines = {
        "best k of each phase": _smooth(best) / TICK_S,
        "k = 0": _smooth(np.diff(hindsight.tokens[0], prepend=0.0)) / TICK_S,
        "auto": _smooth(np.diff(run.tokens, prepend=0.0)) / TICK_S,
    }
    title = f"{scenario.profile.name}, {scenario.trace.name}, seed {scenario.seed}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{2 * (_HEIGHT + _GAP)}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="16">{escape(title)}</text>',
        *_panel(lines, 24, scenario.duration_s, "tok/s"),
        *_panel({"k": run.steps}, 24 + _HEIGHT + _GAP, scenario.duration_s, "k"),
        "</svg>",
    ]
    return "\n".join(parts)


def _smooth(values: Array) -> Array:
    n = round(_SMOOTH_S / TICK_S)
    smooth: Array = np.convolve(values, np.full(n, 1 / n), "same").astype(np.float64)
    return smooth


def _panel(lines: dict[str, Array], top: int, duration_s: float, unit: str) -> Sequence[str]:
    most = max(float(values.max()) for values in lines.values()) * 1.05 or 1.0
    width, height = _WIDTH - _LEFT - 10, _HEIGHT - 20
    parts = [
        f'<rect x="{_LEFT}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
        f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.3g} {unit}</text>',
        f'<text x="{_LEFT - 6}" y="{top + height}" text-anchor="end">0</text>',
        f'<text x="{_LEFT + width}" y="{top + height + 14}" text-anchor="end">{duration_s:.0f} s</text>',
    ]
    for i, (name, values) in enumerate(lines.items()):
        points = " ".join(
            f"{_LEFT + width * j / len(values):.1f},{top + height * (1 - v / most):.1f}" for j, v in enumerate(values)
        )
        colour = _COLOURS[name]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        if len(lines) > 1:
            y = top + height + 14
            parts.append(f'<text x="{_LEFT + 190 * i}" y="{y}" fill="{colour}">{escape(name)}</text>')
    return parts
