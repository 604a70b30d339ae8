"""Numbers that mean nothing are refused when a configuration is built, by the name of the field."""

import pathlib

import pytest

from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope='module')
def config():
  return load_file(str(ROOT / 'configs' / 'quickstart.py'), Config)


@pytest.mark.parametrize(
  ('key', 'text', 'words'),
  [
    ('stages.grpo.minibatches', '0', ['stages.grpo.minibatches: 0', 'at least 1']),
    ('stages.grpo.group_size', '-3', ['stages.grpo.group_size: -3']),
    ('stages.sft.steps', '0', ['stages.sft.steps: 0']),
    ('stages.sft.evaluate_every', '0', ['stages.sft.evaluate_every: 0']),
    ('learner.chunks_per_rank', '0', ['learner.chunks_per_rank: 0']),
    ('rollout.max_response_length', '0', ['rollout.max_response_length: 0']),
    ('rollout.embedded.prefill_buckets', '[2]', ['prefill_buckets', '2', 'at least 5']),
    ('stages', '[]', ['stages', 'empty']),
    ('stages.grpo.name', 'sft', ['stages', "2 are called 'sft'"]),
    ('tasksets.train.name', 'eval', ['tasksets', "2 are called 'eval'"]),
    ('evaluation.held_out.tasks', '0', ['evaluation.held_out', 'tasks 0']),
  ],
)
def test_a_number_that_means_nothing_is_one_line(config, key, text, words):
  with pytest.raises(UserError, match=r'^[^\n]*$') as caught:
    apply_overrides(config, {key: text})
  for word in words:
    assert word in str(caught.value)


def test_filters_that_evaluation_wants_must_be_compiled(config):
  wanted = {'evaluation.held_out.samples': '4', 'evaluation.held_out.top_p': '0.9'}
  with pytest.raises(UserError, match=r'held_out.*filters'):
    apply_overrides(config, wanted)
  apply_overrides(config, {**wanted, 'rollout.embedded.filters': 'true'})
