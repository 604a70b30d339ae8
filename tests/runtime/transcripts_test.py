"""Rollouts of a report: packed ones and parts of steps."""

import json

import numpy as np

from jaxrl_llm.runtime import transcripts, writers

STAGES = [{'name': 'grpo', 'offset': 0}]


def row(index, *, tokens=2000, **fields):
  draws = np.random.default_rng(index)
  ids = draws.integers(0, 30, tokens)
  return {
    'uid': f'grpo/t/0/{index}',
    'task_id': 't',
    'group_id': 'grpo/t/0',
    'prompt': 'p',
    'completion': ''.join(f'<{i}>' for i in ids),
    'tokens': [f'<{i}>' for i in ids],
    'token_ids': ids.astype(np.int32),
    # Multiples of 1/8, which lists and packed arrays write alike.
    'behaviour_logprobs': np.where(ids < 5, np.nan, -draws.integers(0, 9, tokens) / 8),
    'trainer_logprobs': -draws.integers(0, 9, tokens) / 8,
    'advantages': np.full(tokens, 0.5),
    'reward': 1.0,
    **fields,
  }


def test_a_report_shows_packed_rollouts_as_it_shows_lists(tmp_path):
  rows = [row(index) for index in range(3)]
  packed = writers.RolloutsWriter(tmp_path / 'packed').write('grpo', 1, rows)
  lists = writers.write_rows(tmp_path / 'lists' / 'rollouts' / 'grpo' / '000001.jsonl', rows)
  assert packed.stat().st_size < lists.stat().st_size / 3
  shown = [transcripts.rollouts(tmp_path / name, STAGES) for name in ('packed', 'lists')]
  assert shown[0] == shown[1] and len(shown[0][0]['rows']) == 3 and shown[0][1] == 0


def test_a_report_states_that_files_contain_only_some_groups(tmp_path):
  rollouts = writers.RolloutsWriter(tmp_path)
  rollouts.write('grpo', 1, [row(0, step_samples=1024), row(1, step_samples=1024)])
  rollouts.write('grpo', 2, [row(0, tokens=3)])
  shown = transcripts.rollouts(tmp_path, STAGES)[0]['shown']
  assert 'The files of 1 of these steps hold some groups of their 1,024 samples' in shown


def test_a_damaged_array_costs_its_row_alone(tmp_path):
  path = writers.RolloutsWriter(tmp_path).write('grpo', 1, [row(0), row(1)])
  first, second = map(json.loads, path.read_text().splitlines())
  first['token_ids']['zlib'] = first['token_ids']['zlib'][:40]
  path.write_text(f'{json.dumps(first)}\n{json.dumps(second)}\n')
  found, corrupt = transcripts.rollouts(tmp_path, STAGES)
  assert corrupt == 1 and [r['u'] for r in found['rows']] == [second['uid']]
