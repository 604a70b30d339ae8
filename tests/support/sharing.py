"""A run that explores and shares its batches, and a run that follows it. Neither has a model."""

from __future__ import annotations

import functools
import json
import pathlib

import exploring

from jaxrl_llm.app.composition.version_exchange import FollowedVersions
from jaxrl_llm.batching.plan import StepPlan
from jaxrl_llm.core.types import Version
from jaxrl_llm.master.following import FollowedBatches, FollowedConfig
from jaxrl_llm.master.sharing import SharingBatches
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.replay.shared import (
  Opening,
  SharedBatches,
  SharedVersion,
  vocabulary_digest,
  write_opening,
)
from jaxrl_llm.rollout.untrusted import Bounds, checked_sample
from jaxrl_llm.rollout.workflow import completion_text


def version_at(run: str, step: int) -> SharedVersion:
  return SharedVersion(run=run, attempt=1, step=step, digest=f'weights {step}')


async def explore(
  tokenizer,
  directory,
  versions,
  *,
  run,
  start=0,
  state=None,
  share=(0, 1),
  seed=None,
  tasks='',
):
  """Explores batches of two groups of two samples, from step `start` on.

  Args:
    versions: for each batch, the follower's step whose weights generate it.
    run: name of the follower's store.
    seed, tasks: what the run states in its opening.

  Returns:
    The states, keyed by number of completed batches; and the experiences of each batch.
  """
  store = open_store(directory, synchronous='normal')
  write_opening(
    directory,
    Opening(
      store=store.name,
      attempt=store.attempt,
      step=start,
      vocabulary=vocabulary_digest(tokenizer.vocabulary),
      seed=seed,
      share=share,
      tasks=tasks,
    ),
  )
  store.recover(start)
  exploration = exploring.Exploration(
    tokenizer, store, lambda attempt: float(attempt.uid.endswith('1')), bound=1, share=share
  )
  followed = FollowedVersions(directory)
  batches = SharingBatches(
    exploration.explorer,
    store=store,
    version_of=followed.of,
    taken_versions=followed.taken,
    committed=lambda: start,
  )
  if state is not None:
    batches.restore(json.loads(state))
  states, taken = {}, []
  async with batches.running():
    for i, version in enumerate(versions):
      step, attempt = start + i, 100 * store.attempt + i
      followed.record(attempt, version_at(run, version))
      await exploration.engine.relabel(Version(attempt, step))
      batches.advance(step, step)
      rows, _ = await batches.next()
      taken.append(batches.taken())
      batches.record(StepPlan(step=step, stage='grpo', rows=tuple(rows)))
      batches.trained(StepPlan(step=step, stage='grpo', rows=tuple(rows)))
      states[step + 1] = json.dumps(batches.state())
  store.close()
  return states, taken


class Follower:
  """A run that follows the stores in `others`."""

  def __init__(
    self,
    tokenizer,
    directory: pathlib.Path,
    *others: pathlib.Path,
    start: int = 0,
    state: str | None = None,
    sleep=None,
    exported=lambda step: f'weights {step}',
    **fields,
  ):
    self.store = open_store(directory, synchronous='normal')
    self.store.recover(start)
    config = FollowedConfig(
      **{
        'stage': 'learn',
        'where': 'stages.learn.source',
        'groups_per_batch': 2,
        'group_size': 2,
        'bound': 1,
        'longest': 64,
        'max_steps': 1,
        'vocabulary': vocabulary_digest(tokenizer.vocabulary),
        'deadline_s': 20.0,
        **fields,
      }
    )

    bounds = Bounds(vocab_size=tokenizer.vocab_size, max_length=1024)

    async def nothing_new(seconds):
      raise AssertionError('there is nothing new to read')

    self.batches = FollowedBatches(
      config,
      [SharedBatches(other, functools.partial(checked_sample, bounds=bounds)) for other in others],
      store=self.store,
      tasks={task.uid: task for task in exploring.make_tasks(24)},
      render=lambda task: tokenizer.render_prompt(task.prompt),
      text=lambda sample: completion_text(
        tokenizer, sample.tokens[sample.prompt_len :], sample.finish_reason
      ),
      exported=exported,
      sleep=sleep or nothing_new,
    )
    if state is not None:
      self.batches.restore(json.loads(state))
    self.step, self.states, self.taken, self.counts = start, {}, [], []

  async def train(self, steps: int) -> list[StepPlan]:
    """Trains on the next `steps` batches."""
    plans = []
    for _ in range(steps):
      self.batches.advance(self.step, self.step)
      rows, counts = await self.batches.next()
      plans.append(StepPlan(step=self.step, stage='learn', rows=tuple(rows)))
      self.taken.append(self.batches.taken())
      self.counts.append(counts)
      self.batches.record(plans[-1])
      self.batches.trained(plans[-1])
      self.step += 1
      self.states[self.step] = json.dumps(self.batches.state())
    return plans
