"""Expert rows that are added to a run of MIX while it is active and while it is down: from a file,
from the best rollouts of another run, and a person's correction of an answer.
"""

import json

import job
import pytest

from jaxrl_llm.app.offline.experts import Correction, Run, add_corrections, add_file, add_run
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.experts import arrived

WORDS = ('abc', 'dog', 'cat', 'sun', 'sky', 'tree', 'bird', 'fish')
ROWS = 6
"""Expert rows of a batch: a fifth of 30 sequences."""
STEPS = 9


def config():
  return job.small('mix.py:mix', '--config.stages.1.source.experts.count=40', steps=STEPS)


def drawn(workdir) -> list[list[str]]:
  """The added rows in each batch of MIX, as the plans have them."""
  rows = [[row['uid'] for row in plan['rows']] for plan in job.plans(workdir, 'mix')]
  return [[uid for uid in uids if uid.startswith('experts/')] for uids in rows]


@pytest.mark.full
def test_added_rows_are_trained_on_once_each_in_their_order_of_arrival_through_a_kill(tmp_path):
  """Eight rows arrive while the first stage runs. The run is killed once MIX has trained on them;
  other rows arrive while it is down. The batches that it repeats are the same bit for bit.
  """
  workdir, file = tmp_path / 'run', tmp_path / 'rows.jsonl'
  file.write_text(''.join(json.dumps({'prompt': f'{w}>', 'answer': w[::-1]}) + '\n' for w in WORDS))
  process = job.start(workdir, config=config())
  job.wait_for_rows(workdir, 1, process)
  run = Run(workdir)
  report = add_file(run, file, 'ann')
  assert (report.added, report.refused) == (len(WORDS), [])
  job.wait_for_rows(workdir, 12 + 1 + 5, process)
  job.kill(process)
  before = job.untimed(workdir)[:-1]  # The last one may be incomplete.
  trained = job.plans(workdir, 'mix')[0]['rows'][0]['uid']
  correction = Correction(trained, 'zyx', 'bob')
  assert add_corrections(run, [('here', correction)]).added == 1
  best = add_run(run, job.quick_run(), ('grpo',), SelectionConfig(kind='best'), 'eve')
  assert best.added > STEPS and not best.refused
  job.train(workdir, config=config())
  assert job.untimed(workdir)[: len(before)] == before

  batches, order = drawn(workdir), [row.uid for row in arrived(workdir / 'replay', after=0)]
  flat = [uid for uids in batches for uid in uids]
  assert [len(uids) for uids in batches[:3]] == [ROWS, len(WORDS) - ROWS, 0]
  assert flat == order[: len(flat)] and len(flat) > len(WORDS)
  report = audit(workdir / 'replay')
  assert report.ok, report.lines
  assert report.experts == (
    f'expert rows {len(order)} = trained {len(flat)} + waiting {len(order) - len(flat)} + arriving '
    f'0 + refused 0; trained: 1 times {len(flat)}'
  )
  rows = [row for row in job.rows(workdir) if 'run/experts/added' in row]
  assert len(rows) == STEPS
  assert sum(row['run/experts/added'] for row in rows) == len(flat)
  assert sum(row['run/experts/arrived'] for row in rows) == len(order)
  by_row = {row.uid: row for row in arrived(workdir / 'replay', after=0)}
  assert [by_row[uid].origin['kind'] for uid in order] == [
    *['file'] * len(WORDS),
    'correction',
    *['run'] * best.added,
  ]


@pytest.mark.acceptance
def test_added_rows_of_two_processes_and_a_bound_are_trained_on_once_each_through_a_kill(tmp_path):
  workdir, file = tmp_path / 'run', tmp_path / 'rows.jsonl'
  file.write_text(''.join(json.dumps({'prompt': f'{w}>', 'answer': w[::-1]}) + '\n' for w in WORDS))
  flags = ('--config.stages.1.source.bound=1', '--config.learner.mesh.fsdp=2')
  process = job.start(workdir, *flags, config=config(), processes=2)
  job.wait_for_rows(workdir, 1, process)
  assert add_file(Run(workdir), file, 'ann').added == len(WORDS)
  job.wait_for_rows(workdir, 12 + 1 + 3, process)
  job.kill(process)
  best = add_run(Run(workdir), job.quick_run(), ('grpo',), SelectionConfig(kind='best'), 'eve')
  job.train(workdir, *flags, config=config(), processes=2)
  order = [row.uid for row in arrived(workdir / 'replay', after=0)]
  flat = [uid for uids in drawn(workdir) for uid in uids]
  assert flat == order[: len(flat)] and len(order) == len(WORDS) + best.added
  assert len(WORDS) < len(flat) and len(flat) == len({*flat})
  report = audit(workdir / 'replay')
  assert report.ok and f'trained: 1 times {len(flat)}' in report.experts, report.lines
