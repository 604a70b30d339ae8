"""Environments of verifiers, played by its own code behind the recording proxy.

verifiers has an environment of its own, `.venv-verifiers`; without it, these tests are skipped.
"""

import asyncio
import dataclasses
import json
import os
import shlex
import subprocess

import exploring
import pytest
from paths import FIXTURES, ROOT
from scripted import Scripted

from jaxrl_llm.app.composition.workflows import build_workflow
from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.rollout.agents import verifiers_agent
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.workflow import WorkflowConfig
from jaxrl_llm.tasks.tokenizer import build_character_tokenizer

pytestmark = pytest.mark.full
PYTHON = ROOT / '.venv-verifiers' / 'bin' / 'python'
AGENT = verifiers_agent.__file__
LOCAL = {'harness': {'id': 'null'}, 'runtime': {'type': 'subprocess'}}


@pytest.fixture(scope='module')
def ascii_tokenizer(tmp_path_factory):
  letters = [''.join(map(chr, range(32, 127))) + '\n']
  return build_character_tokenizer(
    letters, tmp_path_factory.mktemp('ascii') / 'tokenizer', template='plain'
  )


@pytest.fixture(autouse=True)
def _verifiers(monkeypatch):
  if not PYTHON.exists():
    pytest.skip('.venv-verifiers is missing: see docs/guides/agents.md')
  monkeypatch.setenv('PYTHONPATH', str(FIXTURES))
  monkeypatch.setenv('PATH', f'{PYTHON.parent}{os.pathsep}{os.environ["PATH"]}')
  monkeypatch.delenv('PYTHONDONTWRITEBYTECODE', raising=False)  # Its import takes a minute without.


def environment(taskset, **fields):
  return json.dumps({'taskset': {'id': taskset}, 'agent': LOCAL, **fields})


def exported(tmp_path, taskset):
  file = tmp_path / 'tasks.jsonl'
  command = [PYTHON, AGENT, f'--env={environment(taskset)}', f'--export={file}']
  subprocess.run(command, check=True)
  return [json.loads(line) for line in file.read_text().splitlines()]


def played(tokenizer, taskset, idx, *texts):
  words = [str(PYTHON), AGENT, f'--env={environment(taskset)}']
  options = {'reward': 'agent', 'with_truth': True, 'deadline_s': 500.0}
  config = WorkflowConfig(kind=f'external:{shlex.join(words)}', options=options)
  workflow = build_workflow(config, Scripted(tokenizer, *texts), tokenizer, 200)
  task = dataclasses.replace(exploring.make_tasks(1)[0], fields={'idx': idx})

  async def play():
    runs = checked_run(workflow, task, 0, stage='grpo', samples=1, sampling=Sampling())
    (rollout,) = [each async for each in runs]
    return rollout

  return asyncio.run(play())


def test_a_task_of_one_turn_is_exported_played_and_scored(ascii_tokenizer, tmp_path):
  rows = exported(tmp_path, 'verifiers_sums')
  assert rows[5] == {'idx': 5, 'prompt': '1+2=', 'system': ''} and len(rows) == 9
  sample, text, verdict, *_ = played(ascii_tokenizer, 'verifiers_sums', 5, '3$')
  assert text == '3' and verdict.value == 1.0
  assert verdict.evidence == {'rewards': {'right': [1.0, 1.0]}, 'metrics': {}}
  assert ascii_tokenizer.decode(sample.tokens[: sample.prompt_len].tolist()).endswith('1+2=')


def test_turns_of_an_interaction_are_one_sample(ascii_tokenizer):
  rollout = played(ascii_tokenizer, 'verifiers_guess', 0, '7$', '3$', '5$')
  assert rollout.verdict.value == pytest.approx(1 / 3) and len(rollout.steps) == 1
  sample = rollout.sample
  assert len(sample.segments) == 3
  read = ascii_tokenizer.decode(sample.tokens[sample.role != Role.POLICY].tolist())
  assert 'guess' in read and 'lower' in read and 'higher' in read


def test_an_environment_that_fails_makes_the_sample_unscorable(ascii_tokenizer):
  rollout = played(ascii_tokenizer, 'verifiers_guess', 0, 'no number$')
  assert rollout.verdict.value is None
  assert 'invalid literal for int' in rollout.verdict.evidence['error']
