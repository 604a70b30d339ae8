"""The sign of the KL gradient, of algorithms of the catalogue and of a user's own."""

import pytest

from jaxrl_llm.app.composition.stages import build_algorithm
from jaxrl_llm.app.doctor.divergence import kl_gradient
from jaxrl_llm.app.doctor.findings import FindingStatus
from jaxrl_llm.app.schema import AlgorithmConfig
from jaxrl_llm.learner.algorithm import Setting


def examined(name, **options):
  algorithm = build_algorithm(
    AlgorithmConfig(name=name, options=options), Setting(max_response_length=8)
  )
  return list(kl_gradient('stage', algorithm, dict.fromkeys(algorithm.constants, 0.1)))


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('grpo', {'kl_loss_coef': 0.01, 'kl_loss_type': 'k3'}),
    ('grpo', {'kl_loss_coef': 0.01, 'kl_loss_type': 'k2', 'kl_unbiased_gradient': False}),
    ('opmd', {'tau': 0.1}),
    ('ppo', {'kl_reward_coef': 0.05}),
  ],
)
def test_the_catalogues_penalties_draw_the_policy_to_its_reference(name, options):
  (finding,) = examined(name, **options)
  assert finding.status == FindingStatus.OK
  assert finding.detail['kl_change'] is None or finding.detail['kl_change'] < 0


def test_a_swapped_sign_is_a_failure():
  (finding,) = examined('fixtures.faulty_parts:REPELLED', kl_loss_coef=0.01)
  assert finding.status == FindingStatus.FAILURE
  assert finding.detail['cosine'] < -0.9 and finding.detail['kl_change'] > 0


def test_an_estimator_without_gradient_is_a_warning():
  options = {'kl_loss_coef': 0.01, 'kl_loss_type': 'k1', 'allow_zero_gradient_kl': True}
  (finding,) = examined('grpo', **options)
  assert finding.status == FindingStatus.WARNING


def test_without_a_reference_there_is_nothing_to_say():
  assert examined('grpo') == []
