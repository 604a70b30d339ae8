"""Runs whose samples are played by agents of others, through the recording proxy.

The acceptance tests need an environment with the clients, by default .venv-agents:

  python -m venv .venv-agents
  .venv-agents/bin/pip install openai 'pydantic-ai-slim[openai]'
  npm install --prefix .venv-agents openai
"""

import json
import os
import pathlib
import shlex
import shutil
import sys
import time

import job
import pytest
from paths import FIXTURES

from jaxrl_llm.replay.audit import audit
from tests.jobs.episodes_test import learn

ENVIRONMENT = pathlib.Path(
  os.environ.get('JAXRL_LLM_AGENTS_ENVIRONMENT', job.ROOT / '.venv-agents')
)
AGENTS = FIXTURES / 'agents'


def workflow(*command, **options):
  config = {'kind': f'external:{shlex.join(map(str, command))}', 'options': options}
  return f'--config.rollout.workflow={json.dumps(config)}'


def running(program):
  """Processes whose command names this file."""
  found = []
  for entry in pathlib.Path('/proc').iterdir():
    if entry.name.isdecimal():
      try:
        words = (entry / 'cmdline').read_bytes()
      except OSError:
        continue
      found += [entry.name] if str(program).encode() in words else []
  return found


def sampled(run, step):
  """Tokens and logprobs of a batch, by uid."""
  lines = (run / 'rollouts' / 'grpo' / f'{step:06d}.jsonl').read_text().splitlines()
  rows = map(json.loads, lines)
  return {row['uid']: (row['token_ids'], row['behaviour_logprobs']) for row in rows}


@pytest.mark.full
def test_agents_in_explorers_sample_what_the_built_in_workflow_does_and_none_outlives_a_killed_run(
  tmp_path,
):
  agent, run = tmp_path / 'agent.py', tmp_path / 'run'
  shutil.copy(FIXTURES / 'agent.py', agent)
  flags = (
    workflow(sys.executable, '-S', agent, 'turns=1', 'tokens=7'),
    '--config.rollout.explorers={"processes":2,"groups":3}',
    '--config.stages.grpo.steps=2',
    '--config.evaluation.held_out.tasks=4',
  )
  process = job.start(run, *flags)
  job.wait_for_rows(run, 12, process)
  deadline = time.monotonic() + 60
  while not running(agent):
    assert time.monotonic() < deadline and process.poll() is None
    time.sleep(0.01)
  job.kill(process)
  deadline = time.monotonic() + 30
  while running(agent) and time.monotonic() < deadline:
    time.sleep(0.02)
  assert not running(agent), 'agents end with the run'
  job.train(run, *flags)
  assert not running(agent)
  assert sampled(run, 13) == sampled(job.quick_run(), 13)
  assert audit(run / 'replay').ok


@pytest.mark.acceptance
@pytest.mark.parametrize(
  'command',
  [
    (ENVIRONMENT / 'bin' / 'python', AGENTS / 'official.py'),
    ('node', ENVIRONMENT / 'official.mjs'),
    (ENVIRONMENT / 'bin' / 'python', AGENTS / 'framework.py'),
  ],
  ids=['openai for Python', 'openai for Node', 'Pydantic AI'],
)
def test_an_agent_on_a_client_of_others_is_trained(tmp_path, command):
  if not (ENVIRONMENT / 'node_modules').exists():
    pytest.skip(f'{ENVIRONMENT} has no clients')
  shutil.copy(AGENTS / 'official.mjs', ENVIRONMENT)  # Node looks for modules beside the script.
  run = tmp_path / 'run'
  learn(
    run,
    'calculator',
    workflow(*command, reward='agent', turn_tokens=7),
    '--config.stages.sft.steps=40',
    '--config.stages.grpo.steps=2',
    '--config.stages.grpo.source.groups_per_batch=3',
    '--config.stages.grpo.source.group_size=4',
    '--config.evaluation.held_out.tasks=4',
  )
  rows = [row for row in job.rows(run) if 'rewards/environment/agent_calls' in row]
  assert len(rows) == 2 and all(row['rewards/environment/agent_calls'] >= 1 for row in rows)
  assert all(row['rewards/environment/agent_refused'] == 0 for row in rows)
  # Pydantic AI repeats its question in its own words if an answer is empty, and the tokenizer of
  # this task has digits alone.
  assert all(row['num_unscorable'] <= 6 for row in rows)
  assert audit(run / 'replay').ok


@pytest.mark.acceptance
def test_an_agent_learns_the_calculator(tmp_path):
  start, end = learn(
    tmp_path / 'run',
    'calculator',
    workflow(sys.executable, '-S', AGENTS / 'plain.py', reward='agent', turn_tokens=7),
    '--config.stages.grpo.steps=30',
    '--config.stages.grpo.source.groups_per_batch=8',
    '--config.evaluation.held_out.tasks=32',
  )
  assert start <= 0.6 and end >= 0.75
