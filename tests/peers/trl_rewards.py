"""What TRL's own reward functions say through our adapter, and called as its trainer calls them.

  python trl_rewards.py RESULTS.json

Runs in the peers' environment (launch/install_peers.sh), with this project's `rewards.adapters` on
PYTHONPATH.
"""

import json
import os
import pathlib
import sys

os.environ |= {'HF_HUB_OFFLINE': '1'}

from trl import rewards

from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rewards.api import Attempt
from jaxrl_llm.rewards.scorers.adapters import trl_scorer

PROMPT = [{'role': 'user', 'content': 'Think.'}]
COMPLETIONS = [
  '<think>\nThis is my reasoning.\n</think>\nThis is my answer.',
  '<think>\nThis is my reasoning.\nThis is my answer.',
  'no thought at all',
]
overlong = rewards.get_soft_overlong_punishment(max_completion_len=6, soft_punish_cache=4)
"""Of a completion of 5 tokens: (6 - 4 - 5) / 4."""
FUNCTIONS = {
  'trl.rewards:think_format_reward': rewards.think_format_reward,
  f'{__file__}:overlong': overlong,
}


def ours(name, completion):
  task = Task(
    taskset='t', domain='general', prompt=tuple(PROMPT), truth=None, fields={'prompt': PROMPT}
  )
  attempt = Attempt(uid='u', task=task, completion=completion, finish_reason='stop', response_len=5)
  return trl_scorer(function=name)(attempt).value


def theirs(function):
  batch = [[{'role': 'assistant', 'content': completion}] for completion in COMPLETIONS]
  given = {
    'prompts': [PROMPT] * len(batch),
    'completion_ids': [[1] * 5] * len(batch),
    'trainer_state': None,
  }
  return function(completions=batch, **given)


def main(results):
  said = [
    {'ours': [ours(n, text) for text in COMPLETIONS], 'theirs': theirs(f)}
    for n, f in FUNCTIONS.items()
  ]
  pathlib.Path(results).write_text(json.dumps(said))


if __name__ == '__main__':
  main(*sys.argv[1:])
