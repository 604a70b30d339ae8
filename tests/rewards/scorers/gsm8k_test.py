"""Every gold answer of GSM8K is right in all its written forms, and no perturbed answer is."""

import json
import random

import pytest
from fixtures.rewards_scorers import attempt
from paths import ROOT

from jaxrl_llm.rewards.scorers.answer.choosing import ANYWHERE
from jaxrl_llm.rewards.scorers.answer.extraction import reference
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer

DATA = ROOT.parent / 'shared' / 'data' / 'gsm8k'
TRAIN_ROWS = 100

NUMERIC = answer_scorer(mode='numeric', extraction=ANYWHERE)
WITH_WORDS = answer_scorer(mode='numeric', extraction=ANYWHERE, units='ignored')
LATEX = answer_scorer(mode='latex', extraction='boxed')


EVERY = [25, pytest.param(5, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.acceptance)]


@pytest.fixture(scope='module', params=EVERY, ids=['some', 'many', 'all'])
def rows(request):
  """Every 25th, every fifth or all test rows, and as large a share of some train rows of a seeded
  draw.
  """
  if not (DATA / 'test.jsonl').is_file():
    pytest.skip('no ../shared/data/gsm8k beside the checkout')

  def read(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]

  test, train = read('test.jsonl'), read('train.jsonl')
  assert (len(test), len(train)) == (1319, 7473)
  return (test + random.Random(8).sample(train, TRAIN_ROWS))[:: request.param]


def gold(row):
  number = row['answer'].split('####')[1].strip().replace(',', '')
  assert str(int(number)) == number
  return int(number)


def value(scorer, row, completion):
  return scorer(attempt(completion, truth=row['answer'], prompt=row['question'])).value


def forms(n):
  """(text, whether words follow the number)."""
  comma, latex = f'{n:,}', f'{n:,}'.replace(',', '{,}')
  money = f'-${abs(n):,}.00' if n < 0 else f'${n:,}.00'
  numbers = [
    f'{n}',
    comma,
    f'{n}.0',
    f'{n}.00',
    f'{comma}.00',
    money,
    rf'\${n}',
    f'${n}$',
    rf'\({n}\)',
    f'**{n}**',
    f'{n}.',
  ]
  numbers += [
    rf'\text{{{n}}}',
    latex,
    rf'\frac{{{2 * n}}}{{2}}',
    f'{3 * n}/3',
    f'x = {n}',
    f' {n} ',
  ]
  words = [
    f'{n} eggs',
    rf'{latex} \text{{ dollars}}',
    f'{comma} miles per hour',
    rf'{n}\text{{ cm}}^2',
    f'{n} apples left',
  ]
  yield from ((text, False) for text in numbers)
  yield from ((text, True) for text in words)


PLACES = {
  'whole': '{}',
  'boxed': r'So the total is $\boxed{{{}}}$.',
  'hashes': 'Add them up.\n#### {}',
  'tags': '<think>Add 1 and 2, no, 3.</think><answer>{}</answer>',
  'phrase': 'We add them up. Therefore, the answer is {}',
}


def test_every_gold_answer_matches_itself_in_all_its_written_forms(rows):
  for row in rows:
    n = gold(row)
    assert reference(row['answer']).replace(',', '') == str(n)
    assert value(NUMERIC, row, row['answer']) == 1.0
    places = list(PLACES.values())
    for i, (text, words) in enumerate(forms(n)):
      scorer = WITH_WORDS if words else NUMERIC
      completion = places[(n + i) % len(places)].format(text)
      assert value(scorer, row, completion) == 1.0, (completion, row['answer'])


@pytest.mark.parametrize('place', PLACES)
def test_every_form_is_read_in_every_place(place):
  for n in (0, 7, -7, 42, 1200, -1200, 1234567):
    row = {'question': 'How many?', 'answer': f'They add up.\n#### {n:,}'}
    for text, words in forms(n):
      assert value(WITH_WORDS if words else NUMERIC, row, PLACES[place].format(text)) == 1.0, (
        place,
        text,
      )


def perturbed(n):
  digits = str(abs(n))
  others = {
    n + 1,
    n - 1,
    10 * n,
    -n,
    int(digits[::-1]),
    int(digits[1:] or 1),
    int(digits + '0'),
    n + 100,
    2 * n + 1,
  }
  if len(digits) > 1:
    others.add(int(digits[1] + digits[0] + digits[2:]))
  for other in sorted(others - {n}):
    yield f'{other}'
    yield f'{other:,}.00'
  yield from (
    (f'{n}.5', f'{n}01.0', f'{n}/7' if n % 7 or not n else f'{n}/11', f'1/{n or 3}00') if n else ()
  )
  near = n + 1
  yield from (
    f'{n}, {near}',
    f'{near}, {n}',
    f'{n} or {near}',
    f'{near} and {n}',
    f'{n} {near}',
    f'{near} = {n}',
  )
  yield from (
    f'{n} to {near}',
    f'between {n} and {near}',
    f'not {n}',
    f'{n} \\pm 1',
    f'{n} thousand' if n else '1 thousand',
  )
  yield from (
    f'{n}-{near}',
    f'{n}; {near}',
    f'{n}x',
    f'{n}{n}{near}',
    f'{n} + {near}',
    '',
    '?',
    f'-{n + 3}',
    f'x > {n}',
  )


def test_no_perturbed_answer_matches(rows):
  for row in rows:
    n = gold(row)
    places = list(PLACES.values())
    for i, text in enumerate(perturbed(n)):
      completion = places[(n + i) % len(places)].format(text)
      scorer = WITH_WORDS if (n // len(places) + i) % 2 else NUMERIC
      assert value(scorer, row, completion) == 0.0, (completion, row['answer'])
    for two in (
      rf'\boxed{{{n}}} \boxed{{{n + 1}}}',
      f'#### {n + 1}\n#### {n}',
      f'{row["answer"]}\n#### {n + 1}',
    ):
      assert value(NUMERIC, row, two) == 0.0, two
    assert (
      value(
        NUMERIC, {**row, 'question': row['question'] + f' #### {n}'}, row['question'] + f' #### {n}'
      )
      == 0.0
    )


def test_expressions_say_the_same_of_gold_answers_as_numbers_do(rows):
  for row in rows[:40]:
    n = gold(row)
    for text in (f'{n}', f'{n}.0', rf'\frac{{{2 * n}}}{{2}}', rf'{n}\text{{ eggs}}'):
      assert value(LATEX, row, rf'\boxed{{{text}}}') == 1.0, text
    for text in (
      f'{n + 1}',
      f'{n - 1}',
      f'{n}0' if n else '10',
      f'{n}, {n + 1}',
      rf'{n} \text{{ or }} {n + 1}',
      f'{n}.5',
    ):
      assert value(LATEX, row, rf'\boxed{{{text}}}') == 0.0, text
