"""A labelled set of right, wrong and hostile answers, made by hand before the code was fitted:
precision and recall.

Each row of the file has `kind` (the mode), `truth`, `completion`, `right`, `why`, and where it
needs them `options`, `prompt` and `fields`.
"""

import collections
import json

import pytest
from fixtures.rewards_scorers import attempt
from paths import FIXTURES

from jaxrl_llm.rewards.scorers.answer.choosing import ANYWHERE
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer

FILE = FIXTURES / 'answers_adversarial.jsonl'
ROWS = [json.loads(line) for line in FILE.read_text().splitlines()]


def judged(row):
  scorer = answer_scorer(mode=row['kind'], extraction=ANYWHERE, **row.get('options', {}))
  prompt, fields = row.get('prompt', 'What is it?'), row.get('fields')
  verdict = scorer(attempt(row['completion'], truth=row['truth'], prompt=prompt, fields=fields))
  assert verdict.value is not None, (row, verdict.evidence)
  return verdict.value == 1.0


def test_the_set_is_large_and_balanced():
  kinds = collections.Counter((row['kind'], row['right']) for row in ROWS)
  assert len(ROWS) >= 150 and 0.4 < sum(row['right'] for row in ROWS) / len(ROWS) < 0.6
  assert min(kinds.values()) >= 5 and len(kinds) == 14
  assert len({json.dumps({**row, 'why': ''}, sort_keys=True) for row in ROWS}) == len(ROWS)


def test_precision_and_recall(capsys):
  told = [(row, judged(row)) for row in ROWS]
  accepted = [row for row, said in told if said]
  missed = [row for row, said in told if row['right'] and not said]
  precision = sum(row['right'] for row in accepted) / len(accepted)
  recall = 1 - len(missed) / sum(row['right'] for row in ROWS)
  with capsys.disabled():
    print(f'\nanswers: {len(ROWS)} rows, precision {precision:.3f}, recall {recall:.3f}')
    for row in missed:
      print(f'  missed: {row["completion"]!r} for {row["truth"]!r} ({row["why"]})')
  assert [row for row in accepted if not row['right']] == []
  assert recall >= 0.95


@pytest.mark.parametrize(
  'row', [row for row in ROWS if row['right']][::5], ids=lambda row: row['completion'][:40]
)
def test_a_right_answer_beside_a_wrong_one_is_none(row):
  hedged = row['completion'] + '\n' + r'\boxed{-7/13}'
  if r'\boxed' in row['completion']:
    assert not judged({**row, 'completion': hedged})
