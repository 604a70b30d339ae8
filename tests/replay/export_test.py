"""Exported samples are those of the store, bit for bit, and what is not exported is told."""

import json

import numpy as np
import pytest
from stored import experts, issues, make_sample, score_of, store_group

from jaxrl_llm.app.commands import buffer
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.replay.export import Selection, export
from jaxrl_llm.replay.index import open_store

TRAINED, DROPPED, WAITING = ['a/0', 'a/1'], ['b/0'], ['c/0']


@pytest.fixture
def directory(tmp_path):
  """Two samples trained in the steps 0 and 1, one dropped in step 1, one admitted, one issued."""
  store = open_store(tmp_path / 'replay', max_uses=2)
  store_group(store, TRAINED, 0)
  store.at(0).score([score_of('a/0', 0.1), score_of('a/0', 0.75)])
  store.at(0).score([Score(uid='a/1', scorer='odd', value=None, evidence={'x': float('nan')})])
  store.at(0).derive([('a/0', 'experience', {'reward': 0.75})])
  store.at(0).seal(TRAINED)
  store.at(0).trained(TRAINED)
  store.at(1).trained(['a/0'])
  store_group(store, DROPPED, 1)
  store.at(1).drop(DROPPED, 'not selected')
  store_group(store, WAITING, 2, version=2)
  store.at(2).issue(issues(['d/0']))
  store.at(2).join(experts(['x']))
  store.close()
  return tmp_path / 'replay'


def lines(file) -> dict[str, dict]:
  def refuse(name):
    raise AssertionError(f'{name} is not JSON')

  rows = [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]
  return {row['uid']: row for row in rows}


def test_a_line_has_the_sample_bit_for_bit_its_scores_and_its_history(directory, tmp_path):
  exported = export(directory, tmp_path / 'all.jsonl')
  rows = lines(tmp_path / 'all.jsonl')
  assert [*rows] == [*TRAINED, *DROPPED, *WAITING], 'in the order of issue'
  assert (exported.samples, exported.tokens, exported.lost) == (4, 48, ())
  assert exported.without_bytes == {'issued': 1, 'admitted': 1}
  assert exported.size == (tmp_path / 'all.jsonl').stat().st_size
  for uid, row in rows.items():
    sample = make_sample(uid)
    assert row['tokens'] == sample.tokens.tolist()
    assert row['loss_mask'] == [0] * 4 + [1] * 8
    assert row['role'] == [0] * 4 + [1] * 8
    logprobs = np.array(row['logprobs'], np.float32)
    assert logprobs.tobytes() == sample.behaviour_logprobs.tobytes()
  assert rows['c/0']['spans'] == [
    {'start': 4, 'end': 12, 'attempt': 1, 'version': 2, 'engine': 'embedded', 'finish': 'stop'}
  ]
  assert (rows['a/0']['trained'], rows['a/1']['trained'], rows['c/0']['trained']) == (
    [0, 1],
    [0],
    [],
  )
  assert (rows['b/0']['state'], rows['b/0']['reason']) == ('dropped', 'not selected')
  score = rows['a/0']['scores']['answer']
  assert (score['value'], score['status'], score['parts']) == (0.75, 'ok', {'match': 1.0})
  assert rows['a/1']['scores']['odd']['evidence'] == {'x': None}
  assert rows['a/0']['derived'] == {'experience': {'reward': 0.75}}


def command(*flags) -> int:
  """Runs `jaxrl buffer` in this process, with no flags of earlier calls."""
  for name in buffer.FLAGS:
    buffer.FLAGS[name].unparse()
  return buffer.main(['buffer', *flags])


@pytest.mark.parametrize(
  'selection, wanted',
  [
    (Selection(stage='a'), TRAINED),
    (Selection(state='dropped'), DROPPED),
    (Selection(steps=(0, 0)), TRAINED),
    (Selection(steps=(1, 1)), ['a/0', *DROPPED]),
    (Selection(steps=(2, 9), state='admitted'), WAITING),
    (Selection(task='t', stage='b'), DROPPED),
  ],
)
def test_conditions_select(directory, tmp_path, selection, wanted):
  export(directory, tmp_path / 'some.jsonl', selection)
  assert [*lines(tmp_path / 'some.jsonl')] == wanted


def test_what_cannot_be_meant_is_refused_and_leaves_no_file(directory, tmp_path):
  file = tmp_path / 'some.jsonl'
  with pytest.raises(UserError, match='has no sample with stage typo;'):
    export(directory, file, Selection(stage='typo'))
  with pytest.raises(UserError, match="state 'train': unknown; wanted one of issued"):
    Selection(state='train')
  with pytest.raises(UserError, match='ascending'):
    Selection(steps=(3, 2))
  with pytest.raises(UserError, match='cannot be created: No such file'):
    export(directory, tmp_path / 'missing' / 'some.jsonl')
  with pytest.raises(UserError, match='no such file; give the replay directory'):
    export(tmp_path / 'elsewhere', file)
  assert [path.name for path in tmp_path.iterdir()] == ['replay']
  file.write_text('mine')
  with pytest.raises(UserError, match='exists, and an export overwrites no file'):
    export(directory, file)
  assert file.read_text() == 'mine'


def test_a_damaged_segment_is_a_line_and_the_others_are_exported(directory, tmp_path, capsys):
  (segment,) = (directory / 'segments').iterdir()
  segment.write_bytes(segment.read_bytes()[:40])
  flags = [f'--workdir={tmp_path}', f'--export={tmp_path / "some.jsonl"}']
  assert command(*flags) == 1
  problems = [line for line in capsys.readouterr().out.splitlines() if 'PROBLEM' in line]
  assert len(problems) == 1
  assert problems[0].startswith(f'PROBLEM {segment.name}: 2 samples lost: a/0, a/1: segment ')
  assert [*lines(tmp_path / 'some.jsonl')] == [*DROPPED, *WAITING]
  assert command(*flags) == 2, 'the file exists'
  assert 'exists' in capsys.readouterr().err


def test_flags_without_an_export_are_refused(directory, tmp_path, capsys):
  assert command(f'--workdir={tmp_path}', '--steps=1:2') == 2
  assert '--steps: only with --export=FILE' in capsys.readouterr().err
  assert command(f'--workdir={tmp_path}', '--export=f', '--steps=1:x') == 2
  assert '--steps=1:x: wanted FIRST:LAST' in capsys.readouterr().err
