"""Draws a run's curves as an SVG figure, for pages without scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

_WIDTH, _HEIGHT = 460, 240
"""Size of a panel in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 34, 40
_MAX_POINTS = 300
"""Maximum number of points drawn per curve. A curve with more points is divided into this many
equal sections, and only the mean of each section is drawn.
"""


class Panel(NamedTuple):
  """A curve, its title and the unit of its values."""

  title: str
  unit: str
  noise: float
  """Absolute value up to which values are rounding error. A curve without larger values is drawn as
  a flat line.
  """
  points: Sequence[tuple[int, float]]
  """(step, value) pairs in ascending order of steps."""


def figure(panels: Sequence[Panel]) -> str:
  """Returns an SVG document with two panels in each row, dark on white."""
  columns = min(2, len(panels))
  rows = -(-len(panels) // 2)
  drawn = [
    f'<g transform="translate({i % 2 * _WIDTH} {i // 2 * _HEIGHT})">{_panel(panel)}</g>'
    for i, panel in enumerate(panels)
  ]
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * _WIDTH}" height="{rows * _HEIGHT}" '
    f'viewBox="0 0 {columns * _WIDTH} {rows * _HEIGHT}" font-family="sans-serif" font-size="12">'
    f'<rect width="100%" height="100%" fill="#fff"/>{"".join(drawn)}</svg>\n'
  )


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
  if len(points) <= _MAX_POINTS:
    return [*points]
  sections = [
    points[i * len(points) // _MAX_POINTS : (i + 1) * len(points) // _MAX_POINTS]
    for i in range(_MAX_POINTS)
  ]
  return [
    (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in sections
  ]


def _panel(panel: Panel) -> str:
  points = _thinned(panel.points)
  first, last = points[0][0], points[-1][0]
  low, high = min(y for _, y in points), max(y for _, y in points)
  if max(abs(low), abs(high)) <= panel.noise:
    low, high = min(0.0, -10 * panel.noise * (low < 0)), 10 * panel.noise
  if low == high:
    low, high = min(0.0, 2 * low), max(0.0, 2 * high) or float(low == 0)
  right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

  def place(x: float, y: float) -> tuple[float, float]:
    return (
      _LEFT + (x - first) / ((last - first) or 1) * (right - _LEFT),
      floor - (y - low) / (high - low) * (floor - _TOP),
    )

  line = ' '.join(f'{x:.1f},{y:.1f}' for x, y in (place(*point) for point in points))
  parts = [
    f'<text x="{_LEFT}" y="20" font-size="14" font-weight="600">{html.escape(panel.title)}</text>',
    f'<polyline points="{line}" fill="none" stroke="#0068a8" stroke-width="1.8"/>',
    f'<path d="M{_LEFT},{_TOP}V{floor}H{right}" fill="none" stroke="#888"/>',
    f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle" fill="#555">step'
    '</text>',
    f'<text transform="translate(14 {(_TOP + floor) / 2}) rotate(-90)" text-anchor="middle" '
    f'fill="#555">{html.escape(panel.unit)}</text>',
  ]
  for value, y in ((low, floor), (high, _TOP + 4)):
    parts.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end" fill="#555">{value:.3g}</text>')
  for value, x in ((first, _LEFT), (last, right)):
    parts.append(
      f'<text x="{x}" y="{floor + 16}" text-anchor="middle" fill="#555">{round(value):,}</text>'
    )
  return ''.join(parts)
