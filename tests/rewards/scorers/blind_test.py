"""Pairs written by people who had not seen the code: precision and recall with the options that are
chosen from them.

Each row of the files has `gold`, `completion`, `right`, `mode` (null: chosen) and `kind`.
"""

import json

import pytest
from fixtures.rewards_scorers import attempt
from paths import FIXTURES

from jaxrl_llm.rewards.scorers.answer.choosing import choose
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer

FILES = sorted(FIXTURES.glob('answers_blind_*.jsonl'))


@pytest.mark.parametrize('file', FILES, ids=lambda file: file.stem)
def test_precision_and_recall_on_pairs_of_others(file, capsys):
  rows = [json.loads(line) for line in file.read_text().splitlines()]
  chosen = choose(row['gold'] for row in rows if row['mode'] is None).options
  accepted = [
    row
    for row in rows
    for options in [chosen if row['mode'] is None else {**chosen, 'mode': row['mode']}]
    if answer_scorer(**options)(attempt(row['completion'], truth=row['gold'])).value == 1.0
  ]
  hits = sum(row['right'] for row in accepted)
  precision, recall = hits / len(accepted), hits / sum(row['right'] for row in rows)
  with capsys.disabled():
    print(f'\n{file.stem}: {len(rows)} pairs, precision {precision:.4f}, recall {recall:.4f}')
  assert len(rows) >= 300 and chosen['mode'] == 'latex'
  assert precision >= 0.995 and recall >= 0.96
