"""Agents that a command starts for each sample: their exits, rewards and processes."""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import shlex
import sys
import tempfile
import types

import exploring
import psutil
import pytest
from paths import FIXTURES

from jaxrl_llm.app.composition.workflows import build_workflow
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.rollout.agents.workflow import MAX_TASK, task_json
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.workflow import WorkflowConfig

TASK = exploring.make_tasks(1)[0]
AGENT = FIXTURES / 'agent.py'


def external(tokenizer, *flags, command=None, max_tokens=60, **options):
  words = [sys.executable, '-S', str(AGENT), *flags]
  kind = f'external:{shlex.join(words) if command is None else command}'
  config = WorkflowConfig(kind=kind, options={'deadline_s': 100.0, **options})
  return build_workflow(config, exploring.FakeEngine(tokenizer), tokenizer, max_tokens)


async def rollouts(workflow, samples=2, task=TASK):
  runs = checked_run(workflow, task, 0, stage='grpo', samples=samples, sampling=Sampling())
  return sorted([one async for one in runs], key=lambda one: one.sample.sample_index)


def agents(*, recursive):
  """Processes that have the agent's file in their command: guards, and with `recursive` agents."""
  present = []
  for process in psutil.Process().children(recursive=recursive):
    with contextlib.suppress(psutil.Error):  # It has just ended.
      present += [process.pid] if str(AGENT) in ' '.join(process.cmdline()) else []
  return present


def left_over():
  """Processes of agents, and directories of their logs, that exist now."""
  return agents(recursive=True), [*pathlib.Path(tempfile.gettempdir()).glob('jaxrl-agents-*')]


@pytest.fixture(autouse=True)
def _folder_of_its_own(monkeypatch, tmp_path):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))


def test_each_sample_has_an_agent_whose_calls_become_its_turns(tokenizer):
  for rollout in asyncio.run(rollouts(external(tokenizer))):
    sample, verdict = rollout.sample, rollout.verdict
    assert len(sample.segments) == 2 and sample.loss_mask.sum() == sum(
      s.end - s.start for s in sample.segments
    )
    assert (sample.role == Role.TOOL).any()
    assert (verdict.value, verdict.parts) == (0.0, {'agent_calls': 2.0, 'agent_refused': 0.0})
  assert left_over() == ([], [])


def test_samples_do_not_depend_on_who_is_first(tokenizer):
  """Agents are deterministic, and so are the random keys of their calls."""

  async def both():
    workflow = external(tokenizer)
    first, second = await asyncio.gather(rollouts(workflow), rollouts(workflow))
    return [[one.sample.tokens.tolist() for one in group] for group in (first, second)]

  first, second = asyncio.run(both())
  assert first == second and first[0] != first[1]


def test_an_agent_posts_its_own_reward_for_each_turn(tokenizer):
  workflow = external(tokenizer, 'reward=0.5', reward='agent', with_truth=True)
  for _, _, verdict, *_ in asyncio.run(rollouts(workflow)):
    assert (verdict.value, verdict.turn_values) == (1.0, (0.5,))
    assert verdict.evidence == {'truth': TASK.truth}


@pytest.mark.parametrize(
  ('flags', 'options', 'line'),
  [
    (('say=no luck', 'exit=3'), {}, 'exit code 3: no luck'),
    (('exit=3',), {}, 'exit code 3'),
    (('hang',), {'deadline_s': 3.0}, 'did not end within 3 s'),
    ((), {'reward': 'agent'}, 'it posted no reward (POST /v1/reward)'),
    (('reward=1',), {}, 'exit code 1: urllib.error.HTTPError: HTTP Error 400: Bad Request'),
  ],
)
def test_what_an_agent_does_wrong_makes_its_sample_unscorable(tokenizer, flags, options, line):
  for _, _, verdict, *_ in asyncio.run(rollouts(external(tokenizer, *flags, **options))):
    assert verdict.value is None and verdict.evidence['error'].endswith(f': {line}')
    assert '\n' not in verdict.evidence['error']
  assert left_over() == ([], [])


def test_an_agent_at_the_limit_of_tokens_has_a_sample_of_that_length(tokenizer):
  workflow = external(tokenizer, 'turns=50', max_tokens=10)
  for sample, _, verdict, *_ in asyncio.run(rollouts(workflow)):
    assert sample.finish_reason == 'length' and verdict.value == 0.0


def test_a_sample_that_is_not_trained_on_stays_so_at_the_limit_of_tokens(tokenizer):
  workflow = external(tokenizer, 'turns=50', 'top_p=0.9', max_tokens=10, filtered='unscorable')
  for sample, _, verdict, *_ in asyncio.run(rollouts(workflow)):
    assert sample.finish_reason == 'length' and verdict.value is None
    assert verdict.evidence['error'].endswith('the agent asked for top_p=0.9')


def test_an_agent_that_fails_before_its_first_call_is_started_again(tokenizer, tmp_path):
  workflow = external(tokenizer, f'fails_once={tmp_path / "failed"}')
  (rollout,) = asyncio.run(rollouts(workflow, samples=1))
  assert rollout.verdict.value == 0.0 and len(rollout.sample.segments) == 2


def test_a_first_prompt_that_the_tokenizer_refuses_makes_the_sample_unscorable(tokenizer):
  for sample, _, verdict, *_ in asyncio.run(rollouts(external(tokenizer, 'first=ß'))):
    assert verdict.value is None and "lacks 'ß'" in verdict.evidence['error']
    assert sample.prompt_len == 1


def test_addresses_without_a_proxy_are_those_of_both_variables(tokenizer, monkeypatch):
  monkeypatch.setenv('NO_PROXY', 'a.example')
  monkeypatch.setenv('no_proxy', 'b.example')
  workflow = external(tokenizer)
  workflow._proxy = types.SimpleNamespace(base_url='')
  assert workflow._environment(TASK, '')['no_proxy'] == 'a.example,b.example,127.0.0.1'


@pytest.mark.parametrize(
  ('flags', 'command', 'line'),
  [
    (('mute',), None, 'it made no call to the policy'),
    (('mute', 'say=no key', 'exit=2'), None, 'exit code 2: no key'),
    ((), 'no-such-agent', 'no-such-agent cannot be started'),
  ],
)
def test_an_agent_that_never_asks_the_policy_ends_the_run_with_one_line(
  tokenizer, flags, command, line
):
  with pytest.raises(RunError) as caught:
    asyncio.run(rollouts(external(tokenizer, *flags, command=command), samples=1))
  assert line in str(caught.value) and '\n' not in str(caught.value)
  assert 'ended before the first answer' in str(caught.value)
  assert left_over() == ([], [])


def test_a_group_that_is_given_up_leaves_no_agent(tokenizer):
  async def check():
    running = asyncio.ensure_future(rollouts(external(tokenizer, 'hang')))
    while not left_over()[0]:
      await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.wait({running})

  asyncio.run(check())
  assert left_over() == ([], [])


def test_no_more_agents_run_than_permitted(tokenizer):
  most = 0

  async def check():
    nonlocal most
    workflow = external(tokenizer, concurrency=1)
    running = asyncio.ensure_future(rollouts(workflow, samples=3))
    while not running.done():
      most = max(most, len(agents(recursive=False)))
      await asyncio.sleep(0.05)
    assert len(running.result()) == 3

  asyncio.run(check())
  assert most == 1


def test_a_task_has_no_reference_answer_unless_asked_for():
  assert TASK.truth is not None
  assert set(json.loads(task_json(TASK, with_truth=False))) == {
    'uid',
    'taskset',
    'domain',
    'prompt',
  }
  assert json.loads(task_json(TASK, with_truth=True))['truth'] == TASK.truth


def test_a_task_that_no_environment_variable_holds_is_one_line():
  task = dataclasses.replace(TASK, prompt=({'role': 'user', 'content': 'h' * MAX_TASK},))
  with pytest.raises(RunError, match=r'bytes as JSON, wanted at most 128000') as caught:
    task_json(task, with_truth=False)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('options', 'line'),
  [
    ({'command': ''}, "command '' is empty"),
    ({'command': 'echo "'}, 'No closing quotation'),
    ({'reward': 'mine'}, "options.reward: got 'mine', wanted one of scorers, agent"),
    ({'filtered': 'no'}, "options.filtered: got 'no', wanted one of reject, ignore, unscorable"),
    ({'deadline_s': 0}, 'options.deadline_s: got 0, wanted above 0'),
    ({'parser': 'none'}, "no 'none'; wanted auto"),
    ({'speed': 3}, "does not take ['command', 'deadline_s', 'speed']"),
  ],
)
def test_an_impossible_option_is_one_line(tokenizer, options, line):
  with pytest.raises(UserError) as caught:
    external(tokenizer, **options)
  assert line in str(caught.value) and '\n' not in str(caught.value)
