"""Archives the files that a fresh host needs to resume a run."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping

from jaxrl_llm.app.composition.choices import FILE as CHOICES
from jaxrl_llm.app.composition.workdir import ATTEMPT, CONFIG, DATA, TOKENIZER
from jaxrl_llm.core.disk import link_or_copy
from jaxrl_llm.replay.copying import mirror
from jaxrl_llm.runtime.archive import Archive
from jaxrl_llm.runtime.checkpoint import Checkpoints
from jaxrl_llm.runtime.history import FILE as HISTORY
from jaxrl_llm.runtime.log.api import DIRECTORY as LOGGING
from jaxrl_llm.runtime.writers import METRICS_FILE

_STAGED = 'archive.staged'
"""Directory in the run directory with copies and links of the files that are being archived."""
_REPLAY = 'replay'
_CHANGING = (CONFIG, HISTORY, ATTEMPT, METRICS_FILE, 'goodput-*.jsonl', f'{LOGGING}/**/*')
"""Patterns of files that the run changes in place, so that the archive needs copies of them."""
_FIXED = (
  *(f'{directory}/**/*' for directory in (TOKENIZER, DATA, 'rollouts', 'evals')),
  *(f'{directory}/**/*' for directory in ('hf', 'critic', 'adapter')),
  'report.html',
  CHOICES,
)
"""Patterns of files that the run never changes in place, so that the archive can use hard links.
The run either keeps such a file or replaces the whole file.
"""


@contextlib.contextmanager
def staged(workdir: pathlib.Path, step: int) -> Iterator[Mapping[str, pathlib.Path]]:
  """Yields the files that a fresh host needs to resume the run from the commit at `step`, keyed by
  their path in the run directory. The files are copies or links that do not change during the
  block.

  Raises UserError if the store is damaged, and OSError if a file cannot be copied.
  """
  directory = workdir / _STAGED
  shutil.rmtree(directory, ignore_errors=True)  # A killed start may have left files there.
  try:
    mirror(workdir / _REPLAY, directory / _REPLAY, commit=step)
    for file in _matches(workdir, _CHANGING):
      target = directory / file.relative_to(workdir)
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copyfile(file, target)
    for file in _matches(workdir, (*_FIXED, f'checkpoints/{step}/**/*')):
      link_or_copy(file, directory / file.relative_to(workdir))
    yield {
      file.relative_to(directory).as_posix(): file
      for file in sorted(directory.rglob('*'))
      if file.is_file()
    }
  finally:
    shutil.rmtree(directory, ignore_errors=True)


def _matches(workdir: pathlib.Path, patterns: tuple[str, ...]) -> list[pathlib.Path]:
  files = {file for pattern in patterns for file in workdir.glob(pattern) if file.is_file()}
  # A file that is still being written, such as that of an evaluation, may be renamed at any moment.
  return sorted(file for file in files if file.suffix != '.tmp')


def archiver(
  archive: Archive, workdir: pathlib.Path, checkpoints: Checkpoints
) -> Callable[[], Mapping[str, float]]:
  """Returns a function that archives the newest commit. The function returns metrics: the duration
  in seconds, and the number of bytes written.
  """

  def ship() -> Mapping[str, float]:
    steps = checkpoints.steps()
    with staged(workdir, steps[-1]) as files:
      shipped = archive.ship(steps[-1], files, keep=steps)
    return {'perf/archive_s': shipped.seconds, 'perf/archive_bytes': float(shipped.bytes_written)}

  return ship
