"""State of a run (parameters, optimizers, reference) at its start, at the start of a stage, and
after a restart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import xxhash
from jax.sharding import Mesh

from jaxrl_llm.app.composition.initial_weights import checkpoint_directory, model_directory
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Params
from jaxrl_llm.learner.state import (
  Learned,
  TrainState,
  abstract_state,
  copy_params,
  init_params,
  init_state,
  init_trained,
  place_params,
  renewed,
  with_output,
  with_schedule,
)
from jaxrl_llm.master.loop import LoopState
from jaxrl_llm.master.trainer import Optimization, Stage
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.heads import fresh_head, replace_head, with_head
from jaxrl_llm.rollout.publisher import Gatherer
from jaxrl_llm.rollout.vllm.publication import digest
from jaxrl_llm.runtime.checkpoint import Checkpoints
from jaxrl_llm.weights.hf import load_params, read_spec


def critic_model(model: Model) -> Model:
  """Builds the critic of PPO: the policy's architecture with one output per token and without
  adapters.
  """
  return build_model(
    with_head(model.spec, 'value'), dataclasses.replace(model.options, lora=None), model.mesh
  )


def begin_stage(
  stage: Stage, config: Config, state: LoopState, mesh: Mesh, critic: Model
) -> LoopState:
  """Returns the state with which a stage begins: the previous policy, copied as the reference if
  the algorithm needs one.

  The optimizer state is new. If the stage sets `keep_optimizer`, it contains the moments of the
  previous stage's optimizer.
  """
  params, before = state.learned.policy.params, state.learned.policy.opt_state
  reads, rule = 'reference' in stage.algorithm.reads, stage.algorithm.reference
  reference = copy_params(params) if reads and rule.every != 1 else None
  learned = Learned(
    policy=init_state(params, stage.policy.optimizer, mesh, offload=stage.policy.config.offload),
    critic=_begin_critic(stage, config, state.learned, mesh, critic)
    if stage.algorithm.critic_loss is not None
    else None,
    reference=reference,
    reference_step=state.step,
    base=state.learned.base,
  )
  if before is not None and stage.keep_optimizer:
    # Keep the moments, but restart the learning-rate schedule for this stage.
    kept = with_schedule(before, learned.policy.opt_state)
    learned = learned._replace(policy=learned.policy.replace(opt_state=kept))
  return dataclasses.replace(state, learned=learned)


def _begin_critic(
  stage: Stage, config: Config, before: Learned, mesh: Mesh, critic: Model
) -> TrainState:
  """Returns the critic with which a stage begins. Its parameters are those of the configured model,
  or else of the previous stage's critic, or else those of the policy with a new head.
  """
  source = next(s for s in config.stages if s.name == stage.name).critic.init_from
  offload = stage.critic.config.offload
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
    host = load_params(
      directory, spec, scan_layers=config.policy.scan_layers, dtype=config.policy.param_dtype
    )
    params = place_params(critic, mesh, host)
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
  host = load_params(
    directory, spec, scan_layers=config.policy.scan_layers, dtype=config.policy.param_dtype
  )
  if spec.head != model.spec.head:
    kernel = fresh_head(model.spec, jax.random.key(config.seed), dtype=config.policy.param_dtype)
    host = replace_head(host, model.spec, np.asarray(kernel))
  placed = place_params(model, mesh, host)
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
  """Returns a digest of the names and values of the base parameters. Every process must call it."""
  hasher = xxhash.xxh3_128()
  for name, array in Gatherer(mesh).leaves(base):
    hasher.update(f'{name} {array.dtype} {array.shape} {digest(array)}\n'.encode())
  return hasher.hexdigest()


def check_base(digest: str | None, committed: Mapping[str, Any], config: Config) -> None:
  """Raises UserError if the base weights are not those on which the committed adapters were
  trained.
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
  """Restores the state committed at `step`, which is a step of `stage`, without the frozen base."""
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
  """Returns the shapes and shardings of the arrays in a commit of a stage, keyed by role."""
  algorithm = stage.algorithm
  like = {
    'train': abstract_state(
      model, stage.policy.optimizer, mesh, offload=stage.policy.config.offload
    )
  }
  if 'reference' in algorithm.reads and algorithm.reference.every != 1:
    like['reference'] = like['train'].params
  if algorithm.critic_loss is not None:
    critic, offload = critic_model(model), stage.critic.config.offload
    like['critic'] = abstract_state(critic, stage.critic.optimizer, mesh, offload=offload)
  return like
