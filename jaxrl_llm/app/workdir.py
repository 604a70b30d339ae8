"""The run directory: one live run at a time, one configuration for good."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import shutil

from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import difference
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import UserError

MAY_CHANGE = (
  'rewards.workers',
  'rollout.explorers',
  *(
    f'rollout.vllm.{name}'
    for name in (
      *('environment', 'servers', 'addresses', 'key_file', 'ca_file', 'env', 'devices', 'publish_dir', 'max_in_flight'),
      *('transfer_deadline_s', 'start_deadline_s', 'latency_s', 'min_tokens_per_s', 'max_retries', 'max_restarts'),
    )
  ),
)
"""What a resumed run may have otherwise: how many there are of what serves it, where, and how long they are waited for,
not what they compute."""
TOKENIZER, DATA = 'tokenizer', 'data'
"""Where a start keeps what it makes from the configuration: the tokenizer, the static rows of offline stages."""


class WorkdirInUse(UserError):
  """Another live process runs in this directory."""


class Workdir:
  """Holds the directory's lock until the process ends, however it ends."""

  def __init__(self, path: pathlib.Path):
    self.path = path.absolute()
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      self._lock = (self.path / 'lock').open('a+')
    except OSError as error:
      raise UserError(f'--workdir={path}: {error.strerror}; choose a directory that can be written') from error
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._lock.seek(0)
      owner = self._lock.read().strip() or 'unknown'
      raise WorkdirInUse(
        f'--workdir={path}: in use by a live run (process {owner}); wait for it, stop it, or choose another --workdir'
      ) from None
    except OSError as error:
      raise UserError(
        f'--workdir={path}: cannot be locked ({error.strerror}); choose a directory on a file system with locks'
      ) from error
    self._lock.truncate(0)
    self._lock.write(str(os.getpid()))
    self._lock.flush()

  def adopt(self, config: Config) -> None:
    """Writes the configuration down at the first start, and refuses another one once something was committed.

    Until then a start leaves nothing to go on from: a mistake in the first command must not spoil the directory.
    """
    file = self.path / 'config.json'
    if file.exists():
      try:
        old = json.loads(file.read_text())
        if not isinstance(old, dict):
          raise ValueError('no JSON object')
      except ValueError as error:  # no JSON, or not even text
        raise UserError(f'{file}: not the configuration of a run ({error}); choose another --workdir') from error
      changes = difference(old, config)
      changes = [change for change in changes if not change[0].startswith(MAY_CHANGE)]
      if not changes:
        return
      if any(self.path.glob('checkpoints/*/COMMIT')):
        told = '; '.join(f'{key}: {before!r} in the run, {after!r} now' for key, before, after in changes[:5])
        more = f' and {len(changes) - 5} more' if len(changes) > 5 else ''
        raise UserError(
          f'{self.path}: holds a run with another configuration ({told}{more}); resume with the same command, '
          f'or branch from it with --init_from={self.path} and another --workdir'
        )
      for made in (TOKENIZER, DATA):
        shutil.rmtree(self.path / made, ignore_errors=True)
    temporary = file.with_suffix('.tmp')
    temporary.write_text(json.dumps(to_json(config), indent=1))
    temporary.rename(file)
