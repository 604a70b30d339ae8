"""A short run, killed once and started again: every edge is in its events, and what is made of
them.
"""

import collections
import itertools
import json

import job
import pytest

from jaxrl_llm.runtime import events, report
from jaxrl_llm.runtime.events import EDGES, Edge

pytestmark = pytest.mark.full

FLAGS = (
  '--config.stages.sft.steps=4',
  '--config.stages.grpo.steps=4',
  '--config.stages.grpo.source.selection.kind=mixed',  # some groups are dropped
  '--config.stages.grpo.evaluate_every=2',
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('events') / 'run'
  flags = (*FLAGS, job.own_programs(workdir))
  process = job.start(workdir, *flags)
  # Four steps and two evaluations; the next step has everything to compile. Committed are three
  # steps, or four.
  job.wait_for_rows(workdir, 6, process)
  job.wait_for_commit(workdir, process)
  job.kill(process)
  file = workdir / events.FILE
  file.write_bytes(file.read_bytes()[:-9])
  job.train(workdir, *flags)
  return workdir


OWN = set(EDGES) - {
  *(Edge.AUXILIARY_SCORE, Edge.AUXILIARY_MODEL, Edge.CHANGE, Edge.SERVER, Edge.REWARD_PASS),
  *(Edge.OFFLOAD, Edge.RELOAD, Edge.RELEASE, Edge.RESTORE, Edge.LEDGER),
}
"""Of every run; the others are of workflows that ask (tests/jobs/explorers_test.py), of changes and
branches (tests/jobs/change_test.py, branch_test.py), of servers of a registry
(tests/jobs/registry_test.py), of a reward model of the trainer (tests/jobs/reward_model_test.py)
and of memory phases (tests/jobs/phases_test.py).
"""


@pytest.fixture(scope='module')
def found(run):
  return list(events.read(run / events.FILE))


def test_every_edge_is_there_requests_and_replies_apart_each_with_its_pair_of_ids(run, found):
  rows = [
    json.loads(line) for line in (run / events.FILE).read_text().splitlines() if line.endswith('}')
  ]
  kinds = collections.defaultdict(set)
  for row in rows:
    ends = EDGES[Edge(row['edge'])]
    way = (row['to'], row['from']) if row['kind'] == 'reply' else (row['from'], row['to'])
    assert way == (ends.source, ends.target)
    assert ('of' in row) == ('s' in row) == (row['kind'] == 'reply')
    kinds[row['edge']].add(row['kind'])
  assert kinds == {
    edge: {'request', 'reply'} if EDGES[edge].answered else {'message'} for edge in OWN
  }


def test_each_request_of_a_whole_attempt_is_answered_later_and_once_or_its_group_is_dropped(found):
  last = [event for event in found if event is not None and event.attempt == 1]
  assert [event.id for event in last] == list(range(len(last)))
  assert all(a.t <= b.t and a.step <= b.step for a, b in itertools.pairwise(last))
  requests = {event.id: event for event in last if event.kind == 'request'}
  replies = [event for event in last if event.kind == 'reply']
  for reply in replies:
    assert requests[reply.of].edge == reply.edge and reply.of < reply.id
  assert len({reply.of for reply in replies}) == len(replies)
  dropped = {event.fields['group'] for event in last if event.edge == Edge.DROP}
  answered = {reply.of for reply in replies}
  for request in requests.values():
    assert request.id in answered or request.fields['group'] in dropped, request


def test_logged_events_match_the_run(run, found):
  last = [event for event in found if event is not None and event.attempt == 1]
  updates = [
    event.fields['batch']
    for event in last
    if (event.edge, event.kind) == (Edge.GRADIENT_UPDATE, 'request')
  ]
  steps = [row['training/global_step'] for row in job.rows(run) if 'timing_s/step' in row]
  assert steps == list(range(1, 9)) and updates in (steps[3:], steps[4:])
  commits = {
    event.fields['commit'] for event in last if (event.edge, event.kind) == (Edge.COMMIT, 'request')
  }
  assert {int(path.parent.name) for path in (run / 'checkpoints').glob('*/COMMIT')} - commits <= {
    3,
    4,
  }
  stored = {e.fields['group']: e.id for e in last if (e.edge, e.kind) == (Edge.STORE, 'request')}
  admitted = {
    e.of for e in last if e.edge == Edge.STORE and e.kind == 'reply' and e.fields['admitted']
  }
  trained = {row['group_id'] for step in range(5, 9) for row in rollouts(run, step)}
  assert {stored[group] for group in trained} <= admitted and len(trained) == 4 * 6


def rollouts(run, step):
  return map(json.loads, (run / 'rollouts' / 'grpo' / f'{step:06d}.jsonl').read_text().splitlines())


def test_the_first_attempt_is_still_there_and_its_torn_line_spoils_nothing(run, found):
  attempts = [event.attempt for event in found if event is not None]
  assert set(attempts) == {0, 1} and attempts == sorted(attempts) and found.count(None) == 1
  assert '1 unreadable line in events.jsonl left out.' in report.payload(run)['warnings']


def test_the_report_has_a_timeline_of_the_last_attempt_and_idle_shares_of_all_steps(run):
  data = report.payload(run)
  assert data['timeline']['steps'][-1]['n'] == 8 and data['timeline']['hidden'] == 0
  assert data['idle']['trainer']['x'] == tuple(range(1, 9)) and data['idle']['rollout']['x'] == (
    5,
    6,
    7,
    8,
  )
  assert all(0 <= y <= 1 for curve in data['idle'].values() for y in curve['y'])
  assert {span['e'] for span in data['timeline']['spans']} >= OWN - {Edge.DROP}
  assert (
    json.dumps(data['timeline'], ensure_ascii=False, separators=(',', ':'))
    in (run / 'report.html').read_text()
  )


def test_the_command_writes_a_trace_that_a_viewer_can_read(run, tmp_path):
  command = ('launch/report.py', f'--workdir={run}', f'--target={tmp_path}/report.html')
  for flag, path in (
    ('--perfetto', run / 'perfetto.json'),
    (f'--perfetto={tmp_path}/x.json', tmp_path / 'x.json'),
  ):
    assert f'{path}  (' in job.call(*command, flag).stdout
    rows = json.loads(path.read_text())['traceEvents']
    assert {row['ph'] for row in rows} == set('MXstf') and all(
      row.get('dur', 0) >= 0 for row in rows
    )
    opened = collections.Counter(row['id'] for row in rows if row['ph'] == 's')
    assert opened == collections.Counter(row['id'] for row in rows if row['ph'] == 'f')
    named = {
      (row['pid'], row['tid']) for row in rows if row['ph'] == 'M' and row['name'] == 'thread_name'
    }
    assert {(row['pid'], row['tid']) for row in rows} == named
  (line,) = job.call(
    *command, f'--perfetto={tmp_path}/nowhere/x.json', expect=2
  ).stderr.splitlines()
  assert line.startswith('error: --perfetto=')
