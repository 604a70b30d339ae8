"""From a configuration to the parts of a run: the only place that names implementations."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxrl_llm.app.engines import build_engine, needs_proof
from jaxrl_llm.app.prepare import Prepared, checkpoint_directory, demonstrations_file
from jaxrl_llm.app.schema import AlgorithmConfig, Config, StageConfig
from jaxrl_llm.batching.plan import plan_shape
from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Params
from jaxrl_llm.data.load import RowLoader
from jaxrl_llm.data.streams import RowStream
from jaxrl_llm.learner.algorithm import Algorithm, GrpoConfig, SftConfig, grpo, sft
from jaxrl_llm.learner.optimizer import build_optimizer
from jaxrl_llm.learner.state import abstract_state, copy_params, init_params, init_state, place_params
from jaxrl_llm.master.evaluation import Evaluator
from jaxrl_llm.master.explorer import Explorer, ExplorerConfig
from jaxrl_llm.master.gate import Gate
from jaxrl_llm.master.keeper import Logs, RunKeeper
from jaxrl_llm.master.loop import LoopState, Parts
from jaxrl_llm.master.stage import Batches, Planner, RolloutBatches, StreamBatches
from jaxrl_llm.master.trainer import Stage, StageTrainer
from jaxrl_llm.models.api import Model
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.ops.logprobs import plan_token_chunk
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import build_mesh, data_parallel_ranks
from jaxrl_llm.replay.index import ReplayStore, open_store
from jaxrl_llm.rewards.answer import answer_scorer
from jaxrl_llm.rewards.api import Scorer
from jaxrl_llm.rewards.format import format_scorer
from jaxrl_llm.rewards.pool import ScorerPool
from jaxrl_llm.rewards.verifier import verifier_scorer
from jaxrl_llm.rollout.api import Engine
from jaxrl_llm.rollout.replica import SPECULATION
from jaxrl_llm.rollout.workflow import SingleTurn
from jaxrl_llm.runtime.checkpoint import Checkpoints
from jaxrl_llm.runtime.machine import CompilationCounter, Heartbeat
from jaxrl_llm.runtime.phases import PhaseManager
from jaxrl_llm.runtime.progress import ProgressDisplay
from jaxrl_llm.runtime.writers import EvalsWriter, MetricsWriter, RolloutsWriter
from jaxrl_llm.sync.full import Gatherer, Publisher
from jaxrl_llm.sync.probe import Prober
from jaxrl_llm.tasks.sampler import TaskSampler
from jaxrl_llm.weights.hf import load_params

ALGORITHMS: Mapping[str, tuple[type, Callable[[Any], Algorithm]]] = {
  'sft': (SftConfig, sft),
  'grpo': (GrpoConfig, grpo),
}
SCORERS: Mapping[str, Callable[..., Scorer]] = {
  'answer': answer_scorer,
  'format': format_scorer,
  'verifier': verifier_scorer,
}
OFFLINE = frozenset({'sft'})
"""Algorithms that learn from demonstrations instead of rollouts."""


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
  if config.name not in ALGORITHMS:
    raise UserError(f'algorithm {config.name!r}: unknown; {nearest(config.name, ALGORITHMS)}')
  options, make = ALGORITHMS[config.name]
  return make(from_json(dict(config.options), options, f'options of algorithm {config.name}'))


def build_scorers(config: Config) -> dict[str, Scorer]:
  scorers = {}
  for scorer in config.rewards.scorers:
    if scorer.implementation not in SCORERS:
      raise UserError(
        f'rewards.scorers: no scorer {scorer.implementation!r}; {nearest(scorer.implementation, SCORERS)}'
      )
    scorers[scorer.name] = SCORERS[scorer.implementation](**scorer.options)
  return scorers


def build_stages(config: Config, mesh: Mesh, vocab_size: int) -> tuple[Stage, ...]:
  """The stages with their derived numbers."""
  stages, start = [], 0
  for stage in config.stages:
    stages.append(_stage(stage, config, mesh, start, vocab_size))
    start += stage.steps
  return tuple(stages)


def _stage(stage: StageConfig, config: Config, mesh: Mesh, start: int, vocab_size: int) -> Stage:
  optimizer = stage.optimizer or config.learner.optimizer
  where = f'stages.{stage.name}'
  if optimizer is None:
    raise UserError(f'{where}.optimizer: missing, and learner.optimizer too; give one with its peak_lr')
  explores = stage.algorithm.name not in OFFLINE
  if not explores and stage.demonstrations is None:
    raise UserError(f'{where}.demonstrations: {stage.algorithm.name} learns from demonstrations; say how to write them')
  if explores and config.rollout.engine == 'vllm' and config.rollout.vllm.speculative:
    raise UserError(f'rollout.vllm.args.speculative_config: stage {stage.name} samples rollouts; {SPECULATION}')
  if explores and stage.temperature <= 0:
    raise UserError(f'{where}.temperature: {stage.temperature} is not above 0: training needs samples to differ')
  rows = stage.groups_per_batch * stage.group_size if explores else stage.sequences_per_batch
  if rows % stage.minibatches:
    raise UserError(
      f'{where}.minibatches: {rows} sequences cannot be dealt evenly into {stage.minibatches} minibatches'
    )
  longest = config.rollout.max_prompt_length + config.rollout.max_response_length
  chunk_len = config.learner.chunk_len or -(-longest // 8) * 8
  if chunk_len < longest:
    raise UserError(
      f'learner.chunk_len: {chunk_len} tokens are too few for max_prompt_length + max_response_length = {longest}'
    )
  chunks = config.learner.chunks_per_rank
  updates = stage.steps * stage.minibatches * stage.epochs
  return Stage(
    name=stage.name,
    start=start,
    end=start + stage.steps,
    algorithm=build_algorithm(stage.algorithm),
    optimizer=build_optimizer(optimizer, updates),
    optimizer_config=optimizer,
    keep_optimizer=stage.keep_optimizer,
    shape=plan_shape(
      rows=rows // stage.minibatches, ranks=data_parallel_ranks(mesh), chunks=chunks, chunk_len=chunk_len
    ),
    token_chunk=plan_token_chunk(
      chunks=chunks, time=chunk_len, vocab=vocab_size, budget_bytes=config.learner.logits_budget_bytes
    ),
    minibatches=stage.minibatches,
    epochs=stage.epochs,
    evaluate_every=stage.evaluate_every,
    explores=explores,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
  """What process 0 has beside the loop's parts; `open_host` makes it, `close` ends it."""

  store: ReplayStore
  engine: Engine
  scorers: ScorerPool
  logs: Logs
  heartbeat: Heartbeat

  async def start(self) -> None:
    async with asyncio.TaskGroup() as starts:
      starts.create_task(self.scorers.start())
      starts.create_task(self.engine.start())

  async def close(self) -> None:
    """Ends all of it, also where `start` failed half-way."""
    try:
      await self.engine.close()
    finally:
      await self.scorers.close()
      self.logs.metrics.close()
      self.store.close()


def policy_options(config: Config) -> ModelOptions:
  policy = config.policy
  return ModelOptions(
    scan_layers=policy.scan_layers, remat=policy.remat, dtype=policy.dtype, param_dtype=policy.param_dtype
  )


def open_host(
  config: Config, workdir: pathlib.Path, prepared: Prepared, stages: tuple[Stage, ...], device: DeviceThread, host: Any
) -> Host:
  """Opens what process 0 writes to and rolls out with, as the commit `host` (None: no commit) left it."""
  step = host['step'] if host else 0
  store = open_store(workdir / 'replay', synchronous='normal')
  store.recover(step)
  engine = build_engine(config, workdir, prepared, device)
  scorers = ScorerPool(build_scorers(config), config.rewards)
  workflow = SingleTurn(engine, prepared.tokenizer, max_tokens=config.rollout.max_response_length)
  compilations, heartbeat = CompilationCounter(), Heartbeat()

  def machine_metrics() -> dict[str, float]:
    return {
      'perf/compilations': compilations.take(),
      'perf/heartbeat_max_s': heartbeat.take(),
      'run/clock_decisions': scorers.counts['timeout'],
      **engine.take_metrics(),
    }

  metrics = MetricsWriter(workdir, committed=host['metrics_offset'] if host else 0)
  rollouts, evals = RolloutsWriter(workdir), EvalsWriter(workdir)
  committed = {stage.name: min(step, stage.end) for stage in stages if host and stage.start < step}
  rollouts.discard_later(committed)
  evals.discard_later(committed)
  logs = Logs(
    metrics=metrics,
    rollouts=rollouts,
    evals=evals,
    progress=ProgressDisplay({stage.name: stage.end - stage.start for stage in stages}),
    store=store,
    batches={
      stage.name: _batches(config, stage_config, stage, workdir, prepared, store, scorers, workflow)
      for stage_config, stage in zip(config.stages, stages, strict=True)
      if stage.end > step
    },
    evaluator=Evaluator(workflow=workflow, scorers=scorers, rewards=config.rewards),
    suites=prepared.suites,
    token_text=prepared.tokenizer.token_text,
    machine_metrics=machine_metrics,
    mismatch=config.rollout.mismatch,
  )
  if host and host['stage'] in logs.batches:
    logs.batches[host['stage']].restore(host['batches'])
  return Host(store=store, engine=engine, scorers=scorers, logs=logs, heartbeat=heartbeat)


def _batches(
  config: Config,
  stage_config: StageConfig,
  stage: Stage,
  workdir: pathlib.Path,
  prepared: Prepared,
  store: ReplayStore,
  scorers: ScorerPool,
  workflow: SingleTurn,
) -> Batches:
  if not stage.explores:
    file = demonstrations_file(stage.name)
    return StreamBatches(RowStream(workdir, file, rows=stage_config.sequences_per_batch, seed=config.seed))
  tasksets = [prepared.tasksets[name] for name in stage_config.tasksets]
  sampler = TaskSampler(tasksets, order=stage_config.order, seed=config.seed)
  gate = Gate(bound=0, groups_per_batch=stage_config.groups_per_batch)
  explorer = Explorer(
    ExplorerConfig(
      groups_per_batch=stage_config.groups_per_batch,
      group_size=stage_config.group_size,
      temperature=stage_config.temperature,
      max_dropped_groups=stage_config.max_dropped_groups,
      collect_deadline_s=config.rollout.collect_deadline_s,
    ),
    stage=stage.name,
    workflow=workflow,
    sampler=sampler,
    scorers=scorers,
    rewards=config.rewards,
    store=store,
    gate=gate,
  )
  return RolloutBatches(explorer, store, sampler, gate)


def build_parts(
  config: Config,
  workdir: pathlib.Path,
  *,
  model: Model,
  mesh: Mesh,
  stages: tuple[Stage, ...],
  coordinator: Coordinator,
  device: DeviceThread,
  checkpoints: Checkpoints,
  stop: asyncio.Future,
  host: Host | None,
  attempt: int,
  best: tuple[float, int] | None,
) -> Parts:
  """The loop's parts; `host` is process 0's and None elsewhere."""
  phases = PhaseManager()
  longest = config.rollout.max_prompt_length + config.rollout.max_response_length
  prober = Prober(model, mesh, max_length=longest) if needs_proof(config) else None
  publisher = Publisher(host.engine if host else None, Gatherer(mesh), device, prober=prober)
  loader = RowLoader(workdir, mesh)

  async def enter_stage(stage: Stage, state: LoopState) -> tuple[StageTrainer, LoopState]:
    if state.step == stage.start:
      state = await device.run(_begin_stage, stage, state, mesh)
    trainer = StageTrainer(
      stage,
      model=model,
      mesh=mesh,
      loader=loader,
      device=device,
      phases=phases,
      state=state.train,
      reference=state.reference,
    )
    return trainer, state

  return Parts(
    stages=stages,
    coordinator=coordinator,
    phases=phases,
    publisher=publisher,
    keeper=RunKeeper(
      coordinator=coordinator,
      device=device,
      phases=phases,
      publisher=publisher,
      checkpoints=checkpoints,
      attempt=attempt,
      stop=stop,
      logs=host.logs if host else None,
      best=best,
    ),
    enter_stage=enter_stage,
    planner=Planner(
      seed=config.seed,
      every_steps=config.checkpoint.every_steps,
      every_minutes=config.checkpoint.every_minutes,
      stop=stop,
    ),
    batches=dict(host.logs.batches) if host else {},
    attempt=attempt,
  )


def _begin_stage(stage: Stage, state: LoopState, mesh: Mesh) -> LoopState:
  """A stage starts from the policy before it, which is its reference; its optimizer is fresh, or keeps its moments."""
  before = state.train.opt_state
  reference = copy_params(state.train.params) if 'reference' in stage.algorithm.reads else None
  train = init_state(state.train.params, stage.optimizer, mesh)
  if before is not None and stage.keep_optimizer:
    # The moments go on; the schedule is this stage's own, from its beginning.
    of_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)
    choose = lambda old, new: new if of_schedule(new) else old
    train = train.replace(opt_state=jax.tree.map(choose, before, train.opt_state, is_leaf=of_schedule))
  return dataclasses.replace(state, train=train, reference=reference)


def initial_params(config: Config, model: Model, mesh: Mesh) -> Params:
  """The policy before the first stage."""
  directory = checkpoint_directory(config)
  if directory is None:
    return init_params(model, mesh, seed=config.seed)
  host = load_params(directory, model.spec, scan_layers=config.policy.scan_layers, dtype=config.policy.param_dtype)
  return place_params(model, mesh, host)


def restore_state(stage: Stage, step: int, checkpoints: Checkpoints, model: Model, mesh: Mesh) -> LoopState:
  """The state that was committed at `step`, inside or at the end of `stage`."""
  like = {'train': abstract_state(model, stage.optimizer, mesh)}
  if 'reference' in stage.algorithm.reads:
    like['reference'] = like['train'].params
  arrays = checkpoints.restore(step, like)
  evaluated = checkpoints.host(step)['evaluated']
  return LoopState(arrays['train'], step, arrays.get('reference'), evaluated=evaluated)


def mesh_of(config: Config) -> Mesh:
  return build_mesh(config.learner.mesh, jax.devices())
