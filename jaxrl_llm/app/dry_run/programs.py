"""Lists the programs that a run's stages compile and the arrays that they keep on the devices,
without running them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.app.composition.loop_parts import build_gatherer
from jaxrl_llm.app.composition.reward_role import TrainerRewardModel
from jaxrl_llm.app.composition.state import model_of
from jaxrl_llm.app.schema import Config
from jaxrl_llm.batching.chunks import Chunks, shapes
from jaxrl_llm.batching.plan import Shape
from jaxrl_llm.learner.algorithm import Loss
from jaxrl_llm.learner.forward import build_score
from jaxrl_llm.learner.state import TrainState, abstract_base, abstract_state, param_shardings
from jaxrl_llm.learner.update import build_update
from jaxrl_llm.master.phases import PUBLISHED_BITS, REWARD_MODEL
from jaxrl_llm.master.trainer import Optimization, Stage, value_pass
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import Model
from jaxrl_llm.models.flops import causal_pairs, model_flops, recomputed_flops
from jaxrl_llm.parallel.memory import is_on_host
from jaxrl_llm.parallel.rules import sharding_of_batch


class Program(NamedTuple):
  name: str
  lower: Callable[[], jax.stages.Lowered]
  flops: int
  """Model FLOPs over all devices for a micro-batch in which each packed chunk is one sequence; 0 if
  unknown.
  """
  recomputed: int = 0
  """FLOPs over all devices that the backward pass of such a micro-batch computes again."""


class Held(NamedTuple):
  """Memory of the arrays of a role, such as the policy, the reference or the gradients."""

  role: str
  whole: int
  """Total size of the role's arrays in bytes, counting replicated data once."""
  per_device: int
  """Bytes of the role's arrays on each device, including replicas."""
  offloaded: int
  """Bytes of the role's arrays in host memory per device, including replicas. These arrays use no
  device memory.
  """


def stage_programs(stage: Stage, model: Model, critic: Model, mesh: Mesh) -> Iterator[Program]:
  """Yields the programs of the policy and the critic: updates, and forward passes for logprobs and
  values.
  """
  algorithm, shape, model = stage.algorithm, stage.shape, model_of(stage, model)
  tokens = shape.total_chunks * shape.chunk_len
  pairs = causal_pairs([shape.chunk_len] * shape.total_chunks)
  arrays = batch_shapes(shape, mesh), jax.ShapeDtypeStruct((), np.int32)

  def update(
    of: Model,
    loss: Loss,
    by: Optimization,
    updates: int,
    constants: Iterable[str],
    on_policy: tuple[str, ...] = (),
  ) -> Callable[[], jax.stages.Lowered]:
    scalars = {name: jax.ShapeDtypeStruct((), np.float32) for name in constants}
    state = abstract_state(of, by.optimizer, mesh, offload=by.config.offloads)
    fields = dict(updates=updates, on_policy=on_policy, **stage.program_options)
    built = build_update(of, loss, *by, mesh, state, **fields)
    return lambda: built.lower(state, *arrays, scalars, abstract_base(of, mesh))

  def score(built: Any, of: Model, state: TrainState) -> Callable[[], jax.stages.Lowered]:
    return lambda: built.lower(lora.join(state.params, abstract_base(of, mesh)), *arrays)

  def flops(of, backward):
    return model_flops(of.spec, tokens, pairs=pairs, backward=backward)

  policy_update = update(
    model,
    algorithm.loss,
    stage.policy,
    stage.updates,
    algorithm.update_constants,
    stage.on_policy,
  )
  recomputed = recomputed_flops(
    model.spec,
    model.options,
    tokens,
    pairs=pairs,
    once=stage.token_chunk == shape.chunk_len,
  )
  yield Program('update', policy_update, flops(model, True), recomputed)
  if algorithm.reads & {'proximal', 'reference'}:
    built = build_score(model, mesh, **stage.program_options)
    yield Program(
      'logprobs',
      score(built, model, abstract_state(model, stage.policy.optimizer, mesh)),
      flops(model, False),
    )
  if algorithm.critic_loss is not None:
    critic_update = update(
      critic, algorithm.critic_loss, stage.critic, stage.critic_updates, algorithm.constants
    )
    recomputed = recomputed_flops(critic.spec, critic.options, tokens, pairs=pairs, once=True)
    yield Program('critic update', critic_update, flops(critic, True), recomputed)
    built = value_pass(stage, critic, mesh)
    yield Program(
      'values',
      score(built, critic, abstract_state(critic, stage.critic.optimizer, mesh)),
      flops(critic, False),
    )


def publishing_program(config: Config, model: Model, mesh: Mesh) -> Program:
  """Returns the largest program of a publication, measured by the size of its results.

  The programs of a publication cut, convert and gather parts of the policy's weights for the
  engine. The returned program is compiled as in a job of several processes.
  """
  programs = build_gatherer(config, mesh, several=True).programs(abstract_params(model, mesh))

  def size(name: str) -> int:
    return sum(
      math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(programs[name].out_info)
    )

  largest = max(programs, key=size)
  return Program(f'largest program of publishing ({largest})', lambda: programs[largest], 0)


def abstract_params(model: Model, mesh: Mesh) -> Any:
  """Returns the shapes, dtypes and shardings of a model's parameters."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(model.init, jax.random.key(0)),
    param_shardings(model, mesh),
  )


def batch_shapes(shape: Shape, mesh: Mesh) -> Chunks:
  """Returns the shapes and shardings of the arrays of one optimizer step or one forward pass, as
  they are placed on the devices.
  """
  arrays = shapes(
    shape.micro_batches,
    shape.total_chunks,
    time=shape.chunk_len,
    segments=shape.segments,
    shares_prefixes=shape.shares_prefixes,
  )

  def placed(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of_batch(mesh))

  return Chunks(**{name: placed(array) for name, array in arrays.items()})


def scoring_program(reward_model: TrainerRewardModel, mesh: Mesh) -> Program:
  """Returns the forward pass with which the trainer's reward model scores rollouts."""
  scoring, spec = reward_model.scoring, reward_model.model.spec
  chunks, length = scoring.shape.total_chunks, scoring.shape.chunk_len
  flops = model_flops(spec, chunks * length, pairs=causal_pairs([length] * chunks), backward=False)
  arguments = (
    abstract_params(reward_model.model, mesh),
    batch_shapes(scoring.shape, mesh),
    jax.ShapeDtypeStruct((), np.int32),
  )
  return Program('rewards', lambda: scoring.program.lower(*arguments), flops)


def held(
  stages: Sequence[Stage],
  model: Model,
  critic: Model,
  mesh: Mesh,
  reward_model: TrainerRewardModel | None = None,
  image: np.dtype | None = None,
) -> list[Held]:
  """Returns, for each role, the maximum of its memory over the stages. Gradients, which exist only
  during an update, and the host copy of a commit count as roles of their own.

  Args:
    reward_model: reward model of the trainer; None if it has none.
    image: data type of the published version's bits that the devices keep; None if they keep none.
  """
  largest: dict[str, Held] = {}

  def add_size(size: Held) -> None:
    largest[size.role] = max(largest.get(size.role, size), size, key=lambda held: held.whole)

  def add(role: str, tree: Any) -> None:
    add_size(Held(role, *held_bytes(tree)))

  if model.options.lora is not None:
    add('base', abstract_base(model, mesh))
  for stage in stages:
    state = abstract_state(
      model_of(stage, model),
      stage.policy.optimizer,
      mesh,
      offload=stage.policy.config.offloads,
    )
    algorithm, committed = stage.algorithm, [state]
    add('policy', state.params)
    add('gradients', state.params)
    add('optimizer', state.opt_state)
    if 'reference' in algorithm.reads and algorithm.reference.every != 1:
      add('reference', state.params)
      committed.append(state.params)
    if algorithm.critic_loss is not None:
      offload = stage.critic.config.offloads
      state = abstract_state(critic, stage.critic.optimizer, mesh, offload=offload)
      add('critic', state.params)
      add('critic optimizer', state.opt_state)
      committed.append(state)
    whole, per_device, offloaded = held_bytes(committed)
    # A commit keeps a copy of the state in host memory until its files are written.
    add_size(Held('commit in flight', whole, 0, per_device + offloaded))
  if reward_model is not None:
    add(REWARD_MODEL, abstract_params(reward_model.model, mesh))
  if image is not None:
    params = abstract_base(model, mesh) or abstract_params(model, mesh)
    add(PUBLISHED_BITS, jax.tree.map(lambda x: x.update(dtype=image), params))
  return list(largest.values())


def held_bytes(tree: Any) -> tuple[int, int, int]:
  """Returns the sizes in bytes of a tree of sharded shapes.

  Returns:
    (total size of the arrays, counting replicated arrays once; bytes in the memory of each device;
    bytes in host memory for each device).
  """
  whole = per_device = offloaded = 0
  for leaf in jax.tree.leaves(tree):
    itemsize = np.dtype(leaf.dtype).itemsize
    shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * itemsize
    whole += math.prod(leaf.shape) * itemsize
    if is_on_host(leaf.sharding):
      offloaded += shard
    else:
      per_device += shard
  return whole, per_device, offloaded
