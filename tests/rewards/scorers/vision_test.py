"""Boxes by intersection over union, points by region; what is no box and no point scores 0."""

import json
from fractions import Fraction

import pytest
from fixtures.rewards_scorers import attempt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.scorers.answer.choosing import ANYWHERE
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer
from jaxrl_llm.rewards.scorers.vision import (
  Box,
  Point,
  box_iou_scorer,
  contains,
  iou,
  parse_box,
  parse_region,
  point_scorer,
)

TRUTH = '[10, 10, 30, 30]'


@pytest.mark.parametrize(
  ('completion', 'value'),
  [
    # 200 / 600
    ('[10, 10, 30, 30]', 1.0), ('<answer>[10.0,10,30,30]</answer>', 1.0),
    (r'\boxed{[20, 10, 40, 30]}', 1 / 3), ('The answer is (10, 10), (30, 20)', 0.5),
    ('[10, 10, 20, 20]', 0.25), ('[0, 0, 40, 40]', 0.25), ('[30, 30, 50, 50]', 0.0),
    ('{"bbox_2d": [10, 10, 30, 30], "label": "cat"}', 1.0),
    ('<|box_start|>(10,10),(30,30)<|box_end|>', 1.0), ('[50, 50, 60, 60]', 0.0),
    ('[30, 30, 10, 10]', 0.0), ('[10, 10, 10, 30]', 0.0), ('[10, 10, 30]', 0.0),
    ('[10, 10, 30, 30, 40]', 0.0), ('', 0.0), ('a cat', 0.0),
    ('[10, 10, 30, 30] or [0, 0, 9, 9]', 0.0), ('[10, 10, 30, 30] and again [10, 10, 30, 30]', 1.0),
    ('[nan, 0, 1, 1]', 0.0),
    ('[10, 10, 1e9, 30]', 0.0), ('[-99999999999, 0, 99999999999, 1]', 0.0),
    (r'\boxed{[10,10,30,30]} \boxed{[0,0,30,30]}', 0.0),
  ],
)  # fmt: skip
def test_boxes(completion, value):
  said = box_iou_scorer()(attempt(completion, truth=TRUTH))
  assert said.value == pytest.approx(value)
  assert said.parts == ({'iou': said.value} if parse_box(completion) or said.value else {})


def test_a_threshold_makes_it_right_or_wrong():
  scorer = box_iou_scorer(threshold=0.25)
  assert [
    scorer(attempt(text, truth=TRUTH)).value for text in ('[10,10,20,20]', '[10,10,19,20]')
  ] == [1.0, 0.0]
  # IoU is exactly 7/10, which the float 0.7 is not.
  assert box_iou_scorer(threshold=0.7)(attempt('[0,0,7,1]', truth='[0,0,10,1]')).value == 1.0
  with pytest.raises(UserError, match=r"scorer 'box_iou': option threshold is 1\.5"):
    box_iou_scorer(threshold=1.5)


def test_width_and_height():
  assert (
    box_iou_scorer(form='xywh')(attempt('[10, 10, 20, 10]', truth='[10, 10, 20, 20]')).value == 0.5
  )


@pytest.mark.parametrize(
  'truth', [None, '', 'cat', '[30, 30, 10, 10]', '[1, 2, 3]', '[1,1,2,2] [3,3,4,4]']
)
def test_a_box_that_is_none_makes_the_task_unscorable(truth):
  for completion in ('[1, 1, 2, 2]', ''):
    assert box_iou_scorer()(attempt(completion, truth=truth)).value is None


coordinates = st.fractions(-50, 50, max_denominator=8)
boxes = st.tuples(
  coordinates,
  coordinates,
  st.fractions(1, 40, max_denominator=8),
  st.fractions(1, 40, max_denominator=8),
).map(lambda b: Box(b[0], b[1], b[0] + b[2], b[1] + b[3]))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(a=boxes, b=boxes, shift=coordinates, scale=st.fractions(1, 9, max_denominator=4))
def test_iou_is_symmetric_in_0_1_and_1_only_for_the_same(a, b, shift, scale):
  assert iou(a, b) == iou(b, a) and 0 <= iou(a, b) <= 1
  assert iou(a, a) == 1 and (iou(a, b) == 1) == (a == b)

  def moved(box):
    return Box(*(scale * number + shift for number in box))

  assert iou(moved(a), moved(b)) == iou(a, b)


@given(a=st.tuples(*[st.integers(0, 6)] * 4), b=st.tuples(*[st.integers(0, 6)] * 4))
def test_iou_counts_cells(a, b):
  a, b = (Box(*map(Fraction, (x, y, x + w + 1, y + h + 1))) for x, y, w, h in (a, b))

  def cells(box):
    return {
      (x, y) for x in range(int(box.x1), int(box.x2)) for y in range(int(box.y1), int(box.y2))
    }

  assert iou(a, b) == Fraction(len(cells(a) & cells(b)), len(cells(a) | cells(b)))


L_SHAPE = '[[0,0],[4,0],[4,1],[1,1],[1,4],[0,4]]'


@pytest.mark.parametrize(
  ('truth', 'completion', 'value'),
  [
    (TRUTH, '(20, 20)', 1.0), (TRUTH, '[10, 10]', 1.0), (TRUTH, '(30, 15)', 1.0),
    (TRUTH, '(30.0001, 15)', 0.0), (TRUTH, '(9, 20)', 0.0),
    (TRUTH, '<point x="20" y="20" alt="the cat">the cat</point>', 1.0),
    (TRUTH, r'\boxed{(20, 20)}', 1.0), (TRUTH, 'The answer is (20, 20).', 1.0),
    (TRUTH, '(20, 20) or (0, 0)', 0.0), (TRUTH, '20, 20', 0.0), (TRUTH, '', 0.0),
    (TRUTH, '(20, 20, 20)', 0.0), (L_SHAPE, '(0.5, 3)', 1.0), (L_SHAPE, '(3, 0.5)', 1.0),
    (L_SHAPE, '(2, 2)', 0.0), (L_SHAPE, '(1, 1)', 1.0), (L_SHAPE, '(1, 4)', 1.0),
    (L_SHAPE, '(0, 5)', 0.0), ('[[0,0],[4,4],[4,0],[0,3]]', '(0, 4)', 0.0),
    ('hello', '(1, 1)', None), ('[[0,0],[1,1],[2,2]]', '(1, 1)', None),
    ('[[0,0],[1,1]]', '(1, 1)', None), ('[3,3,1,1]', '(1, 1)', None),
    (None, '(1, 1)', None), ('[[0,0],[1,"a"],[2,2]]', '(1,1)', None), ('[' * 5000, '(1,1)', None),
  ],
)  # fmt: skip
def test_points(truth, completion, value):
  assert point_scorer()(attempt(completion, truth=truth)).value == value


@given(box=boxes, x=coordinates, y=coordinates, start=st.integers(0, 3), turned=st.booleans())
def test_a_box_as_a_polygon_is_the_same_region(box, x, y, start, turned):
  corners = [
    Point(box.x1, box.y1),
    Point(box.x2, box.y1),
    Point(box.x2, box.y2),
    Point(box.x1, box.y2),
  ]
  corners = (corners[start:] + corners[:start])[:: -1 if turned else 1]
  assert contains(corners, Point(x, y)) == (box.x1 <= x <= box.x2 and box.y1 <= y <= box.y2)


def test_regions_are_read_exactly():
  assert parse_region('[0.1, 0, 0.3, 1]')[0] == (Fraction(1, 10), 0)


def test_questions_about_pictures_are_for_answer():
  fields = {'media': [{'kind': 'image', 'path': 'a.png'}], 'aliases': ['kitten']}
  scorer = answer_scorer(mode='text', extraction=ANYWHERE)
  assert [
    scorer(attempt(t, domain='vision', truth='cat', fields=fields)).value
    for t in ('A cat.', 'kitten', 'dog')
  ] == [1, 1, 0]
  assert json.dumps(fields)
