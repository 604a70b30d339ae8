"""The keeper of a process other than 0, and how process 0 records a batch."""

import asyncio
import threading
import types

import exploring
import numpy as np
import pytest

from jaxrl_llm.batching.plan import Row, StepPlan
from jaxrl_llm.learner.algorithm import Annotation
from jaxrl_llm.master.keeper import Logs, RunKeeper, Start, write_step
from jaxrl_llm.master.loop import LoopState
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.trainer import Batch, Updated
from jaxrl_llm.runtime import goodput
from jaxrl_llm.runtime.writers import MetricsWriter


class Follower:
  """Coordinator of a process that is told `said`."""

  leads = False

  def __init__(self, said):
    self.said = said

  async def broadcast(self, decision):
    assert decision is None
    return self.said


def test_every_process_knows_which_steps_are_repeated(tmp_path):
  process = Process(coordinator=Follower(said=2), device=None, mesh=None)
  stage = types.SimpleNamespace(name='grpo', start=1)
  batch = types.SimpleNamespace(plan=types.SimpleNamespace(evaluate=False, commit=False))
  keeper = RunKeeper(
    process,
    Start(stop=None),
    publisher=None,
    checkpoints=None,
    logs=None,
    generates=False,
    goodput_file=goodput.file_of(tmp_path, 1),
  )

  async def main():
    await keeper.start(LoopState(None, 1, evaluated=True), stage)
    for step in (2, 3):
      with process.stopwatch.timed('step'), process.stopwatch.timed('gen'):
        pass
      await keeper.after_step(LoopState(None, step), stage, batch, None)

  asyncio.run(main())
  classes = [
    {key.removeprefix('goodput/seconds/trainer/') for key in row} & {'recompute', 'wait'}
    for row in goodput.rows_of_others(tmp_path)
  ]
  assert classes == [{'recompute'}, {'wait'}]


class Source:
  """A source of batches that changes the store when a batch is recorded. `error` follows the
  change, in a batch that fails.
  """

  def __init__(self, store, error=None):
    self.store, self.error, self.calls = store, error, []

  def taken(self):
    return {}

  def record(self, plan):
    self.calls.append(('record', threading.current_thread() is threading.main_thread()))
    self.store.set_meta('recorded', plan.step)
    if self.error is not None:
      raise self.error

  def trained(self, plan):
    self.calls.append(('trained', threading.current_thread() is threading.main_thread()))


def write_batch(folder, source):
  """Writes a step whose only row has 4,000 tokens."""
  row = Row(
    uid='r', source='s', index=0, length=4000, prompt_len=2, group='g', reward=1.0,
    is_expert=False, truncated=False, version_step=0,
  )  # fmt: skip
  plan = StepPlan(step=0, stage='sft', rows=(row,))
  logs = Logs(
    metrics=MetricsWriter(folder, committed=None),
    rollouts=None,
    evals=None,
    progress=None,
    store=source.store,
    batches={'sft': source},
    evaluator=None,
    suites=(),
    decode=str,
    machine_metrics=dict,
  )
  batch = Batch(plan, Annotation(np.zeros(1), np.ones(1, bool), {}), [])
  stage, seconds = types.SimpleNamespace(name='sft'), {'step': 1.0, 'gen': 1.0}
  try:
    asyncio.run(write_step(logs, stage, 1, batch, Updated({}, None, True), seconds, {}))
  finally:
    logs.metrics.close()


def test_a_long_batch_is_recorded_in_a_thread_and_then_completed(tmp_path):
  source = Source(exploring.new_store(tmp_path / 'replay'))
  write_batch(tmp_path, source)
  assert source.calls == [('record', False), ('trained', True)]
  assert [*source.store.plans()] == [0] and source.store.meta('recorded') == 0
  source.store.close()


def test_a_plan_and_its_samples_are_recorded_together_or_not_at_all(tmp_path):
  source = Source(exploring.new_store(tmp_path / 'replay'), error=ValueError('no'))
  with pytest.raises(ValueError, match='no'):
    write_batch(tmp_path, source)
  assert source.store.plans() == {} and source.store.meta('recorded') is None
  assert [name for name, _ in source.calls] == ['record']
  source.store.close()
