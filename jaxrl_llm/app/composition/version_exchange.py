"""Exchanges versions of the weights between two runs, one of which explores while the other trains.

The training run exports its policy to `versions/` in its run directory. The exploring run takes the
newest version there, and records in its store's directory from which version the weights of each
attempt were taken.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
from collections.abc import Awaitable, Callable
from typing import Any

from absl import logging

from jaxrl_llm.app.composition.exporting import ModelExport, export_together
from jaxrl_llm.app.composition.initial_weights import checkpoint_directory
from jaxrl_llm.app.composition.prepare import Prepared
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.workdir import TOKENIZER
from jaxrl_llm.app.sources import FollowConfig
from jaxrl_llm.config.values import from_json, to_json
from jaxrl_llm.core.disk import write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_json, read_bytes
from jaxrl_llm.core.types import Json, Version
from jaxrl_llm.core.waits import bounded, unless
from jaxrl_llm.learner.loading import read_params
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.master.loop import LoopState
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.replay.shared import SHARED, SharedVersion
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.weights import versions
from jaxrl_llm.weights.hf import describe, read_spec

POLL_S = 0.5
"""Seconds between two checks for a new version."""
_MAX_BYTES = 1 << 16


class FollowedVersions:
  """Records of the exported versions from which this run took its weights. Each attempt of this run
  has one file.
  """

  def __init__(self, store: pathlib.Path):
    """
    Args:
      store: directory of this run's store.
    """
    self._folder = store / SHARED
    self._known: dict[int, SharedVersion | None] = {}
    self._before = self._count()

  def record(self, attempt: int, version: SharedVersion) -> None:
    """Records the exported version from which the weights of an attempt are taken."""
    self._folder.mkdir(parents=True, exist_ok=True)
    write_durably(self._file(attempt), json.dumps(to_json(version)))

  def of(self, attempt: int) -> SharedVersion | None:
    """Returns the exported version from which the weights of an attempt were taken; None if no
    version was recorded for the attempt.
    """
    if attempt not in self._known:
      path = self._file(attempt)
      self._known[attempt] = (
        from_json(parse_json(read_bytes(path, _MAX_BYTES).decode()), SharedVersion, str(path))
        if path.exists()
        else None
      )
    return self._known[attempt]

  def taken(self) -> int:
    """Returns the number of versions recorded since this object was created."""
    return self._count() - self._before

  def _count(self) -> int:
    return sum(1 for _ in self._folder.glob('version-*.json'))

  def _file(self, attempt: int) -> pathlib.Path:
    return self._folder / f'version-{attempt:06d}.json'


class VersionExchange:
  """Implements `master.loop.Versions`: exports versions of the policy, or takes versions that
  another run exports.
  """

  def __init__(
    self,
    setup: Setup,
    *,
    prepared: Prepared | None,
    run: str | None,
    stop: asyncio.Future,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
  ):
    """
    Args:
      prepared: prepared data in process 0; None in the other processes.
      run: name of this run's store in process 0; None in the other processes.
      stop: future that resolves to the number of the signal that stops the run.
      sleep: function that waits for a number of seconds; called between two checks for a new
        version.
    """
    self._setup, self._prepared, self._run, self._stop = setup, prepared, run, stop
    self._sleep = sleep
    self._exported = False
    self._taken: tuple[Version, int] | None = None
    """Newest version that this run has taken, and the step at which it was taken."""
    self._refused = ''

  async def export(self, stage: Stage, state: LoopState) -> None:
    if self._exported and (state.step - stage.start) % stage.export_every:
      return
    setup, learned = self._setup, state.learned
    version = Version(state.attempt, state.step)
    folder = setup.workdir / versions.VERSIONS
    model = ModelExport(
      directory=versions.unfinished_directory(folder, version),
      gatherer=Gatherer(setup.process.mesh, setup.config.policy.lora),
      params=learned.whole(learned.policy.params),
      spec=setup.model.spec,
      dtype=setup.config.policy.param_dtype,
    )
    source = next(s.source for s in setup.config.stages if s.name == stage.name)

    def complete(weights: versions.ExportedWeights) -> None:
      versions.complete(model.directory, version, weights, run=self._run, keep=source.keep_versions)

    leads = self._prepared is not None
    await export_together(
      setup.process,
      model,
      (lambda: self._describe(model, version)) if leads else None,
      digests=True,
      complete=complete if leads else None,
    )
    self._exported = True

  def _describe(self, model: ModelExport, version: Version) -> None:
    """Creates the directory of an export, with everything but the weights."""
    setup, folder, tokenizer = self._setup, model.directory.parent, self._prepared.tokenizer
    if not self._exported:
      versions.withdraw_later(folder, version.step)
    versions.begin(folder, version)
    describe(
      model.directory,
      model.spec,
      dtype=model.dtype,
      tokenizer_dir=checkpoint_directory(setup.config) or setup.workdir / TOKENIZER,
      eos_ids=tokenizer.stop_ids,
      pad_id=tokenizer.pad_id,
    )

  async def follow(self, stage: Stage, state: LoopState) -> LoopState:
    coordinator, process = self._setup.process.coordinator, self._setup.process
    source = next(s.source for s in self._setup.config.stages if s.name == stage.name)
    decision: Any = await coordinator.broadcast(
      self._decide(source.follow, state.step) if coordinator.leads else None
    )
    if decision['stop']:
      return dataclasses.replace(state, stop=decision['stop'])
    if decision['directory'] is None:
      return state
    params = await process.device.run(self._load, pathlib.Path(decision['directory']))
    before = state.learned.policy
    policy = TrainState(
      params=params, opt_state=before.opt_state, updates=before.updates, skipped=before.skipped
    )
    learned = state.learned._replace(policy=policy)
    return dataclasses.replace(state, learned=learned, attempt=decision['attempt'], moved=0)

  def _load(self, directory: pathlib.Path):
    model = self._setup.model
    return read_params(model, self._setup.process.mesh, directory, read_spec(directory))

  async def _decide(self, follow: FollowConfig, step: int) -> Json:
    """Decides, in process 0, whether to take a new version, and which one. Waits for a version if
    the current one may not be used for another batch. Records the chosen version under the number
    of a new attempt.
    """
    nothing = {'stop': 0, 'directory': None}
    exhausted = self._taken is None or (
      follow.batches_per_version is not None and step - self._taken[1] >= follow.batches_per_version
    )
    found = await asyncio.to_thread(self._newest, follow)
    if found is None and not exhausted:
      return nothing
    if found is None:
      logging.info('follow: waiting for a version in %s', follow.run)
      found = await unless(self._stop, self._wait(follow))
      if found is None:
        return nothing | {'stop': self._stop.result()}
    directory, manifest = found
    attempt = self._setup.next_attempt()
    version = SharedVersion(
      run=manifest.run, attempt=manifest.attempt, step=manifest.step, digest=manifest.digest
    )
    await asyncio.to_thread(
      FollowedVersions(self._setup.workdir / 'replay').record, attempt, version
    )
    self._taken = manifest.version, step
    return nothing | {'directory': str(directory), 'attempt': attempt}

  async def _wait(self, follow: FollowConfig):
    async def found():
      while (version := await asyncio.to_thread(self._newest, follow)) is None:
        await self._sleep(POLL_S)
      return version

    return await bounded(
      found(),
      name='version',
      owner='the loop',
      waits_for=f'weights of the run {follow.run} (follow.deadline_s); is that run active?',
      deadline_s=follow.deadline_s,
    )

  def _newest(self, follow: FollowConfig):
    """Returns the directory and manifest of the newest complete version that is newer than the
    version taken last; None if there is none. If a version does not match its manifest, logs a
    warning and considers the next older one.

    Raises UserError if the weights belong to another model.
    """
    folder = pathlib.Path(follow.run).expanduser() / versions.VERSIONS
    after = self._taken[0] if self._taken else None
    for directory in versions.newer(folder, after):
      try:
        manifest = versions.verified(directory)
      except UserError as error:
        if directory.exists() and str(error) != self._refused:
          self._refused = str(error)
          logging.warning('follow: version refused: %s', error)
        continue
      self._check(directory)
      return directory, manifest
    return None

  def _check(self, directory: pathlib.Path) -> None:
    found, wanted = read_spec(directory), self._setup.model.spec
    length = wanted.max_position_embeddings
    if dataclasses.replace(found, max_position_embeddings=length) != wanted:
      raise UserError(
        f'follow: {directory} contains another model ({found}), wanted {wanted}; start both runs '
        'from the same checkpoint, or with the same policy.family and policy.model'
      )
