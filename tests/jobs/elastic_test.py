"""A run goes on with other devices and processes: the same rows and draws, the same losses to
rounding.
"""

import json
import time

import job
import programs
import pytest

from jaxrl_llm.replay.audit import audit
from jaxrl_llm.runtime import history

pytestmark = pytest.mark.full

LOSS, NORM = 'actor/sft_loss', 'actor/grad_norm'


def environment(devices):
  count = f' --xla_force_host_platform_device_count={devices}' if devices > 1 else ''
  return job.environment(XLA_FLAGS=programs.CHEAP + count)


def steps(workdir):
  """Rows of the metrics of training, by step."""
  return {row['training/global_step']: row for row in job.rows(workdir) if LOSS in row}


def killed_after_the_step_after(commit, workdir, processes, devices):
  """Starts the run, and kills it when `commit` is complete and the step after it is recorded, which
  the next start repeats. Returns the row of that step.
  """
  environ = environment(devices)
  process = job.start(workdir, processes=processes, environ=environ)
  deadline = time.monotonic() + 600
  while commit not in job.commits(workdir) or commit + 1 not in steps(workdir):
    assert process.poll() is None, process.communicate()[1]
    assert time.monotonic() < deadline
    time.sleep(0.02)
  job.kill(process)
  assert job.commits(workdir)[-1] == commit, 'killed before the next commit'
  return steps(workdir)[commit + 1]


@pytest.mark.parametrize(
  'course',
  [
    pytest.param([(1, 4), (1, 2)], id='4 to 2 devices'),
    pytest.param(
      [(1, 8), (1, 4), (1, 1), (1, 8)], id='8 to 4 to 1 to 8', marks=pytest.mark.acceptance
    ),
    pytest.param(
      [(2, 1), (1, 4), (2, 2), (1, 1)], id='2 processes, 1, 2, 1', marks=pytest.mark.acceptance
    ),
  ],
)
def test_a_run_goes_on_with_other_devices_and_processes(tmp_path, course):
  """`course`: processes, and devices of each, one pair for each start."""
  workdir, before = tmp_path / 'run', {}
  for number, (processes, devices) in enumerate(course[:-1], 1):
    row = killed_after_the_step_after(3 * number, workdir, processes, devices)
    before[3 * number + 1] = row
  processes, devices = course[-1]
  environ = environment(devices)
  done = job.start(workdir, processes=processes, environ=environ)
  _, err = done.communicate(timeout=600)
  assert done.returncode == 0, err
  # The step after each commit was made by both sides of a change, from the same state.
  after, reference = steps(workdir), steps(job.quick_run())
  for step, row in before.items():
    assert abs(after[step][LOSS] - row[LOSS]) <= 1e-6 * max(1.0, abs(row[LOSS])), step
    assert after[step][NORM] == pytest.approx(row[NORM], rel=1e-5), step
  # The run that was never interrupted, on one device: the same rows and lengths, and near losses.
  assert after.keys() == reference.keys()
  for step, row in reference.items():
    assert after[step][LOSS] == pytest.approx(row[LOSS], rel=1e-3), step
  plans, wanted = (job.plans(path, 'sft') for path in (workdir, job.quick_run()))
  keys = ('rows', 'optimizer_steps', 'evaluate')
  assert [[plan[key] for key in keys] for plan in plans] == [
    [plan[key] for key in keys] for plan in wanted
  ]
  # The same tasks are drawn, in the same groups.
  groups, drawn = (
    [sorted({row['group'] for row in plan['rows']}) for plan in job.plans(path, 'grpo')]
    for path in (workdir, job.quick_run())
  )
  assert groups == drawn
  report = audit(workdir / 'replay')
  assert report.ok, report.lines
  machines = [(p, p * d) for p, d in course]
  recorded = [
    (entry.machine['processes'], entry.machine['devices']) for entry in history.read(workdir)
  ]
  assert recorded == machines
  changed = [change.key for entry in history.read(workdir)[1:] for change in entry.changes]
  assert set(changed) <= {'devices', 'processes'} and changed
  events = [json.loads(line) for line in (workdir / 'events.jsonl').read_text().splitlines()]
  assert sum(event['edge'] == 'change' for event in events) == len(course) - 1
