"""Numbers that mean nothing are refused when a configuration is built, by the name of the field."""

import dataclasses
import math
import re

import judged
import pytest
from paths import ROOT

from jaxrl_llm.app.schema import AlgorithmConfig, Config, StageConfig
from jaxrl_llm.app.sources import (
  Demonstrations,
  Examples,
  ExpertsConfig,
  FollowConfig,
  Followed,
  Pairs,
  PastConfig,
  Recorded,
  Rollouts,
  Stored,
)
from jaxrl_llm.config.annotations import field_types
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.config.moved import moved_fields
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.models.spec import LoraConfig
from jaxrl_llm.rewards.api import RewardsConfig, ScorerConfig
from jaxrl_llm.tasks.sampler import LaterWeights, SamplerConfig


@pytest.fixture(scope='module')
def config():
  return load_file(str(ROOT / 'configs' / 'quickstart.py'), Config)


@pytest.mark.parametrize(
  ('key', 'text', 'words'),
  [
    ('stages.grpo.minibatches', '0', ['stages.grpo.minibatches: 0', 'at least 1']),
    ('rollout.vllm.discover', '2', ['rollout.vllm.discover: set', '--config.registry={}']),
    ('rollout.explorers', '{"listen": {}}', ['rollout.explorers.listen.token_file: missing']),
    ('rollout.explorers', '{"direct": true}', ['rollout.explorers.direct: True', 'fronts sign']),
    (
      'rewards.scorers',
      '[{"name": "code", "options": {"discover": "*"}}]',
      ['rewards.scorers.code.options.discover: set', '--config.registry={}'],
    ),
    ('registry.lease_s', '3', ['registry.lease_s: 3', 'at least 15']),
    ('stages.grpo.source.group_size', '-3', ['stages.grpo.source.group_size: -3']),
    (
      'stages.grpo.source.response_lengths',
      '[[0, 8], [5, 9]]',
      ['stages.grpo.source.response_lengths: 9 tokens above rollout.max_response_length=7'],
    ),
    (
      'stages.grpo.source.response_lengths',
      '[[1, 3]]',
      ['response_lengths: its steps are [1]', 'ascending steps from 0'],
    ),
    (
      'stages.grpo.source.response_lengths',
      '[[0, 3], [0, 4]]',
      ['response_lengths: its steps are [0, 0]', 'ascending'],
    ),
    (
      'stages.grpo.source.response_lengths',
      '[[0, 0]]',
      ['response_lengths: 0 tokens from step 0 on', 'at least 1'],
    ),
    ('stages.sft.steps', '0', ['stages.sft.steps: 0']),
    ('stages.sft.evaluate_every', '0', ['stages.sft.evaluate_every: 0']),
    ('stages.sft.overlap_evaluation', 'True', ['overlap_evaluation', 'set evaluate_every']),
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


def stage(source, **fields):
  return StageConfig(
    **{
      'name': 's',
      'algorithm': AlgorithmConfig(name='grpo'),
      'source': source,
      'steps': 1,
      **fields,
    }
  )


def rollouts(**fields):
  return Rollouts(tasksets=('t',), groups_per_batch=4, group_size=6, **fields)


def experts(ratio=0.25):
  return ExpertsConfig(tasksets=('t',), templates=('{truth}',), ratio=ratio)


PAIRED = SelectionConfig(kind='pairs')
RECORDED = Recorded(run='r', tasksets=('t',), groups_per_batch=4, group_size=6)
STORED = Stored(stages=('a',), tasksets=('t',), sequences_per_batch=10)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: stage(Rollouts(tasksets=())), 'stages.s.source.tasksets: empty'),
    (
      lambda: stage(Demonstrations(tasksets=(), templates=('{truth}',))),
      'stages.s.source.tasksets: empty',
    ),
    (lambda: stage(dataclasses.replace(RECORDED, tasksets=())), 'stages.s.source.tasksets: empty'),
    (
      lambda: stage(dataclasses.replace(RECORDED, group_size=0)),
      'stages.s.source.group_size: 0, wanted at least 1',
    ),
    (
      lambda: stage(Pairs(train='p', sequences_per_batch=0)),
      'stages.s.source.sequences_per_batch: 0',
    ),
    (
      lambda: stage(Examples(train='e', sequences_per_batch=0)),
      'stages.s.source.sequences_per_batch: 0',
    ),
    (lambda: stage(rollouts(temperature=0.0)), 'stages.s.source.temperature: 0.0 is not above 0'),
    (lambda: stage(rollouts(rollout_only=True, experts=experts())), 'stages.s.source.rollout_only'),
    (lambda: stage(rollouts(follow=FollowConfig(run='r'))), 'stages.s.source.follow'),
    (
      lambda: stage(
        rollouts(rollout_only=True, follow=FollowConfig(run='r', batches_per_version=0))
      ),
      'stages.s.source.follow.batches_per_version',
    ),
    (
      lambda: stage(
        rollouts(
          rollout_only=True,
          follow=FollowConfig(run='r'),
          selection=SelectionConfig(kind='best'),
        )
      ),
      'stages.s.source.selection',
    ),
    (
      lambda: stage(Followed(run='r', tasksets=('t',), bound=1, export_every=3)),
      'stages.s.source.export_every',
    ),
    (lambda: stage(Followed(run='r', tasksets=('t',), bound=-1)), 'stages.s.source.bound'),
    (lambda: stage(Followed(run=(), tasksets=('t',))), 'stages.s.source.run'),
    (lambda: stage(Followed(run=('r', 'r'), tasksets=('t',))), 'stages.s.source.run'),
    (
      lambda: stage(rollouts(rollout_only=True, follow=FollowConfig(run='r', share=(2, 2)))),
      'stages.s.source.follow.share',
    ),
    (
      lambda: stage(
        rollouts(
          rollout_only=True,
          follow=FollowConfig(run='r', share=(0, 2)),
          sampler=SamplerConfig(order='prioritised'),
        )
      ),
      'stages.s.source.follow.share',
    ),
    (
      lambda: stage(
        rollouts(
          rollout_only=True,
          follow=FollowConfig(run='r', share=(0, 2)),
          sampler=SamplerConfig(
            weights={'t': 1.0}, schedule=(LaterWeights(from_batch=1, weights={'t': 2.0}),)
          ),
        )
      ),
      'stages.s.source.follow.share',
    ),
    (
      lambda: stage(rollouts(rollout_only=True, past=PastConfig(groups=1, max_uses=2))),
      'stages.s.source.rollout_only',
    ),
    (
      lambda: stage(Rollouts(tasksets=('t',), group_size=1, selection=PAIRED)),
      'group_size: 1 sample makes no pair',
    ),
    (
      lambda: stage(rollouts(selection=PAIRED, experts=experts())),
      "stages.s.source.selection: 'pairs' cannot be combined",
    ),
    (lambda: Demonstrations(tasksets=('t',), templates=()), '0 templates and 1 weights'),
    (lambda: experts(0.0), 'experts.ratio: 0.0'),
    (lambda: experts(1.0), 'experts.ratio: 1.0'),
    (lambda: stage(dataclasses.replace(STORED, stages=())), 'stages.s.source.stages: empty'),
    (
      lambda: stage(dataclasses.replace(STORED, selection=SelectionConfig(kind='mixed'))),
      "stages.s.source.selection: 'mixed' selects whole groups",
    ),
    (
      lambda: stage(rollouts(), init_from=('base',), keep_optimizer=True),
      'stages.s.keep_optimizer: the optimizer state belongs to weights other than',
    ),
  ],
)
def test_a_stage_that_means_nothing_is_one_line(make, message):
  with pytest.raises(UserError, match=r'^[^\n]*$') as caught:
    make()
  assert message in str(caught.value)


@pytest.mark.parametrize('name', moved_fields(StageConfig))
def test_a_field_that_a_source_took_over_is_answered_with_its_place(config, name):
  place = moved_fields(StageConfig)[name]
  if place.startswith('source.'):
    having = {
      kind.__name__
      for kind in (Rollouts, Demonstrations, Examples, Pairs, Recorded)
      if name in field_types(kind)
    }
    assert having and having == set(re.findall(r'[A-Z]\w+', place))

  def line(where):
    return f'^{re.escape(f"{where}.{name}: moved to {where}.{place}")}$'

  with pytest.raises(UserError, match=line('StageConfig')):
    StageConfig(name='s', algorithm=AlgorithmConfig(name='grpo'), steps=1, **{name: None})
  with pytest.raises(UserError, match=line('StageConfig')):
    dataclasses.replace(config.stages[0], **{name: None})
  with pytest.raises(AttributeError, match=line('StageConfig')):
    getattr(config.stages[0], name)
  for key in (name, f'{name}.count'):
    with pytest.raises(UserError, match=line('--config.stages.grpo')):
      apply_overrides(config, {f'stages.grpo.{key}': '1'})


def test_a_field_of_another_source_is_refused_by_the_name_of_the_stages_own(config):
  with pytest.raises(
    UserError, match=r"^--config\.stages\.sft\.source\.bound: Demonstrations has no field 'bound'; "
  ):
    apply_overrides(config, {'stages.sft.source.bound': '1'})


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'policy.lora': '{"rank": 2}'}, ['stages.grpo.source.follow', 'policy.lora']),
    ({'phases': '{}'}, ['phases', 'source.follow of stages.grpo']),
    (
      {'stages.sft.source': '{"@type": "Followed", "run": "r", "tasksets": ["train"]}'},
      ["'grpo'", 'separate runs'],
    ),
  ],
)
def test_a_run_that_follows_another_is_refused_in_one_line(config, changes, words):
  follow = {'stages.grpo.source.rollout_only': 'true', 'stages.grpo.source.follow': '{"run": "r"}'}
  apply_overrides(config, follow)
  with pytest.raises(UserError) as refused:
    apply_overrides(config, follow | changes)
  line = str(refused.value)
  assert '\n' not in line and all(word.strip("'") in line for word in words), line


def test_memory_phases_and_an_evaluation_beside_training_exclude_each_other(config):
  overlapping = {'stages.grpo.evaluate_every': '2', 'stages.grpo.overlap_evaluation': 'true'}
  apply_overrides(config, overlapping)
  with pytest.raises(
    UserError, match=r'^phases: with stages\.grpo\.overlap_evaluation, .*remove one'
  ):
    apply_overrides(config, overlapping | {'phases': '{}'})


def test_another_source_is_given_by_its_name(config):
  given = '{"@type": "Recorded", "run": "r", "tasksets": ["train"]}'
  grpo = apply_overrides(
    config, {'stages.grpo.source': given, 'stages.grpo.source.group_size': '4'}
  ).stages[1]
  assert grpo == dataclasses.replace(
    config.stages[1], source=Recorded(run='r', tasksets=('train',), group_size=4)
  )


@pytest.mark.parametrize(
  ('usual', 'ratio', 'rows'),
  [
    (48, 0.25, 16),
    (6, 0.25, 2),
    (7, 0.25, 3),
    (1, 0.01, 1),
    (9, 0.1, 1),
    (8, 0.9, 72),
    (30, 0.4, 20),
  ],
)
def test_so_many_experts_join_that_their_share_is_at_least_the_ratio(usual, ratio, rows):
  assert experts(ratio).rows(usual) == rows
  assert rows / (usual + rows) >= ratio - 1e-9, 'and one less would be too few'
  assert (rows - 1) / (usual + rows - 1) < ratio


@pytest.mark.parametrize(
  ('source', 'sequences', 'unit'),
  [
    (rollouts(), 4 * 6, 1),
    (rollouts(experts=experts()), 4 * 6 + 8, 1),
    (rollouts(past=PastConfig(groups=3, max_uses=2)), (4 + 3) * 6, 1),
    (rollouts(selection=SelectionConfig(kind='mixed')), 4 * 6, 1),
    (rollouts(selection=SelectionConfig(kind='shortest_correct')), 4, 1),
    (rollouts(selection=SelectionConfig(kind='pairs', pairs_per_group=2)), 4 * 2 * 2, 2),
    (rollouts(selection=SelectionConfig(kind='pairs', pairs_per_group=99)), 4 * 5 * 2, 2),
    (Pairs(train='p', sequences_per_batch=10), 10, 2),
    (Examples(train='e', sequences_per_batch=10), 10, 1),
    (Demonstrations(tasksets=('t',), templates=('{truth}',), sequences_per_batch=10), 10, 1),
    (RECORDED, 4 * 6, 1),
    (STORED, 10, 1),
    (dataclasses.replace(STORED, selection=SelectionConfig(kind='margin')), 10, 2),
  ],
)
def test_what_a_batch_may_hold(source, sequences, unit):
  assert (source.sequences, source.unit) == (sequences, unit)
  assert stage(source).explores == isinstance(source, Rollouts)


def test_adapters_reach_servers_as_files(config):
  adapter = {'policy.lora.rank': '8', 'rollout.vllm.lora': 'adapter'}
  apply_overrides(config, adapter)
  with pytest.raises(UserError, match=r"rollout.vllm.transfer is 'nccl'"):
    apply_overrides(config, {**adapter, 'rollout.vllm.transfer': 'nccl'})


@pytest.mark.parametrize('engine', ['embedded', 'vllm'])
def test_keys_and_values_are_kept_only_where_answers_are_in_flight(config, engine):
  keep = {'rollout.engine': engine, f'rollout.{engine}.kv': 'keep'}
  words = rf"rollout\.{engine}\.kv: 'keep', but stages\.grpo\.source\.bound is 0"
  with pytest.raises(UserError, match=words):
    apply_overrides(config, keep)
  partial = {'rollout.partial.budget': '4', 'rollout.embedded.prefill_buckets': '[]'}
  with pytest.raises(UserError, match=words):
    apply_overrides(config, {**keep, **partial})
  apply_overrides(config, {**keep, 'stages.grpo.source.bound': '1'})
  apply_overrides(config, {**keep, f'rollout.{engine}.kv': 'recompute', **partial})


def test_answers_are_computed_again_only_in_a_bucket_that_holds_them(config):
  again = {'rollout.embedded.kv': 'recompute', 'rollout.max_response_length': '64'}
  with pytest.raises(UserError, match=r"embedded\.kv: 'recompute', but .*; wanted one of at least"):
    apply_overrides(config, {**again, 'rollout.embedded.prefill_buckets': '[16]'})
  apply_overrides(config, {**again, 'rollout.embedded.prefill_buckets': '[]'})


def test_filters_that_evaluation_wants_must_be_compiled(config):
  wanted = {'evaluation.held_out.samples': '4', 'evaluation.held_out.top_p': '0.9'}
  with pytest.raises(UserError, match=r'held_out.*filters'):
    apply_overrides(config, wanted)
  apply_overrides(config, {**wanted, 'rollout.embedded.filters': 'true'})


def pipeline(config, last, *, max_steps=1, **fields):
  """The quickstart with a third stage `last`."""
  *_, grpo = config.stages
  third = dataclasses.replace(grpo, name='last', **last)
  rollout = dataclasses.replace(config.rollout, max_steps=max_steps)
  return dataclasses.replace(config, stages=(*config.stages, third), rollout=rollout, **fields)


@pytest.mark.parametrize(
  ('last', 'fields', 'message'),
  [
    ({'init_from': ('later',)}, {}, "stages.last.init_from: 'later', wanted one of ['sft', 'grpo'"),
    ({'init_from': ('sft', 'last')}, {}, "stages.last.init_from: 'last', wanted one of"),
    (
      {'init_from': ('grpo', 'best:last')},
      {},
      "stages.last.init_from: 'best:last', wanted 'best:' before one of ['sft', 'grpo']",
    ),
    (
      {'init_from': ('best:grpo',)},
      {'evaluation': ()},
      "stages.last.init_from: 'best:grpo', but the run evaluates nothing",
    ),
    (
      {'init_from': ('best:sft',)},
      {},
      "stages.last.init_from: 'best:sft', but sft is evaluated only at its end; set "
      "stages.sft.evaluate_every, or name 'sft'",
    ),
    (
      {'source': dataclasses.replace(STORED, stages=('grpo',))},
      {'max_steps': 2},
      'stages.last.source: Stored learns from trajectories of one step',
    ),
    (
      {'source': dataclasses.replace(STORED, stages=('sft',))},
      {},
      "stages.last.source.stages: 'sft', wanted one of ['grpo']",
    ),
    (
      {'source': dataclasses.replace(STORED, stages=('grpo', 'last'))},
      {},
      "stages.last.source.stages: 'last', wanted one of ['grpo']",
    ),
    (
      {'source': rollouts(rewards={})},
      {},
      "stages.last.source.rewards: empty; wanted weights of ['verifier']",
    ),
    (
      {'source': rollouts(rewards={'judge': 1.0})},
      {},
      "stages.last.source.rewards: no scorer 'judge'; configured are ['verifier']",
    ),
    (
      {'source': rollouts(rewards={'verifier': math.nan})},
      {},
      "rewards.scorers 'verifier': weight is nan",
    ),
  ],
)
def test_a_stage_that_needs_what_does_not_exist_is_one_line(config, last, fields, message):
  with pytest.raises(UserError, match=r'^[^\n]*$') as caught:
    pipeline(config, last, **fields)
  assert message in str(caught.value)


@pytest.mark.parametrize(
  ('init_from', 'fields', 'message'),
  [
    (
      'stage:other',
      {},
      "'stage:other', wanted 'stage:' before one of ['sft', 'preferred', 'grpo']",
    ),
    ('stage:', {}, "'stage:', wanted 'stage:' before one of"),
    ('stage:grpo', {}, "'stage:grpo' ends after stages.grpo begins, whose rollouts it is to score"),
    (
      'best:preferred',
      {},
      "'best:preferred', and no evaluation measures a reward model; name the end of the stage: "
      "'stage:preferred'",
    ),
    ('stage:preferred', {'lora': LoraConfig()}, 'policy.lora trains adapters in all stages'),
    (
      'stage:preferred',
      {'order': ('sft', 'grpo', 'preferred')},
      "'stage:preferred' ends after stages.grpo begins, whose rollouts it is to score; name a "
      'stage before grpo, or leave the reward model out of stages.grpo.source.rewards',
    ),
  ],
)
def test_a_reward_model_of_a_stage_that_does_not_exist_in_time_is_refused(
  init_from, fields, message
):
  config = judged.get_config()
  assert config.reward_model.stage == 'preferred'
  stages = {stage.name: stage for stage in config.stages}
  policy = dataclasses.replace(config.policy, lora=fields.get('lora'))
  reward_model = dataclasses.replace(config.reward_model, init_from=init_from)
  with pytest.raises(UserError, match=r'^[^\n]*$') as caught:
    dataclasses.replace(
      config,
      policy=policy,
      reward_model=reward_model,
      stages=tuple(stages[name] for name in fields.get('order', stages)),
    )
  assert f'reward_model.init_from: {message}' in str(caught.value) or (
    'lora' in fields and message in str(caught.value)
  )


def test_the_mean_of_adapters_is_refused(config):
  adapters = dataclasses.replace(config.policy, lora=LoraConfig())
  with pytest.raises(UserError, match='the mean of adapters is not an adapter'):
    pipeline(config, {'init_from': ('sft', 'grpo')}, policy=adapters)
  pipeline(config, {'init_from': ('sft',)}, policy=adapters)


@pytest.mark.parametrize('name', ['base', 'best:grpo'])
def test_a_stage_named_like_a_keyword_must_not_be_meant_by_init_from(config, name):
  sft, grpo = config.stages
  named = dataclasses.replace(sft, name=name)
  with pytest.raises(UserError, match=f"'{name}' is the name of a stage, too"):
    dataclasses.replace(config, stages=(named, dataclasses.replace(grpo, init_from=(name,))))


def test_a_stage_chooses_and_weighs_its_scorers(config):
  scorers = tuple(ScorerConfig(name=name) for name in ('verifier', 'length', 'format'))
  rewards = RewardsConfig(scorers=scorers, correct_by='verifier')
  chosen = {'source': rollouts(rewards={'format': 0.5, 'length': 0.0})}
  whole = pipeline(config, chosen, rewards=rewards)
  of_last = whole.rewards_of('last')
  assert [(s.name, s.weight) for s in of_last.scorers] == [('length', 0.0), ('format', 0.5)]
  assert of_last.correct_by is None
  for name in ('grpo', 'sft', 'evaluation-held_out'):
    assert whole.rewards_of(name) == rewards
