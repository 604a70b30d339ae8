"""Scorers for visual grounding: one scores a box by its IoU (intersection over union) with the true
box, the other scores whether a point is in the true region.

Coordinates are compared as they are written, in the unit that the task defines (pixels or
thousandths). All arithmetic is exact. The scorers `answer` and `k12` are for questions about images
whose answer is a number, a letter or words.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from jaxrl_llm.rewards.api import Attempt, Scorer, Verdict, read_options
from jaxrl_llm.rewards.scorers.answer.choosing import ANYWHERE
from jaxrl_llm.rewards.scorers.answer.expressions import unboxed
from jaxrl_llm.rewards.scorers.answer.extraction import Methods, extract


class Point(NamedTuple):
  x: Fraction
  y: Fraction


class Box(NamedTuple):
  x1: Fraction
  y1: Fraction
  x2: Fraction
  y2: Fraction


_NUMBER = r'[-+]?(?:\d{1,9}(?:\.\d{0,12})?|\.\d{1,12})'
_LIST = r'[\[(]\s*{0}\s*[\])]'
_FOUR = re.compile(_LIST.format(r'\s*,\s*'.join([f'({_NUMBER})'] * 4)), re.ASCII)
_TWO = re.compile(_LIST.format(rf'({_NUMBER})\s*,\s*({_NUMBER})'), re.ASCII)
_CORNERS = re.compile(rf'{_TWO.pattern}\s*,?\s*{_TWO.pattern}', re.ASCII)
_XML = re.compile(rf'<point\s+x="({_NUMBER})"\s+y="({_NUMBER})"', re.ASCII)


def parse_box(text: str, form: str = 'xyxy') -> Box | None:
  """Returns the only box in the text. Returns None if there is no box, if two boxes differ, or if
  the box has no area.

  A box is written `[x1, y1, x2, y2]` or `(x1, y1), (x2, y2)`, with its top left and bottom right
  corners. In form `xywh`, the last two numbers are its width and height.
  """
  boxes = {
    tuple(map(Fraction, numbers))
    for pattern in (_FOUR, _CORNERS)
    for numbers in pattern.findall(text)
  }
  if len(boxes) != 1:
    return None
  a, b, c, d = boxes.pop()
  box = Box(a, b, a + c, b + d) if form == 'xywh' else Box(a, b, c, d)
  return box if box.x1 < box.x2 and box.y1 < box.y2 else None


def parse_point(text: str) -> Point | None:
  """Returns the only point in the text, written `(x, y)`, `[x, y]` or as a tag that begins with
  `<point x="…" y="…"`. Returns None if there is no point or two points differ.
  """
  points = {
    tuple(map(Fraction, numbers)) for pattern in (_TWO, _XML) for numbers in pattern.findall(text)
  }
  return Point(*points.pop()) if len(points) == 1 else None


def iou(a: Box, b: Box) -> Fraction:
  """Returns the area of the intersection divided by the area of the union."""
  width = min(a.x2, b.x2) - max(a.x1, b.x1)
  height = min(a.y2, b.y2) - max(a.y1, b.y1)
  both = max(width, Fraction(0)) * max(height, Fraction(0))

  def area(box):
    return (box.x2 - box.x1) * (box.y2 - box.y1)

  return both / (area(a) + area(b) - both)


def parse_region(text: str) -> tuple[Point, ...] | None:
  """Returns, in order, the corners of a box `[x1, y1, x2, y2]` or a polygon `[[x, y], …]`. Returns
  None if the text is malformed or the shape has no area.
  """
  try:
    value = json.loads(text, parse_float=Fraction, parse_int=Fraction)
  except (ValueError, RecursionError):
    return None

  def numbers(items, count):
    return (
      isinstance(items, list)
      and len(items) == count
      and all(isinstance(item, Fraction) for item in items)
    )

  if numbers(value, 4):
    x1, y1, x2, y2 = value
    corners = (
      [Point(x1, y1), Point(x2, y1), Point(x2, y2), Point(x1, y2)] if x1 < x2 and y1 < y2 else []
    )
  elif isinstance(value, list) and len(value) >= 3 and all(numbers(corner, 2) for corner in value):
    corners = [Point(*corner) for corner in value]
  else:
    return None
  twice = sum(a.x * b.y - b.x * a.y for a, b in zip(corners, [*corners[1:], *corners[:1]]))
  return tuple(corners) if twice else None


def contains(region: Sequence[Point], point: Point) -> bool:
  """Returns whether the point is inside the polygon or on its edge. For a polygon that intersects
  itself, the even-odd rule decides.
  """
  inside = False
  for a, b in zip(region, [*region[1:], *region[:1]]):
    side = (b.x - a.x) * (point.y - a.y) - (b.y - a.y) * (point.x - a.x)
    between = min(a.x, b.x) <= point.x <= max(a.x, b.x) and min(a.y, b.y) <= point.y <= max(
      a.y, b.y
    )
    if side == 0 and between:
      return True
    if (a.y > point.y) != (b.y > point.y) and (side > 0) == (b.y > a.y):
      inside = not inside
  return inside


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoxOptions:
  threshold: float = 0.0
  """Minimum IoU for a value of 1.0. Below it, the value is 0.0. If the threshold is 0, the value is
  the IoU itself.
  """
  form: Literal['xyxy', 'xywh'] = 'xyxy'
  """Form of boxes in truth and answer. xyxy: the top left and bottom right corners; xywh: the top
  left corner, the width and the height.
  """
  extraction: Methods = ANYWHERE
  tag: str = 'answer'

  def __post_init__(self):
    if not 0 <= self.threshold <= 1:
      raise ValueError(f'option threshold is {self.threshold}, wanted 0 to 1')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointOptions:
  extraction: Methods = ANYWHERE
  tag: str = 'answer'


def _answer(attempt: Attempt, extraction: Methods, tag: str) -> str:
  prompts = [message['content'] for message in attempt.task.prompt]
  return unboxed(
    extract(attempt.completion, method=extraction, tag=tag, prompts=prompts).answer or ''
  )


def score_box_iou(attempt: Attempt, *, options: BoxOptions) -> Verdict:
  """Scores the IoU of the answer's box with the true box, in [0, 1]. The value is 0 if the answer
  does not have a single box with an area. If a threshold is set, the value is 1.0 or 0.0.
  """
  truth = parse_box(attempt.task.truth or '', options.form)
  if truth is None:
    return Verdict(value=None, evidence={'reason': 'the truth is not one box with an area'})
  box = parse_box(_answer(attempt, options.extraction, options.tag), options.form)
  if box is None:
    return Verdict(value=0.0, evidence={'reason': 'the answer is not one box with an area'})
  overlap = iou(truth, box)
  # The threshold is converted through its text, because Fraction(0.7) is slightly less than 7/10.
  value = (
    float(overlap >= Fraction(str(options.threshold))) if options.threshold else float(overlap)
  )
  return Verdict(
    value=value, parts={'iou': float(overlap)}, evidence={'box': [float(number) for number in box]}
  )


def score_point(attempt: Attempt, *, options: PointOptions) -> Verdict:
  """Scores 1.0 if the answer's point is in the true region or on its edge, else 0.0."""
  region = parse_region(attempt.task.truth or '')
  if region is None:
    return Verdict(
      value=None, evidence={'reason': 'the truth is neither a box nor a polygon with an area'}
    )
  point = parse_point(_answer(attempt, options.extraction, options.tag))
  if point is None:
    return Verdict(value=0.0, evidence={'reason': 'the answer is not one point'})
  return Verdict(
    value=float(contains(region, point)), evidence={'point': [float(point.x), float(point.y)]}
  )


def box_iou_scorer(**options: Any) -> Scorer:
  """Returns a scorer that scores a box `[x1, y1, x2, y2]` by its intersection over union with the
  true box. The options are `BoxOptions`.
  """
  return functools.partial(score_box_iou, options=read_options(BoxOptions, options, 'box_iou'))


def point_scorer(**options: Any) -> Scorer:
  """Returns a scorer that checks whether a point `(x, y)` is in the true box or polygon. The
  options are `PointOptions`.
  """
  return functools.partial(score_point, options=read_options(PointOptions, options, 'point'))
