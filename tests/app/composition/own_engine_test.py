"""An engine of a user's own: found by name, with options and errors like any other part."""

import dataclasses
import pathlib

import pytest
from fixtures import own_engine
from paths import ROOT

from jaxrl_llm.app.composition.workdir import Workdir
from jaxrl_llm.app.offline.reopen import config_to_serve
from jaxrl_llm.app.schema import Config, RolloutConfig
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.catalogue import ENGINES
from jaxrl_llm.rollout.engine import EngineSpec

NAME = 'fixtures.own_engine:ENGINE'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remote:
  """Options of an engine that attaches to servers."""

  addresses: tuple[str, ...] = ()
  patience_s: float = 1.0
  greedy: bool = True


def remote(options: Remote) -> EngineSpec:
  return EngineSpec(
    build=lambda setting, run: None,
    served=True,
    addresses=options.addresses,
    may_change=('addresses', 'patience_s'),
    unsupported=lambda sampling: (
      'it only samples greedily' if options.greedy and sampling.temperature else None
    ),
  )


REMOTE = (Remote, remote)
NO_SPEC = (Remote, lambda options: 'an engine')
HERE = __name__


def rollout(**fields) -> RolloutConfig:
  return RolloutConfig(max_prompt_length=8, max_response_length=8, **fields)


def config_of(engine: str, options: str) -> Config:
  config = load_file(str(ROOT / 'configs' / 'quickstart.py'), Config)
  return apply_overrides(config, {'rollout.engine': engine, 'rollout.engine_options': options})


def test_old_spellings_name_the_engines_of_the_catalogue():
  assert rollout() == rollout(engine='embedded') and set(ENGINES) == {'embedded', 'vllm'}
  assert [rollout(engine=name).engine_spec().served for name in ENGINES] == [False, True]


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'engine': 'vlm'}, r"engine 'vlm': unknown; did you mean 'vllm'\?; .* 'module:attribute'$"),
    (
      {'engine_options': {'slots': 4}},
      "rollout.engine_options: .* rollout.engine is 'embedded'; set rollout.embedded instead",
    ),
    (
      {'engine': 'math:pi'},
      r"engine 'math:pi': wanted \(options dataclass, function that takes the options\), got 3.14",
    ),
    (
      {'engine': 'no_such_module:A'},
      "engine 'no_such_module:A': no module 'no_such_module'; is its directory in",
    ),
    ({'engine': f'{HERE}:NO_SPEC'}, f"engine '{HERE}:NO_SPEC': made a str, wanted an EngineSpec"),
    (
      {'engine': NAME, 'engine_options': {'metrics': 'a'}},
      "rollout.engine_options.metrics: .*did you mean 'metric'",
    ),
  ],
)
def test_a_name_that_is_no_engine_is_one_line(fields, message):
  with pytest.raises(UserError, match=f'^{message}'):
    rollout(**fields).engine_spec()


def test_its_options_reach_it():
  filtered = Sampling(top_k=4)
  assert rollout(engine=NAME).engine_spec().unsupported(filtered) is None
  off = rollout(engine=NAME, engine_options={'embedded': {'filters': False}}).engine_spec()
  assert off.unsupported(filtered).endswith('which is off') and off.unsupported(Sampling()) is None


def test_a_run_samples_only_as_its_engine_can():
  engine = f'{HERE}:REMOTE'
  with pytest.raises(UserError, match=r'^stages\.grpo: it only samples greedily$'):
    config_of(engine, '{}').check_sampling()
  config_of(engine, '{"greedy": false}').check_sampling()
  with pytest.raises(
    UserError,
    match=r'^stages\.grpo: temperature 0\.7, with rollout\.vllm\.args\.speculative_config set; ',
  ):
    speculative = {
      'rollout.engine': 'vllm',
      'rollout.vllm.args': '{"speculative_config": {"method": "ngram"}}',
      'stages.grpo.source.temperature': '0.7',
    }
    apply_overrides(load_file(str(ROOT / 'configs' / 'quickstart.py'), Config), speculative)


def test_a_resumed_run_changes_what_its_engine_says_may_change(tmp_path):
  engine = f'{HERE}:REMOTE'
  workdir = Workdir(tmp_path)
  workdir.adopt(config_of(engine, '{"patience_s": 1.0}'))
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  (tmp_path / 'checkpoints' / '1' / 'COMMIT').touch()
  workdir.adopt(config_of(engine, '{"patience_s": 2.0}'))
  with pytest.raises(UserError, match=r'rollout.engine_options.greedy'):
    workdir.adopt(config_of(engine, '{"patience_s": 1.0, "greedy": false}'))
  workdir.close()


def test_servers_that_a_run_attached_to_are_not_given_old_weights(tmp_path):
  workdir = Workdir(tmp_path)
  workdir.adopt(config_of(f'{HERE}:REMOTE', '{"addresses": ["unix:/a"]}'))
  workdir.close()
  key = 'rollout.engine_options.addresses'
  with pytest.raises(UserError, match=f'^{key}: .* --config.{key}='):
    config_to_serve(tmp_path, None, {})
  config_to_serve(tmp_path, None, {'rollout.engine_options.addresses': '["unix:/b"]'})
  options = {'rollout.engine': 'embedded', 'rollout.engine_options': '{}'}
  config_to_serve(tmp_path, None, options)


def test_the_recipe_shows_the_engine_that_is_tested():
  recipe = (ROOT / 'docs' / 'develop' / 'engines.md').read_text()
  assert pathlib.Path(own_engine.__file__).read_text() in recipe
