"""Measures what a run committed, afterwards: each commit on the suites of its configuration, or on other ones."""

from __future__ import annotations

import asyncio
import json
import pathlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxrl_llm.app.build import build_publisher, build_scorers
from jaxrl_llm.app.engines import build_engine
from jaxrl_llm.app.prepare import Prepared, prepare
from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.stages import build_stages, model_spec, policy_options
from jaxrl_llm.app.state import committed_state
from jaxrl_llm.app.workdir import DATA, TOKENIZER
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Version
from jaxrl_llm.master.evaluation import Evaluator
from jaxrl_llm.models.api import build_model
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import build_mesh
from jaxrl_llm.rewards.pool import ScorerPool
from jaxrl_llm.rollout.workflow import SingleTurn
from jaxrl_llm.runtime.checkpoint import Checkpoints


def config_of_run(run: pathlib.Path) -> Config:
  """As the run wrote it down."""
  file = run / 'config.json'
  try:
    return from_json(json.loads(file.read_text()), Config)
  except FileNotFoundError:
    raise UserError(f'--workdir={run}: no run is there ({file.name} is missing); name the directory of a run') from None
  except ValueError as error:
    raise UserError(f'{file}: not the configuration of a run ({error})') from error


def chosen_steps(run: pathlib.Path, config: Config, wanted: Sequence[int] | None) -> list[int]:
  """Commits to measure; 0 is what the run began with.

  Args:
    wanted: None: all that are kept.
  """
  kept = Checkpoints(run / 'checkpoints', config.checkpoint, leads=True).steps()
  if wanted is None and not kept:
    raise UserError(f'--workdir={run}: nothing was committed there yet; --steps=0 measures what it began with')
  missing = sorted(set(wanted or ()) - {0, *kept})
  if missing:
    raise UserError(f'--steps: no commit at step {missing[0]} in {run}; kept are {", ".join(map(str, kept)) or "none"}')
  return kept if wanted is None else sorted(set(wanted))


async def evaluate(config: Config, run: pathlib.Path, steps: Sequence[int]) -> AsyncIterator[dict[str, Any]]:
  """For each step and suite: `step`, `suite`, `metrics`, and `rows` as in `evals/`. The run is only read."""
  if not config.evaluation:
    raise UserError(
      'evaluation: the configuration has no suite; give one with --config.evaluation.0.name=… and .taskset=…'
    )
  with tempfile.TemporaryDirectory(prefix='jaxrl_llm-') as scratch:
    prepared = await asyncio.to_thread(_prepared, config, run, pathlib.Path(scratch))
    mesh, device = build_mesh(config.learner.mesh), DeviceThread()
    stages = build_stages(config, mesh, prepared.spec.vocab_size, prepared.lengths)
    model = build_model(model_spec(config, prepared.spec), policy_options(config), mesh)
    checkpoints = Checkpoints(run / 'checkpoints', config.checkpoint, leads=True)
    engine = build_engine(config, pathlib.Path(scratch), prepared, device)
    scorers = ScorerPool(build_scorers(config), config.rewards)
    workflow = SingleTurn(engine, prepared.tokenizer, max_tokens=config.rollout.max_response_length)
    evaluator = Evaluator(workflow=workflow, scorers=scorers, rewards=config.rewards)
    publisher = build_publisher(config, model, mesh, engine, device)
    try:
      await scorers.start()
      await engine.start()
      for step in steps:
        state, _ = await device.run(committed_state, config, step, stages, checkpoints, model, mesh)
        learned = state.learned
        await publisher.publish(learned.whole(learned.policy.params), Version(0, step), moved=step)
        for suite, tasks in prepared.suites:
          metrics, rows = await evaluator.run(suite, tasks)
          yield {'step': step, 'suite': suite.name, 'metrics': metrics, 'rows': rows}
    finally:
      await engine.close()
      await scorers.close()
      device.close()


def _prepared(config: Config, run: pathlib.Path, scratch: pathlib.Path) -> Prepared:
  """With the run's own tokenizer and static rows, in a folder that may be written to."""
  for made in (TOKENIZER, DATA):
    if (run / made).is_dir():
      shutil.copytree(run / made, scratch / made)
  return prepare(config, scratch)
