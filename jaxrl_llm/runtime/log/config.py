"""Configuration of the log writers, which copy a run's metrics to other places."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.extras import check_library
from jaxrl_llm.runtime.log.api import LogRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbConfig:
  """Log writer for Weights & Biases. By default, project, entity and mode come from W&B's
  environment variables.
  """

  project: str | None = None
  """Project of the run. If None, WANDB_PROJECT from the environment is used if it is set, otherwise
  'jaxrl_llm'.
  """
  entity: str | None = None
  """User or team that owns the project. If None, WANDB_ENTITY from the environment is used if it is
  set, otherwise the account's default.
  """
  group: str | None = None
  """Group, within the project, to which this run belongs. If None, the run belongs to no group."""
  tags: tuple[str, ...] = ()
  notes: str | None = None
  mode: Literal['online', 'offline'] | None = None
  """Mode of W&B: 'online' uploads rows during the run; 'offline' writes files that `wandb sync`
  uploads later. If None, WANDB_MODE from the environment is used if it is set, otherwise 'online'.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogWriterConfig:
  """A custom log writer."""

  kind: str
  """Function that builds the writer, as 'module:attribute'. It takes a `LogRun` and the options."""
  name: str | None = None
  """Name of the writer in messages, metrics and files. If None, it is the attribute in `kind`."""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Keyword arguments with which the function `kind` is called."""

  @property
  def label(self) -> str:
    """Name of the writer in messages, metrics and files."""
    return self.name or self.kind.rpartition(':')[2]

  def __post_init__(self):
    if ':' not in self.kind:
      raise UserError(
        f"logging.writers: kind {self.kind!r}, wanted 'module:attribute' (to turn on TensorBoard "
        'or W&B, set logging.tensorboard or logging.wandb)'
      )
    if not re.fullmatch(r'\w[\w.-]*', self.label):
      raise UserError(
        f'logging.writers: the name {self.label!r} is also the name of a directory: use only '
        'letters, digits and . _ -, starting with a letter'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
  """Log writers, which copy the rows of metrics.jsonl to other places."""

  tensorboard: bool = True
  """Whether event files for TensorBoard are written to `tensorboard/` in the run directory."""
  wandb: WandbConfig | None = None
  """Settings of the log writer for Weights & Biases; `{}` turns the writer on with the default
  settings. If None, the writer is off.
  """
  writers: tuple[LogWriterConfig, ...] = ()
  """Custom log writers. Each runs in a separate process."""
  transcript_tokens: int | None = 100_000
  """Maximum number of response tokens per step for which all samples are written to `rollouts/`. If
  a step has more, only some groups are written, chosen by a hash of their names: at least one
  group, and further groups as long as their tokens together do not exceed this number. 0 turns
  transcripts off. If None, all samples are written.
  """
  event_bytes: int = 256_000_000
  """Approximate maximum size in bytes of `events.jsonl` and `events.1.jsonl` together. When the
  files would become larger, the oldest messages are deleted.
  """
  peak_tflops: float | None = None
  """Peak speed of one device in 10¹² operations per second. `perf/mfu/<role>` is the achieved share
  of this speed. If None, the data sheet's dense bfloat16 figure is used for TPUs v4 to v6e, H100
  and H200, and runs on other devices do not write these metrics.
  """
  profile_steps: tuple[int, ...] = ()
  """Steps that every process traces with `jax.profiler`, counted from 1 over the whole run, at most
  20. The traces are written to `profile/step_N/process_P/` in the run directory. They open in
  Perfetto, XProf and TensorBoard.
  """
  close_s: float = 60.0
  """Maximum seconds for which the run, at its end, waits for W&B and custom writers."""

  def __post_init__(self):
    names = [writer.label for writer in self.apart()]
    for name in names:
      if names.count(name) > 1:
        raise UserError(
          f'logging.writers: {names.count(name)} are called {name!r}; give each its own name'
        )
    if self.close_s <= 0:
      raise UserError(f'logging.close_s: {self.close_s}, wanted a number of seconds above 0')
    if self.event_bytes < 1_000_000:
      raise UserError(f'logging.event_bytes: got {self.event_bytes}, wanted at least 1,000,000')
    if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
      raise UserError(
        f'logging.peak_tflops: got {self.peak_tflops}, wanted a positive number of 10¹² operations '
        'per second, or None'
      )
    if len(self.profile_steps) > 20 or any(step < 1 for step in self.profile_steps):
      raise UserError(
        f'logging.profile_steps: got {self.profile_steps}, wanted at most 20 steps, counted from 1'
      )
    if self.transcript_tokens is not None and self.transcript_tokens < 0:
      raise UserError(
        f'logging.transcript_tokens: got {self.transcript_tokens}, wanted at least 0 (off), or '
        'None for all samples'
      )

  def apart(self) -> Iterator[LogWriterConfig]:
    """Yields the configurations of the writers that run in separate processes."""
    if self.wandb is not None:
      options = {**dataclasses.asdict(self.wandb), 'tags': list(self.wandb.tags)}
      yield LogWriterConfig(
        kind='jaxrl_llm.runtime.log.wandb_writer:WandbWriter', name='wandb', options=options
      )
    yield from self.writers

  def check(self) -> None:
    """Raises UserError if a required package is not installed, or if a custom writer cannot be
    built from its options.
    """
    if self.wandb is not None:
      check_library('wandb', 'logging.wandb')
    for writer in self.writers:
      make = own_part(writer.kind, 'log writer')
      run = LogRun(name='', workdir=pathlib.Path(), directory=pathlib.Path(), config={})
      try:
        inspect.signature(make).bind(run, **writer.options)
      except TypeError as error:
        raise UserError(
          f'logging.writers: {writer.kind!r} cannot be called with a run and the options '
          f'{sorted(writer.options)} ({error})'
        ) from None
