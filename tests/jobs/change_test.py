"""A run goes on under a changed configuration, and the exact guarantee holds across the change."""

import job
import pytest

from jaxrl_llm.runtime import history

pytestmark = pytest.mark.full

LONGER = (
  '--config.stages.grpo.steps=12',
  '--config.stages.grpo.optimizer.peak_lr=2e-4',
  '--config.stages.grpo.optimizer.schedule=cosine',
  '--config.checkpoint.every_steps=50',
)
"""Four more steps than QUICK has, and no commit before the last of them."""
END = 24


def test_a_run_goes_on_with_another_learning_rate_and_more_steps_also_when_killed_before_a_commit(
  tmp_path,
):
  """Killed between the change and the next commit, the run equals one that was not."""
  whole, killed = (job.copy(job.quick_run(), tmp_path / name) for name in ('whole', 'killed'))
  said = job.train(whole, *LONGER).stdout
  assert 'from step 21 on, stages.grpo.steps: 8 → 12' in ' '.join(said.split())
  process = job.start(killed, *LONGER)
  job.wait_for_rows(killed, len(job.rows(job.quick_run())) + 2, process)
  job.kill(process)
  assert job.commits(killed)[-1] == 20
  job.train(killed, *LONGER)
  assert job.commits(killed)[-1] == END
  job.assert_equal_runs(killed, whole)
  before, changed = history.read(killed)
  assert (before.step, changed.step) == (1, 21)
  assert {change.key for change in changed.changes} == {
    flag.removeprefix('--config.').partition('=')[0] for flag in LONGER
  }
  rates = [row['actor/lr'] for row in job.rows(killed) if 'actor/lr' in row]
  assert len(rates) == END and max(rates[20:]) < 2e-4 < rates[19] * 10
  lines = (killed / 'events.jsonl').read_text().splitlines()
  # Once for each start that applied the change.
  assert sum('"edge":"change"' in line and '"first":21' in line for line in lines) == 2
  assert 'stages.grpo.optimizer.peak_lr' in (killed / 'report.html').read_text()
  # Each step can still be repeated under the configuration under which it was made.
  for step in (20, END):
    said = job.call('launch/replay.py', f'--workdir={killed}', f'--step={step}').stdout
    assert 'equal, and so are the' in said
