"""Stages that cannot learn, or would learn something else than they seem to, are refused before
anything starts.
"""

import dataclasses
import functools
import sys

import jax
import judged
import pytest
from paths import ROOT

from jaxrl_llm.app.composition.prepare import prepare
from jaxrl_llm.app.composition.stages import build_stages, model_spec, origins
from jaxrl_llm.app.composition.static_rows import preferences_file
from jaxrl_llm.app.schema import AlgorithmConfig, Config, CriticConfig, RolloutConfig
from jaxrl_llm.app.sources import Pairs
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.data.streams import all_rows, sample_lengths
from jaxrl_llm.master.exploring.partial import PartialConfig
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import LoraConfig
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.rewards.api import ScorerConfig
from jaxrl_llm.rewards.sandbox.isolation import NoIsolation
from jaxrl_llm.rewards.scorers.verifier import scorer as verifier
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
from jaxrl_llm.rollout.workflow import WorkflowConfig
from jaxrl_llm.tasks.sampler import SamplerConfig

REFERENCE = {'kl_loss_coef': 0.1, 'reference': {'every': 1}}


@functools.cache
def config_of(name: str, **overrides: str) -> Config:
  return apply_overrides(load_file(f'{ROOT}/configs/{name}', Config), overrides)


def built(config: Config, lengths=None):
  return build_stages(config, build_mesh(MeshConfig(), jax.devices()[:1]), 30, lengths or {})


def changed(name: str, source=None, **fields) -> Config:
  """A shipped configuration whose last stage differs, `source` in fields of its source."""
  config = config_of(name)
  if source is not None:
    fields['source'] = dataclasses.replace(config.stages[-1].source, **source)
  return dataclasses.replace(
    config, stages=(*config.stages[:-1], dataclasses.replace(config.stages[-1], **fields))
  )


def delayed(*, bound: int, **options) -> Config:
  """A shipped configuration with a scorer whose verdicts come later."""
  scorer = ScorerConfig(name='human', kind='delayed', options=options)
  config = changed('quickstart.py', {'bound': bound})
  return dataclasses.replace(
    config, rewards=dataclasses.replace(config.rewards, scorers=(scorer,), correct_by=None)
  )


SHIPPED = ['quickstart.py', 'ppo.py', 'opmd.py', 'mix.py', 'mix.py:grpo', 'mix.py:sft', 'dpo.py',
           'dpo.py:online', 'dpo.py:rejection', 'reward_model.py', 'gsm8k_pairs.py:dpo,x',
           'gsm8k_pairs.py:reward_model,x', 'grpo.py:dapo', 'lora.py', 'lora.py:base', 'smollm2.py',
           'smollm2.py:lora', 'r1.py', 'r1.py:without_reasoning',
           'r1.py:without_helpfulness', 'r1.py:without_all_rewards', 'kimi.py',
           'kimi.py:without_long_cot', 'kimi.py:without_curriculum',
           'kimi.py:without_rl_length']  # fmt: skip


@pytest.mark.parametrize('name', SHIPPED)
def test_shipped_configurations_build(name):
  config = config_of(name)
  assert [stage.name for stage in built(config)] == [stage.name for stage in config.stages]


def test_an_option_without_effect_is_a_warning(caplog):
  built(changed('grpo.py:dapo', algorithm=AlgorithmConfig(name='dapo', options={'gamma': 0.9})))
  (line,) = [
    record.getMessage() for record in caplog.records if 'has no effect' in record.getMessage()
  ]
  assert line.startswith('stages.') and '.algorithm: dapo.gamma: 0.9 has no effect without' in line


@pytest.mark.parametrize(
  ('algorithm', 'is_refused'),
  [
    (AlgorithmConfig(name='grpo'), False),
    (AlgorithmConfig(name='grpo', options={'bypass_old_logprobs': True}), False),
    (AlgorithmConfig(name='grpo', options={'rollout_is': 'none'}), True),
    (AlgorithmConfig(name='opmd'), True),
  ],
)
def test_tokens_of_older_weights_need_an_algorithm_that_corrects_them(algorithm, is_refused):
  config = changed('quickstart.py', source={'bound': 1}, algorithm=algorithm)
  rollout = dataclasses.replace(
    config.rollout, partial=PartialConfig(budget=4, loss='all'), embedded=EmbeddedConfig()
  )
  config = dataclasses.replace(config, rollout=rollout)
  if is_refused:
    with pytest.raises(UserError, match="loss 'all' trains on tokens of older weights, for which"):
      built(config)
  else:
    built(config)


@pytest.mark.parametrize(
  ('source', 'ahead'),
  [({'bound': 0}, 0), ({'bound': 2}, 2), ({'bound': 2, 'batch_policy': 'complete_first'}, 1)],
)
def test_a_stage_knows_for_how_many_batches_its_groups_start_ahead(source, ahead):
  """An evaluation beside training may defer a publication for no more."""
  assert built(changed('quickstart.py', source))[-1].batches_ahead == ahead


PLACES = {'environment': 'x:Y', 'concurrency': 4}


@pytest.mark.parametrize(
  ('workflow', 'algorithm', 'line'),
  [
    (WorkflowConfig(kind='environment', options=PLACES), 'grpo', 'concurrency: 4, and with'),
    (WorkflowConfig(kind='environment'), 'ppo', 'ppo credits the rewards of turns'),
  ],
)
def test_partial_rollouts_of_workflows_have_limits(workflow, algorithm, line):
  config = changed('quickstart.py', algorithm=AlgorithmConfig(name=algorithm))
  partial = PartialConfig(budget=4)
  rollout = dataclasses.replace(
    config.rollout, partial=partial, workflow=workflow, embedded=EmbeddedConfig()
  )
  with pytest.raises(UserError, match=line) as refused:
    built(dataclasses.replace(config, rollout=rollout))
  assert '\n' not in str(refused.value)


def test_an_algorithm_reads_the_response_length_of_its_stage():
  """DAPO's penalty cannot begin before the first token."""
  algorithm = AlgorithmConfig(name='grpo', options={'overlong_buffer_len': 4})
  built(changed('quickstart.py', algorithm=algorithm))
  lengths = {'response_lengths': ((0, 2), (5, 3))}
  with pytest.raises(UserError, match='max_response_length=3 tokens'):
    built(changed('quickstart.py', source=lengths, algorithm=algorithm))


def test_a_schedule_counts_the_updates_that_are_taken():
  *_, ppo = built(config_of('ppo.py'))
  assert (ppo.critic_updates, ppo.updates) == (260 * 4, 140 * 4)


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    (changed('ppo.py', steps=120), 'critic_warmup=120 of 120 steps'),
    (changed('quickstart.py', critic=CriticConfig(init_from='x')), 'grpo has no critic'),
    (
      changed('quickstart.py', {'selection': SelectionConfig(kind='pairs')}),
      'does not learn from pairs',
    ),
    (changed('quickstart.py', {'selection': SelectionConfig(kind='shortest_correct')}), 'use sft'),
    (
      changed('quickstart.py', algorithm=AlgorithmConfig(name='dpo')),
      'dpo learns from pairs; set Pairs, or Rollouts or Stored with selection',
    ),
    (changed('quickstart.py', algorithm=AlgorithmConfig(name='mix')), 'mix needs expert rows'),
    (
      changed('quickstart.py', algorithm=AlgorithmConfig(name='reward_model')),
      'reward_model learns from pairs; set Pairs, or Stored with selection',
    ),
    (
      changed('quickstart.py', algorithm=AlgorithmConfig(name='grpo', options=REFERENCE)),
      'always equals the policy',
    ),
    (
      changed('quickstart.py', algorithm=AlgorithmConfig(name='math:pi')),
      r"algorithm 'math:pi': wanted \(options dataclass, function that takes",
    ),
    (changed('mix.py', minibatches=64), 'experts.ratio gives 32'),
    (changed('dpo.py:online', minibatches=32), 'groups_per_batch gives 16'),
    (changed('dpo.py', algorithm=AlgorithmConfig(name='grpo')), 'grpo does not learn from pairs'),
    (
      changed('mix.py:sft', algorithm=AlgorithmConfig(name='grpo')),
      'grpo learns from rollouts; give it',
    ),
    (
      changed('quickstart.py', algorithm=AlgorithmConfig(name='sft')),
      'sft learns from demonstrations; set',
    ),
    (
      changed('dpo.py', algorithm=AlgorithmConfig(name='dpo', options={'reference': {'every': 1}})),
      'a fixed reference',
    ),
    (
      dataclasses.replace(
        changed(
          'dpo.py', algorithm=AlgorithmConfig(name='dpo', options={'reference': {'ema': 0.9}})
        ),
        policy=dataclasses.replace(config_of('dpo.py').policy, param_dtype='bfloat16'),
      ),
      'too coarse for its small steps',
    ),
    (
      dataclasses.replace(
        changed(
          'dpo.py', algorithm=AlgorithmConfig(name='dpo', options={'reference': {'ema': 0.9}})
        ),
        policy=dataclasses.replace(config_of('dpo.py').policy, lora=LoraConfig()),
      ),
      "mean of adapters' factors",
    ),
    (delayed(bound=0), 'bound 0; wanted at least 1'),
    (delayed(bound=3, max_age_versions=2), 'max_age_versions 2, below .*bound 3'),
    (delayed(bound=1, max_groups=1), 'max_groups 1, below .*groups_per_batch'),
    (delayed(bound=1, max_age_hours=0.0), 'max_age_hours is 0.0, wanted a positive number'),
  ],
)
def test_stages_that_would_not_do_what_they_say_are_refused(config, message):
  with pytest.raises(UserError, match=message):
    built(config)


def test_models_of_two_kinds_are_runs_of_their_own():
  config = config_of('dpo.py')
  spec = tiny('llama', 30)
  assert model_spec(config_of('reward_model.py'), spec).head == 'scalar'
  with pytest.raises(UserError, match='different outputs'):
    model_spec(
      dataclasses.replace(config, stages=(*config.stages, *config_of('reward_model.py').stages)),
      spec,
    )
  # In a run of reward models alone, the initial weights are those of one.
  (first,) = (config_of('reward_model.py')).stages
  second = dataclasses.replace(first, name='second', init_from=('base', first.name))
  both = dataclasses.replace(config_of('reward_model.py'), stages=(first, second))
  assert model_spec(both, spec).head == 'scalar'
  with pytest.raises(UserError, match='generates no text'):
    model_spec(config, dataclasses.replace(spec, head='scalar', tie_word_embeddings=False))


def judged_with(stages: dict, *, init_from: str = 'preferred') -> Config:
  """The configuration of tests/support/judged.py with other stages: copies of its own, keyed by
  name, each with the name of the original and the fields that differ.
  """
  config = judged.get_config()
  known = {stage.name: stage for stage in config.stages}
  built = tuple(
    dataclasses.replace(known[original], name=name, **fields)
    for name, (original, fields) in stages.items()
  )
  reward_model = dataclasses.replace(config.reward_model, init_from=f'stage:{init_from}')
  return dataclasses.replace(config, stages=built, reward_model=reward_model)


@pytest.mark.parametrize(
  ('stages', 'init_from', 'begins'),
  [
    ({'sft': ('sft', {}), 'preferred': ('preferred', {}), 'grpo': ('grpo', {})}, 'preferred',
     {'sft': (), 'preferred': (), 'grpo': ('sft',)}),
    ({'preferred': ('preferred', {}), 'grpo': ('grpo', {}), 'more': ('grpo', {})}, 'preferred',
     {'preferred': (), 'grpo': ('base',), 'more': ()}),
    ({'sft': ('sft', {}), 'a': ('preferred', {}), 'b': ('preferred', {'init_from': ('sft',)}),
      'grpo': ('grpo', {})}, 'b', {'a': (), 'b': ('sft',), 'grpo': ('sft',)}),
    ({'sft': ('sft', {}), 'more': ('sft', {}), 'preferred': ('preferred', {}),
      'grpo': ('grpo', {'init_from': ('sft', 'more')})}, 'preferred', {'grpo': ('sft', 'more')}),
  ],
)  # fmt: skip
def test_a_policy_continues_with_the_last_stage_that_trained_it(stages, init_from, begins):
  config = judged_with(stages, init_from=init_from)
  assert model_spec(config, tiny('llama', 30)).head == 'lm'
  assert {name: origins(name, config) for name in begins} == begins


IN_ORDER = {'sft': ('sft', {}), 'preferred': ('preferred', {}), 'grpo': ('grpo', {})}


@pytest.mark.parametrize(
  ('changes', 'init_from', 'words'),
  [
    ({}, 'sft', "reward_model.init_from: 'stage:sft' trains no reward model; wanted 'stage:' "
     "before one of ['preferred']"),
    ({'preferred': ('sft', {})}, 'sft', 'trains no reward model; no stage does'),
    ({'later': ('preferred', {})}, 'preferred', 'stages.later: its reward model is not used'),
    ({'grpo': ('grpo', {'keep_optimizer': True})}, 'preferred',
     'stages.grpo.keep_optimizer: preferred before it trains a model of another output'),
    ({'preferred': ('preferred', {'keep_optimizer': True})}, 'preferred',
     'stages.preferred.keep_optimizer: sft before it trains a model of another output'),
    ({'grpo': ('grpo', {'init_from': ('preferred',)})}, 'preferred',
     "stages.grpo.init_from: 'preferred' trains a reward model, which generates no text"),
    ({'preferred': ('preferred', {'evaluate_every': 2}),
      'grpo': ('grpo', {'init_from': ('best:preferred',)})}, 'preferred',
     "stages.grpo.init_from: 'best:preferred' trains a reward model, which generates no text"),
    ({'preferred': ('preferred', {'evaluate_every': 2}),
      'grpo': ('preferred', {'init_from': ('best:preferred',)}), 'last': ('grpo', {})}, 'grpo',
     "stages.grpo.init_from: 'best:preferred', and no evaluation measures a reward model; name its "
     "end, 'preferred'"),
    ({'grpo': ('preferred', {'init_from': ('sft', 'preferred')}), 'last': ('grpo', {})}, 'grpo',
     "stages.grpo.init_from: ['sft', 'preferred'] are weights of a policy and of a reward model"),
  ],
)  # fmt: skip
def test_reward_models_and_policies_that_do_not_fit_together_are_refused(changes, init_from, words):
  assert model_spec(judged_with(IN_ORDER), tiny('llama', 30)).head == 'lm'
  config = judged_with(IN_ORDER | changes, init_from=init_from)
  with pytest.raises(UserError) as caught:
    model_spec(config, tiny('llama', 30))
  assert words in str(caught.value) and '\n' not in str(caught.value)


SMALL = {'tasksets.train.size': '2000', 'tasksets.eval.size': '2000',
         'stages.sft.source.count': '200', 'evaluation.held_out.tasks': '24'}  # fmt: skip


def test_what_is_held_out_is_not_trained_on(tmp_path):
  sizes = {'preferences.train_pairs.size': '100', 'preferences.eval_pairs.size': '50'}
  config = config_of('dpo.py', **SMALL, **sizes)
  assert prepare(config, tmp_path / 'apart').spec.head == 'lm'
  stage = dataclasses.replace(
    config.stages[-1], source=Pairs(train='train_pairs', held_out='train_pairs')
  )
  with pytest.raises(
    UserError, match=r'train_pairs \(training\) and train_pairs \(held out\) share \d+ prompts'
  ):
    prepare(dataclasses.replace(config, stages=(config.stages[0], stage)), tmp_path / 'same')
  with pytest.raises(UserError, match="no preferences 'other'"):
    stage = dataclasses.replace(config.stages[-1], source=Pairs(train='other'))
    prepare(dataclasses.replace(config, stages=(config.stages[0], stage)), tmp_path / 'none')


def test_a_run_needs_a_sandbox_where_verifiers_evaluate_and_nowhere_else(monkeypatch, tmp_path):
  def refuse(isolation):
    raise NoIsolation('none')

  monkeypatch.setattr(verifier, 'check_isolation', refuse)
  config = config_of('quickstart.py', **SMALL | {'evaluation.held_out.tasks': '1'})
  prepare(config, tmp_path / 'without')
  plain = {'options': {}, 'prompt': None, 'truth': None, 'match': None, 'size': 30}
  tasksets = [
    dataclasses.replace(t, source='reasoning_gym:countdown', **plain) for t in config.tasksets
  ]
  with pytest.raises(
    UserError, match=r"'countdown' evaluates answers, which needs a sandbox.*isolation='none'"
  ):
    prepare(dataclasses.replace(config, tasksets=tuple(tasksets)), tmp_path / 'with')


@pytest.mark.parametrize(
  ('field', 'value'), [('domain', 'math'), ('origin', 'synthetic'), ('on_corrupt', 'skip')]
)
def test_pairs_of_a_taskset_say_nothing_that_the_taskset_says(tmp_path, field, value):
  config = config_of('dpo.py', **SMALL, **{f'preferences.train_pairs.{field}': value})
  with pytest.raises(UserError, match=rf'preferences\.train_pairs\.{field}: .* remove it'):
    prepare(config, tmp_path)


def test_a_sampler_is_of_the_stages_tasksets():
  with pytest.raises(
    UserError,
    match=(
      r"stages\.grpo\.source\.sampler\.weights: names \['other'\], but the tasksets are \['train'\]"
    ),
  ):
    changed('quickstart.py', {'sampler': SamplerConfig(weights={'other': 1.0})})


def test_whoever_says_what_is_correct_has_to_judge_all_of_it(tmp_path):
  config = config_of('quickstart.py', **SMALL)
  (verifier,) = config.rewards.scorers
  other = dataclasses.replace(verifier, name='other', kind='verifier', domains=('code',))
  rewards = dataclasses.replace(config.rewards, scorers=(verifier, other), correct_by='other')
  with pytest.raises(UserError, match='correct_by'):
    prepare(dataclasses.replace(config, rewards=rewards), tmp_path)


def test_beside_a_configuration_lies_what_it_may_import():
  config_of('reward_model.py')  # It imports configs/dpo.py.
  assert str(ROOT / 'configs') in sys.path


def test_micro_batches_are_planned_on_the_lengths_that_are_known():
  """64 demonstrations of 14 tokens are 15 or 16 chunks of 64: 16 in two micro-batches of 8, not in
  two of 12.
  """
  config = config_of('quickstart.py')
  unknown, *_ = built(config)
  known, grpo = built(config, {'sft': [14] * 100})
  assert (unknown.shape.chunks, known.shape.chunks, grpo.shape.chunks) == (12, 8, 12)


def stepwise(config: Config, most: int) -> Config:
  return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, max_steps=most))


def test_the_shapes_of_rollouts_have_room_for_the_most_steps():
  config = config_of('quickstart.py')
  before, after = built(config), built(stepwise(config, 3))
  assert before[0].shape == after[0].shape  # Demonstrations have no steps.
  plain, wide = before[-1].shape, after[-1].shape
  assert (wide.chunks, wide.chunk_len) == (plain.chunks, plain.chunk_len)
  sequences = 3 * config.stages[-1].source.sequences
  assert wide.segments == min(sequences, wide.chunk_len)
  in_micro_batch = wide.chunks * wide.rows_per_chunk
  assert wide.micro_batches == -(-sequences // in_micro_batch) > plain.micro_batches


def test_pairs_share_prefixes_in_any_number_of_minibatches():
  *_, stored = built(config_of('kimi.py'))
  *_, pairs = built(changed('dpo.py:pairs', minibatches=4))
  *_, online = built(changed('dpo.py:online', minibatches=2))
  assert [stage.shape.shares_prefixes for stage in (stored, pairs, online)] == [True] * 3


def test_pairs_that_fit_apart_fit_where_they_share_prefixes():
  """2 x 528 tokens hold two sequences of 524, but 1 x 1024, which is rounded, only one."""
  config = changed('dpo.py:pairs', minibatches=1)
  config = dataclasses.replace(
    config,
    stages=config.stages[-1:],
    policy=dataclasses.replace(config.policy, attention='blockwise'),
    learner=dataclasses.replace(config.learner, chunks_per_rank=2, chunk_len=None),
    rollout=RolloutConfig(max_prompt_length=24, max_response_length=500),
  )
  (stage,) = built(config)
  shape = stage.shape
  assert (shape.chunks, shape.chunk_len, shape.shares_prefixes) == (2, 528, True)


def test_pairs_are_not_of_trajectories_of_several_steps():
  for name in ('dpo.py:online', 'dpo.py:rejection'):
    with pytest.raises(UserError, match=r'rollouts of one sequence, and rollout\.max_steps=2'):
      built(stepwise(config_of(name), 2))


def test_lengths_are_those_of_what_a_stage_reads(tmp_path):
  sizes = {'preferences.train_pairs.size': '100', 'preferences.eval_pairs.size': '50'}
  config = config_of('dpo.py:pairs', **SMALL, **sizes)
  lengths = prepare(config, tmp_path).lengths
  rows = all_rows(tmp_path, preferences_file(config.stages[-1].source.train))
  assert [row.label for row in rows[:4]] == [1, -1, 1, -1]
  assert list(lengths['dpo']) == [row.length for row in rows]
  assert len(sample_lengths(tmp_path, rows[0].source, unit=2, most=10)) <= 10
