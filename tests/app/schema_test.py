"""Numbers that mean nothing are refused when a configuration is built, by the name of the field."""

import pytest
from paths import ROOT

from jaxrl_llm.app.schema import AlgorithmConfig, Config, ExpertsConfig, PairsConfig, StageConfig
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.tasks.taskset import DemonstrationsConfig


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
    ('policy.lora.rank', '0', ['lora.rank: got 0', 'at least 1']),
    ('policy.lora.targets', '["q_proj"]', ['lora.targets', 'query']),
    ('rollout.vllm.lora', 'adapter', ["rollout.vllm.lora: 'adapter'", 'policy.lora']),
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


DEMONSTRATIONS = DemonstrationsConfig(templates=('{truth}',))


def stage(**fields):
  return StageConfig(
    **{'name': 's', 'algorithm': AlgorithmConfig(name='grpo'), 'steps': 1, 'tasksets': ('t',), **fields}
  )


def experts(ratio=0.25):
  return ExpertsConfig(tasksets=('t',), demonstrations=DEMONSTRATIONS, ratio=ratio)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: stage(demonstrations=DEMONSTRATIONS, preferences=PairsConfig(train='p')), 'exclude each other'),
    (lambda: stage(tasksets=()), 'stages.s.tasksets: empty'),
    (lambda: experts(0.0), 'experts.ratio: 0.0'),
    (lambda: experts(1.0), 'experts.ratio: 1.0'),
  ],
)
def test_a_stage_that_means_nothing_is_one_line(make, message):
  with pytest.raises(UserError, match=r'^[^\n]*$') as caught:
    make()
  assert message in str(caught.value)


@pytest.mark.parametrize(
  ('usual', 'ratio', 'rows'),
  [(48, 0.25, 16), (6, 0.25, 2), (7, 0.25, 3), (1, 0.01, 1), (9, 0.1, 1), (8, 0.9, 72), (30, 0.4, 20)],
)
def test_so_many_experts_join_that_their_share_is_at_least_the_ratio(usual, ratio, rows):
  assert experts(ratio).rows(usual) == rows
  assert rows / (usual + rows) >= ratio - 1e-9, 'and one less would be too few'
  assert (rows - 1) / (usual + rows - 1) < ratio


@pytest.mark.parametrize(
  ('fields', 'sequences', 'unit'),
  [
    ({}, 4 * 6, 1),
    ({'experts': experts()}, 4 * 6 + 8, 1),
    ({'selection': SelectionConfig(kind='mixed')}, 4 * 6, 1),
    ({'selection': SelectionConfig(kind='shortest_correct')}, 4, 1),
    ({'selection': SelectionConfig(kind='pairs', pairs_per_group=2)}, 4 * 2 * 2, 2),
    ({'selection': SelectionConfig(kind='pairs', pairs_per_group=99)}, 4 * 5 * 2, 2),
    ({'preferences': PairsConfig(train='p'), 'tasksets': (), 'sequences_per_batch': 10}, 10, 2),
    ({'demonstrations': DEMONSTRATIONS, 'sequences_per_batch': 10}, 10, 1),
  ],
)
def test_what_a_batch_may_hold(fields, sequences, unit):
  made = stage(groups_per_batch=4, group_size=6, **fields)
  assert (made.sequences, made.unit) == (sequences, unit)
  assert made.explores == ('preferences' not in fields and 'demonstrations' not in fields)


def test_adapters_reach_servers_as_files(config):
  adapter = {'policy.lora.rank': '8', 'rollout.vllm.lora': 'adapter'}
  apply_overrides(config, adapter)
  with pytest.raises(UserError, match=r"rollout.vllm.transfer is 'nccl'"):
    apply_overrides(config, {**adapter, 'rollout.vllm.transfer': 'nccl'})


def test_filters_that_evaluation_wants_must_be_compiled(config):
  wanted = {'evaluation.held_out.samples': '4', 'evaluation.held_out.top_p': '0.9'}
  with pytest.raises(UserError, match=r'held_out.*filters'):
    apply_overrides(config, wanted)
  apply_overrides(config, {**wanted, 'rollout.embedded.filters': 'true'})
