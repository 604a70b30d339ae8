"""Surrogates as values: by name, from a user's module, with their options; the file of the recipe
among them.
"""

import inspect
import re

import jax
import numpy as np
import pytest
from learning import SETTING, USUAL, Subject, compute, write_samples
from paths import FIXTURES, ROOT

from jaxrl_llm.app.composition.stages import build_algorithm
from jaxrl_llm.app.schema import AlgorithmConfig
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner import policy_options
from jaxrl_llm.objectives import surrogates

RECIPE = ROOT / 'docs' / 'develop' / 'add_algorithm.md'
EXAMPLE = FIXTURES / 'own_sapo.py'
SHARED = {
  'entropy_coeff': 0.01,
  'kl_loss_coef': 0.1,
  'rollout_is_threshold': 1.2,
  'overlong_buffer_len': 10,
  'loss_agg_mode': 'seq-mean-token-sum-norm',
}
"""Everything that the family adds around a surrogate."""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('rows')
  write_samples(path)
  return path


def built(name, **options):
  return build_algorithm(AlgorithmConfig(name=name, options=options), SETTING)


def computed(folder, name, **options):
  return compute(
    folder, Subject(built(name, **options), USUAL), model='bigram', chunks=2, chunk_len=48
  )


def assert_equal_bits(found, wanted):
  jax.tree.map(
    np.testing.assert_array_equal, (found.loss, found.grads), (wanted.loss, wanted.grads)
  )
  assert found.stats.keys() == wanted.stats.keys()


def test_the_recipes_file_has_the_numbers_of_the_built_in_algorithm(folder):
  own = computed(folder, 'fixtures.own_sapo:ALGORITHM', tau_neg=3.0, **SHARED)
  assert_equal_bits(own, computed(folder, 'sapo', tau_neg=3.0, **SHARED))
  assert own.loss != computed(folder, 'sapo', **SHARED).loss
  assert {'actor/kl', 'actor/entropy', 'rollout_corr/rollout_is_weight'} <= own.stats.keys()
  assert 'actor/pg_clipfrac' not in own.stats


@pytest.mark.parametrize('name', ['sapo', 'fixtures.own_sapo:SAPO'])
def test_any_algorithm_of_the_family_takes_it_with_its_options(folder, name):
  found = computed(folder, 'grpo', policy_loss=name, policy_loss_options={'tau_neg': 3.0}, **SHARED)
  assert_equal_bits(found, computed(folder, 'sapo', tau_neg=3.0, **SHARED))


def test_the_recipe_shows_this_file_and_the_built_in_code():
  source = EXAMPLE.read_text()
  assert (
    f'```python\n{source}```' in RECIPE.read_text() and len(RECIPE.read_text().splitlines()) <= 84
  )
  for part in (surrogates.SapoOptions, surrogates.sapo):
    assert inspect.getsource(part) in source

  def without_name(text):
    return re.sub(r'policy_loss: str = .*', '', text)

  assert without_name(inspect.getsource(policy_options.SapoConfig)) in without_name(source)


def test_metrics_of_a_surrogate_are_means_over_its_tokens(folder, monkeypatch):
  def with_metric(tokens, options):
    return surrogates.sapo(tokens, options)._replace(
      metrics={'actor/positive': tokens.advantages > 0}
    )

  monkeypatch.setitem(surrogates.SURROGATES, 'sapo', (surrogates.SapoOptions, with_metric))
  stat = computed(folder, 'sapo').stats['actor/positive']
  assert 0 < stat.total < stat.count == stat.count.round()


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    (
      {'policy_loss': 'gpso'},
      "policy_loss 'gpso': unknown; did you mean 'gspo'?; a custom one is 'module:attr",
    ),
    (
      {'policy_loss': 'fixtures.own_sapo:SAPPO'},
      "policy_loss 'fixtures.own_sapo:SAPPO': module fixtures.own_sapo has",
    ),
    (
      {'policy_loss': 'fixtures.own_sapo:sapo'},
      'wanted (options dataclass, function that takes the options), got',
    ),
    (
      {'policy_loss': 'sapo', 'policy_loss_options': {'tau': 1.0}},
      "grpo.policy_loss_options.tau: SapoOptions has no field 'tau'",
    ),
    (
      {'policy_loss': 'sapo', 'policy_loss_options': {'tau_pos': 0.0}},
      'sapo.tau_pos: 0.0, wanted a finite number',
    ),
    (
      {'policy_loss_options': {'clip_ratio_low': 0.1}},
      'set clip_ratio_low, clip_ratio_high, clip_ratio_c there',
    ),
  ],
)
def test_a_wrong_surrogate_is_one_line(options, said):
  with pytest.raises(UserError) as caught:
    built('grpo', **options)
  assert said in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize('name', ['sapo', 'fixtures.own_sapo:ALGORITHM'])
def test_options_of_the_surrogate_are_checked_among_those_of_the_algorithm(name):
  with pytest.raises(UserError, match=r'^sapo.tau_neg: -1.0, wanted a finite number above 0$'):
    built(name, tau_neg=-1.0)
  with pytest.raises(UserError, match="has no field 'tau'"):
    built(name, tau=1.0)


def test_options_that_the_surrogate_does_not_read_are_named():
  (line,) = built('sapo', clip_ratio_high=0.3).no_effect
  assert line == 'sapo.clip_ratio_high: 0.3 has no effect without policy_loss clip or gspo or cispo'
  (line,) = built('sapo', policy_loss='clip', tau_pos=2.0).no_effect
  assert line == 'sapo.tau_pos: 2.0 has no effect without policy_loss sapo'
  assert built('sapo', policy_loss='clip', clip_ratio_high=0.3).no_effect == ()
