"""Selects the tasks of a taskset that are neither too easy nor too hard for a policy, and whose
answers the policy cannot guess.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.app.composition.prepare import check_scored
from jaxrl_llm.app.offline.reopen import Serving, reopen, serving
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.core.waits import gathered
from jaxrl_llm.master.exploring.judging import judged
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.workflow import SingleTurn, Workflow
from jaxrl_llm.tasks import processors
from jaxrl_llm.tasks.processors import Outcomes, Passed


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurateConfig:
  """Settings of the selection by pass rate and guessability, two measures from Kimi k1.5
  (arXiv:2501.12599, section 2.1).
  """

  samples: int = 10
  """Number of attempts at each task."""
  temperature: float = 1.0
  """Sampling temperature of attempts and guesses."""
  low: float = 0.0
  """Minimum share of correct attempts for a task to be kept, inclusive."""
  high: float = 1.0
  """Maximum share of correct attempts for a task to be kept, inclusive."""
  guess_tries: int = 8
  """Number of guesses (attempts without reasoning) per task. A task is dropped if a guess is
  correct. If 0, no guesses are made.
  """
  guess_tokens: int = 16
  """Maximum length of a guess in tokens."""
  guess_instruction: str = 'Give the final answer at once, without any reasoning.'
  """Text appended to the prompt of a guess. If empty, only the length limits a guess."""

  def __post_init__(self):
    for name, least in (('samples', 1), ('guess_tries', 0), ('guess_tokens', 1)):
      if getattr(self, name) < least:
        raise UserError(f'--{name}={getattr(self, name)}: wanted at least {least}')
    if not self.temperature > 0:
      raise UserError(
        f'--temperature={self.temperature}: wanted above 0; otherwise all attempts are the same'
      )
    if not 0 <= self.low <= self.high <= 1:
      raise UserError(f'--low={self.low} --high={self.high}: wanted 0 <= low <= high <= 1')


class Curated(NamedTuple):
  rows: list[dict[str, Json]]
  """Source rows of the kept tasks, with the measurements added."""
  passed: list[Passed]
  """Numbers of tasks that each filter received and dropped. The filter by pass rate comes first. If
  guesses were made, the filter by guesses comes second.
  """


async def curate(
  config: Config, run: pathlib.Path, step: int, name: str, how: CurateConfig
) -> Curated:
  """Measures the tasks of taskset `name` with the policy committed at `step`, and returns the tasks
  to keep. Step 0 is the initial policy.
  """
  if name not in [taskset.name for taskset in config.tasksets]:
    raise UserError(
      f'--taskset={name}: no such taskset; configured are '
      f'{sorted(taskset.name for taskset in config.tasksets)}'
    )
  async with reopen(config, run) as past:
    taskset = past.prepared.tasksets[name]
    check_scored(taskset, config.rewards)
    if how.guess_tries:
      _check_guesses(
        taskset.tasks, past.prepared.tokenizer.render_prompt, config.rollout.max_prompt_length, how
      )
    async with serving(past) as served:
      await served.serve(step)
      attempts = await _outcomes(
        served, served.workflow, {task.uid: task for task in taskset.tasks}, how.samples, how
      )
      rate = processors.pass_rate(attempts, low=how.low, high=how.high)
      tasks, passed = processors.run(
        f'pass_rate in [{how.low:g}, {how.high:g}]', rate, taskset.tasks
      )
      counts, guesses = [passed], {}
      if how.guess_tries:
        tokens = min(how.guess_tokens, config.rollout.max_response_length)
        workflow = SingleTurn(served.engine, past.prepared.tokenizer, max_tokens=tokens)
        asked = {task.uid: guess_of(task, how.guess_instruction) for task in tasks}
        guesses = await _outcomes(served, workflow, asked, how.guess_tries, how)
        tasks, passed = processors.run(
          f'guessable in {how.guess_tries} tries', processors.guessable(guesses), tasks
        )
        counts.append(passed)
  return Curated([_row(task, attempts, guesses) for task in tasks], counts)


def guess_of(task: Task, instruction: str) -> Task:
  """Returns the task with `instruction` (answer without reasoning) appended to its last message."""
  *before, last = task.prompt
  content = f'{last["content"]}\n\n{instruction}' if instruction else last['content']
  return dataclasses.replace(task, prompt=(*before, {**last, 'content': content}))


def _check_guesses(tasks: Sequence[Task], render, limit: int, config: CurateConfig) -> None:
  """Raises UserError if the guess instruction makes a prompt longer than `limit` tokens. Called
  before sampling.
  """
  longest = max(len(render(guess_of(task, config.guess_instruction).prompt)) for task in tasks)
  if longest > limit:
    raise UserError(
      f'--guess_instruction: makes prompts of up to {longest} tokens, and '
      f'rollout.max_prompt_length is {limit}; raise '
      "it with --config.rollout.max_prompt_length, shorten the instruction (--guess_instruction='' "
      'adds none), or '
      'turn guesses off with --guess_tries=0'
    )


async def _outcomes(
  served: Serving, workflow: Workflow, tasks: dict[str, Task], samples: int, config: CurateConfig
) -> dict[str, Outcomes]:
  """Runs and scores `samples` attempts at each task. Returns the outcomes, keyed like `tasks`."""
  stage = 'curate' if workflow is served.workflow else 'guess'
  rewards, sampling = served.past.config.rewards, Sampling(temperature=config.temperature)

  max_steps = served.past.config.rollout.max_steps
  how = {'stage': stage, 'samples': samples, 'sampling': sampling, 'max_steps': max_steps}

  async def attempt(task: Task) -> Outcomes:
    runs = checked_run(workflow, task, 0, **how)
    verdicts = [
      scored.reward.correct for scored in await judged(runs, task, served.scorers, rewards)
    ]
    return Outcomes(correct=verdicts.count(True), attempts=len(verdicts) - verdicts.count(None))

  outcomes = await gathered(
    map(attempt, tasks.values()),
    name='curated_tasks',
    owner=stage,
    waits_for='the engine and the scorers to finish another task (rollout.collect_deadline_s)',
    deadline_s=served.past.config.rollout.collect_deadline_s,
  )
  return dict(zip(tasks, outcomes, strict=True))


def _row(
  task: Task, attempts: dict[str, Outcomes], guesses: dict[str, Outcomes]
) -> dict[str, Json]:
  rate = attempts[task.uid].rate
  row = {**task.fields, 'pass_rate': rate, 'hardness': 1.0 - rate}
  return {**row, 'guessed': guesses[task.uid].correct} if guesses else row
