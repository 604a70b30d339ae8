"""Measures what a run committed, afterwards: each commit on the suites of its configuration."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.app.build import build_publisher, build_scorers
from jaxrl_llm.app.engines import build_engine
from jaxrl_llm.app.prepare import Prepared, prepare
from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.stages import build_stages, model_spec, policy_options
from jaxrl_llm.app.state import committed_state
from jaxrl_llm.app.workdir import DATA, TOKENIZER
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Params, Version
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
  except UserError as error:
    raise UserError(f'{file}: written by another version of this program: {error}') from None


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
    raise UserError('evaluation: the configuration of the run has no suite, so there is nothing that could be measured')
  async with contextlib.AsyncExitStack() as opened:
    scratch = pathlib.Path(opened.enter_context(tempfile.TemporaryDirectory(prefix='jaxrl_llm-')))
    prepared = await asyncio.to_thread(_prepared, config, run, scratch)
    mesh, device = build_mesh(config.learner.mesh), DeviceThread()
    opened.callback(device.close)
    stages = build_stages(config, mesh, prepared.spec.vocab_size, prepared.lengths)
    model = build_model(model_spec(config, prepared.spec), policy_options(config), mesh)
    checkpoints = Checkpoints(run / 'checkpoints', config.checkpoint, leads=True)
    scorers = ScorerPool(build_scorers(config), config.rewards)
    opened.push_async_callback(scorers.close)
    await scorers.start()
    engine = build_engine(config, scratch, prepared, device)
    opened.push_async_callback(engine.close)
    await engine.start()
    workflow = SingleTurn(engine, prepared.tokenizer, max_tokens=config.rollout.max_response_length)
    evaluator = Evaluator(workflow=workflow, scorers=scorers, rewards=config.rewards)
    publisher = build_publisher(config, model, mesh, engine, device)
    for step in steps:
      try:
        params = await device.run(_policy, config, step, stages, checkpoints, model, mesh)
      except (UserError, OSError):
        if step == 0 or step in checkpoints.steps():
          raise
        logging.warning('step %d: the run that is going on has removed its commit meanwhile', step)
        continue
      await publisher.publish(params, Version(0, step), moved=step)
      del params  # Not two of them at a time.
      for suite, tasks in prepared.suites:
        metrics, rows = await evaluator.run(suite, tasks)
        yield {'step': step, 'suite': suite.name, 'metrics': metrics, 'rows': rows}


def _policy(*committed: Any) -> Params:
  """Of a commit, and nothing else of it."""
  learned = committed_state(*committed)[0].learned
  return learned.whole(learned.policy.params)


def _prepared(config: Config, run: pathlib.Path, scratch: pathlib.Path) -> Prepared:
  """With the run's own tokenizer and static rows, in a folder that may be written to."""
  if (run / TOKENIZER).is_dir():
    shutil.copytree(run / TOKENIZER, scratch / TOKENIZER)
  (scratch / DATA).mkdir()
  for rows in (run / DATA).glob('*.arrayrecord'):
    (scratch / DATA / rows.name).symlink_to(rows.absolute())
  return prepare(config, scratch)
