"""Offline evaluation of a run's commits on the suites of its configuration."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.app.composition.stages import reward_stages
from jaxrl_llm.app.offline.reopen import reopen, serving
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.master.evaluation import Evaluator
from jaxrl_llm.runtime.checkpoint import Checkpoints


def chosen_steps(run: pathlib.Path, config: Config, wanted: Sequence[int] | None) -> list[int]:
  """Returns the sorted steps of the commits to measure; 0 is the initial policy.

  Args:
    wanted: requested steps. If None, all commits are chosen except the commits of reward models.

  Raises:
    UserError: a requested commit does not exist, or no steps are requested and the run has no
      commit of a policy.
  """
  checkpoints = Checkpoints(run / 'checkpoints', config.checkpoint, leads=True)
  kept = checkpoints.steps()
  if reward_names := reward_stages(config):
    of_policy = [step for step in kept if checkpoints.host(step)['stage'] not in reward_names]
  else:
    of_policy = kept
  if wanted is None and not of_policy:
    raise UserError(f'--workdir={run}: no commit yet; --steps=0 measures the initial policy')
  missing = sorted(set(wanted or ()) - {0, *kept})
  if missing:
    raise UserError(
      f'--steps: no commit at step {missing[0]} in {run}; kept are '
      f'{", ".join(map(str, kept)) or "none"}'
    )
  return of_policy if wanted is None else sorted(set(wanted))


async def evaluate(
  config: Config, run: pathlib.Path, steps: Sequence[int]
) -> AsyncIterator[dict[str, Any]]:
  """Yields a mapping with `step`, `suite`, `metrics` and `rows` for each step and suite. The rows
  have the form of the files in the run's folder `evals/`.

  Only reads the run, which may still be active. If the run removes the commit of a step in the
  meantime, the step is skipped with a warning.
  """
  if not config.evaluation:
    raise UserError(
      'evaluation: the configuration of the run has no suite, so there is nothing to measure'
    )
  async with reopen(config, run) as past, serving(past) as served:
    evaluator = Evaluator(
      workflow=served.workflow,
      scorers=served.scorers,
      rewards=config.rewards,
      max_steps=config.rollout.max_steps,
      deadline_s=config.rollout.collect_deadline_s,
    )
    for step in steps:
      try:
        await served.serve(step)
      except (UserError, OSError):
        if step == 0 or step in past.checkpoints.steps():
          raise
        logging.warning('step %d: the live run has removed its commit in the meantime', step)
        continue
      for suite, tasks in past.prepared.suites:
        metrics, rows = await evaluator.run(suite, tasks)
        yield {'step': step, 'suite': suite.name, 'metrics': metrics, 'rows': rows}
