"""The audit must find what it is there to find: each test breaks one thing behind the writer's
back.
"""

import sqlite3

import pytest
from stored import experts, issues, make_sample, score_of, store_group

from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store


@pytest.fixture
def directory(tmp_path):
  store = open_store(tmp_path)
  store_group(store, ['g/0', 'g/1', 'g/2', 'g/3'], 0)
  store.at(0).score([score_of('g/0')])
  store.at(0).seal(['g/0', 'g/1'])
  store.at(0).trained(['g/0', 'g/1'])
  store.at(1).expire(['g/3'])
  store.at(1).issue(issues(['g/4']))
  store.close()
  return tmp_path


@pytest.fixture
def mixed(tmp_path):
  """Of both partitions, used more than once."""
  store = open_store(tmp_path, max_uses=2)
  store_group(store, ['g/0', 'g/1'], 0)
  store.at(0).join(experts(['x', 'y']))
  store.at(0).seal(['g/0'])
  for step in range(2):
    store.at(step).trained(['g/0', 'x'])
  store.at(2).trained(['x'])
  store.at(2).issue(issues(['h/0', 'h/1', 'h/2']))
  store.at(2).append([make_sample('h/0'), make_sample('h/1')])
  store.at(2).score([score_of('h/1', 0.25), score_of('h/1', 0.5), score_of('h/1', 1.0)])
  store.close()
  return tmp_path


def test_the_report_adds_up(directory):
  report = audit(directory)
  # 5 issued: g/0, g/1 trained, g/2 admitted, g/3 expired, g/4 issued
  assert report.lines == [
    'issued 5 = issued 1 + partial 0 + stored 0 + awaiting 0 + admitted 1 + trained 2 + '
    'dropped 0 + expired 1 + void 0; results that came twice or late: 0, scores that came again: 0',
    'partitions: usual 5',
    'ended 3, live 2: g/2, g/4',
    'trained: 1 times 2',
    'audit ok',
  ]
  assert report.ok
  assert report.live == ('g/2', 'g/4')


@pytest.mark.parametrize(
  ('statement', 'problem'),
  [
    (
      "UPDATE samples SET state = 'trained' WHERE uid = 'g/2'",
      'g/2 (attempt 1): the index says trained',
    ),
    (
      "DELETE FROM samples WHERE uid = 'g/0'",
      'g/0 (attempt 1): has transitions but was never issued',
    ),
    (
      "DELETE FROM transitions WHERE uid = 'g/4'",
      'g/4 (attempt 1): was issued but has no transition',
    ),
    (
      "DELETE FROM transitions WHERE uid = 'g/4'",
      '5 samples were issued, but the states add up to 4',
    ),
    (
      "DELETE FROM transitions WHERE uid = 'g/0' AND state = 'admitted'",
      'went from stored to trained',
    ),
    (
      "UPDATE transitions SET step = 9 WHERE uid = 'g/0' AND state = 'admitted'",
      'trained at step 0, after admitted',
    ),
    (
      "UPDATE samples SET step = 5 WHERE uid = 'g/0'",
      'first transition is issued at step 0, wanted issued at step 5',
    ),
    (
      "INSERT INTO transitions(step, attempt, uid, state, reason) VALUES (1, 1, 'g/0', 'trained', "
      "'')",
      'g/0: trained 2 times, max_uses is 1',
    ),
    (
      "INSERT INTO transitions(step, attempt, uid, state, reason) VALUES (0, 1, 'g/0', 'trained', "
      "'')",
      'g/0: trained twice in the batch of step 0',
    ),
    (
      "INSERT INTO transitions(step, attempt, uid, state, reason) VALUES (1, 1, 'g/3', 'dropped', "
      "'x')",
      'g/3 (attempt 1): went from expired to dropped',
    ),
    (
      "INSERT INTO transitions(step, attempt, uid, state, reason) VALUES (1, 1, 'g/2', 'stored', "
      "'')",
      'g/2 (attempt 1): accepted more than once',
    ),
    (
      "INSERT INTO samples SELECT NULL, uid, 2, group_id, 't', 0, 'usual', 0, step, state, "
      'changed, last, 0, 1 '
      "FROM samples WHERE uid = 'g/0'",
      'g/0: counts in 2 attempts',
    ),
    (
      "DELETE FROM open_segment WHERE uid = 'g/2'",
      'g/2 (attempt 1): is admitted, but its bytes are in 0 open and 0 sealed segments',
    ),
    (
      "DELETE FROM segment_rows WHERE uid = 'g/1'",
      'g/1 (attempt 1): is trained, but its bytes are in 0 open and 0 sealed segments',
    ),
    (
      "DELETE FROM segment_rows WHERE uid = 'g/1'",
      'has 2 rows, but the index lists a different number',
    ),
    ('DELETE FROM segments', 'the index lists its rows but not the segment'),
    ("UPDATE scores SET uid = 'g/9'", 'g/9 (attempt 1): is in table scores but was never issued'),
    ('UPDATE segment_rows SET row = 1 - row + 10', 'cannot be read: it has 2 rows'),
    (
      "UPDATE open_segment SET payload = x'00' WHERE uid = 'g/2'",
      'open segment, g/2: not a sample',
    ),
  ],
)
def test_the_audit_finds(directory, statement, problem):
  with sqlite3.connect(directory / 'index.sqlite') as db:
    assert db.execute(statement).rowcount
  report = audit(directory)
  assert not report.ok
  assert any(problem in line for line in report.problems), report.problems
  assert report.lines[-1] == f'audit FAILED: {len(report.problems)} problems'


def test_partitions_uses_and_scores_are_told(mixed):
  report = audit(mixed)
  assert report.ok and report.lines == [
    'issued 7 = issued 1 + partial 0 + stored 2 + awaiting 0 + admitted 2 + trained 2 + '
    'dropped 0 + expired 0 + void 0; results that came twice or late: 0, scores that came again: 2',
    'partitions: expert 2, usual 5',
    'ended 2, live 5: g/1, h/0, h/1, h/2, y',
    'stored and never scored 1: h/0',
    'trained: 2 times 1',
    'audit ok',
  ]


@pytest.mark.parametrize(
  ('statement', 'problem'),
  [
    (
      "UPDATE samples SET uses = 1 WHERE uid = 'g/0'",
      'g/0 (attempt 1): the index says changed, last, admitted, uses',
    ),
    (
      "UPDATE samples SET admitted = 1 WHERE uid = 'g/1'",
      'g/1 (attempt 1): the index says changed, last, admitted',
    ),
    (
      "UPDATE samples SET last = 1 WHERE uid = 'g/1'",
      'g/1 (attempt 1): the index says changed, last, admitted, uses',
    ),
    (
      "UPDATE samples SET changed = 1 WHERE uid = 'g/1'",
      'g/1 (attempt 1): the index says changed, last, admitted',
    ),
    (
      "UPDATE samples SET version = 7 WHERE uid = 'g/0'",
      'row 0 has version 0, but the index says 7',
    ),
    (
      "UPDATE samples SET version = 7 WHERE uid = 'g/1'",
      'open segment: the row of g/1 has version 0, but the index says 7',
    ),
    (
      "UPDATE samples SET version = NULL WHERE uid = 'g/1'",
      'g/1 (attempt 1): the index says version None, but it was accepted 1 times',
    ),
    (
      "UPDATE samples SET version = 0 WHERE uid = 'x'",
      'x (attempt 1): the index says version 0, but it was accepted 0 times',
    ),
    ("UPDATE samples SET partition = 'usual' WHERE uid = 'x'", 'x: trained 3 times, max_uses is 2'),
    (
      "UPDATE samples SET partition = 'usual' WHERE uid = 'y'",
      'y (attempt 1): went from issued to admitted, which partition usual does not permit',
    ),
    (
      "UPDATE samples SET partition = 'expert' WHERE uid = 'g/1'",
      'g/1 (attempt 1): the index says version 0, but it was accepted 1 times',
    ),
    (
      "UPDATE samples SET partition = 'expert' WHERE uid = 'g/1'",
      'g/1 (attempt 1): is admitted (expert), but its bytes are in 1 open and 0 sealed segments',
    ),
    (
      "UPDATE tallies SET samples = 9 WHERE partition = 'expert' AND state = 'trained'",
      'expert trained: the index counts 9',
    ),
    (
      "INSERT INTO transitions(step, attempt, uid, state, reason) VALUES (2, 1, 'x', 'trained', "
      "'')",
      'x: trained twice in the batch of step 2',
    ),
    ("UPDATE meta SET json = '1' WHERE key = 'max_uses'", 'g/0: trained 2 times, max_uses is 1'),
  ],
)
def test_the_audit_finds_in_partitions_and_uses(mixed, statement, problem):
  with sqlite3.connect(mixed / 'index.sqlite') as db:
    assert db.execute(statement).rowcount
  problems = audit(mixed).problems
  assert any(problem in line for line in problems), problems


def test_rows_of_another_sample_are_found(directory):
  with sqlite3.connect(directory / 'index.sqlite') as db:
    db.execute("UPDATE segment_rows SET uid = CASE uid WHEN 'g/0' THEN 'x' ELSE 'g/0' END")
    db.execute("UPDATE segment_rows SET uid = 'g/1' WHERE uid = 'x'")
    db.execute(
      "UPDATE open_segment SET payload = ? WHERE uid = 'g/2'", (encode(make_sample('g/3')),)
    )
  problems = audit(directory).problems
  assert any('row 0 contains g/0, but the index says g/1' in line for line in problems)
  assert any('row 1 contains g/1, but the index says g/0' in line for line in problems)
  assert 'open segment: the row of g/2 contains g/3, but the index says g/2' in problems


def test_damaged_rows_are_found_and_named_alone(directory):
  """One flipped byte in the used part of the file, in turn: the audit names row 0 or row 1, or both
  if all is lost.
  """
  (path,) = (directory / 'segments').iterdir()
  whole = path.read_bytes()
  found = set()
  for place in [place for place, byte in enumerate(whole) if byte][::20]:
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    problems = audit(directory).problems
    found.add(
      tuple(
        row for row in (0, 1) if any(f'rows [{row}] cannot be read' in line for line in problems)
      )
    )
    assert len(problems) <= 2
  assert {(0,), (1,)} <= found


def test_a_lost_segment_file_is_found(directory):
  (path,) = (directory / 'segments').iterdir()
  path.unlink()
  assert [('no such file' in line) for line in audit(directory).problems] == [True, True]


def test_a_sample_that_no_result_can_reach_is_found(tmp_path):
  """Its group was closed without it."""
  store = open_store(tmp_path)
  store.at(0).issue(issues(['g/0', 'g/1']))
  store.at(0).append([make_sample('g/0')])
  assert audit(store).ok, 'the other may come'
  store.at(0).admit(['g/0'])
  assert audit(store).problems == (
    'g/1 (attempt 1): is issued, but its group g has ended without it',
  )
  store.at(0).drop(['g/1'], 'given up')
  assert audit(store).ok


def test_a_score_that_may_be_of_a_result_that_was_not_accepted_is_found(tmp_path):
  store = open_store(tmp_path)
  store.at(0).issue(issues(['g/0', 'g/1']))
  store.at(0).append([make_sample('g/0'), make_sample('g/0', length=7), make_sample('g/1')])
  store.at(0).score([score_of('g/0'), score_of('g/1')])
  assert audit(store).ok and audit(store).duplicates == 1
  store.at(0).score([score_of('g/0', 1.0)])
  (problem,) = audit(store).problems
  assert problem.startswith(
    'g/0 (attempt 1): arrived twice and was scored twice by answer at step 0'
  )
