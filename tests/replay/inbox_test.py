"""Verdicts in the inbox: what is attached, what is refused, and that the audit accounts for all."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from paths import ROOT
from stored import issues, make_sample, states

from jaxrl_llm.app.commands import feedback
from jaxrl_llm.app.composition.resources import recover
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.replay import browse, copying
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.awaited import Awaited
from jaxrl_llm.replay.inbox import INBOX, LateVerdict, attach, given
from jaxrl_llm.replay.index import open_store

A, B = 'g/0', 'g/1'


def wait(store, uids, *, hours=1.0, step=0, version=0, scorers=('human',)):
  """Samples that have been generated and wait for verdicts."""
  writer, now = store.at(step), time.time()
  writer.issue(issues(uids))
  writer.append([make_sample(uid, version=version) for uid in uids])
  awaited = Awaited(
    scorers=dict.fromkeys(scorers, 1), since=now, until=now + 3600 * hours, newest_version=version
  )
  writer.wait_for_rewards({uid: f'answer {uid}' for uid in uids}, awaited)


def command(*flags) -> int:
  """Runs `jaxrl feedback` in this process, with no flags of earlier calls."""
  for name in feedback.FLAGS:
    feedback.FLAGS[name].unparse()
  return feedback.main(['feedback', *flags])


@pytest.fixture
def directory(tmp_path):
  """A run directory whose store has the waiting group g of two samples."""
  store = open_store(tmp_path / 'replay')
  wait(store, [A, B])
  store.close()
  return tmp_path


def refusals(directory, *verdicts):
  return [(reply.refused, reply.line) for reply in attach(directory / 'replay', verdicts)]


def test_a_verdict_is_attached_once_and_another_value_of_the_same_person_is_refused(directory):
  first = LateVerdict(uid=A, value=1.0, who='ann')
  ((refused, line),) = refusals(directory, first)
  assert (refused, line) == (None, 'feedback on g/0: human 1 of ann attached')
  twice, other, bob = refusals(
    directory,
    first,
    LateVerdict(uid=A, value=0.0, who='ann'),
    LateVerdict(uid=A, value=0.0, who='bob'),
  )
  assert twice == (None, 'feedback on g/0: ann has already given 1')
  assert other == (
    'conflict',
    'feedback on g/0: ann has already given 1, and now gives 0; the first stands',
  )
  assert bob[0] is None
  assert [(v.who, v.value) for v in given(directory / 'replay')] == [('ann', 1.0), ('bob', 0.0)]


def test_unknown_late_and_misdirected_verdicts_are_refused_with_a_line_each(directory):
  store = open_store(directory / 'replay')
  store.recover(1)
  wait(store, ['h/0'], hours=-1, step=1)
  wait(store, ['i/0'], step=1, scorers=('human', 'customer'))
  store.at(1).issue(issues(['j/0', 'k/0']))
  store.at(1).append([make_sample('j/0')])
  store.at(1).admit(['j/0'])
  store.close()
  verdicts = [
    LateVerdict(uid='nobody/0', value=1, who='ann'),
    LateVerdict(uid='h/0', value=1, who='ann'),
    LateVerdict(uid='i/0', value=1, who='ann'),
    LateVerdict(uid='i/0', value=1, who='ann', scorer='ann'),
    LateVerdict(uid='j/0', value=1, who='ann'),
    LateVerdict(uid='k/0', value=1, who='ann'),
    LateVerdict(uid=A, value=1, who='ann', attempt=7),
  ]
  replies = refusals(directory, *verdicts)
  assert [refused for refused, _ in replies] == [
    *('unknown', 'late', 'unknown', 'unknown', 'late', 'late', 'unknown')
  ]
  lines = [line for _, line in replies]
  assert 'no such sample in the store' in lines[0] and 'the sample waited until' in lines[1]
  assert 'scorer is None, wanted a delayed scorer of the sample: human, customer' in lines[2]
  assert 'the sample is admitted and waits for no reward' in lines[4]
  assert 'the verdict is for the sample of attempt 7' in lines[6]
  assert not given(directory / 'replay') and not any('\n' in line for line in lines)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'value': float('nan')}, 'value is nan, wanted a number from -1e.06 to 1e.06'),
    ({'value': float('-inf')}, 'wanted a number'),
    ({'value': 2e6}, 'wanted a number from'),
    ({'value': True}, 'value is True, wanted a number'),
    ({'value': '1'}, "value is '1', wanted a number"),
    ({'value': 10**400}, 'wanted a number from'),
    ({'who': ''}, 'who is .*, wanted a name'),
    ({'who': 'a\nb'}, 'wanted a name'),
    ({'who': 'x' * 201}, 'wanted a name'),
    ({'who': None}, 'who is None'),
    ({'uid': ''}, 'wanted the uid of a sample'),
    ({'uid': 'x' * 5000}, 'wanted the uid of a sample'),
    ({'attempt': 1.5}, 'wanted a whole number'),
  ],
)
def test_malformed_verdicts_are_refused(fields, message):
  with pytest.raises(UserError, match=message) as raised:
    LateVerdict(**{'uid': A, 'value': 1.0, 'who': 'ann', **fields})
  assert '\n' not in str(raised.value) and len(str(raised.value)) < 5500


def test_a_score_that_rests_on_no_verdict_is_a_problem_of_the_audit(directory):
  attach(directory / 'replay', [LateVerdict(uid=A, value=1.0, who='ann')])
  store = open_store(directory / 'replay')
  store.recover(1)
  store.at(1).score(
    [Score(uid=u, scorer='human', value=1.0, evidence={'verdicts': [['ann', 1.0]]}) for u in (A, B)]
  )
  store.at(1).admit([A, B])
  store.close()
  report = audit(directory / 'replay')
  assert report.feedback == 'verdicts 1 = used 1 + waiting 0 + unused 0 + lost 0'
  assert report.problems == (
    'g/1 (attempt 1): its score of human is based on a verdict of ann, 1.0, which is not in the '
    'inbox',
  )


def test_a_killed_process_loses_no_verdict_that_it_has_acknowledged(directory):
  """A process attaches verdicts of ever new people and prints each; it is killed in between."""
  program = (
    'import itertools, sys\n'
    'from jaxrl_llm.replay.inbox import LateVerdict, attach\n'
    'for n in itertools.count():\n'
    "  attach(sys.argv[1], [LateVerdict(uid='g/0', value=n, who=f'p{n}')])\n"
    '  print(n, flush=True)\n'
  )
  process = subprocess.Popen(
    [sys.executable, '-c', program, str(directory / 'replay')],
    stdout=subprocess.PIPE,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    text=True,
  )
  acknowledged = [int(process.stdout.readline()) for _ in range(20)]
  process.send_signal(signal.SIGKILL)
  acknowledged += [int(line) for line in process.stdout.read().split('\n')[:-1]]
  process.wait()
  there = [int(verdict.value) for verdict in given(directory / 'replay')]
  assert there[: len(acknowledged)] == acknowledged and len(there) <= len(acknowledged) + 1
  assert audit(directory / 'replay').feedback.startswith(f'verdicts {len(there)} = used 0 + wait')


def test_a_file_of_verdicts_is_imported_line_by_line_and_may_be_imported_again(
  directory, capsys, tmp_path
):
  file = tmp_path / 'verdicts.jsonl'
  rows = [
    json.dumps({'uid': A, 'value': 1, 'who': 'ann'}),
    '',
    'not json',
    json.dumps({'uid': B, 'value': 0.5, 'who': 'ann', 'comment': 'x'}),
    '{"uid": "g/1", "value": NaN, "who": "ann"}',
    json.dumps(['g/1', 1, 'ann']),
    '[' * 100_000,
    json.dumps({'uid': 'x/0', 'value': 1, 'who': 'ann'}),
    json.dumps({'uid': B, 'value': 0.25, 'who': 'ann'}),
  ]
  file.write_text('\n'.join(rows))
  flags = [f'--workdir={directory}', f'--import={file}']
  for _ in range(2):
    assert command(*flags) == 1
    out = capsys.readouterr().out.splitlines()
    assert [int(line[len(f'{file}:') :].partition(':')[0]) for line in out[:6]] == [
      *(3, 4, 5, 6, 7, 8)
    ]
    assert out[6] == f'{file}: 2 verdicts attached, 6 refused'
  assert {v.uid: v.value for v in given(directory / 'replay')} == {A: 1.0, B: 0.25}


def test_the_command_attaches_one_verdict_and_lists_what_waits(directory, capsys):
  assert command(f'--workdir={directory}') == 0
  assert capsys.readouterr().out.startswith('g: 2 samples, 0 of 2 verdicts of human, until 20')
  one = [f'--workdir={directory}', f'--uid={A}', '--value=1', '--who=ann']
  assert command(*one) == 0
  assert capsys.readouterr().out == 'feedback on g/0: human 1 of ann attached\n'
  assert command(*one[:2], '--value=2', '--who=ann') == 2
  assert 'the first stands' in capsys.readouterr().err
  assert command(f'--workdir={directory}', '--json') == 0
  (group,) = json.loads(capsys.readouterr().out)['groups']
  assert (group['uids'], group['verdicts'], group['scorers']) == ([A, B], 1, {'human': 1})
  for flags in (['--uid=x'], ['--value=1'], [f'--uid={A}', '--who=a'], ['--import=none.jsonl']):
    assert command(f'--workdir={directory}', *flags) == 2
    assert capsys.readouterr().err.count('\n') == 1


def test_a_damaged_inbox_is_one_line(directory):
  (directory / 'replay' / INBOX).write_bytes(b'nothing that SQLite knows' * 100)
  with pytest.raises(UserError, match=r'inbox .*it is damaged') as raised:
    attach(directory / 'replay', [LateVerdict(uid=A, value=1.0, who='ann')])
  assert '\n' not in str(raised.value)


def test_waiting_samples_have_their_bytes_and_are_not_drawn(directory):
  assert browse.summary(directory / 'replay').samples['usual']['awaiting'] == 2
  assert [entry.uid for entry in browse.find(directory / 'replay', state='awaiting')] == [B, A]
  store = open_store(directory / 'replay')
  store.recover(1)
  assert store.candidates(1) == [] and [s.uid for s in store.read([A])] == [A]
  assert states(store, [A, B]) == ['awaiting', 'awaiting']
  store.at(1).admit([A, B])
  assert [group.uids for group in store.candidates(1)] == [(A, B)]
  store.close()


def test_a_store_from_before_samples_could_wait_is_read_and_continued(tmp_path):
  store = open_store(tmp_path)
  store.at(0).issue(issues([A]))
  store.close()
  with sqlite3.connect(tmp_path / 'index.sqlite') as db:
    db.execute("UPDATE meta SET json = '4' WHERE key = 'schema'")
  db.close()
  assert audit(tmp_path).ok and audit(tmp_path).states['awaiting'] == 0
  again = open_store(tmp_path)
  again.recover(0)
  wait(again, ['h/0'])
  assert audit(again).ok
  again.close()


def test_recovery_keeps_a_judged_sample_even_if_a_batch_has_trained_on_it(directory):
  """The commit is 0. The waiting samples were scored and trained on at steps 0 and 1."""
  attach(directory / 'replay', [LateVerdict(uid=A, value=1.0, who='ann')])
  store = open_store(directory / 'replay')
  store.recover(1)
  writer = store.at(1)
  writer.score([Score(uid=A, scorer='human', value=1.0, evidence={'verdicts': [['ann', 1.0]]})])
  writer.admit([A, B])
  writer.seal([A, B])
  writer.trained([A, B])
  wait(store, ['h/0'], step=1, version=1)
  store.close()
  again = open_store(directory / 'replay')
  assert again.recover(0)['kept'] == 2
  assert states(again, [A, B, 'h/0']) == ['awaiting', 'awaiting', 'void']
  assert not again.scores([A])[A] and [s.uid for s in again.read([A, B])] == [A, B]
  again.at(0).admit([A, B])
  again.close()
  report = audit(directory / 'replay')
  assert report.ok, report.problems


def test_a_run_that_draws_its_data_anew_keeps_no_sample_that_began_to_wait_after_its_commit(
  directory,
):
  store = open_store(directory / 'replay')
  assert store.recover(0, keep_waiting=False)['kept'] == 0
  assert states(store, [A, B]) == ['void', 'void']
  store.at(0).issue(issues([A]))  # Its tasks may be drawn again, under the same names.
  store.close()
  assert audit(directory / 'replay').ok


def test_the_end_of_a_stage_spares_what_waits_in_the_next_one(directory):
  """The commit is the last of stage `sft`. The group `g` of stage `g` began to wait after it."""
  store = open_store(directory / 'replay')
  committed = {'step': 0, 'stage': 'sft', 'batches': {}}
  recover(store, committed, ends={'sft': 0, 'g': 9})
  assert states(store, [A, B]) == ['awaiting', 'awaiting']
  store.close()
  again = open_store(directory / 'replay')
  recover(again, committed | {'batches': None}, ends={'sft': 0, 'g': 9})
  assert states(again, [A, B]) == ['void', 'void']
  again.close()


def test_a_copy_of_a_store_has_no_verdict_that_arrives_after_its_index_is_copied(
  directory, tmp_path, monkeypatch
):
  snapshot = copying.snapshot

  @contextlib.contextmanager
  def slow(source):
    with snapshot(source) as opened:
      yield opened
      attach(source, [LateVerdict(uid=B, value=1.0, who='ann')])

  attach(directory / 'replay', [LateVerdict(uid=A, value=1.0, who='ann')])
  monkeypatch.setattr(copying, 'snapshot', slow)
  copying.copy(directory / 'replay', tmp_path / 'copy', commit=1, max_uses=100)
  assert [verdict.uid for verdict in given(tmp_path / 'copy')] == [A]
