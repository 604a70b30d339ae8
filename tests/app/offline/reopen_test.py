"""Coming back to a run: what of its configuration is used."""

import dataclasses
import json

import pytest
from paths import ROOT

from jaxrl_llm.app.composition.recorded_rows import recorded_config
from jaxrl_llm.app.composition.workdir import Workdir
from jaxrl_llm.app.offline.reopen import config_to_serve
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.rollout.explorers.crew import ExplorersConfig
from jaxrl_llm.rollout.vllm.server import VllmConfig

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
