"""Expert rows that are added to a run: what arrives, what the run takes at which step, and that a
crash changes neither.
"""

import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from paths import ROOT
from stored import assert_rebuilt, issues, make_sample, states

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.replay import browse, copying, experts
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.experts import ARRIVALS, ExpertRow, add, arrived, as_expert, take
from jaxrl_llm.replay.export import export
from jaxrl_llm.replay.index import open_store


def expert(name: str, **fields) -> ExpertRow:
  """A row whose tokens are a function of its name."""
  return ExpertRow(
    **{
      'sample': make_sample(name),
      'who': 'ann',
      'origin': {'kind': 'file', 'file': name},
      **fields,
    }
  )


def uid(name: str) -> str:
  return as_expert(make_sample(name)).uid


def fits(sample) -> None:
  pass


def drawn(store, step, *, count=2, max_uses=1, longest=99) -> list[str]:
  """Takes what arrived, and trains the batch of a step on at most `count` rows."""
  take(store, step, fits)
  uids = store.added(step, max_uses=max_uses, longest=longest)[:count]
  store.at(step).seal(uids)
  store.at(step).trained(uids)
  return uids


def names(uids, of='abcdefgh') -> str:
  by_uid = {uid(name): name for name in of}
  return ''.join(by_uid[uid] for uid in uids)


def test_rows_are_trained_on_once_each_in_the_order_of_their_arrival(tmp_path):
  store = open_store(tmp_path)
  add(tmp_path, [expert('c'), expert('a')])
  add(tmp_path, [expert('b')])
  assert names(drawn(store, 0)) == 'ca'
  add(tmp_path, [expert('d'), expert('a'), expert('e')])
  assert [names(drawn(store, step)) for step in (1, 2, 3)] == ['bd', 'e', '']
  report = audit(store)
  assert report.ok, report.lines
  assert report.experts == (
    'expert rows 5 = trained 5 + waiting 0 + arriving 0 + refused 0; trained: 1 times 5'
  )
  assert report.partitions == {'expert': 5} and report.states['trained'] == 5
  store.close()


def test_a_row_is_experience_with_bytes_scores_and_lineage(tmp_path):
  store = open_store(tmp_path)
  (added,) = add(
    tmp_path, [expert('a', scores={'judge': 0.75}, origin={'kind': 'file', 'line': 3})]
  )
  (again,) = add(tmp_path, [expert('a', who='bob')])
  assert added == (uid('a'), None) and again == (uid('a'), 'ann')
  assert take(store, 4, fits) == 1
  assert states(store, [added.uid]) == ['admitted']
  (sample,) = store.read([added.uid])
  given = make_sample('a')
  assert sample.tokens.tolist() == given.tokens.tolist() and sample.uid == added.uid
  assert sample.loss_mask.tolist() == (given.role == Role.POLICY).tolist()
  assert not sample.sampled.any() and not sample.behaviour_logprobs.any() and not sample.segments
  (score,) = store.scores([added.uid])[added.uid]
  assert (score.scorer, score.value, score.evidence) == ('judge', 0.75, {'who': 'ann'})
  lineage = store.derived([added.uid], 'expert')[added.uid]
  assert (lineage['arrival'], lineage['who'], lineage['origin']) == (
    *(1, 'ann'),
    {'kind': 'file', 'line': 3},
  )
  assert lineage['digest'] == experts.digest(given) and lineage['at'] > 1.7e9
  store.close()
  exported = export(tmp_path, tmp_path / 'rows.jsonl')
  assert (exported.samples, exported.without_bytes, exported.lost) == (1, {}, ())
  (line,) = map(json.loads, (tmp_path / 'rows.jsonl').read_text().splitlines())
  assert line['tokens'] == given.tokens.tolist() and line['derived']['expert'] == lineage
  assert line['scores']['judge']['value'] == 0.75 and line['version'] is None
  assert browse.summary(tmp_path).samples['expert']['admitted'] == 1
  assert any('open segment: 12 tokens' in line for line in browse.history(tmp_path, added.uid))


def test_a_row_is_used_as_often_as_configured_those_used_least_first(tmp_path):
  store = open_store(tmp_path)
  add(tmp_path, [expert(name) for name in 'abc'])
  batches = [names(drawn(store, step, max_uses=2)) for step in range(4)]
  # Of equal uses, those that arrived first.
  assert batches == ['ab', 'ca', 'bc', '']
  assert audit(store).experts.endswith('trained: 2 times 3')
  store.close()


def test_a_row_that_is_too_long_for_a_stage_waits_for_another(tmp_path):
  store = open_store(tmp_path)
  add(tmp_path, [expert('a', sample=make_sample('a', 20)), expert('b')])
  assert names(drawn(store, 0, longest=15)) == 'b'
  assert drawn(store, 1, longest=20) == [as_expert(make_sample('a', 20)).uid]
  store.close()


@pytest.mark.parametrize('late', [False, True])
def test_a_run_that_repeats_a_batch_after_a_crash_takes_the_same_rows(tmp_path, late):
  """The commit is 1. Batches 1 and 2 are lost, and repeated; rows arrive before each batch, and
  also while the run is down if `late`.
  """
  store = open_store(tmp_path)
  batches = []
  for step, arriving in enumerate(['a', 'bcd', 'e']):
    add(tmp_path, [expert(name) for name in arriving])
    batches.append(names(drawn(store, step)))
  assert batches == ['a', 'bc', 'de']
  store.close()
  if late:
    add(tmp_path, [expert('f'), expert('g')])
  again = open_store(tmp_path)
  again.recover(1)
  assert states(again, [uid(name) for name in 'ab']) == ['trained', 'void']
  assert [names(drawn(again, step)) for step in (1, 2)] == ['bc', 'de']
  assert names(drawn(again, 3)) == ('fg' if late else '')
  report = audit(again)
  assert report.ok, report.lines
  assert report.states['void'] == 4
  assert report.experts.startswith(f'expert rows {7 if late else 5} = trained {7 if late else 5} +')
  again.close()


def test_a_batch_that_found_nothing_finds_nothing_when_it_is_repeated(tmp_path):
  store = open_store(tmp_path)
  assert drawn(store, 0) == drawn(store, 1) == []
  store.close()
  add(tmp_path, [expert('a')])
  again = open_store(tmp_path)
  again.recover(0)
  assert [names(drawn(again, step)) for step in range(3)] == ['', '', 'a']
  again.close()


def test_a_branch_has_the_rows_of_its_parent_and_takes_them_at_the_same_steps(tmp_path):
  store = open_store(tmp_path / 'parent')
  for step, name in enumerate('abc'):
    add(tmp_path / 'parent', [expert(name)])
    drawn(store, step)
  add(tmp_path / 'parent', [expert('d')])
  store.close()
  copying.copy(tmp_path / 'parent', tmp_path / 'branch', commit=2, max_uses=100)
  branch = open_store(tmp_path / 'branch', max_uses=100)
  branch.recover(2)
  assert [names(drawn(branch, step)) for step in (2, 3)] == ['c', 'd']
  report = audit(branch)
  assert report.ok, report.lines
  branch.close()


def test_a_lost_index_is_rebuilt_with_the_rows_and_the_steps_at_which_they_were_taken(tmp_path):
  store = open_store(tmp_path / 'lost')
  add(tmp_path / 'lost', [expert('a'), expert('b'), expert('c')])
  drawn(store, 0)
  store.close()
  assert_rebuilt(tmp_path / 'lost', tmp_path / 'made')
  again = open_store(tmp_path / 'made')
  again.recover(0)
  add(tmp_path / 'made', [expert('d')])
  assert [names(drawn(again, step)) for step in (0, 1)] == ['ab', 'cd']
  again.close()


def test_a_row_that_the_run_cannot_train_on_is_left_out_with_a_line(tmp_path, caplog):
  def check(sample):
    if sample.uid == uid('b'):
      raise ValueError('token 99, wanted 0 … 29')

  store = open_store(tmp_path)
  add(tmp_path, [expert('a'), expert('b'), expert('c'), expert('d')])
  with sqlite3.connect(tmp_path / ARRIVALS) as db:
    db.execute("UPDATE rows SET payload = x'00' WHERE digest = ?", (uid('c').split('/')[1],))
  db.close()
  assert take(store, 0, check) == 2
  assert names(store.added(0, max_uses=1, longest=99)) == 'ad'
  lines = [record.getMessage() for record in caplog.records if 'left out' in record.getMessage()]
  assert len(lines) == 2 and 'token 99, wanted' in lines[0] and 'damaged' in lines[1]
  report = audit(store)
  assert report.ok, report.lines
  assert report.experts == 'expert rows 4 = trained 0 + waiting 2 + arriving 0 + refused 2'
  store.close()


def test_the_audit_finds_rows_that_never_arrived_and_rows_that_were_damaged(tmp_path):
  store = open_store(tmp_path)
  add(tmp_path, [expert('a'), expert('b')])
  drawn(store, 0)
  store.close()
  with sqlite3.connect(tmp_path / ARRIVALS) as db:
    db.execute("UPDATE rows SET payload = x'00' WHERE seq = 1")
    db.execute('DELETE FROM rows WHERE seq = 2')
  db.close()
  assert audit(tmp_path).problems == (
    f'{uid("a")}: the row that arrived is damaged',
    f'{uid("b")}: is an expert row but is not in experts.sqlite',
  )


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'scores': {'judge': float('nan')}}, 'judge: nan, wanted a number from'),
    ({'scores': {'judge': float('inf')}}, 'judge: inf, wanted a number from'),
    ({'scores': {'judge': '1'}}, "judge: '1', wanted a number"),
    ({'scores': {'': 1.0}}, 'wanted a short printable name'),
    ({'who': ''}, 'wanted a name'),
    ({'who': None}, 'who is None, wanted a name'),
    ({'origin': {'x': 'y' * 5000}}, 'characters as JSON, wanted at most 4096'),
  ],
)
def test_malformed_rows_are_refused(fields, message):
  with pytest.raises(UserError, match=message) as raised:
    expert('a', **fields)
  assert '\n' not in str(raised.value)


def test_a_row_without_an_answer_is_refused():
  sample = dataclasses.replace(make_sample('a'), role=np.zeros(12, np.uint8))
  with pytest.raises(UserError, match='the answer has no tokens'):
    expert('a', sample=sample)


def test_a_killed_process_loses_no_row_that_it_has_acknowledged(tmp_path):
  """A process adds ever new rows and prints each; it is killed in between."""
  open_store(tmp_path).close()
  program = (
    'import itertools, sys\n'
    'from stored import make_sample\n'
    'from jaxrl_llm.replay.experts import ExpertRow, add\n'
    'for n in itertools.count():\n'
    "  row = ExpertRow(sample=make_sample(str(n), 32), who='ann', origin={'n': n})\n"
    '  add(sys.argv[1], [row])\n'
    '  print(n, flush=True)\n'
  )
  process = subprocess.Popen(
    [sys.executable, '-c', program, str(tmp_path)],
    stdout=subprocess.PIPE,
    env={**os.environ, 'PYTHONPATH': f'{ROOT}:{ROOT}/tests/support'},
    text=True,
  )
  acknowledged = [int(process.stdout.readline()) for _ in range(20)]
  process.send_signal(signal.SIGKILL)
  acknowledged += [int(line) for line in process.stdout.read().split('\n')[:-1]]
  process.wait()
  there = [row.origin['n'] for row in arrived(tmp_path, after=0)]
  assert there[: len(acknowledged)] == acknowledged and len(there) <= len(acknowledged) + 1


def test_a_damaged_file_of_arrivals_is_one_line(tmp_path):
  (tmp_path / ARRIVALS).write_bytes(b'nothing that SQLite knows' * 100)
  with pytest.raises(UserError, match=r'inbox .*it is damaged') as raised:
    add(tmp_path, [expert('a')])
  assert '\n' not in str(raised.value)


def test_rollouts_are_drawn_as_before(tmp_path):
  store = open_store(tmp_path)
  add(tmp_path, [expert('a')])
  take(store, 0, fits)
  store.at(0).issue(issues(['g/0']))
  store.at(0).append([make_sample('g/0')])
  store.at(0).admit(['g/0'])
  assert [group.uids for group in store.candidates(0)] == [('g/0',)]
  assert [entry.uid for entry in store.live()] == ['g/0']
  assert store.visits(['experts']) == {}
  store.close()
