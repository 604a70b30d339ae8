"""State of a run (parameters, optimizers, reference) at its start, at the start of a stage, and
after a restart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxrl_llm.app.composition.initial_weights import checkpoint_directory, model_directory
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.stages import origins
from jaxrl_llm.app.schema import BASE, Config, stage_of_best
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Json, Params
from jaxrl_llm.learner.loading import read_params
from jaxrl_llm.learner.state import (
  Learned,
  TrainState,
  abstract_state,
  copy_params,
  init_params,
  init_state,
  init_trained,
  renewed,
  with_output,
  with_schedule,
)
from jaxrl_llm.master.loop import LoopState
from jaxrl_llm.master.trainer import Optimization, Stage
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.heads import fresh_head, has_head, with_head
from jaxrl_llm.rollout.gatherer import Gatherer, stacked_name
from jaxrl_llm.runtime.checkpoint import Checkpoints
from jaxrl_llm.weights.hf import read_spec
from jaxrl_llm.weights.shares import divided


def critic_model(model: Model) -> Model:
  """Builds the critic of PPO: the policy's architecture with one output per token and without
  adapters.
  """
  return build_model(
    with_head(model.spec, 'value'), dataclasses.replace(model.options, lora=None), model.mesh
  )


def model_of(stage: Stage, model: Model) -> Model:
  """Returns the model that a stage trains.

  Args:
    model: the run's model. If it is a policy and the stage trains a reward model, the result has
      the policy's architecture with one output.
  """
  head = stage.algorithm.head
  if head == model.spec.head:
    return model
  return build_model(with_head(model.spec, head), model.options, model.mesh)


def commits_needed(
  config: Config, stages: Sequence[Stage], step: int, bests: Mapping[str, tuple[float, int]]
) -> frozenset[int]:
  """Returns the steps of the commits whose weights are needed after `step`: as initial weights of
  stages that begin later, or as the reward model that scores rollouts. If a later stage begins with
  the best weights of a stage that has not ended, the commit of the best evaluation so far is
  included.

  Args:
    bests: as in `LoopState.bests`.
  """
  ends = {stage.name: stage.end for stage in stages}
  names = _awaited(config, stages, step) | _awaited_as_reward_model(config, stages, step)
  ended = {ends[name] for name in names & ends.keys() if ends[name] <= step}
  return frozenset(ended | {bests[of][1] for name in names if (of := stage_of_best(name)) in bests})


def _awaited(config: Config, stages: Sequence[Stage], step: int) -> set[str]:
  """Returns the names of the weights with which the stages after `step` begin."""
  return {name for stage in stages if stage.start >= step for name in origins(stage.name, config)}


def _awaited_as_reward_model(config: Config, stages: Sequence[Stage], step: int) -> set[str]:
  """Returns a set with the name of the stage that trains the reward model. The set is empty if the
  reward model is read from files, or if all stages whose rollouts it scores ended before `step`.
  """
  trained = config.reward_model.stage if config.reward_model is not None else None
  scored = any(
    # A stage that has just ended may still be extended.
    built.end >= step and config.scored_by_trainer(stage)
    for built, stage in zip(stages, config.stages, strict=True)
  )
  return {trained} if trained is not None and scored else set()


def first_suite(config: Config) -> Json:
  """Returns the first evaluation suite and its taskset, as JSON; None if the run has no suite. The
  accuracy on the first suite decides which evaluation is the best.
  """
  if not config.evaluation:
    return None
  suite = config.evaluation[0]
  taskset = next(taskset for taskset in config.tasksets if taskset.name == suite.taskset)
  return {'suite': to_json(suite), 'taskset': to_json(taskset)}


def committed_bests(
  committed: Mapping[str, Any], config: Config, stages: Sequence[Stage]
) -> dict[str, tuple[float, int]]:
  """Returns `LoopState.bests` as of a commit.

  If the first suite has changed since the commit, the result contains only stages that have ended.
  In other stages, later accuracies cannot be compared with the earlier ones.

  Args:
    committed: host state of the commit.
  """
  bests = {name: tuple(best) for name, best in committed.get('bests', {}).items()}
  if committed.get('best_of') == first_suite(config):
    return bests
  ended = {stage.name for stage in stages if _has_ended(stage, committed)}
  return {name: best for name, best in bests.items() if name in ended}


def unknown_bests(
  committed: Mapping[str, Any], config: Config, stages: Sequence[Stage]
) -> list[str]:
  """Returns the names of the stages that had ended by a commit and whose best evaluation is not
  known, although a later stage begins with their best weights.
  """
  awaited = {stage_of_best(name) for name in _awaited(config, stages, committed['step'])}
  bests = committed_bests(committed, config, stages)
  return [
    stage.name
    for stage in stages
    if stage.name in awaited and stage.name not in bests and _has_ended(stage, committed)
  ]


def _has_ended(stage: Stage, committed: Mapping[str, Any]) -> bool:
  """Returns whether the stage, including its last evaluation, was complete at a commit."""
  step = committed['step']
  return stage.end < step or (stage.end == step and committed['evaluated'])


def starting_state(stage: Stage, setup: Setup, state: LoopState) -> LoopState:
  """Returns the state in which the policy has the weights that `origins` names for the stage, and
  no optimizer state.

  Args:
    state: state at the end of the previous stage.

  Raises:
    UserError: a commit from which the stage takes weights no longer exists, or the stage begins
      with the best weights of a stage whose evaluations had no scored answer.
  """
  names = origins(stage.name, setup.config)
  weights = [_weights_of(name, stage, setup, state) for name in names]
  params = weights[0] if len(weights) == 1 else _mean(weights)
  policy = TrainState(params=params, opt_state=None, updates=None, skipped=None)
  return dataclasses.replace(state, learned=state.learned._replace(policy=policy))


def _weights_of(name: str, stage: Stage, setup: Setup, state: LoopState) -> Params:
  """Returns the trained parameters at the beginning of the run (if `name` is 'base'), at the best
  evaluation of a stage ('best:STAGE') or at the end of the stage `name`.
  """
  if name == BASE:
    return initial_params(setup.config, setup.model, setup.process.mesh)[0]
  where = f'stages.{stage.name}.init_from'
  if (of_best := stage_of_best(name)) is None:
    step = next(earlier.end for earlier in setup.stages if earlier.name == name)
  elif of_best in state.bests:
    accuracy, step = state.bests[of_best]
    logging.info('%s: %s is step %d, with accuracy %.3f', where, name, step, accuracy)
  else:
    raise UserError(
      f'{where}: {name!r}, but no evaluation of {of_best} had a scored answer; branch with another '
      'init_from'
    )
  if step == stage.start:
    return state.learned.policy.params
  return _committed_params(step, setup, where, name)


def _committed_params(step: int, setup: Setup, where: str, name: str) -> Params:
  """Returns the trained parameters of the commit at `step`.

  Args:
    where: field of the configuration that names the commit, for error messages.
    name: value of this field.
  """
  checkpoints = setup.checkpoints
  if step not in checkpoints.steps():
    raise UserError(
      f'{where}: the commit at step {step} ({name}) no longer exists, only those of '
      f'{checkpoints.steps()}; restore it from a copy, or branch with another init_from'
    )
  trained_by = next(s for s in setup.stages if s.name == checkpoints.host(step)['stage'])
  like = committed_like(trained_by, setup.model, setup.process.mesh)['train'].params
  return checkpoints.restore_part(step, {'train': {'params': like}})['train']['params']


def reward_params(setup: Setup) -> Params:
  """Reads the parameters of the trainer's reward model onto the mesh, from its files or from the
  commit at the end of the stage that trained it.
  """
  role, mesh = setup.reward_model, setup.process.mesh
  if role.files is not None:
    return role.read(mesh)
  chosen = setup.config.reward_model
  step = next(stage.end for stage in setup.stages if stage.name == chosen.stage)
  params = _committed_params(step, setup, 'reward_model.init_from', chosen.init_from)
  return _of_type(params, chosen.dtype)


def untrained_reward_params(setup: Setup, policy: Params) -> Params:
  """Returns parameters for the reward model before a stage of the run has trained it: the policy's
  parameters with a new head. They share no buffers with `policy`.
  """
  role, chosen = setup.reward_model, setup.config.reward_model
  params = _with_head_of(role.model, setup.config, setup.process.mesh, policy)
  return copy_params(_of_type(params, chosen.dtype))


def _of_type(params: Params, dtype: str) -> Params:
  """Returns the parameters, converted to a data type, with the same shardings."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
  convert = jax.jit(
    lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree), out_shardings=shardings
  )
  return convert(params)


def _with_head_of(model: Model, config: Config, mesh: Mesh, params: Params) -> Params:
  """Returns `params`. If their head does not fit `model`, a new head replaces it."""
  if has_head(params, model.spec):
    return params
  kernel = fresh_head(model.spec, jax.random.key(config.seed), dtype=config.policy.param_dtype)
  return with_output(model, mesh, params, kernel)


def _mean(weights: Sequence[Params]) -> Params:
  """Returns the mean of parameter trees, computed in float32."""

  def mean(*leaves):
    total = functools.reduce(jnp.add, [leaf.astype(jnp.float32) for leaf in leaves])
    return (total / len(leaves)).astype(leaves[0].dtype)

  shardings = jax.tree.map(lambda leaf: leaf.sharding, weights[0])
  average = jax.jit(lambda trees: jax.tree.map(mean, *trees), out_shardings=shardings)
  return average(list(weights))


def begin_stage(
  stage: Stage, config: Config, state: LoopState, mesh: Mesh, model: Model, critic: Model
) -> LoopState:
  """Returns the state with which a stage begins: the policy of `state`, and a copy of it as the
  reference if the algorithm keeps one.

  The optimizer state is new, but if the stage sets `keep_optimizer`, it contains the moments of the
  previous stage's optimizer. The head is new if the stage trains a reward model and `state` has the
  weights of a policy.

  Args:
    state: state at the end of the previous stage, or as returned by `starting_state`.
    model: model that the stage trains (`model_of`).
    critic: model of the critic (`critic_model`).
  """
  params, before = state.learned.policy.params, state.learned.policy.opt_state
  if state.learned.base is None:
    params = _with_head_of(model, config, mesh, params)
  reads, rule = 'reference' in stage.algorithm.reads, stage.algorithm.reference
  reference = copy_params(params) if reads and rule.every != 1 else None
  learned = Learned(
    policy=init_state(params, stage.policy.optimizer, mesh, offload=stage.policy.config.offloads),
    critic=_begin_critic(stage, config, state.learned, mesh, critic)
    if stage.algorithm.critic_loss is not None
    else None,
    reference=reference,
    reference_step=state.step,
    base=state.learned.base,
    reward_model=state.learned.reward_model,
  )
  if before is not None and stage.keep_optimizer:
    # Keep the moments, but restart the learning-rate schedule for the new stage.
    kept = with_schedule(before, learned.policy.opt_state)
    learned = learned._replace(policy=learned.policy.replace(opt_state=kept))
  return dataclasses.replace(state, learned=learned)


def _begin_critic(
  stage: Stage, config: Config, before: Learned, mesh: Mesh, critic: Model
) -> TrainState:
  """Returns the critic with which a stage begins. Its parameters come from the configured model, or
  else from the previous stage's critic, or else from the policy with a new head.
  """
  source = next(s for s in config.stages if s.name == stage.name).critic.init_from
  offload = stage.critic.config.offloads
  if source is None and before.critic is not None:
    state = init_state(before.critic.params, stage.critic.optimizer, mesh, offload=offload)
    if stage.keep_optimizer:
      state = state.replace(opt_state=with_schedule(before.critic.opt_state, state.opt_state))
    return state
  if source is not None:
    directory = model_directory(source)
    spec = read_spec(directory)
    length = spec.max_position_embeddings
    wanted = dataclasses.replace(critic.spec, head=spec.head, max_position_embeddings=length)
    if spec.head == 'lm' or spec != wanted:
      raise UserError(
        f'stages.{stage.name}.critic.init_from: {source} is a {spec.family} model with head '
        f'{spec.head!r}; wanted a '
        "reward model or critic of the policy's own shape, as jaxrl train exports them"
      )
    params = read_params(critic, mesh, directory, spec)
  else:
    dtype = config.policy.param_dtype
    kernel = fresh_head(critic.spec, jax.random.key(config.seed), dtype=dtype)
    body = lora.merge(before.whole(before.policy.params), config.policy.lora)
    body = jax.tree.map(lambda leaf: leaf.astype(dtype), body)
    params = copy_params(with_output(critic, mesh, body, kernel))
  return init_state(params, stage.critic.optimizer, mesh, offload=offload)


def initial_params(config: Config, model: Model, mesh: Mesh) -> tuple[Params, Params | None]:
  """Returns the initial trainable parameters and the frozen base parameters, which are None without
  adapters (`models.lora.split`).

  If the checkpoint has another kind of head than the model, a new head replaces it.
  """
  directory = checkpoint_directory(config)
  if directory is None:
    return lora.split(init_params(model, mesh, seed=config.seed), model.spec, model.options)
  spec = read_spec(directory)
  same_head = spec.head == model.spec.head
  placed = read_params(model, mesh, directory, spec, with_head=same_head)
  if not same_head:
    kernel = fresh_head(model.spec, jax.random.key(config.seed), dtype=config.policy.param_dtype)
    placed = with_output(model, mesh, placed, kernel)
  if model.options.lora is not None:
    placed = lora.join(placed, init_trained(model, mesh, seed=config.seed))
  return lora.split(placed, model.spec, model.options)


def committed_state(setup: Setup, step: int) -> tuple[LoopState, str | None]:
  """Returns the state of the run after `step` steps, and the digest of the frozen base parameters.

  The state is restored from the commit at `step`, or newly initialised if `step` is 0. The digest
  is None if no parameters are frozen.
  """
  config, model, mesh = setup.config, setup.model, setup.process.mesh
  params, base, base_hash = None, None, None
  if step == 0 or model.options.lora is not None:
    params, base = initial_params(config, model, mesh)
  if base is not None:
    base_hash = base_digest(base, mesh)
  if step == 0:
    policy = TrainState(params=params, opt_state=None, updates=None, skipped=None)
    return LoopState(Learned(policy, base=base), 0), base_hash
  host = setup.checkpoints.host(step)
  check_base(base_hash, host, config)
  stage = next(s for s in setup.stages if s.name == host['stage'])
  state = restore_state(stage, step, setup.checkpoints, model, mesh)
  return dataclasses.replace(state, learned=state.learned._replace(base=base)), base_hash


def base_digest(base: Params, mesh: Mesh) -> str:
  """Returns a digest of the names and values of the base parameters. Every process must call this
  function. Each copies to its host, and hashes, only a share of the arrays.
  """
  whole, gatherer = flatten(base), Gatherer(mesh)
  names = sorted(whole)

  def array_of(unrolled: str) -> str:
    return unrolled if unrolled in whole else stacked_name(unrolled)

  # Shares are most alike if the largest arrays are divided first.
  sizes = {name: whole[name].nbytes for name in sorted(names, key=lambda n: -whole[n].nbytes)}
  share = divided(sizes, jax.process_count())[jax.process_index()]
  hashers = {name: xxhash.xxh3_128() for name in share}
  tensors = {tensor.name for tensor, _ in gatherer.tensors(base)}
  ours = {name for name in tensors if array_of(name) in hashers}
  for name, array in gatherer.leaves(base, ours):
    # The layers of a stack arrive one at a time, in order. Together, their bytes equal the bytes of
    # the stack.
    rows = np.ascontiguousarray(array).reshape(-1)
    hashers[array_of(name)].update(memoryview(rows.view(np.uint8)))
  hashes = np.zeros((len(names), xxhash.xxh3_128().digest_size), np.uint8)
  for name, hasher in hashers.items():
    hashes[names.index(name)] = np.frombuffer(hasher.digest(), np.uint8)
  if jax.process_count() > 1:
    # Each row is 0 in all processes but one.
    # Wait 'device': bounded by the deadline of the device thread.
    everywhere = multihost_utils.process_allgather(hashes)
    hashes = np.bitwise_or.reduce(everywhere)
  digests = xxhash.xxh3_128()
  for name, row in zip(names, hashes, strict=True):
    line = f'{name} {whole[name].dtype} {whole[name].shape} {row.tobytes().hex()}\n'
    digests.update(line.encode())
  return digests.hexdigest()


def check_base(digest: str | None, committed: Mapping[str, Any], config: Config) -> None:
  """Raises UserError if the base weights differ from the base weights with which the committed
  adapters were trained.
  """
  if digest != committed.get('base'):
    source = config.policy.init_from or f'random weights of seed {config.seed}'
    raise UserError(
      f'policy.init_from: {source} no longer gives the weights that the adapters of the commit at '
      f'step {committed["step"]} were trained on (digest {digest}, wanted {committed["base"]}); '
      'restore those, or start another run'
    )


def restore_state(
  stage: Stage, step: int, checkpoints: Checkpoints, model: Model, mesh: Mesh
) -> LoopState:
  """Restores the state committed at `step`, which is a step of `stage`. The result lacks the frozen
  base parameters.
  """
  arrays = checkpoints.restore(step, committed_like(stage, model, mesh))
  host = checkpoints.host(step)
  if host.get('reset_optimizer', False):
    arrays['train'] = _with_fresh_moments(arrays['train'], stage.policy)
    if 'critic' in arrays:
      arrays['critic'] = _with_fresh_moments(arrays['critic'], stage.critic)
  learned = Learned(
    arrays['train'],
    arrays.get('critic'),
    arrays.get('reference'),
    reference_step=host['reference_step'],
    algorithm_state=host['algorithm_state'],
  )
  return LoopState(learned, step, evaluated=host['evaluated'])


def _with_fresh_moments(state: TrainState, by: Optimization) -> TrainState:
  """Returns the state with new optimizer moments, for a branch with --reset_optimizer."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
  renew = jax.jit(lambda s: renewed(s, by.optimizer), donate_argnums=0, out_shardings=shardings)
  return renew(state)


def committed_like(stage: Stage, model: Model, mesh: Mesh) -> dict[str, Any]:
  """Returns the shapes and shardings of the arrays in a stage's commit, keyed by role."""
  algorithm = stage.algorithm
  like = {
    'train': abstract_state(
      model_of(stage, model), stage.policy.optimizer, mesh, offload=stage.policy.config.offloads
    )
  }
  if 'reference' in algorithm.reads and algorithm.reference.every != 1:
    like['reference'] = like['train'].params
  if algorithm.critic_loss is not None:
    critic, offload = critic_model(model), stage.critic.config.offloads
    like['critic'] = abstract_state(critic, stage.critic.optimizer, mesh, offload=offload)
  return like
