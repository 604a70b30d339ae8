"""Agent that plays an environment of the library verifiers, version 0.4 (`verifiers.v1`).

  python verifiers_agent.py --env=CONFIG --export=FILE.jsonl [--limit=N]
  python verifiers_agent.py --env=CONFIG [--seat=NAME]

The agent runs in a Python installation that has verifiers. The packages there may differ from the
trainer's, so the agent imports nothing from jaxrl_llm. CONFIG is a JSON object with the keys of
verifiers' own `[env]` block, or just the id of a taskset.

The first form writes the tasks as rows of a taskset, with the fields `prompt`, `system` and `idx`.
The second form is the command of the workflow `external`, with the options `reward: 'agent'` and
`with_truth: true`. It plays the task whose `idx` is in the environment variable JAXRL_TASK:
verifiers runs and scores the episode, and its harness calls the run's recording proxy. An episode
of verifiers has one trace for each of its agents (seats). The reward of the trained seat's trace is
posted, with the reward's components as evidence.

If an episode or its scoring fails, the exit code is 1, which makes the sample unscorable, and the
last line on stderr has the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

MODEL = 'policy'
"""Name of the model in requests. The proxy answers requests for any name with the policy."""
_POST_S = 60.0
"""Maximum seconds for one attempt to post a reward."""


class Failed(Exception):
  """Raised when the tasks cannot be exported, or when the episode has no reward."""


def _environment(text: str) -> Any:
  """Returns the environment of a configuration, which is JSON or the id of a taskset."""
  from verifiers.v1.utils.loaders import load_environment, resolve_env_config

  config = json.loads(text) if text.lstrip().startswith('{') else {'taskset': {'id': text}}
  return load_environment(resolve_env_config(config))


def _rows(tasks: Any, limit: int | None) -> Any:
  """Yields the row of each task."""
  if limit is None and not tasks.bounded:
    raise Failed('the taskset is infinite; give --limit')
  for task in itertools.islice(tasks, limit):
    data = task.data
    yield {'idx': data.idx, 'prompt': data.prompt_text, 'system': data.system_prompt or ''}


def _index() -> int:
  """Returns the field `idx` of the task in JAXRL_TASK."""
  index = json.loads(os.environ['JAXRL_TASK']).get('fields', {}).get('idx')
  if not isinstance(index, int) or isinstance(index, bool):
    raise Failed(
      f'the task has idx {index!r}, wanted a number; take the rows of --export as the taskset, and '
      'set with_truth: true'
    )
  return index


async def _played(environment: Any, index: int) -> Any:
  """Plays the task with this index, and returns the episode."""
  from verifiers.v1.clients import ModelContext
  from verifiers.v1.configs.client import EvalClientConfig
  from verifiers.v1.env import RunSlot

  tasks = [*environment.taskset.include(idx=[str(index)])]
  if len(tasks) != 1:
    raise Failed(f'the taskset has {len(tasks)} tasks with idx {index}, wanted one')
  client = EvalClientConfig(base_url=os.environ['OPENAI_BASE_URL'], api_key_var='OPENAI_API_KEY')
  async with environment.serving():
    return await environment.run_slot(RunSlot(tasks[0]), ModelContext(model=MODEL, client=client))


def _reward(episode: Any, seat: str | None) -> dict[str, Any]:
  """Returns the body of the request that posts the reward. `value` is the reward of the trained
  seat's trace. The evidence has the reward's components, each as [score, weight], and the trace's
  metrics.
  """
  problems = [error for part in (episode, *episode.traces) for error in part.errors]
  if problems:
    raise Failed(f'{problems[0].type}: {problems[0].message}')
  traces = [
    trace
    for trace in episode.traces
    if (trace.agent.trainable if seat is None else trace.agent.name == seat)
  ]
  if len(traces) != 1:
    raise Failed(f'the episode has {len(traces)} traces to train on, wanted one; give --seat')
  (trace,) = traces
  rewards = {name: [part.score, part.weight] for name, part in trace.rewards.items()}
  return {'value': trace.reward, 'evidence': {'rewards': rewards, 'metrics': trace.metrics}}


def _post(body: dict[str, Any]) -> None:
  import openai  # Installed with verifiers. Its client reads URL and key from the environment.

  with openai.OpenAI(timeout=_POST_S) as client:
    client.post('/reward', body=json.loads(json.dumps(body, default=str)), cast_to=object)


def main(argv: Sequence[str]) -> int:
  parser = argparse.ArgumentParser(prog='verifiers_agent.py')
  parser.add_argument('--env', required=True, help='JSON of the environment, or id of a taskset.')
  parser.add_argument('--seat', help='Name of the trained agent, if several are trainable.')
  parser.add_argument('--export', help='File of JSON Lines to which the tasks are written.')
  parser.add_argument('--limit', type=int, help='Maximum number of tasks to write.')
  options = parser.parse_args(argv)
  try:
    environment = _environment(options.env)
    if options.export:
      with open(options.export, 'w', encoding='utf-8') as file:
        for row in _rows(environment.taskset, options.limit):
          file.write(json.dumps(row) + '\n')
    else:
      _post(_reward(asyncio.run(_played(environment, _index())), options.seat))
  except (Exception, SystemExit) as error:  # verifiers exits if no user is logged in.
    version = importlib.metadata.version('verifiers')
    line = ' '.join(f'{type(error).__name__}: {error}'.split())
    print(f'verifiers {version}: {line[:2000]}', file=sys.stderr, flush=True)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
