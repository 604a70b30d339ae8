"""Builds the stages of a run from their configurations, in every process. Computes numbers that
follow from a configuration, such as a stage's first step and the shapes of its batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from absl import logging
from jax.sharding import Mesh

from jaxrl_llm.app.schema import (
  AlgorithmConfig,
  Config,
  CriticConfig,
  Examples,
  Pairs,
  Recorded,
  Rollouts,
  StageConfig,
)
from jaxrl_llm.batching.plan import Shape, plan_shape
from jaxrl_llm.config.own import named_pair
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner.algorithm import Algorithm, Setting
from jaxrl_llm.learner.catalogue import ALGORITHMS, OFFLINE, PAIRWISE
from jaxrl_llm.learner.optimizer import build_optimizer
from jaxrl_llm.master.exploring.processors import PROCESSORS, Processor, ProcessorConfig
from jaxrl_llm.master.trainer import Optimization, Stage
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.ops.logprobs import plan_token_chunk
from jaxrl_llm.parallel.mesh import SEQUENCE, data_parallel_ranks
from jaxrl_llm.parallel.rules import parts


def build_algorithm(config: AlgorithmConfig, setting: Setting) -> Algorithm:
  """Builds an algorithm: one from the catalogue, or a user-defined one, which is a pair of an
  options dataclass and a function of (options, setting).
  """
  options, make = named_pair(config.name, 'algorithm', ALGORITHMS)
  return make(
    from_json(dict(config.options), options, f'options of algorithm {config.name}'), setting
  )


def build_processors(configs: Sequence[ProcessorConfig]) -> tuple[tuple[str, Processor], ...]:
  """Builds processors from the catalogue, or user-defined ones. The latter are pairs of an options
  dataclass and a function of the options.

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
      f'{where}.optimizer: missing, and learner.optimizer too; give one with its peak_lr'
    )
  algorithm = build_algorithm(
    stage.algorithm, Setting(max_response_length=config.rollout.max_response_length)
  )
  _check_stage(stage, config, algorithm)
  for line in algorithm.no_effect:
    logging.warning('%s.algorithm: %s', where, line)
  critic_updates = stage.steps * stage.minibatches * stage.epochs
  updates = critic_updates - algorithm.critic_warmup * stage.minibatches * stage.epochs
  critic = (stage.critic.optimizer or optimizer) if algorithm.critic_loss is not None else None
  shape = _shape(stage, config, mesh, lengths)
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
      budget_bytes=config.learner.logits_budget_bytes,
      time_shards=mesh.shape[SEQUENCE],
    ),
    minibatches=stage.minibatches,
    epochs=stage.epochs,
    evaluate_every=stage.evaluate_every,
    explores=stage.explores,
    publish_every=source.publish_every if isinstance(source, Rollouts) else 1,
    recorded=isinstance(source, Recorded),
    trains=stage.trains,
    held_out=source.held_out if isinstance(source, Examples | Pairs) else None,
  )


def _chunk_len(config: Config, mesh: Mesh) -> int:
  """Returns the length of a packed chunk in tokens.

  Raises UserError if the configured length is too small or does not fit the mesh.
  """
  longest, sequence = config.rollout.max_length, mesh.shape[SEQUENCE]
  multiple = math.lcm(8, sequence)
  chunk_len = config.learner.chunk_len or -(-longest // multiple) * multiple
  if chunk_len % sequence:
    raise UserError(
      f'learner.chunk_len: {chunk_len} tokens cannot be cut over learner.mesh.sequence={sequence} '
      'devices; wanted a multiple of it'
    )
  if chunk_len < longest:
    raise UserError(
      f'learner.chunk_len: {chunk_len} tokens are too few for max_prompt_length + '
      f'max_response_length = {longest}'
    )
  return chunk_len


def _shape(stage: StageConfig, config: Config, mesh: Mesh, lengths: Sequence[int]) -> Shape:
  """Returns the shape of the arrays of a minibatch, which is the same in all steps of a stage.

  Args:
    lengths: sequence lengths of the stage in tokens; empty if they are not known in advance.
  """
  source = stage.source
  # Rollouts and expert rows are divided among the minibatches separately. If either do not divide
  # evenly, some minibatches get one unit (row, or pair of rows) more, for which there must be room.
  expert_rows = source.expert_rows if isinstance(source, Rollouts) else 0
  kinds = [source.sequences - expert_rows, expert_rows]
  rows = sum(-(-kind // source.unit // stage.minibatches) * source.unit for kind in kinds)
  return plan_shape(
    rows=rows,
    ranks=data_parallel_ranks(mesh),
    chunks=config.learner.chunks_per_rank,
    chunk_len=_chunk_len(config, mesh),
    unit=source.unit,
    lengths=lengths,
  )


def _check_stage(stage: StageConfig, config: Config, algorithm: Algorithm) -> None:
  """Raises UserError if the stage could learn nothing, or if a setting would not have the effect
  that its name suggests.
  """
  where, name, source = f'stages.{stage.name}', stage.algorithm.name, stage.source
  pairs, groups = source.unit == 2, isinstance(source, Rollouts | Recorded)
  selection = source.selection.kind if isinstance(source, Rollouts) else 'all'
  expert_rows = source.expert_rows if isinstance(source, Rollouts) else 0
  if name in PAIRWISE and not pairs:
    raise UserError(
      f'{where}.source: {name} learns from pairs; set Pairs, or Rollouts with '
      "selection.kind='pairs'"
    )
  if pairs and name in ALGORITHMS and name not in PAIRWISE:
    raise UserError(
      f'{where}: {name} does not learn from pairs; use one of {", ".join(sorted(PAIRWISE))}'
    )
  if name == 'sft' and groups and selection != 'shortest_correct':
    raise UserError(
      f'{where}.source: sft learns from demonstrations; set Demonstrations or Examples, or imitate '
      "the policy's own best by "
      "Rollouts with selection.kind='shortest_correct'"
    )
  if selection == 'shortest_correct' and name in ALGORITHMS and name != 'sft':
    raise UserError(
      f'{where}.source.selection: imitates one answer of a group, which {name} does not; use sft'
    )
  if not groups and name in ALGORITHMS and name not in OFFLINE:
    raise UserError(
      f'{where}.source: {name} learns from rollouts; give it Rollouts '
      + ('with experts' if name == 'mix' else 'or Recorded')
    )
  if (name == 'mix') != bool(expert_rows) and name in ALGORITHMS:
    raise UserError(
      f'{where}.source.experts: mix needs expert rows besides its rollouts, and only mix uses them'
    )
  if algorithm.head == 'scalar' and groups:
    raise UserError(
      f'{where}.source: {name} trains a model of one score, which generates nothing; set Pairs'
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
    selection in ('all', 'mixed')
    and not expert_rows
    and source.sequences % (stage.minibatches * source.unit)
  ):
    raise UserError(
      f'{where}.minibatches: {source.sequences} sequences cannot be dealt evenly into '
      f'{stage.minibatches} minibatches' + (' of pairs' if pairs else '')
    )


def _check_rollouts(stage: StageConfig, source: Rollouts, config: Config) -> None:
  """Raises UserError if the settings of the rollouts conflict with the engine, the scorers or the
  number of minibatches.
  """
  where = f'stages.{stage.name}'
  least = {
    'groups_per_batch': source.groups_per_batch
    if source.selection.kind in ('pairs', 'shortest_correct')
    else None,
    'experts.ratio': source.expert_rows if source.experts is not None else None,
  }
  for field, units in least.items():
    if units is not None and units < stage.minibatches:
      raise UserError(
        f'{where}.minibatches: {stage.minibatches} need rows of each kind, and source.{field} '
        f'gives {units}; lower minibatches or raise it'
      )
  _check_processors(stage.name, source, config)
  if source.past is not None and source.group_size % (stage.minibatches * source.unit):
    raise UserError(
      f'{where}.minibatches: with earlier groups the number of groups in a batch varies, so that '
      f'each must divide evenly; group_size {source.group_size} does not divide into '
      f'{stage.minibatches} minibatches'
    )


def _check_partial(stage: StageConfig, config: Config, algorithm: Algorithm) -> None:
  partial = config.rollout.partial
  if partial is not None and partial.loss != 'current_only' and not algorithm.corrects:
    raise UserError(
      f'stages.{stage.name}.algorithm: rollout.partial.loss {partial.loss!r} trains on tokens of '
      f'older weights, which {stage.algorithm.name} does not correct here; set its rollout_is to '
      "'token', or loss to 'current_only'"
    )


def _check_processors(stage: str, source: Rollouts, config: Config) -> None:
  """Checks the processors by building them. Every process does this before anything is loaded, so
  that all processes report errors.
  """
  build_processors(source.processors)
  scorers = [scorer.name for scorer in config.rewards.scorers]
  for processor in source.processors:
    if processor.implementation == 'repetition' and config.rollout.repetition_detection is None:
      raise UserError(
        f'stages.{stage}.source.processors: {processor.name} acts on answers that '
        'rollout.repetition_detection ended, which is not set; set it, or remove the processor'
      )
    key = processor.options.get('key')
    if processor.implementation == 'shape' and key.split('/')[0] not in scorers:
      raise UserError(
        f'stages.{stage}.source.processors: {processor.name} shapes by {key!r}, and no scorer is '
        f'called {key.split("/")[0]!r}; configured are {sorted(scorers)}'
      )


def _check_reference(stage: StageConfig, config: Config, algorithm: Algorithm) -> None:
  """Raises UserError if the reference would always equal the policy, or cannot be updated as
  configured.
  """
  where, rule = f'stages.{stage.name}', algorithm.reference
  if 'reference' not in algorithm.reads:
    return
  if rule.ema is not None and config.policy.param_dtype != 'float32':
    raise UserError(
      f'{where}: reference.ema averages in the type of the parameters, and '
      f'{config.policy.param_dtype} rounds its small steps away; use param_dtype=float32, or '
      'reference.every'
    )
  if rule.ema is not None and config.policy.lora is not None:
    raise UserError(
      f"{where}: reference.ema averages parameters, and the means of two adapters' factors are not "
      'those of what they '
      'add to the weights; use reference.every, or policy.lora=null'
    )
  if rule.every == 1 and isinstance(stage.source, Pairs):
    raise UserError(
      f'{where}: pairs are compared with a fixed reference; reference.every=1 has none'
    )
  if rule.every == 1 and stage.minibatches * stage.epochs == 1:
    text = (
      f'{where}: with reference.every=1 and one update a batch the policy is its own reference, '
      'without effect; set minibatches or epochs above 1, or another reference'
    )
    if stage.algorithm.name != 'opmd':
      raise UserError(text)
    # Only a warning: if the reference has no effect, OPMD is a policy gradient, which still learns.
    logging.warning('%s', text)


def model_spec(config: Config, spec: ModelSpec) -> ModelSpec:
  """Returns the spec of the stages' model: a policy, or a reward model with one output."""
  setting = Setting(max_response_length=config.rollout.max_response_length)
  heads = {stage.name: build_algorithm(stage.algorithm, setting).head for stage in config.stages}
  if len(set(heads.values())) > 1:
    raise UserError(
      f'stages: {heads} train models of different outputs; train them in separate runs'
    )
  (head,) = set(heads.values())
  if head == 'scalar' and config.evaluation:
    raise UserError(
      'evaluation: a reward model generates nothing; measure it on held-out pairs (source.held_out)'
    )
  if head == 'lm' and spec.head != 'lm':
    raise UserError(
      f'policy.init_from: a model with one output ({spec.head}), which generates nothing; name a '
      'language model'
    )
  return with_head(spec, head)


def policy_options(config: Config) -> ModelOptions:
  policy = config.policy
  return ModelOptions(
    scan_layers=policy.scan_layers,
    remat=policy.remat,
    attention=policy.attention,
    dtype=policy.dtype,
    param_dtype=policy.param_dtype,
    lora=policy.lora,
  )
