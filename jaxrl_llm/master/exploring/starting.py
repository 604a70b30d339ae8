"""Start of a stage's groups: builds the gate and the scheduler that the configuration needs."""

from __future__ import annotations

from typing import NamedTuple

from jaxrl_llm.master.exploring.awaiting import Awaiting
from jaxrl_llm.master.exploring.batch_policy import batches_ahead
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.gate import Gate
from jaxrl_llm.master.exploring.scheduling import Immediate, Rounds, Scheduler, ScoringRounds
from jaxrl_llm.master.exploring.started import StartedGroups
from jaxrl_llm.master.exploring.waves import Waves
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.rewards.pool.pool import ScorerPool


class Starting(NamedTuple):
  """Parts that decide when a stage's groups start."""

  gate: Gate
  scheduler: Scheduler
  awaiting: Awaiting | None
  """Groups that wait for delayed rewards; None if the run has no delayed scorer."""
  rounds: ScoringRounds | None
  """Rounds of the trainer's reward model; None if the run has none."""
  waves: Waves | None
  """The scheduler if groups start in waves, otherwise None."""


def build_starting(
  config: ExplorerConfig, scorers: ScorerPool, groups: StartedGroups, store: ReplayStore
) -> Starting:
  """Builds the gate and the scheduler of a stage.

  Args:
    groups: the started groups of the stage.
  """
  gate = _build_gate(config)
  scheduler: Scheduler = Immediate()
  awaiting = rounds = waves = None
  if scorers.delayed:
    scheduler = awaiting = Awaiting(
      groups, scorers, store, newest=lambda: config.first_step + gate.last_batch
    )
  if scorers.by_trainer & {scorer.name for scorer in scorers.config.scorers}:
    scheduler = rounds = ScoringRounds(groups, groups_per_batch=config.groups_per_batch)
  if config.partial is not None:
    most = config.partial.max_groups(config.groups_per_batch, config.bound)
    if config.bound:
      scheduler = Rounds(groups, max_groups=most)
    else:
      scheduler = waves = Waves(groups, groups_per_batch=config.groups_per_batch, max_groups=most)
  return Starting(gate, scheduler, awaiting, rounds, waves)


def _build_gate(config: ExplorerConfig) -> Gate:
  spare = 0
  if config.partial is not None and not config.bound:
    spare = config.partial.max_groups(config.groups_per_batch, 0) - config.groups_per_batch
  return Gate(
    bound=config.bound,
    ahead=batches_ahead(config.batch_policy, config.bound),
    groups_per_batch=config.groups_per_batch,
    batches=config.batches,
    spare=spare,
  )
