"""Shapes of a stage's packed batches, and whether its sequences share prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from absl import logging
from jax.sharding import Mesh

from jaxrl_llm.app.composition.automatic import SMALL
from jaxrl_llm.app.schema import AUTO, Config, StageConfig
from jaxrl_llm.app.sources import Followed, Recorded, Rollouts
from jaxrl_llm.batching.plan import Shape, plan_shape
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.attention import chosen, platform_of
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.ops.attention import CHECKED, why_not_shared
from jaxrl_llm.parallel.mesh import SEQUENCE, data_parallel_ranks


class _Chunking(NamedTuple):
  chunks: int
  """Number of chunks per rank and micro-batch."""
  chunk_len: int
  shares_prefixes: bool


def stage_shape(
  stage: StageConfig,
  config: Config,
  mesh: Mesh,
  lengths: Sequence[int],
  *,
  options: ModelOptions,
) -> Shape:
  """Returns the shape of the arrays of a minibatch, which is the same in all steps of a stage.

  Args:
    lengths: sequence lengths of the stage in tokens; empty if they are not known in advance.
    options: compute options of the policy.

  Raises:
    UserError: the configured length of a chunk is too small or does not fit the mesh.
  """
  source = stage.source
  # Rollouts and expert rows are divided among the minibatches separately. If either number is not
  # divisible, some minibatches get one more unit (row, or pair of rows), so the shape must have
  # room for it. The numbers assume that every trajectory has the maximum number of steps. A batch
  # with fewer rows has fewer micro-batches of the same shape.
  kinds = config.sequences(stage)
  rows = sum(-(-kind // source.unit // stage.minibatches) * source.unit for kind in kinds)
  chunking = _chunking(stage, config, mesh, options)
  return plan_shape(
    rows=rows,
    ranks=data_parallel_ranks(mesh),
    unit=source.unit,
    lengths=lengths,
    longest=config.rollout.max_length,
    splits_remainder=config.learner.split_remainder,
    **chunking._asdict(),
  )


def _chunking(stage: StageConfig, config: Config, mesh: Mesh, options: ModelOptions) -> _Chunking:
  """Returns the number and length of the chunks of a micro-batch, and whether sequences share
  prefixes.

  If sequences share prefixes, the chunks may be longer and fewer, so that more sequences with a
  common prompt fit into a chunk. The number of tokens in the micro-batch does not grow.
  """
  chunks = config.learner.chunks_per_rank
  chunks = SMALL['chunks_per_rank'] if chunks == AUTO else chunks
  apart = _Chunking(chunks, chunk_length(config, mesh), False)
  unit = stage.source.unit
  alike = _sharing(stage, config)
  if alike == 1:
    return apart
  chunks, chunk_len = apart[:2]
  if options.attention == AUTO and platform_of(mesh) in CHECKED:
    # The devices are absent, or a run has not begun. It may use a kernel there that shares nothing.
    return apart
  choice = chosen(options, mesh, time=chunk_len, keys=chunk_len, same_tokens=True)
  if why_not := why_not_shared(choice.implementation, time=chunk_len, keys=chunk_len):
    logging.info(
      'stage %s: shared prefixes are computed once per sequence, since %s (%s)',
      *(stage.name, why_not, choice.reason),
    )
    return apart
  # Chunks for masked attention stay short, because its cost grows with the square of their length.
  if config.learner.chunk_len is None and options.attention != 'masked':
    rollout, room = config.rollout, chunks * chunk_len
    tree = rollout.max_prompt_length + alike * (rollout.max_response_length + 1)
    chunks = max(1, room // tree)
    # Long chunks get a length with many divisors, since logits are computed for a fraction of the
    # chunk at a time.
    multiple = math.lcm(128 if room // chunks >= 1024 else 8, mesh.shape[SEQUENCE])
    chunk_len = max(chunk_len, room // chunks // multiple * multiple)
    too_long = why_not_shared(choice.implementation, time=chunk_len, keys=chunk_len)
    if too_long or chunks * (chunk_len // rollout.max_length) < unit:
      chunks, chunk_len = apart[:2]
  return _Chunking(chunks, chunk_len, True)


def saved_by_sharing(config: Config) -> float:
  """Returns the share of tokens that shared prefixes save, if each prompt and response has its
  maximum length and each chunk holds whole groups. If the stages have different shares, returns the
  largest one; 0 if no stage shares prefixes.
  """
  prompt, longest = config.rollout.max_prompt_length, config.rollout.max_length
  alike = max((_sharing(stage, config) for stage in config.stages), default=1)
  return (1 - 1 / alike) * prompt / longest


def _sharing(stage: StageConfig, config: Config) -> int:
  """Returns the maximum number of sequences in a minibatch that may share a prompt within a chunk;
  1 if prefixes are not shared.
  """
  if not config.learner.share_prefixes:
    return 1
  # The rows of a pair are never separated.
  unit = stage.source.unit
  return unit if unit == 2 else -(-_alike(stage, config) // stage.minibatches)


def _alike(stage: StageConfig, config: Config) -> int:
  """Returns the maximum number of sequences in a batch that have the same prompt and may share it
  within a chunk. Not used for preference pairs, whose two sequences may always share their prompt.
  """
  source = stage.source
  if isinstance(source, Rollouts):
    return source.selection.most(source.group_size) * config.rollout.max_steps
  if isinstance(source, Recorded | Followed):
    return source.group_size * config.rollout.max_steps
  return 1


def chunk_length(config: Config, mesh: Mesh) -> int:
  """Returns the length of a packed chunk in tokens, if sequences do not share prefixes.

  Raises:
    UserError: the configured length is too small or does not fit the mesh.
  """
  longest, sequence = config.rollout.max_length, mesh.shape[SEQUENCE]
  multiple = math.lcm(8, sequence)
  chunk_len = config.learner.chunk_len or -(-longest // multiple) * multiple
  if chunk_len % sequence:
    raise UserError(
      f'learner.chunk_len: {chunk_len} tokens cannot be split over '
      f'learner.mesh.sequence={sequence} devices; wanted a multiple of it'
    )
  if chunk_len < longest:
    raise UserError(
      f'learner.chunk_len: {chunk_len} tokens are too few for max_prompt_length + '
      f'max_response_length = {longest}'
    )
  return chunk_len
