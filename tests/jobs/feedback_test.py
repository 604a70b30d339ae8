"""Delayed rewards in the quickstart's job: a script judges the samples that wait, while the run
runs and while it does not.
"""

import contextlib
import json
import pathlib
import statistics
import sys
import threading

import job
import pytest
from paths import FIXTURES

from jaxrl_llm.app.offline.feedback import waiting_groups
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.inbox import LateVerdict, attach, given

sys.path.insert(0, str(FIXTURES))
from letters import share_of_a

EXACT = {'name': 'verifier', 'tasksets': ['eval']}
"""Scorer of the evaluation, which waits for nobody."""
OPTIONS = {'max_groups': 12, 'max_age_versions': 6}
HUMAN = {'name': 'human', 'kind': 'delayed', 'tasksets': ['train'], 'options': OPTIONS}
RULE = {
  'name': 'human',
  'kind': 'python',
  'tasksets': ['train'],
  'options': {'function': f'{FIXTURES / "letters.py"}:share_of_a'},
}
"""The rule of the script as a scorer that answers at once."""


def flags(*scorers):
  return (
    f'--config.rewards.scorers={json.dumps(scorers)}',
    '--config.rewards.correct_by=null',
    '--config.stages.grpo.source.bound=1',
    '--config.evaluation=()',
    '--config.stages.grpo.evaluate_every=null',
  )


@contextlib.contextmanager
def judging(workdir: pathlib.Path, who: str = 'script'):
  """Attaches the rule's verdict to each sample that waits, in the background."""
  done, directory = threading.Event(), workdir / 'replay'

  def judge():
    while not done.wait(0.2):
      if (directory / 'index.sqlite').exists():
        verdicts = [
          LateVerdict(uid=uid, value=share_of_a('', text, None), who=who)
          for group in waiting_groups(directory)
          for uid, text in zip(group.uids, group.texts, strict=True)
        ]
        attach(directory, verdicts)

  thread = threading.Thread(target=judge)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()


def check(workdir: pathlib.Path, steps: int) -> None:
  """Each trained sample has the reward of its verdict, and the audit accounts for all."""
  report = audit(workdir / 'replay')
  assert report.ok and report.live == (), report.lines
  assert report.states['trained'] == steps * 6 * 4 and set(report.uses) == {1}
  total = len(given(workdir / 'replay'))
  assert report.feedback.startswith(f'verdicts {total} = used {report.states["trained"]} + ')
  rows = [row for row in job.rows(workdir) if row['stage'] == 'grpo']
  assert sum(row['run/awaiting/joined'] for row in rows) >= steps * 6
  assert max(row['run/awaiting/open'] for row in rows) <= OPTIONS['max_groups']
  assert max(row['staleness/max'] for row in rows) <= OPTIONS['max_age_versions']


@pytest.mark.full
def test_groups_wait_through_a_kill_and_are_trained_on_with_the_verdicts_of_a_script(tmp_path):
  """Nobody judges at first, so the run waits in its first batch. It is killed there. Half of the
  samples are judged while it does not run, and the others after it has resumed.
  """
  workdir, steps = tmp_path / 'run', 3
  job_flags = (*flags(EXACT, HUMAN), f'--config.stages.grpo.steps={steps}')
  process = job.start(workdir, *job_flags)
  job.wait_for_rows(workdir, 12, process)
  while len(groups := waiting_groups(workdir / 'replay')) < OPTIONS['max_groups']:
    assert process.poll() is None, process.communicate()[1]
  job.kill(process)
  early = [
    LateVerdict(uid=uid, value=share_of_a('', text, None), who='script')
    for group in groups[:3]
    for uid, text in zip(group.uids, group.texts, strict=True)
  ]
  assert not any(reply.refused for reply in attach(workdir / 'replay', early))
  with judging(workdir):
    job.train(workdir, *job_flags)
  check(workdir, steps)
  verdicts = {(v.uid, v.attempt): v.value for v in given(workdir / 'replay')}
  assert verdicts.keys() >= {(verdict.uid, 1) for verdict in early}
  first = job.plans(workdir, 'grpo')[0]['rows']
  assert {row['uid'] for row in first} & {verdict.uid for verdict in early}
  assert all(row['reward'] == verdicts[row['uid'], 1] for row in first)


@pytest.mark.acceptance
def test_a_run_learns_from_delayed_rewards_what_it_learns_from_immediate_ones(tmp_path):
  more = ('--config.stages.grpo.steps=40', '--config.stages.grpo.optimizer.peak_lr=2e-3')
  ends = {}
  for name, scorer in (('immediate', RULE), ('delayed', HUMAN)):
    workdir = tmp_path / name
    with judging(workdir) if name == 'delayed' else contextlib.nullcontext():
      job.train(workdir, *flags(EXACT, scorer), *more, timeout_s=3000)
    rewards = [row['critic/score/mean'] for row in job.rows(workdir) if row['stage'] == 'grpo']
    ends[name] = statistics.fmean(rewards[:5]), statistics.fmean(rewards[-5:])
    print(name, ends[name])
  check(tmp_path / 'delayed', 40)
  for start, end in ends.values():
    assert end >= 3 * start and end >= 0.3
  assert ends['delayed'][1] >= 0.6 * ends['immediate'][1]
