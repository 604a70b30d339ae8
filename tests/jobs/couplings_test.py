"""Every pair of couplings in a job that ends well, or in a refusal of one line
(`tests/support/couplings.py`).
"""

import contextlib
import json
import os

import attached
import job
import pytest
import spending
from couplings import DEFAULT, MODEL, REFUSED, REFUSED_TOGETHER, jobs
from paths import FIXTURES, SUPPORT
from services import Service

from jaxrl_llm.replay.audit import audit

STEPS, SAMPLES = 4, 4 * 4
JOBS = jobs()
FULL = [levels for levels in JOBS if levels['processes'] == 1 and not levels['explorers']][:3]
"""Jobs that run in the full tier: those that take the least time."""


def verdict(body):
  """The share of the reference's letters that are in the completion."""
  truth = set(body['ground_truth'])
  return {'value': len(truth & set(body['completion'])) / len(truth)}


def train(run, levels, *flags, expect=0):
  """Trains with these levels of the factors; returns the process."""
  path = os.pathsep.join(map(str, (job.ROOT, FIXTURES, SUPPORT, job.ROOT / 'configs')))
  processes = levels['processes']
  if processes > 1:
    flags = (*flags, '--config.learner.mesh.fsdp=2')
  with contextlib.ExitStack() as stack:
    if levels['engine'] == 'vllm' and not expect:
      flags = (*flags, *stack.enter_context(attached.fakes(run.parent, model=MODEL)))
    if levels['service']:
      service = Service(verdict)
      stack.enter_context(service.in_thread())
      levels = levels | {'service': service.address}
    config = (f'--config={FIXTURES / "coupled.py"}:{json.dumps(levels)}',)
    process = job.start(
      run, *flags, config=config, processes=processes, environ=job.environment(PYTHONPATH=path)
    )
    _, err = process.communicate(timeout=540)
  assert process.returncode == expect, err[-4000:]
  return err


def name(levels):
  return '-'.join(str(level) for level in levels.values())


@pytest.mark.parametrize(
  'levels',
  [
    pytest.param(levels, marks=pytest.mark.full if levels in FULL else pytest.mark.acceptance)
    for levels in JOBS
  ],
  ids=map(name, JOBS),
)
def test_every_pair_of_couplings_ends_well(tmp_path, levels):
  run = tmp_path / 'run'
  train(run, levels)
  steps = [row for row in job.rows(run) if 'actor/pg_loss' in row]
  assert [row['training/global_step'] for row in steps] == [1, 2, 3, 4]
  if not levels['replay']:  # Earlier groups are older.
    assert max(row['staleness/max'] for row in steps) <= levels['bound']
  differences = [
    row['sampling/sampling_logp_difference/max'] for row in steps if row['staleness/max'] == 0
  ]
  assert differences and max(differences) < 1e-4
  report = audit(run / 'replay')
  assert report.ok and report.live == (), report.lines
  assert sum(report.uses.values()) == STEPS * SAMPLES
  assert (2 in report.uses) == levels['replay']
  kinds = {
    'servers': levels['engine'] == 'vllm',
    'explorers': levels['explorers'],
    'scorers': not levels['service'],
  }
  spending.check_seconds(run, 'trainer', *(kind for kind, has in kinds.items() if has))
  spending.check_tokens(run)


@pytest.mark.full
@pytest.mark.parametrize(('pair', 'reason'), REFUSED.items(), ids=str)
def test_a_refused_pair_is_one_line(tmp_path, pair, reason):
  check_refused(tmp_path, dict(pair), f'rollout.partial: cannot be combined with {reason}')


@pytest.mark.full
def test_levels_that_are_refused_together_are_one_line(tmp_path):
  check_refused(tmp_path, dict(REFUSED_TOGETHER), 'ppo credits the rewards of turns')


def check_refused(tmp_path, levels, reason):
  said = train(tmp_path / 'run', DEFAULT | levels, expect=2)
  line = said.splitlines()[-1]
  assert line.startswith('error: ') and reason in line
  assert 'Traceback' not in said
