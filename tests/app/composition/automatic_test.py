"""Values that are chosen where a configuration says 'auto'."""

import dataclasses
import json

import pytest

from jaxrl_llm.api import load_config
from jaxrl_llm.app.composition.automatic import (
  logits_budgets,
  open_fields,
  parameters,
  values_of,
  with_recorded,
  with_sized,
  with_values,
)
from jaxrl_llm.app.composition.chosen import kept_choices
from jaxrl_llm.app.composition.workdir import write_configuration
from jaxrl_llm.config.values import to_json
from jaxrl_llm.models.families import tiny

LARGE = dataclasses.replace(
  tiny('qwen2', 151_936), hidden_size=896, intermediate_size=4864, num_hidden_layers=24
)
PLANNED = {
  'policy.remat', 'learner.chunks_per_rank', 'stages.0.optimizer.offload',
  'stages.1.optimizer.offload', 'learner.logits_budget_bytes',
}  # fmt: skip


def config_of(**overrides):
  return load_config('quickstart', {'learner.chunks_per_rank': 'auto', **overrides})


def test_on_cpus_and_for_small_models_values_are_those_of_the_quickstart():
  for platform, spec in (('cpu', None), ('cpu', LARGE), ('cuda', tiny('qwen2', 64))):
    config = with_sized(config_of(), platform=platform, spec=spec)
    assert not open_fields(config)
    policy = config.policy
    assert (policy.dtype, policy.scan_layers, policy.remat) == ('float32', False, 'none')
    assert config.learner.chunks_per_rank == 8 and not config.stages[0].optimizer.offloads
    assert config.learner.logits_budget_bytes == 256 << 20


def test_a_large_model_gets_bfloat16_and_a_scan_and_a_plan():
  assert parameters(LARGE) > 400e6
  config = with_sized(config_of(), platform='tpu', spec=LARGE)
  assert (config.policy.dtype, config.policy.scan_layers) == ('bfloat16', True)
  assert set(open_fields(config)) == PLANNED
  tried = with_sized(config, platform='tpu', spec=LARGE, plans=False)
  assert not open_fields(tried) and tried.policy.remat == 'full'
  assert tried.learner.logits_budget_bytes == 256 << 20


MIB = 1 << 20


@pytest.mark.parametrize(
  ('memory', 'wanted'),
  [
    (16 << 30, [1024, 512, 256, 128, 64]),
    (80 << 30, [2048, 1024, 512, 256, 128]),
    (1 << 30, [256, 32, 16, 8, 4]),
  ],
)
def test_logits_may_take_a_sixteenth_of_a_devices_memory_or_less(memory, wanted):
  assert [budget / MIB for budget in logits_budgets(memory)] == wanted


def test_a_limit_opens_the_plan_anywhere():
  config = with_sized(config_of(**{'learner.memory_bytes': 10**9}), platform='cpu', spec=None)
  assert config.policy.dtype == 'float32' and set(open_fields(config)) == PLANNED


def test_what_the_configuration_says_stays():
  fields = {'policy.dtype': 'bfloat16', 'policy.remat': 'dots', 'learner.chunks_per_rank': 3}
  config = with_sized(config_of(**fields), platform='cpu', spec=None)
  assert (config.policy.dtype, config.policy.remat) == ('bfloat16', 'dots')
  assert config.learner.chunks_per_rank == 3 and config.policy.scan_layers is False


def test_a_resumed_run_has_the_values_that_were_chosen_at_its_start(tmp_path):
  chosen = with_values(
    config_of(),
    {
      'policy.remat': 'dots',
      'policy.attention': 'splash',
      'stages.1.optimizer.offload': True,
      'learner.logits_budget_bytes': 1 << 30,
    },
  )
  (tmp_path / 'config.json').write_text(json.dumps(to_json(chosen)))
  resumed = with_recorded(config_of(**{'policy.dtype': 'bfloat16'}), tmp_path)
  assert (resumed.policy.remat, resumed.policy.attention) == ('dots', 'splash')
  assert resumed.policy.dtype == 'bfloat16'
  assert resumed.learner.logits_budget_bytes == 1 << 30
  assert [stage.optimizer.offload for stage in resumed.stages] == ['auto', True]
  assert with_recorded(config_of(), None) == config_of()


def test_a_start_without_commits_is_repeated_with_its_choices_unless_it_changed(tmp_path):
  write_configuration(tmp_path, with_values(config_of(), {'policy.remat': 'dots'}))
  assert kept_choices(config_of(), tmp_path).policy.remat == 'dots'
  assert kept_choices(config_of(seed=7), tmp_path) == config_of(seed=7)
  assert kept_choices(config_of(), tmp_path / 'none') == config_of()


@pytest.mark.parametrize('written', ['', '[]', '{"policy": 3, "stages": 4}', '{"policy": {}}'])
def test_an_unreadable_configuration_changes_nothing(tmp_path, written):
  (tmp_path / 'config.json').write_text(written)
  assert with_recorded(config_of(), tmp_path) == config_of()


def test_options_of_parts_stay_as_they_are():
  """Settled options of scorers may have tuples, which JSON does not have."""
  config = config_of()
  scorer = dataclasses.replace(config.rewards.scorers[0], options={'kinds': ('a', 'b')})
  config = dataclasses.replace(
    config, rewards=dataclasses.replace(config.rewards, scorers=(scorer,))
  )
  chosen = with_values(config, {'policy.remat': 'dots', 'stages.1.optimizer.offload': True})
  assert chosen.rewards == config.rewards and chosen.policy.remat == 'dots'
  assert [stage.optimizer.offload for stage in chosen.stages] == ['auto', True]


def test_every_field_that_accepts_auto_is_listed():
  """Besides the attention, whose 'auto' may stay."""
  values = values_of(to_json(config_of()))
  assert {key for key, value in values.items() if value == 'auto'} == {
    *open_fields(config_of()), 'policy.attention',
  }  # fmt: skip
  assert json.dumps(to_json(config_of())).count('"auto"') == len(open_fields(config_of())) + 1
