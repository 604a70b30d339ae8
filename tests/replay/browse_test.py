"""A run's store as a person looks at it, by the functions and by the command."""

import os
import sqlite3
import subprocess
import sys

import pytest
from paths import ROOT
from stored import experts, issues, score_of, store_group

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import Media, Task
from jaxrl_llm.replay import browse
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.replay.tables import Issue


@pytest.fixture
def run(tmp_path):
  store = open_store(tmp_path / 'replay')
  store_group(store, ['g/0', 'g/1', 'g/2'], 0)
  store.at(0).score([score_of('g/0')])
  store.at(0).seal(['g/0', 'g/1'])
  store.at(0).trained(['g/0', 'g/1'])
  store.at(1).drop(['g/2'], 'not selected')
  store.at(1).issue(issues(['g/3']))
  store.close()
  return tmp_path


def command(run, *flags, expect=0):
  buffer = [sys.executable, 'launch/buffer.py', f'--workdir={run}', *flags]
  done = subprocess.run(
    buffer,
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == expect, done.stderr
  return (done.stderr if expect == 2 else done.stdout).splitlines()


def test_the_summary_says_what_is_there(run):
  lines = browse.summary(run / 'replay').lines
  assert (
    lines[0]
    == 'samples, usual, 4: issued 1, partial 0, stored 0, awaiting 0, admitted 0, trained 2, '
    'dropped 1, expired 0, void 0'
  )
  assert lines[1] == 'uses of those trained, usual, max_uses 1: 1 times 2'
  assert lines[2] == 'attempts of the run: 1'
  assert lines[3].startswith('sealed segments 1: 2 samples, ')
  assert [line for line in lines if line.startswith('scores of')] == [
    f'scores of {score_of("g/0").scorer}, ok: 1, mean {score_of("g/0").value:.4g}'
  ]


def test_partitions_versions_and_uses_are_told(tmp_path):
  store = open_store(tmp_path, max_uses=2)
  for number in range(12):
    store_group(store, [f'g{number}/0', f'g{number}/1'], number, version=number)
  store.at(12).join(experts(['x', 'y']))
  store.at(12).seal(['g11/0', 'g11/1', 'g10/0'])
  for step in (12, 13):
    store.at(step).trained(['g11/0', 'g11/1', 'x'])
  store.at(14).trained(['g10/0', 'x'])
  store.close()
  lines = browse.summary(tmp_path).lines
  assert lines[:5] == [
    'samples, usual, 24: issued 0, partial 0, stored 0, awaiting 0, admitted 21, trained 3, '
    'dropped 0, expired 0, void 0',
    'samples, expert, 2: issued 0, partial 0, stored 0, awaiting 0, admitted 1, trained 1, '
    'dropped 0, expired 0, void 0',
    'versions of those admitted: 10: 1, 9: 2, 8: 2, 7: 2, 6: 2, 5: 2, 4: 2, 3: 2, 0 to 2: 6',
    'uses of those trained, usual, max_uses 2: 1 times 1, 2 times 2',
    'uses of those trained, expert: 3 times 1',
  ]
  found = browse.find(tmp_path, task='e')
  assert [(entry.uid, entry.partition, entry.version, entry.uses) for entry in found] == [
    ('x', 'expert', None, 3),
    ('y', 'expert', None, 0),
  ]


def test_a_task_is_told_with_what_became_of_its_samples(run):
  task = Task(
    taskset='train', domain='vision', prompt=({'role': 'user', 'content': 'Where?'},),
    truth='(1, 2)', fields={}, media=(Media(kind='image', digest='ab' * 16, reference='a.png'),),
  )  # fmt: skip
  store = open_store(run / 'replay')
  store.recover(2)
  for step in (2, 3):
    with store.transaction():
      store.at(step).offer([task])
      group = f'g/{step}'

      def row(i, group=group, step=step):
        return Issue(uid=f'{group}/{i}', group_id=group, task_id=task.uid, visit=step)

      store.at(step).issue([row(0), row(1)])
  store.at(3).drop(['g/2/0'], 'timeout')
  assert not audit(store).ok, 'the samples of before are of no task that is known'
  store.close()
  assert 'tasks, taskset: train 1' in browse.summary(run / 'replay').lines
  assert command(run, f'--task={task.uid}')[:4] == [
    f'{task.uid} of taskset train, domain vision: 2 visits, samples dropped 1, issued 3',
    'prompt: [{"role": "user", "content": "Where?"}]',
    'truth: "(1, 2)"',
    f'image: {"ab" * 16}',
  ]
  assert browse.asked(run / 'replay', 'another') == []


def test_samples_are_found_by_state_and_task_those_that_changed_last_first(run):
  def found(**wanted):
    return [entry.uid for entry in browse.find(run / 'replay', **wanted)]

  assert found() == ['g/3', 'g/2', 'g/1', 'g/0'] and found(limit=2) == ['g/3', 'g/2']
  assert found(state='trained') == ['g/1', 'g/0'] and found(state='void') == []
  (entry,) = browse.find(run / 'replay', state='dropped')
  assert (entry.uid, entry.task_id) == ('g/2', entry.task_id) and found(
    task=entry.task_id, state='dropped'
  ) == ['g/2']
  assert found(task='none') == []
  with pytest.raises(
    UserError, match="state 'lost': unknown; wanted one of issued, partial, stored"
  ):
    found(state='lost')


def test_a_samples_history_is_told_whole(run):
  lines = browse.history(run / 'replay', 'g/0')
  assert [line.partition(': ')[2] for line in lines[:4]] == [
    'issued',
    'stored',
    'admitted',
    'trained',
  ]
  assert (
    'score of' in lines[4]
    and lines[5].startswith('attempt 1, segments/')
    and ' tokens, of which ' in lines[5]
  )
  assert browse.history(run / 'replay', 'g/2')[3] == 'attempt 1, step 1: dropped (not selected)'
  with pytest.raises(UserError, match="sample 'g/9': never issued"):
    browse.history(run / 'replay', 'g/9')


@pytest.mark.full
def test_the_command_prints_it_and_fails_where_nothing_adds_up(run):
  assert command(run)[0].startswith('samples, usual, 4: ')
  assert command(run, '--state=dropped') == [
    'g/2  dropped  usual, attempt 1, issued at step 0, version 0, used 0 times'
  ]
  assert command(run, '--uid=g/2')[3] == 'attempt 1, step 1: dropped (not selected)'
  assert command(run, '--audit')[-1] == 'audit ok'
  with sqlite3.connect(run / 'replay' / 'index.sqlite') as db:
    db.execute("UPDATE samples SET state = 'trained' WHERE uid = 'g/3'")
  assert command(run, '--audit', expect=1)[-1].startswith('audit FAILED')
  (line,) = command(run / 'nowhere', expect=2)
  assert line.startswith('error: replay store') and 'no such file' in line


def test_a_damaged_index_and_one_of_a_newer_program_are_one_line(run):
  index = run / 'replay' / 'index.sqlite'
  with sqlite3.connect(index) as db:
    db.execute("UPDATE meta SET json = '99' WHERE key = 'schema'")
  for flags in ((), ('--audit',)):
    (line,) = command(run, *flags, expect=2)
    assert 'schema 99, this program reads 5; use the program version that wrote it' in line
  data = index.read_bytes()
  index.write_bytes(data[:100] + bytes(len(data) - 100))
  (line,) = command(run, expect=2)
  assert 'is damaged or not a store of this program' in line
