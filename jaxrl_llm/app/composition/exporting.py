"""Exports of trained models as Hugging Face directories, which all processes of the trainer write
together: each writes files with a share of the tensors, and process 0 writes everything else.

Invariant: the weights files get their final names after all processes have written theirs, so an
export that fails, or whose processes are killed, leaves no directory that looks complete. All
processes raise an error if one of them cannot write.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrl_llm.app.composition.initial_weights import base_of, checkpoint_directory
from jaxrl_llm.app.composition.prepare import Prepared
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.workdir import TOKENIZER
from jaxrl_llm.config.values import from_json, to_json
from jaxrl_llm.core.disk import TOKEN, is_seen, mark
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.types import Json, Params
from jaxrl_llm.learner.state import Learned
from jaxrl_llm.master.process import Process
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.weights.hf import describe
from jaxrl_llm.weights.peft import export_adapter
from jaxrl_llm.weights.safetensors_files import (
  FilePlan,
  discard_files,
  plan_files,
  reveal_files,
  unfinished_file,
  write_files,
  writing,
)
from jaxrl_llm.weights.shares import parameters_of
from jaxrl_llm.weights.versions import ExportedWeights, FileDigest, digest_of_file


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelExport:
  """A model to export, and the directory of the export."""

  directory: pathlib.Path
  gatherer: Gatherer
  """Gatherer that copies the parameters to the hosts."""
  params: Params
  spec: ModelSpec
  dtype: str
  """Hugging Face name of the data type of the weights in the files."""


async def export_models(
  setup: Setup, prepared: Prepared | None, learned: Learned
) -> dict[str, pathlib.Path]:
  """Exports the models that a finished run has trained. Every process must call this function.

  Args:
    prepared: prepared data in process 0; None in the other processes.

  Returns:
    The written directories, keyed by 'policy', 'critic' or 'adapter'.

  Raises:
    RunError: a model cannot be written, in all processes.
  """
  config, path, process, spec = setup.config, setup.workdir, setup.process, setup.model.spec
  gatherer, dtype = Gatherer(process.mesh), config.policy.param_dtype
  models = {
    'policy': ModelExport(
      directory=path / 'hf',
      gatherer=Gatherer(process.mesh, config.policy.lora),
      params=learned.whole(learned.policy.params),
      spec=spec,
      dtype=dtype,
    )
  }
  if learned.critic is not None:
    models['critic'] = ModelExport(
      directory=path / 'critic',
      gatherer=gatherer,
      params=learned.critic.params,
      spec=with_head(spec, 'value'),
      dtype=dtype,
    )
  for model in models.values():
    description = None
    if prepared is not None:
      description = functools.partial(
        describe,
        model.directory,
        model.spec,
        dtype=dtype,
        tokenizer_dir=checkpoint_directory(config) or path / TOKENIZER,
        eos_ids=prepared.tokenizer.stop_ids,
        pad_id=prepared.tokenizer.pad_id,
      )
    await export_together(process, model, description, digests=False)
  written = {part: model.directory for part, model in models.items()}
  if config.policy.lora is not None:
    written['adapter'] = path / 'adapter'
    write = functools.partial(
      export_adapter, written['adapter'], spec=spec, lora=config.policy.lora, base=base_of(config)
    )
    await export_alone(process, gatherer, learned.policy.params, write)
  return written


async def export_alone(
  process: Process,
  gatherer: Gatherer,
  params: Params,
  write: Callable[[Iterator[tuple[str, np.ndarray]]], None],
) -> None:
  """Lets process 0 write parameters while it gathers them. Every process must call this function.

  Args:
    write: writes parameters, given as pairs of (name in the tree, array).

  Raises:
    RunError: process 0 cannot write the parameters. All processes raise this error, with the same
      message.
  """

  def lead() -> str:
    leaves = gatherer.leaves(params)
    try:
      write(leaves)
    except (RunError, UserError) as error:
      for _ in leaves:  # Gathering needs all processes, so this one takes part until the end.
        pass
      return str(error)
    return ''

  leads = process.coordinator.leads
  error = await process.device.run(*((lead,) if leads else (gatherer.take_part, params)))
  if reason := (await process.coordinator.gather(error))[0]:
    raise RunError(reason)


async def export_together(
  process: Process,
  model: ModelExport,
  describe: Callable[[], None] | None,
  *,
  digests: bool,
  complete: Callable[[ExportedWeights], None] | None = None,
) -> ExportedWeights | None:
  """Exports a model. Every process must call this function.

  If a process does not see the directory of process 0, process 0 writes all files.

  Args:
    describe: function that creates the directory and writes all files except the weights. Process 0
      passes it; the other processes pass None.
    digests: whether to compute digests of the files, in addition to digests of the tensors.
    complete: last step of the export in process 0, given the digests of the weights, after their
      files have their final names; None for none, and in the other processes.

  Returns:
    Digests of the weights in process 0; None in the other processes. Without `digests`, the field
    `files` of the result is empty.

  Raises:
    UserError: the parameters do not match the model, or `describe` has raised this error.
    RunError: a file cannot be written or renamed, or `complete` has failed. All processes raise
      this error, with the same message.
    PeerFailed: `describe` has failed in process 0, or a process is gone.
  """
  coordinator = process.coordinator

  async def begin() -> Json:
    return await asyncio.to_thread(_begin, model.directory, describe)

  token = await coordinator.broadcast(begin() if coordinator.leads else None)
  sees = await asyncio.to_thread(is_seen, model.directory, token)
  writers = jax.process_count() if all(await coordinator.gather(sees)) else 1
  plan = plan_files(model.spec, dtype=model.dtype, writers=writers)
  report = await process.device.run(_write, model, plan, digests)
  reports = [report for report in await coordinator.gather(report) if report is not None]
  errors = [
    f'process {number} could not write its share: {report["error"]}'
    for number, report in enumerate(reports)
    if 'error' in report
  ]

  def end() -> str:
    try:
      _end(model.directory, plan, revealed=not errors)
      if complete is not None and not errors:
        with writing(model.directory):
          complete(_joined(reports))
    except RunError as error:
      return str(error)
    return ''

  failure = await coordinator.broadcast(asyncio.to_thread(end) if coordinator.leads else None)
  if errors:
    raise RunError(f'{model.directory}: the model was not exported: {"; ".join(errors)}')
  if failure:
    raise RunError(failure)
  return _joined(reports) if coordinator.leads else None


def _begin(directory: pathlib.Path, describe: Callable[[], None]) -> str:
  """Creates the directory, and marks it with a token. By the token, the other processes check
  whether they see the same directory. Returns the token; '' if there is only one process.
  """
  describe()
  with writing(directory):
    return mark(directory) if jax.process_count() > 1 else ''


def _write(model: ModelExport, plan: FilePlan, digests: bool) -> Json:
  """Writes the files of this process. Returns digests or, if the files cannot be written, the
  error; None if this process has no files because process 0 writes alone.
  """
  number, writers = jax.process_index(), len(plan.writers)
  if number >= writers:
    model.gatherer.take_part(model.params)
    return None
  leaves: Iterator[tuple[str, np.ndarray]] = model.gatherer.leaves(model.params)
  if writers > 1:
    names = [parameters_of(model.spec, each, writers) for each in range(writers)]
    leaves = model.gatherer.share(model.params, names, number)
  try:
    tensors = write_files(model.directory, plan, leaves, number)
    files: dict[str, Any] = {}
    if digests:
      with writing(model.directory):
        for name in plan.writers[number]:
          files[name] = to_json(digest_of_file(unfinished_file(model.directory, name)))
  except (RunError, UserError) as error:
    if jax.process_count() == 1:
      raise
    for _ in leaves:  # Gathering needs all processes, so this one takes part until the end.
      pass
    return {'error': str(error)}
  return {'tensors': tensors, 'files': files}


def _end(directory: pathlib.Path, plan: FilePlan, *, revealed: bool) -> None:
  """Gives the written files their final names if `revealed`; otherwise, removes them."""
  with writing(directory):
    (directory / TOKEN).unlink(missing_ok=True)
    if not revealed:
      discard_files(directory, plan)
  if revealed:
    reveal_files(directory, plan)


def _joined(reports: list[Any]) -> ExportedWeights:
  return ExportedWeights(
    tensors={name: digest for report in reports for name, digest in report['tensors'].items()},
    files={
      name: from_json(value, FileDigest, name)
      for report in reports
      for name, value in report['files'].items()
    },
  )
