"""Builds the stages of a run from their configurations, in every process. Computes numbers that
follow from a configuration, such as a stage's first step and the shapes of its batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from absl import logging
from jax.sharding import Mesh

from jaxrl_llm.app.composition.automatic import SMALL
from jaxrl_llm.app.composition.scorers import DELAYED, build_scorer
from jaxrl_llm.app.composition.shapes import stage_shape
from jaxrl_llm.app.schema import (
  AUTO,
  BASE,
  AlgorithmConfig,
  Config,
  CriticConfig,
  StageConfig,
  stage_of_best,
)
from jaxrl_llm.app.sources import Examples, Followed, Pairs, Recorded, Rollouts
from jaxrl_llm.config.own import named_pair
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner.algorithm import Algorithm, Setting
from jaxrl_llm.learner.catalogue import ALGORITHMS, OFFLINE, PAIRWISE
from jaxrl_llm.learner.optimizer import build_optimizer
from jaxrl_llm.master.exploring.batch_policy import batches_ahead
from jaxrl_llm.master.exploring.processors import PROCESSORS, Processor, ProcessorConfig
from jaxrl_llm.master.exploring.verifying import ModelProcessor
from jaxrl_llm.master.trainer import Optimization, Stage
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.ops.logprobs import plan_token_chunk
from jaxrl_llm.parallel.mesh import SEQUENCE
from jaxrl_llm.parallel.rules import parts
from jaxrl_llm.rollout.workflow import WorkflowConfig

Head = Literal['lm', 'scalar']
"""Output head of the model that a stage trains: 'lm' for a policy, 'scalar' for a reward model."""


def build_algorithm(config: AlgorithmConfig, setting: Setting) -> Algorithm:
  """Builds an algorithm: one from the catalogue, or a user-defined one, which is a pair of an
  options dataclass and a function of (options, setting).
  """
  options, make = named_pair(config.name, 'algorithm', ALGORITHMS)
  return make(
    from_json(dict(config.options), options, f'options of algorithm {config.name}'), setting
  )


def build_processors(
  configs: Sequence[ProcessorConfig],
) -> tuple[tuple[str, Processor | ModelProcessor], ...]:
  """Builds the processors of a stage's groups: processors from the catalogue, or user-defined ones,
  which are pairs of an options dataclass and a function of the options.

  Returns:
    (name, processor) pairs.
  """
  built = []
  for config in configs:
    options, make = named_pair(config.implementation, 'processor', PROCESSORS)
    built.append(
      (
        config.name,
        make(from_json(dict(config.options), options, f'options of processor {config.name}')),
      )
    )
  return tuple(built)


def build_stages(
  config: Config, mesh: Mesh, vocab_size: int, lengths: Mapping[str, Sequence[int]]
) -> tuple[Stage, ...]:
  """Builds the stages, with their first and last steps and the shapes of their batches.

  Args:
    lengths: sequence lengths in tokens, keyed by stage name, for stages in which they are known in
      advance.
  """
  stages, start = [], 0
  for stage in config.stages:
    stages.append(_stage(stage, config, mesh, start, vocab_size, lengths.get(stage.name, ())))
    start += stage.steps
  config.check_sampling()
  return tuple(stages)


def _setting(stage: StageConfig, config: Config) -> Setting:
  rollout, source = config.rollout, stage.source
  longest = source.longest_response if isinstance(source, Rollouts) else 0
  return Setting(
    max_response_length=longest or rollout.max_response_length, max_steps=rollout.max_steps
  )


def _stage(
  stage: StageConfig,
  config: Config,
  mesh: Mesh,
  start: int,
  vocab_size: int,
  lengths: Sequence[int],
) -> Stage:
  source, optimizer = stage.source, stage.optimizer or config.learner.optimizer
  where = f'stages.{stage.name}'
  if optimizer is None:
    raise UserError(
      f'{where}.optimizer: missing, as is learner.optimizer; set one of them, with its peak_lr'
    )
  algorithm = build_algorithm(stage.algorithm, _setting(stage, config))
  _check_stage(stage, config, algorithm)
  for line in algorithm.no_effect:
    logging.warning('%s.algorithm: %s', where, line)
  critic_updates = stage.steps * stage.minibatches * stage.epochs
  updates = critic_updates - algorithm.critic_warmup * stage.minibatches * stage.epochs
  critic = (stage.critic.optimizer or optimizer) if algorithm.critic_loss is not None else None
  shape = stage_shape(stage, config, mesh, lengths, options=policy_options(config))
  budget = config.learner.logits_budget_bytes
  return Stage(
    name=stage.name,
    start=start,
    end=start + stage.steps,
    algorithm=algorithm,
    policy=Optimization(build_optimizer(optimizer, updates), optimizer),
    critic=Optimization(build_optimizer(critic, critic_updates), critic)
    if critic is not None
    else None,
    keep_optimizer=stage.keep_optimizer,
    shape=shape,
    token_chunk=plan_token_chunk(
      chunks=shape.chunks,
      time=shape.chunk_len,
      vocab=vocab_size // parts(mesh, 'vocab', vocab_size),
      budget_bytes=SMALL['logits_budget_bytes'] if budget == AUTO else budget,
      time_shards=mesh.shape[SEQUENCE],
    ),
    minibatches=stage.minibatches,
    epochs=stage.epochs,
    evaluate_every=stage.evaluate_every,
    overlap_evaluation=stage.overlap_evaluation,
    explores=stage.explores,
    publish_every=source.publish_every if isinstance(source, Rollouts) else 1,
    batches_ahead=batches_ahead(source.batch_policy, source.bound)
    if isinstance(source, Rollouts)
    else 0,
    recorded=isinstance(source, Recorded | Followed),
    follows=isinstance(source, Rollouts) and source.follow is not None,
    export_every=source.export_every if isinstance(source, Followed) else None,
    trains=stage.trains,
    held_out=source.held_out if isinstance(source, Examples | Pairs) else None,
  )


def _check_stage(stage: StageConfig, config: Config, algorithm: Algorithm) -> None:
  """Raises UserError if the stage's source does not fit its algorithm, or if other settings of the
  stage contradict each other or would have no effect.
  """
  where, name, source = f'stages.{stage.name}', stage.algorithm.name, stage.source
  pairs, groups = source.unit == 2, isinstance(source, Rollouts | Recorded | Followed)
  imitates = isinstance(source, Rollouts) and source.selection.imitates
  expert_rows = source.expert_rows if isinstance(source, Rollouts) else 0
  if name in PAIRWISE and not pairs:
    others = 'Stored with' if algorithm.head == 'scalar' else 'Rollouts or Stored with'
    raise UserError(
      f'{where}.source: {name} learns from pairs; set Pairs, or {others} '
      "selection.kind='pairs' or 'margin'"
    )
  if pairs and name in ALGORITHMS and name not in PAIRWISE:
    raise UserError(
      f'{where}: {name} does not learn from pairs; use one of {", ".join(sorted(PAIRWISE))}'
    )
  if name == 'sft' and groups and not imitates:
    raise UserError(
      f'{where}.source: sft learns from demonstrations; set Demonstrations or Examples, or imitate '
      "the policy's best answers: Rollouts or Stored with selection.kind='shortest_correct', "
      "'best' or 'above'"
    )
  if imitates and name in ALGORITHMS and name != 'sft':
    raise UserError(
      f'{where}.source.selection: selects answers to imitate, and {name} imitates none; use sft'
    )
  if not groups and name in ALGORITHMS and name not in OFFLINE:
    raise UserError(
      f'{where}.source: {name} learns from rollouts; give it Rollouts '
      + ('with experts' if name == 'mix' else 'Recorded or Followed')
    )
  if (name == 'mix') != bool(expert_rows) and name in ALGORITHMS:
    raise UserError(
      f'{where}.source.experts: mix needs expert rows in addition to rollouts, and only mix uses '
      'them'
    )
  if algorithm.head == 'scalar' and groups:
    raise UserError(
      f'{where}.source: {name} trains a reward model, which generates no text; set Pairs, '
      "or Stored with selection.kind='pairs' or 'margin'"
    )
  _check_reference(stage, config, algorithm)
  if algorithm.critic_loss is None and stage.critic != CriticConfig():
    raise UserError(f'{where}.critic: {name} has no critic; remove it, or use ppo')
  if algorithm.critic_warmup >= stage.steps:
    raise UserError(
      f'{where}: critic_warmup={algorithm.critic_warmup} of {stage.steps} steps leaves none for '
      'the policy; lower it'
    )
  if isinstance(source, Rollouts):
    _check_rollouts(stage, source, config)
    _check_partial(stage, config, algorithm)
  if (
    not (pairs or imitates)
    and not expert_rows
    and source.sequences % (stage.minibatches * source.unit)
  ):
    raise UserError(
      f'{where}.minibatches: {source.sequences} sequences cannot be divided evenly into '
      f'{stage.minibatches} minibatches' + (' of pairs' if pairs else '')
    )


def _check_rollouts(stage: StageConfig, source: Rollouts, config: Config) -> None:
  """Raises UserError if the settings of the rollouts conflict with the number of minibatches, the
  scorers or `rollout.max_steps`.
  """
  where = f'stages.{stage.name}'
  least = {
    'groups_per_batch': source.selection.least and source.groups_per_batch,
    'experts.ratio': source.expert_rows if source.experts is not None else None,
  }
  for field, units in least.items():
    if units is not None and units < stage.minibatches:
      raise UserError(
        f'{where}.minibatches: {stage.minibatches}, and each needs rows of each kind, but '
        f'source.{field} gives {units}; lower minibatches, or raise source.{field}'
      )
  _check_processors(stage.name, source, config)
  _check_delayed(stage.name, source, config)
  selection = source.selection
  if config.rollout.max_steps > 1 and (selection.pairs or selection.imitates):
    raise UserError(
      f'{where}.source.selection: {selection.kind!r} needs rollouts of one sequence, and '
      f'rollout.max_steps={config.rollout.max_steps} permits several; set max_steps to 1, or '
      "selection.kind to 'all' or 'mixed'"
    )
  if source.past is not None and source.group_size % (stage.minibatches * source.unit):
    raise UserError(
      f'{where}.minibatches: with source.past, the number of groups in a batch varies, so each '
      f'group must be divided evenly; group_size {source.group_size} cannot be divided into '
      f'{stage.minibatches} minibatches'
    )


def _check_delayed(stage: str, source: Rollouts, config: Config) -> None:
  """Raises UserError if samples of the stage wait for delayed rewards, but another setting does not
  allow this.
  """
  scorers = [
    scorer
    for scorer in config.rewards_of(stage).scorers
    if scorer.implementation == DELAYED
    and (not scorer.tasksets or set(scorer.tasksets) & set(source.tasksets))
  ]
  for scorer in scorers:
    options, reason, where = build_scorer(scorer), '', f'stages.{stage}'
    if source.bound < 1:
      reason = (
        f'{where}.source.bound {source.bound}; wanted at least 1, since samples age as they wait'
      )
    elif config.rollout.partial is not None:
      reason = 'rollout.partial; remove it'
    elif config.rollout.max_steps > 1:
      reason = f'rollout.max_steps {config.rollout.max_steps}; set it to 1'
    elif options.max_age_versions < source.bound:
      reason = (
        f'max_age_versions {options.max_age_versions}, below {where}.source.bound {source.bound}; '
        'raise it'
      )
    elif any(
      isinstance(processor, ModelProcessor) for _, processor in build_processors(source.processors)
    ):
      reason = f'a processor of {where} that asks a model; use a scorer of kind judge instead'
    elif options.max_groups < source.groups_per_batch:
      reason = (
        f'max_groups {options.max_groups}, below {where}.source.groups_per_batch '
        f'{source.groups_per_batch}; raise it'
      )
    if reason:
      raise UserError(f'rewards.scorers {scorer.name!r}: delayed, cannot be combined with {reason}')


def _check_partial(stage: StageConfig, config: Config, algorithm: Algorithm) -> None:
  partial, workflow = config.rollout.partial, config.rollout.workflow
  if partial is None:
    return
  if partial.loss != 'current_only' and not algorithm.corrects:
    raise UserError(
      f'stages.{stage.name}.algorithm: rollout.partial.loss {partial.loss!r} trains on tokens of '
      f'older weights, for which {stage.algorithm.name} has no correction here; set its rollout_is '
      "to 'token', or loss to 'current_only'"
    )
  places, size = workflow.options.get('concurrency'), getattr(stage.source, 'group_size', 1)
  if isinstance(places, int) and places < size:
    raise UserError(
      f'rollout.workflow.options.concurrency: {places}, and with rollout.partial the samples of a '
      f'group keep their places until all have spent their budgets; wanted at least {size} '
      f'(stages.{stage.name}.source.group_size)'
    )
  is_single_turn = workflow.kind == WorkflowConfig().kind
  if partial.loss != 'all' and algorithm.credits_tokens and not is_single_turn:
    raise UserError(
      f'stages.{stage.name}.algorithm: {stage.algorithm.name} credits the rewards of turns to '
      f'their tokens, and rollout.partial.loss {partial.loss!r} trains on the newest alone; wanted '
      "loss 'all', an algorithm that compares groups, or the workflow 'single_turn'"
    )


def _check_processors(stage: str, source: Rollouts, config: Config) -> None:
  """Raises UserError if a processor cannot be built, or needs a setting or scorer that the run does
  not have. Every process checks this before anything is loaded, so that all processes report
  errors.
  """
  build_processors(source.processors)
  scorers = [scorer.name for scorer in config.rewards_of(stage).scorers]
  for processor in source.processors:
    if processor.implementation == 'repetition' and config.rollout.repetition_detection is None:
      raise UserError(
        f'stages.{stage}.source.processors: {processor.name} needs rollout.repetition_detection, '
        'which is not set; set it, or remove the processor'
      )
    key = processor.options.get('key')
    if processor.implementation == 'shape' and key.split('/')[0] not in scorers:
      raise UserError(
        f'stages.{stage}.source.processors: {processor.name} uses the key {key!r}, and no scorer '
        f'is named {key.split("/")[0]!r}; configured are {sorted(scorers)}'
      )


def _check_reference(stage: StageConfig, config: Config, algorithm: Algorithm) -> None:
  """Raises UserError if the stage's reference model would always equal the policy, or cannot be
  updated as configured. For the algorithm 'opmd', a reference that always equals the policy causes
  only a warning.
  """
  where, rule = f'stages.{stage.name}', algorithm.reference
  if 'reference' not in algorithm.reads:
    return
  if rule.ema is not None and config.policy.param_dtype != 'float32':
    raise UserError(
      f'{where}: reference.ema averages in the data type of the parameters, and '
      f'{config.policy.param_dtype} is too coarse for its small steps; use param_dtype=float32, or '
      'reference.every'
    )
  if rule.ema is not None and config.policy.lora is not None:
    raise UserError(
      f"{where}: reference.ema averages parameters, but the mean of adapters' factors is not the "
      'mean of the adapters; use reference.every, or policy.lora=null'
    )
  if rule.every == 1 and isinstance(stage.source, Pairs):
    raise UserError(
      f'{where}: pairs are compared with a fixed reference, which reference.every=1 does not keep'
    )
  if rule.every == 1 and stage.minibatches * stage.epochs == 1:
    text = (
      f'{where}: with reference.every=1 and one update per batch, the reference always equals '
      'the policy and has no effect; set minibatches or epochs above 1, or another reference'
    )
    if stage.algorithm.name != 'opmd':
      raise UserError(text)
    # Only warn, because OPMD still learns as a policy gradient if the reference has no effect.
    logging.warning('%s', text)


def _heads(config: Config) -> dict[str, Head]:
  """Returns the head of the model that each stage trains, keyed by stage name."""
  return {
    stage.name: build_algorithm(stage.algorithm, _setting(stage, config)).head
    for stage in config.stages
  }


def _head_of_run(heads: Mapping[str, Head]) -> Head:
  """Returns the head of the run's model: 'lm' if any stage trains a policy, else 'scalar'.

  Args:
    heads: head of the model that each stage trains, keyed by stage name.
  """
  return 'lm' if 'lm' in heads.values() else 'scalar'


def reward_stages(config: Config) -> frozenset[str]:
  """Returns the names of the stages that train a reward model for later stages of the same run. The
  result is empty unless `reward_model.init_from` names a stage ('stage:NAME').
  """
  if config.reward_model is None or config.reward_model.stage is None:
    return frozenset()
  return frozenset(name for name, head in _heads(config).items() if head == 'scalar')


def origins(name: str, config: Config) -> tuple[str, ...]:
  """Returns the names of the weights with which a stage begins, in the form of
  `StageConfig.init_from`. The result is empty if the stage continues with the weights of the
  previous stage.

  If `init_from` is empty and the stage trains the policy after a stage that trains a reward model,
  the result names the last stage that trained the policy, or else 'base'.
  """
  index = next(i for i, stage in enumerate(config.stages) if stage.name == name)
  if named := config.stages[index].init_from:
    return named
  reward_names, names = reward_stages(config), [stage.name for stage in config.stages]
  if index == 0 or name in reward_names or names[index - 1] not in reward_names:
    return ()
  of_policy = [before for before in names[:index] if before not in reward_names]
  return (of_policy[-1],) if of_policy else (BASE,)


def _check_reward_stages(config: Config, heads: Mapping[str, Head]) -> None:
  """Raises UserError if the stages that train a reward model do not fit together with the stages
  that train the policy.
  """
  trained = config.reward_model.stage if config.reward_model is not None else None
  scalar = [name for name, head in heads.items() if head == 'scalar']
  if trained is not None and trained not in scalar:
    raise UserError(
      f'reward_model.init_from: {config.reward_model.init_from!r} trains no reward model; '
      + (f"wanted 'stage:' before one of {scalar}" if scalar else 'no stage does')
    )
  if len(set(heads.values())) > 1 and trained is None:
    raise UserError(
      f'stages: {heads} train models with different outputs; train them in separate runs, or let '
      f"the trainer score with the reward model (reward_model.init_from='stage:{scalar[-1]}')"
    )
  if trained is not None and trained != scalar[-1]:
    raise UserError(
      f'stages.{scalar[-1]}: its reward model is not used; remove the stage, or set '
      f"reward_model.init_from='stage:{scalar[-1]}'"
    )
  for before, stage in itertools.pairwise((None, *config.stages)):
    where, head = f'stages.{stage.name}', heads[stage.name]
    if before is not None and stage.keep_optimizer and head != heads[before.name]:
      raise UserError(
        f'{where}.keep_optimizer: {before.name} before it trains a model of another output; remove '
        'keep_optimizer'
      )
    base = _head_of_run(heads)
    kinds = {heads.get(stage_of_best(name) or name, base) for name in stage.init_from}
    for name in stage.init_from:
      if heads.get(stage_of_best(name) or name) != 'scalar':
        continue
      if head != 'scalar':
        raise UserError(
          f'{where}.init_from: {name!r} trains a reward model, which generates no text; name a '
          'stage that trains the policy'
        )
      if (of_best := stage_of_best(name)) is not None:
        raise UserError(
          f'{where}.init_from: {name!r}, and no evaluation measures a reward model; name its end, '
          f'{of_best!r}'
        )
    if len(kinds) > 1:
      raise UserError(
        f'{where}.init_from: {list(stage.init_from)} are weights of a policy and of a reward '
        'model, which have no mean; name weights of one kind'
      )


def model_spec(config: Config, spec: ModelSpec) -> ModelSpec:
  """Returns the spec of the model that the run trains: a policy, or a reward model with one output
  if all stages train one. If the run trains both, stages that train a reward model replace the
  policy's head (`state.model_of`).
  """
  heads = _heads(config)
  _check_reward_stages(config, heads)
  head = _head_of_run(heads)
  if head == 'scalar' and config.evaluation:
    raise UserError(
      'evaluation: a reward model generates no text; measure it on held-out pairs (source.held_out)'
    )
  if head == 'lm' and spec.head != 'lm':
    raise UserError(
      f'policy.init_from: a model with one output ({spec.head}), which generates no text; wanted a '
      'language model'
    )
  return with_head(spec, head)


def policy_options(config: Config) -> ModelOptions:
  """Returns the compute options of the policy. Fields that are still 'auto' get the values of a
  small model.
  """
  policy = config.policy
  names = ('dtype', 'scan_layers', 'sequence_shards', 'remat')
  open_names = [name for name in names if getattr(policy, name) == AUTO]
  policy = dataclasses.replace(policy, **{name: SMALL[name] for name in open_names})
  return ModelOptions(
    scan_layers=policy.scan_layers,
    remat=policy.remat,
    attention=policy.attention,
    sequence_shards=policy.sequence_shards,
    dtype=policy.dtype,
    param_dtype=policy.param_dtype,
    reduce_dtype='bfloat16' if policy.reduce_dtype == 'bfloat16' else None,
    lora=policy.lora,
  )
