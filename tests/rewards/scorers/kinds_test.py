"""Kinds of answers, each read as mathematics or language has it: units, intervals, sets, tuples,
choices, words.
"""

from fractions import Fraction

import pytest
from fixtures.rewards_scorers import attempt
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rewards.scorers.answer.choice import parse_choice, read_choices
from jaxrl_llm.rewards.scorers.answer.choosing import ANYWHERE
from jaxrl_llm.rewards.scorers.answer.effort import explodes
from jaxrl_llm.rewards.scorers.answer.expressions import latex_agree
from jaxrl_llm.rewards.scorers.answer.extraction import extract
from jaxrl_llm.rewards.scorers.answer.intervals import intervals_agree
from jaxrl_llm.rewards.scorers.answer.lists import parse_set, sets_agree, split, tuples_agree
from jaxrl_llm.rewards.scorers.answer.numbers import parse_number
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer
from jaxrl_llm.rewards.scorers.answer.short_text import aliases, normalise
from jaxrl_llm.rewards.scorers.answer.units import (
  parse_quantity,
  parse_unit,
  quantities_agree,
  quantity_key,
)


def quantity(text):
  found = parse_quantity(text)
  return found and found.number.value * (found.unit.factor if found.unit else 1)


@pytest.mark.parametrize(
  ('text', 'in_base_units'),
  [
    ('5 km', 5000), ('5km', 5000), (r'5\,\mathrm{km}', 5000), ('5 kilometres', 5000),
    ('3 ft', Fraction('0.9144')), ('12 inches', Fraction('0.3048')),
    ('1 mile', Fraction('1609.344')), ('2 cm²', Fraction('0.0002')), ('2 square metres', 2),
    (r'12\text{ cm}^3', Fraction('0.000012')), ('1 L', Fraction('0.001')),
    ('5 mL', Fraction('0.000005')), ('250 g', Fraction('0.25')), ('1 lb', Fraction('0.45359237')),
    ('2 min', 120), ('2 h', 7200), ('1 hour 30 minutes', 5400), ('1 hour and 30 minutes', 5400),
    ('5 ft 6 in', Fraction('1.6764')), ('72 km/h', 20), ('72 kilometers per hour', 20),
    ('60 mph', Fraction('26.8224')), ('20 m s^{-1}', 20), ('9.8 m/s^2', Fraction('9.8')),
    ('3 kWh', 10_800_000), ('1 N', 1), ('10 kg m/s^2', 10), ('2 kPa', 2000), ('5 MHz', 5_000_000),
    ('$5.50', Fraction('5.5')), ('50 cents', Fraction('0.5')),
    ('5 dollars 50 cents', Fraction('5.5')),
    ('90°', 90), (r'90^\circ', 90), (r'25\,^{\circ}\mathrm{C}', 25), ('42 red apples', 42),
    ('3 million people', 3_000_000),
    ('2 years', 24), ('1/2 cup', Fraction(1, 2)), ('-5 m', -5), ('42', 42),
  ],
)  # fmt: skip
def test_quantities_are_converted_exactly(text, in_base_units):
  assert quantity(text) == in_base_units


@pytest.mark.parametrize(
  'text',
  ['km', '5 x', '4x', '5 km or 6', '5 km or so', '42 or forty', '5 m - 2 m',
   '42 apples and 3 oranges', '5 and a half', '1 minute 2 hours', '5 m 3 kg', '5 m 3 m',
   '-5 ft 6 in',
   '5 6 m', '5 m ^', '5 not apples', '5, m', '1 hour 30', '5 m' * 200,
   '5π', '5 pi', '3 dozens', '5 millions', '5 squared',
   '6 factorial', '5 thirds', '5 halves', '5 negative', '5 wrong'],
)  # fmt: skip
def test_what_is_not_one_quantity_is_none(text):
  assert parse_quantity(text) is None


@pytest.mark.parametrize(
  ('truth', 'answer', 'stated', 'required'),
  [
    ('5 km', '5000 m', True, True), ('5 km', '5 m', False, False), ('5 km', '5', True, False),
    ('5', '5 km', True, True),
    ('5 km', '5 kg', False, False), ('5 km', '5 bananas', False, False),
    ('42 apples', '42 red apples', True, True), ('42 apples', '42 apple', True, True),
    ('42 apples', '42 oranges', False, False), ('$5', '5 dollars', True, True),
    ('$5', '€5', False, False), ('25 °C', '25 celsius', True, True),
    ('25 °C', '25 °F', False, False), ('25 °C', '298.15 K', False, False),
    ('1 J', '1 N m', True, True), ('1 mL', '1 cm^3', True, True), ('5%', '5 percent', True, True),
    ('1 m^2', '100 cm^2', False, False), ('1 m^2', '10000 cm^2', True, True),
  ],
)  # fmt: skip
def test_units_that_are_stated_have_to_agree(truth, answer, stated, required):
  pair = parse_quantity(truth), parse_quantity(answer)
  assert (quantities_agree(*pair, units='stated'), quantities_agree(*pair, units='required')) == (
    stated,
    required,
  )


def test_a_tolerance_is_in_the_truths_unit():
  def close(answer, **tolerance):
    return quantities_agree(
      parse_quantity('5 km'), parse_quantity(answer), units='stated', **tolerance
    )

  assert close('5100 m', absolute=0.1) and not close('5101 m', absolute=0.1)
  assert close('5100 m', relative=0.02) and not close('5101 m', relative=0.02)


names = st.sampled_from(
  ['m', 'km', 'cm', 'mile', 'ft', 'kg', 'g', 's', 'min', 'hour', 'L', 'mL', 'km/h', 'm/s', 'N', 'J']
)


@given(number=st.integers(-(10**6), 10**6), unit=names, other=names)
@settings(deadline=None, max_examples=60)
def test_a_conversion_there_and_back_is_the_same_quantity(number, unit, other):
  there, back = parse_unit(unit), parse_unit(other)
  if there.dimensions == back.dimensions:
    value = number * there.factor / back.factor
    a, b = (
      parse_quantity(f'{number} {unit}'),
      parse_quantity(f'{value.numerator}/{value.denominator} {other}'),
    )
    if b is not None:
      assert quantities_agree(a, b, units='required') and quantities_agree(b, a, units='required')
      assert quantity_key(a, 'stated') == quantity_key(b, 'stated')
  elif number:
    assert not quantities_agree(
      parse_quantity(f'{number} {unit}'), parse_quantity(f'{number} {other}'), units='stated'
    )


INTERVALS = [
  ('[1,2)', '[1, 2)', True), ('[1,2)', r'\left[1,2\right)', True), ('[1,2)', '[1,2[', True),
  (']1,2]', '(1,2]', True), ('[1,2)', r'1 \le x < 2', True), ('[1,2)', '2 > x >= 1', True),
  ('[1,2)', r'x \in [1;2)', True), ('[1,2)', '(1,2)', False), ('[1,2)', '[1,2]', False),
  ('[1,2)', '(1,2]', False), ('[1,2)', '[1,3)', False), ('[0,1]', r'\left[0, 1\right]', True),
  ('[0,0.5]', r'[0,\frac12]', True), ('[0,50%]', '[0,0.5]', True),
  (r'(-\infty,3]', r'x \leq 3', True), (r'(-\infty,3]', '3 >= x', True),
  (r'(-\infty,3]', '(-oo,3]', True), (r'(-\infty,3]', r'[-\infty,3]', False),
  (r'(-\infty,\infty)', r'\mathbb{R}', True), ('(1,3)', r'(1,2] \cup (2,3)', True),
  ('(1,3)', r'(1,2) \cup (2,3)', False), ('(1,3)', r'(1,2.5) \cup (2,3)', True),
  ('(1,3)', r'(1,3) \cup (1,2)', True), (r'(1,2)\cup(3,4)', '(3,4) U (1,2)', True),
  (r'(1,2)\cup\{3\}', r'\{3\} \cup (1,2)', True), ('[1,2]', r'(1,2)\cup\{1,2\}', True),
  ('[1,2]', r'[1,2] \cup [1.5,2)', True), (r'(-\infty,3)\cup(3,\infty)', r'x \ne 3', True),
  (r'(-\infty,1)\cup(2,\infty)', 'x<1 or x>2', True), (r'\{x | x > 3\}', r'(3, \infty)', True),
  (r'[\sqrt{2},2]', r'[\sqrt 2, \frac{4}{2}]', True),
  (r'[\frac{1}{\sqrt{2}},2]', r'[\frac{\sqrt{2}}{2}, 2]', True),
  (r'[\sqrt{2},2]', '[1.414,2]', False), ('(a,b]', '(a, b]', True),
  ('(a,b]', '[a,b]', False), ('(a,b]', '(b,a]', False), (r'(1,\pi)', r'(1, \pi)', True),
  ('(1,2)', '(2,1)', False), ('(1,2)', '1, 2', False),
  ('(1,2)', r'\{1,2\}', False), ('[1,1]', r'\{1\}', True), (r'\emptyset', r'\varnothing', True),
  (r'\emptyset', '(1,2)', False),
  ('(1000, 2000)', '(1,000, 2,000)', True), ('(1,2)', '(1,2),(3,4)', False), ('(1,2)', '', False),
  ('(1,2)', '((1,2))', False),
  ('(1,2)', '(1,9^{9^{9}})', False), ('hello', '(1,2)', None),
  (r'[-\infty,3]', r'(-\infty,3]', None), ('(2,1)', '(2,1)', None), ('[1,2', '[1,2', None),
]  # fmt: skip


@pytest.mark.parametrize(('truth', 'answer', 'agree'), INTERVALS)
def test_intervals(truth, answer, agree):
  assert intervals_agree(truth, answer) is agree
  if agree is not None and intervals_agree(answer, truth) is not None:
    assert intervals_agree(answer, truth) is agree


ends = st.lists(st.integers(-50, 50), min_size=2, max_size=2, unique=True).map(sorted)


@given(
  ends=ends,
  closed=st.tuples(st.booleans(), st.booleans()),
  other=st.tuples(st.booleans(), st.booleans()),
)
@settings(deadline=None, max_examples=15)
def test_an_interval_equals_itself_written_differently_and_no_other(ends, closed, other):
  low, high = ends

  def written(closed):
    yield f'{"[" if closed[0] else "("}{low},{high}{"]" if closed[1] else ")"}'
    yield f'{"[" if closed[0] else "]"}{low}.0; {high}{"]" if closed[1] else "["}'
    yield f'{low} {"≤" if closed[0] else "<"} x {"≤" if closed[1] else "<"} {high}'
    yield f'{high} {">=" if closed[1] else ">"} t {"≥" if closed[0] else ">"} {low}'
    middle = Fraction(low + high, 2)
    left, right = ('[' if closed[0] else '('), (']' if closed[1] else ')')
    yield f'({middle}, {high}{right} ∪ {left}{low}, {middle}]'

  for first in written(closed):
    for second in written(other):
      assert intervals_agree(first, second) is (closed == other), (first, second)


@pytest.mark.parametrize(
  ('truth', 'answer', 'agree'),
  [
    (r'\{1,2,3\}', '3, 1, 2', True), (r'\{1,2,3\}', r'\left\{ 3,2,1 \right\}', True),
    ('{1,2}', '1 and 2', True), ('1, 2', r'x=1 \text{ or } x=2', True),
    (r'\{1,2\}', '1, 2, and 1', True), (r'\{1,2\}', '1,2,3', False), (r'\{1,2\}', '1', False),
    (r'\{1\}', '1', True), (r'\{2,-2\}', r'\pm 2', True), (r'\{2,-2\}', r'x = \pm\sqrt{4}', True),
    (r'\{1+\sqrt{2},1-\sqrt{2}\}', r'1 \pm \sqrt{2}', True), (r'\{1,3\}', 'x = 2 ± 1', True),
    (r'\{1,3\}', r'2 \pm 2', False), (r'\{1,3\}', r'2 \pm 1 \pm 1', False),
    (r'\{1/2\}', '0.5', True), (r'\{x+1, 2\}', '2, 1+x', True),
    (r'\{(1,2),(3,4)\}', '(3,4),(1,2)', True), (r'\{(1,2),(3,4)\}', '(4,3),(1,2)', False),
    (r'\{\{1\},2\}', r'\{2,\{1\}\}', True),
    (r'\{1,2\}', r'\{\{1,2\}\}', False), (r'\{1,2\}', '(1,2)', False),
    (r'\emptyset', r'\{\}', True), (r'\emptyset', r'\{0\}', False),
    ('1, 2', 'x=1, y=2', False), (r'\{1,2\}', '1 or', False),
    (r'\{1,2,3\}', '1,,2,3', False), (r'\{1000, 2\}', '1,000, 2', True), ('', '1', None),
    (r'\{1\}', ', '.join(map(str, range(200))), False),
  ],
)  # fmt: skip
def test_sets(truth, answer, agree):
  assert sets_agree(truth, answer) is agree


@given(numbers=st.lists(st.integers(-9, 9), min_size=1, max_size=5), data=st.data())
@settings(deadline=None, max_examples=50)
def test_a_set_is_its_elements_in_any_order(numbers, data):
  other = data.draw(st.permutations(numbers))

  def write(items):
    return r'\{' + ', '.join(map(str, items)) + r'\}'

  assert sets_agree(write(numbers), write(other)) is True
  assert sets_agree(write(numbers), write([*other, 10])) is False

  def pair(items):
    return f'({", ".join(map(str, items))})'

  assert tuples_agree(pair(numbers), pair(other)) is (numbers == list(other))


@pytest.mark.parametrize(
  ('truth', 'answer', 'agree'),
  [
    ('(1,2)', '(1, 2)', True), ('(1,2)', r'\left( 1, 2 \right)', True), ('(1,2)', '1, 2', True),
    ('(1,2)', '[1,2]', True), ('(1,2)', '⟨1,2⟩', True),
    ('(1,2)', '(x,y) = (1,2)', True), ('(1,2)', '(2,1)', False), ('(1,2)', '(1,2,2)', False),
    ('(1,2)', '(1,2),(1,2)', False),
    ('(1,2)', r'\{1,2\}', False), ('(1,(2,3))', '(1,(2,3))', True), ('(1,(2,3))', '(1,2,3)', False),
    (r'(\frac{1}{2},x+1)', '(0.5,1+x)', True),
    ('(1,2)', '', False), ('5', '5', None), ('(1,,2)', '(1,2)', None),
    (', '.join('1' * 65), '(1,2)', None),
    ('(1,2)', 'x=1, y=2', True), ('(1,2)', 'y=1, x=2', False), ('(1,2)', '(y,x)=(1,2)', False),
    ('(b,a)=(1,2)', 'b=1, a=2', True), ('(1,(2,3))', r'(1,\{2,3\})', False),
    (r'(1,\{2,3\})', r'(1,\{3,2\})', True),
  ],
)  # fmt: skip
def test_tuples(truth, answer, agree):
  assert tuples_agree(truth, answer) is agree


def test_lists_are_split_outside_brackets():
  assert split('1, (2, 3), {4, 5}') == ['1', '(2, 3)', '{4, 5}']
  assert split('1,000, 2,000') == ['1,000', '2,000'] and split('1,000') == ['1', '000']
  assert parse_set('x = 1') == ['1']


CITIES = read_choices(['Paris', 'London', 'Rome', 'Not enough information'])


@pytest.mark.parametrize(
  ('text', 'letters'),
  [
    ('B', 'B'), ('b', 'B'), ('(B)', 'B'), ('(b).', 'B'), ('B.', 'B'), ('B)', 'B'), ('[B]', 'B'),
    ('**B**', 'B'), (r'\text{B}', 'B'), (r'\textbf{(B)}', 'B'),
    ('$B$', 'B'), ('option B', 'B'), ('Option (B)', 'B'), ('the correct choice B', 'B'),
    ('Answer: B', 'B'), ('London', 'B'), ('london.', 'B'),
    ('B. London', 'B'), ('(B) London', 'B'), ('B London', 'B'), ('B: London', 'B'),
    ('B is correct', 'B'), ('B is the right answer', 'B'),
    ('A, C', 'AC'), ('A and C', 'AC'), ('CA', 'AC'), ('(A), (C)', 'AC'), ('A, B, and C', 'ABC'),
    ('D. Not enough information', 'D'),
    ('E', None), ('', None), ('B. Paris', None), ('A or B', None), ('A/B', None), ('not B', None),
    ('B is wrong', None), ('Berlin', None),
    ('AE', None), ('B?C', None), ('both A and B', None),
    ('London and Paris', None), ('2', None), ('BB', None),
  ],
)  # fmt: skip
def test_choices_that_are_known(text, letters):
  assert parse_choice(text, CITIES) == (None if letters is None else frozenset(letters))


@pytest.mark.parametrize(
  ('text', 'letters'),
  [('B', 'B'), ('B. 12 cm', 'B'), ('(B) 12 cm', 'B'), ('B) the cat', 'B'), ('B cat', None),
   ('B. or C', None), ('B. not sure', None),
   ('B) see C', None), ('cat', None), ('J', 'J'),
   ('B) A', None), ('B. I', None), ('B) A cat', 'B')],
)  # fmt: skip
def test_choices_that_are_not_known(text, letters):
  assert parse_choice(text, None) == (None if letters is None else frozenset(letters))


def test_forms_of_choices_in_rows():
  assert CITIES == {'A': 'Paris', 'B': 'London', 'C': 'Rome', 'D': 'Not enough information'}
  assert read_choices({'a': 'x', 'b': 3}) == {'A': 'x', 'B': '3'}
  assert read_choices({'text': ['x', 'y'], 'label': ['1', '2']}) == {'1': 'x', '2': 'y'}
  assert [read_choices(v) for v in (None, 'AB', [], {}, [['a']], 3)] == [None] * 6
  numbered = read_choices({'text': ['x', '3', 'y'], 'label': ['1', '2', '3']})
  said = {'1': '1', '(2)': '2', 'option 3.': '3', 'x': '1', '4': None, '1, 2': None}
  assert {text: parse_choice(text, numbered) for text in said} == {
    k: v and {v} for k, v in said.items()
  }
  same = read_choices(['one', 'One'])
  assert parse_choice('one', same) is None and parse_choice('A', same) == {'A'}


def test_a_truth_may_count_the_choices():
  scorer = answer_scorer(mode='choice', truth_is_index=True)

  def said(truth, answer):
    return scorer(attempt(answer, truth=truth, fields={'choices': ['x', 'y', 'z']})).value

  assert [said('0', 'A'), said('2', 'C'), said('2', 'z'), said('2', 'B')] == [1.0, 1.0, 1.0, 0.0]
  assert [said(truth, 'A') for truth in ('3', '-1', 'A', '1.0')] == [None] * 4


@pytest.mark.parametrize(
  ('one', 'other'),
  [
    ('The Beatles', 'beatles'), ('New  York.', 'new york'), ("King's College", 'Kings College'),
    ('well-known', 'well known'), ('U.S.A.', 'USA'),
    ('“Paris”', 'paris'), (r'\text{Paris}', 'Paris'), ('**Paris**', 'paris'),
    ('1,000 BC', '1000 bc'), ('rock & roll', 'rock and roll'),
    ('ＡＢＣ', 'abc'), ('北京。', '北京'), ('Yes!', 'yes'), ('king of the hill', 'King of hill'),
    ('Straße', 'STRASSE'), ('cafe\u0301', 'café'),
  ],
)  # fmt: skip
def test_texts_that_are_the_same(one, other):
  assert normalise(one) == normalise(other) != ''


@pytest.mark.parametrize(
  ('one', 'other'),
  [('3.5', '35'), ('-5', '5'), ('C++', 'C'), ('C#', 'C'), ('50%', '50'), ('vitamin A', 'vitamin'),
   ('10²', '102'), ('a', 'the'), ('12:30', '1230'),
   ('1/2', '12'), ('x=1', 'x1'), ('not Paris', 'Paris'), ('.5', '5'), ('1,5', '15')],
)  # fmt: skip
def test_texts_that_differ(one, other):
  assert normalise(one) != normalise(other)


def test_a_truth_may_list_aliases():
  assert aliases('["USA", "United States"]') == ['USA', 'United States']
  assert [aliases(text) for text in ('[1, 2]', '[sic]', '[]', 'x')] == [
    ['[1, 2]'],
    ['[sic]'],
    ['[]'],
    ['x'],
  ]
  scorer = answer_scorer(mode='text', extraction=ANYWHERE)

  def said(text, **more):
    return scorer(attempt(text, truth='["USA", "U.S."]', **more)).value

  assert [said('The answer is the USA.'), said('us'), said('UK')] == [1.0, 1.0, 0.0]
  assert (
    said('America', fields={'aliases': ['America']})
    == said('America', fields={'extra_info': {'aliases': ['America']}})
    == 1.0
  )
  assert scorer(attempt('x', truth='!')).value is None


def test_several_methods_in_their_order():
  methods = ('boxed', 'hashes', 'phrase')

  def found(text, methods=methods):
    return extract(text, method=methods, key=lambda t: parse_number(t) or t)

  assert found(r'The answer is 1. \boxed{2}').answer == '2'
  assert found('The answer is 1. #### 2').answer == '2'
  assert found('The answer is 1.').answer == '1' and found('1').answer is None
  assert found(r'\boxed{1} \boxed{2} #### 1').reason == '2 answers that differ'
  assert found(r'\boxed{1} #### 2').reason == '2 answers that differ'
  assert found(r'\boxed{1} #### two').answer == '1', (
    'what cannot be read as a value contradicts nothing'
  )
  assert found('1', ('boxed', 'whole')).answer == '1'


@pytest.mark.parametrize(
  ('text', 'wanted'),
  [('9^{9^{9}}', True), ('(9^9)^{9}', True), (r'\left(9^{9}\right)^{9}', True), ('2^{99999}', True),
   ('2^{9999}', False), ('99999!', True),
   ('5!', False), ('5!!', True), ('1e9999', True), ('e^{x^2}', False), ('x^{2^3}', False),
   ('10^6', False), ('9' * 400, True), ('(' * 41 + '42' + ')' * 41, True),
   ('(' * 40 + '42' + ')' * 40, False)],
)  # fmt: skip
def test_what_would_explode_is_seen_before_it_is_computed(text, wanted):
  assert explodes(text) is wanted
  if wanted:
    assert latex_agree('42', text) is False and latex_agree(text, text) is True


MODES = ('exact', 'numeric', 'latex', 'interval', 'set', 'tuple', 'choice', 'text')
TRUTHS = {'interval': '[1,2)', 'set': '1, 2', 'tuple': '(1,2)', 'choice': 'B'}


@given(
  text=st.text(alphabet='\\boxed{}()[]<>/#, \n.;=|≤∪±0123456789-%$ABxor', max_size=40),
  mode=st.sampled_from(MODES),
)
@settings(deadline=None, max_examples=150)
def test_any_text_gets_a_value_in_every_mode(text, mode):
  # Not `latex`'s own parser on junk: it takes long, and `rewards_answer_test` has it.
  if mode != 'latex':
    scorer = answer_scorer(mode=mode, extraction=ANYWHERE, units='stated')
    for completion in (text, rf'\boxed{{{text}}}'):
      assert scorer(attempt(completion, truth=TRUTHS.get(mode, '42'))).value in (0.0, 1.0)


@pytest.mark.parametrize(
  'deep',
  ['(' * 900 + '43' + ')' * 900, '{' * 900 + '}' * 900, r'\frac{' * 300 + '}{1}' * 300, '1,' * 900],
)
@pytest.mark.parametrize('mode', MODES)
def test_deep_and_long_answers_are_wrong(mode, deep):
  assert answer_scorer(mode=mode)(attempt(deep, truth=TRUTHS.get(mode, '42'))).value == 0.0
