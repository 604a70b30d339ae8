"""Coming back to a run: what of its configuration is used."""

import asyncio
import contextlib
import dataclasses
import json
import logging

import pytest
from paths import ROOT

from jaxrl_llm.api import load_config
from jaxrl_llm.app.composition.automatic import with_values
from jaxrl_llm.app.composition.recorded_rows import recorded_config
from jaxrl_llm.app.composition.workdir import Workdir
from jaxrl_llm.app.offline.evaluation import evaluate
from jaxrl_llm.app.offline.reopen import config_to_serve, configs_of_run, without_absent_kernel
from jaxrl_llm.app.planning import check_kernel
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.rollout.explorers.crew import ExplorersConfig
from jaxrl_llm.rollout.vllm.config import VllmConfig

LISTEN = FrontConfig(port=8500, token_file='token')
GIVEN = ExplorersConfig(processes=3, silent_s=7.0)


def run_with(path, explorers, **rollout):
  config = load_file(str(ROOT / 'configs' / 'quickstart.py'), Config)
  rollout = dataclasses.replace(config.rollout, explorers=explorers, **rollout)
  Workdir(path).adopt(dataclasses.replace(config, rollout=rollout))
  return path


@pytest.mark.parametrize(
  ('explorers', 'used'),
  [
    (None, None),
    (GIVEN, GIVEN),
    (dataclasses.replace(GIVEN, listen=LISTEN), GIVEN),
    (ExplorersConfig(processes=0, listen=LISTEN), None),
  ],
)
def test_explorers_of_other_machines_stay_with_the_run(tmp_path, explorers, used):
  run = run_with(tmp_path / 'run', explorers)
  assert config_to_serve(run, None, {}).rollout.explorers == used


def test_a_run_whose_explorers_fetch_from_its_servers_opens_with_another_engine(tmp_path):
  vllm = VllmConfig(addresses=('http://127.0.0.1:1',), key_file='token')
  explorers = dataclasses.replace(GIVEN, direct=True)
  run = run_with(tmp_path / 'run', explorers, engine='vllm', vllm=vllm)
  used = config_to_serve(run, None, {'rollout.engine': 'embedded'}).rollout
  assert used.engine == 'embedded' and used.explorers == GIVEN


@pytest.mark.parametrize(
  'text', ['', '{"seed": 1', '[' * 9999, '{"seed": "x"}', f'{{"seed": {"1" * 5000}}}', '[]']
)
def test_a_run_whose_configuration_is_none_is_one_line(tmp_path, text):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(UserError, match=r'^[^\n]*config\.json: [^\n]*$'):
    config_to_serve(tmp_path, None, {})


@pytest.mark.parametrize(
  'text',
  [
    '[]',
    '{}',
    '{"policy": 3}',
    '{"policy": {"init_from": 3}, "rewards": {}}',
    '{"policy": {"init_from": null}, "rewards": {}, "stages": [{"name": "a", "source": {"rewards": '
    '{"x": "1"}}}]}',
    '[' * 9999,
  ],
)
def test_a_run_to_learn_from_whose_configuration_is_none_is_one_line(tmp_path, text):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(
    UserError, match=r'^stages\.learn\.source\.run: [^\n]* is not the directory of a run [^\n]*$'
  ):
    recorded_config('stages.learn.source.run', tmp_path)


def test_a_command_that_names_explorers_has_them(tmp_path):
  run, named = (
    run_with(tmp_path / 'run', GIVEN),
    {'processes': 0, 'listen': {'token_file': 'other'}},
  )
  used = config_to_serve(run, None, {'rollout.explorers': json.dumps(named)}).rollout.explorers
  assert used == ExplorersConfig(processes=0, listen=FrontConfig(token_file='other'))


ON_TPUS = {
  'policy.dtype': 'bfloat16',
  'policy.scan_layers': True,
  'policy.remat': 'offload',
  'policy.attention': 'splash',
  'learner.chunks_per_rank': 2,
  'learner.logits_budget_bytes': 1 << 30,
  'stages.0.optimizer.offload': True,
  'stages.1.optimizer.offload': True,
}
"""Choices of a run on TPUs, whose kernel CPUs do not have."""
TASKS = {'evaluation.held_out.tasks': '2'}


@pytest.fixture
def of_tpus(tmp_path):
  """Directory of a run that was started on TPUs, and has made no step."""
  config = with_values(load_config('quickstart', {'policy.model.num_hidden_layers': '1'}), ON_TPUS)
  Workdir(tmp_path / 'run').adopt(config)
  return tmp_path / 'run'


def test_a_run_of_other_devices_is_evaluated_with_a_line_on_the_kernel(of_tpus, caplog):
  """Every other choice is used as recorded."""

  async def measured(config):
    async with contextlib.aclosing(evaluate(config, of_tpus, [0])) as measurements:
      return [measurement async for measurement in measurements]

  with caplog.at_level(logging.WARNING):
    config = config_to_serve(of_tpus, None, TASKS)
  assert [record.getMessage() for record in caplog.records] == [
    'policy.attention: the run recorded splash, which does not run on this platform (cpu); auto is '
    'used'
  ]
  assert (config.policy.attention, config.policy.dtype) == ('auto', 'bfloat16')
  (measurement,) = asyncio.run(measured(config))
  assert len(measurement['rows']) == 2
  named = config_to_serve(of_tpus, None, TASKS | {'policy.attention': 'splash'})
  with pytest.raises(UserError, match=r'^policy.attention: splash does not run on this platform'):
    asyncio.run(measured(named))


def test_a_kernel_that_this_platform_has_or_that_is_none_stays(of_tpus, caplog):
  ((_, config),) = configs_of_run(of_tpus)
  assert without_absent_kernel(config).policy.attention == 'auto'
  for attention in ('auto', 'masked', 'blockwise'):
    policy = dataclasses.replace(config.policy, attention=attention)
    kept = dataclasses.replace(config, policy=policy)
    assert without_absent_kernel(kept) is kept
  assert len(caplog.records) == 1


def test_a_resumed_run_is_refused_where_its_kernel_is_absent_and_told_what_continues_it(of_tpus):
  """What the line names can be given to a resumed run, see `changes.MAY_CHANGE`."""
  ((_, config),) = configs_of_run(of_tpus)
  with pytest.raises(
    UserError,
    match=r'^policy.attention: the run recorded splash, which does not run on this platform .cpu.; '
    r'[^\n]*--config.policy.attention=blockwise$',
  ):
    check_kernel(config)
  policy = dataclasses.replace(config.policy, attention='blockwise')
  check_kernel(dataclasses.replace(config, policy=policy))
