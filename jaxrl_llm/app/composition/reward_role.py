"""Loads reward models: the trainer's reward model (`reward_model`), and the reward models that
`jaxrl serve --role=reward` serves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxrl_llm.app.composition.initial_weights import model_directory
from jaxrl_llm.app.schema import Config, RewardModelConfig
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Params
from jaxrl_llm.learner.loading import read_params
from jaxrl_llm.master.reward_model import RewardRole, ScoringPass
from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.parallel.mesh import data_parallel_ranks
from jaxrl_llm.tasks.tokenizer import Tokenizer
from jaxrl_llm.weights.hf import read_spec

_END_BYTES = 1 << 20
"""Number of bytes at the end of each file that the fingerprint of a model covers."""
_FINGERPRINTED = ('config.json', 'tokenizer*', 'chat_template*', '*.safetensors')
"""Patterns of the files of a model that its fingerprint covers (`RewardModelFiles.fingerprint`)."""
_SEQUENCES_PER_RANK = 64
"""Number of sequences per data-parallel rank in a forward pass, unless `sequences_per_pass` is
set.
"""


class RewardModelFiles(NamedTuple):
  """Directory of a reward model, and the model's spec."""

  directory: pathlib.Path
  spec: ModelSpec

  def tokenizer(self) -> Tokenizer:
    """Reads the tokenizer. Raises UserError if it does not fit the model."""
    tokenizer = Tokenizer.from_directory(self.directory)
    tokenizer.check_fits(self.spec.vocab_size, f'the model in {self.directory}')
    return tokenizer

  def model(self, dtype: str, mesh: Mesh) -> Model:
    """Builds the model, with weights and activations of type `dtype`."""
    return build_model(self.spec, ModelOptions(dtype=dtype, param_dtype=dtype), mesh)

  def fingerprint(self) -> str:
    """Returns a digest of the name, size and end of each file of the model (`_FINGERPRINTED`)."""
    digest = hashlib.sha256()
    found = {file for pattern in _FINGERPRINTED for file in self.directory.glob(pattern)}
    for file in sorted(found):
      with file.open('rb') as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - _END_BYTES))
        digest.update(f'{file.name} {size}\n'.encode() + opened.read())
    return digest.hexdigest()[:16]


def find_reward_model(source: str, where: str) -> RewardModelFiles:
  """Finds a reward model: a directory, a hub id, or a run that trained it.

  Args:
    where: flag or field that names the source, for error messages.

  Raises:
    UserError: there is no model, or it is not a reward model.
  """
  directory = model_directory(source)
  spec = read_spec(directory)
  if spec.head != 'scalar':
    raise UserError(
      f'{where}={source}: a model with head {spec.head!r}; wanted a reward model '
      '(…ForSequenceClassification with one label), as jaxrl train '
      '--config=configs/reward_model.py exports it'
    )
  return RewardModelFiles(directory, spec)


class TrainerRewardModel(NamedTuple):
  """The reward model of the trainer, without its parameters."""

  model: Model
  scoring: ScoringPass
  files: RewardModelFiles | None
  """Files with the parameters and the tokenizer. None if a stage of the run trains the model, which
  then uses the policy's tokenizer.
  """
  fingerprint: str | None
  """Fingerprint of the model's files. Commits contain this fingerprint instead of the parameters.
  None if a stage of the run trains the model, because commits then contain the parameters.
  """

  def role(self, *, leads: bool, policy: Tokenizer | None) -> RewardRole:
    """Returns the reward model's role in one process of the trainer.

    Args:
      leads: whether this is process 0, which also tokenizes.
      policy: tokenizer of the policy; required only in process 0.
    """
    if not leads:
      return RewardRole(self.scoring, None)
    return RewardRole(self.scoring, policy if self.files is None else self.files.tokenizer())

  def read(self, mesh: Mesh) -> Params:
    """Reads the parameters from the model's files onto the mesh.

    Raises:
      UserError: the files have changed since the run was started.
    """
    if (found := self.files.fingerprint()) != self.fingerprint:
      raise UserError(_changed(self.files.directory, found, self.fingerprint))
    return read_params(self.model, mesh, self.files.directory, self.files.spec)

  def check(self, committed: Mapping[str, Any]) -> None:
    """Raises UserError if the reward model's files have changed since a commit was made.

    Args:
      committed: host state of the commit.
    """
    wanted = committed.get('reward_model')
    if self.files is not None and wanted is not None and wanted != self.fingerprint:
      raise UserError(_changed(self.files.directory, self.fingerprint, wanted))


def _changed(directory: pathlib.Path, found: str, wanted: str) -> str:
  return (
    f'reward_model.init_from: the model in {directory} has changed since the run began '
    f'(fingerprint {found}, wanted {wanted}); restore it, or start another run'
  )


def build_reward_model(config: Config, mesh: Mesh, policy: Model) -> TrainerRewardModel | None:
  """Builds the trainer's reward model; None if the run has none.

  Args:
    policy: the run's model. If a stage trains the reward model, the reward model has the same
      architecture, with one output.

  Raises:
    UserError: there is no model, it is not a reward model, or it cannot be read.
  """
  chosen = config.reward_model
  if chosen is None:
    return None
  files, fingerprint = None, None
  if chosen.stage is None:
    files = find_reward_model(chosen.init_from, 'reward_model.init_from')
    model, fingerprint = files.model(chosen.dtype, mesh), files.fingerprint()
  else:
    options = dataclasses.replace(policy.options, dtype=chosen.dtype, param_dtype=chosen.dtype)
    model = build_model(with_head(policy.spec, 'scalar'), options, mesh)
  scoring = ScoringPass(
    model,
    mesh,
    max_length=min(_max_length(chosen, config), model.spec.max_position_embeddings),
    sequences=chosen.sequences_per_pass or _SEQUENCES_PER_RANK * data_parallel_ranks(mesh),
  )
  return TrainerRewardModel(model, scoring, files, fingerprint)


def _max_length(chosen: RewardModelConfig, config: Config) -> int:
  if chosen.max_length is not None:
    return chosen.max_length
  return config.rollout.max_length + config.rollout.max_length // 4 + 8
