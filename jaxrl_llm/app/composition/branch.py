"""Branches: new runs that start from a commit of another run, their parent.

A branch takes over the parent's commit, its logs up to the commit, its replay store and its data.
It uses hard links where the file system supports them, and copies otherwise. Once made, it no
longer needs its parent. The parent may be running, and is not changed.

Invariant: a branch is built in `<workdir>.branching`, which is renamed to `<workdir>` when the
branch is complete. If the process is killed before that, the next start replaces
`<workdir>.branching`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxrl_llm.app.composition.changes import Refused, Reset, changes, misfits, reset_flags
from jaxrl_llm.app.composition.prepare import prepare
from jaxrl_llm.app.composition.stages import build_stages, model_spec, policy_options
from jaxrl_llm.app.composition.state import (
  commits_needed,
  committed_bests,
  committed_like,
  unknown_bests,
)
from jaxrl_llm.app.composition.static_rows import static_file
from jaxrl_llm.app.composition.workdir import (
  ATTEMPT,
  CONFIG,
  DATA,
  TOKENIZER,
  Workdir,
  committed_steps,
  configuration_at,
  made_files,
  write_configuration,
)
from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.sources import Examples, Pairs
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.disk import link_or_copy, sync, write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models.api import build_model
from jaxrl_llm.parallel.mesh import build_mesh
from jaxrl_llm.replay import copying
from jaxrl_llm.runtime import events, history
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints, Taken
from jaxrl_llm.runtime.history import Change, Parent
from jaxrl_llm.runtime.writers import EVALS_DIR, METRICS_FILE, ROLLOUTS_DIR
from jaxrl_llm.tasks.taskset import Taskset

RESETS = ('optimizer', 'data', 'store')
"""Parts of the parent that a branch can reset, as with --reset_optimizer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
  """Request for a branch: the commit to start from, and the parts to reset."""

  run: pathlib.Path
  """Run directory of the parent, the run from which the branch starts."""
  step: int | None = None
  """Step of the commit. If None, the newest commit is used."""
  reset: tuple[str, ...] = ()
  """Parts to reset, from `RESETS`: the optimizer's moments, the position in the data, the replay
  store.
  """

  @property
  def scored_as(self) -> pathlib.Path | None:
    """Run from which the branch takes automatically chosen scorer options, because it also takes
    over rewards that were computed with these options. None if the branch begins with an empty
    store.
    """
    return None if 'store' in self.reset else self.run

  @classmethod
  def parse(cls, text: str, reset: Sequence[str] = ()) -> Branch:
    """Parses 'RUN' or 'RUN:STEP'. Raises UserError for other texts and for unknown parts in
    `reset`.
    """
    if unknown := set(reset) - set(RESETS):
      raise UserError(f'reset: {sorted(unknown)}, wanted any of {", ".join(RESETS)}')
    run, colon, step = text.rpartition(':')
    if not colon or not step.isdecimal():
      run, step = text, ''
    if not run or len(step) > 18:
      raise UserError(
        f'--branch_from={text}: wanted RUN or RUN:STEP, such as runs/mine or runs/mine:200'
      )
    return cls(
      run=pathlib.Path(run).expanduser().resolve(),
      step=int(step) if step else None,
      reset=tuple(name for name in RESETS if name in reset),
    )

  def made(self, path: pathlib.Path) -> bool:
    """Returns whether the directory `path` already contains this branch, so that it only has to be
    resumed.

    Raises:
      UserError: the directory contains other files, another run, or this branch with other resets.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
      return False
    parents = [entry.parent for entry in history.read(path) if entry.parent is not None]
    if not parents or not committed_steps(path):
      raise UserError(
        f'--workdir={path}: exists, and a branch starts a new run; choose another --workdir'
        + (', or leave out --branch_from to resume it' if committed_steps(path) else '')
      )
    parent = parents[-1]
    if parent.run != str(self.run) or self.step not in (None, parent.step):
      raise UserError(
        f'--workdir={path}: holds a run that {parent}; resume it without --branch_from, or choose '
        'another --workdir'
      )
    if parent.reset != self.reset:
      raise UserError(
        f'--workdir={path}: holds a run that {parent}, and the command resets '
        f'{", ".join(self.reset) or "nothing"}; resume it without --branch_from, or choose another '
        '--workdir'
      )
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fork:
  """A parent's commit that fits the configuration of a branch."""

  branch: Branch
  step: int
  config: Mapping[str, Any]
  """Configuration of the parent at the commit, as JSON."""
  changes: tuple[Change, ...]
  """Differences between the parent's and the branch's configuration."""

  @property
  def parent(self) -> Parent:
    return Parent(run=str(self.branch.run), step=self.step, reset=self.branch.reset)


def find_origin(branch: Branch, config: Config) -> Fork:
  """Finds the commit of a branch and checks that the branch's configuration fits it. Writes
  nothing.

  Raises:
    UserError: the run or commit does not exist, or the configuration does not fit the commit.
  """
  run, where = branch.run, f'--branch_from={branch.run}'
  if not (run / CONFIG).is_file():
    raise UserError(f'{where}: not the directory of a run ({CONFIG} is missing)')
  commits = committed_steps(run)
  if not commits:
    raise UserError(f'{where}: the run has no commit yet; wait for the first')
  step = commits[-1] if branch.step is None else branch.step
  if step not in commits:
    raise UserError(
      f'{where}:{step}: no commit at this step; the run keeps those at '
      f'{", ".join(map(str, commits))} (checkpoint.keep)'
    )
  of_parent = configuration_at(run, step)
  all_problems = misfits(of_parent, config, step)
  if problems := [problem for problem in all_problems if problem[1] not in branch.reset]:
    raise _misfit(branch, step, problems)
  return Fork(branch=branch, step=step, config=of_parent, changes=changes(of_parent, config))


def make(branch: Branch, config: Config, workdir: Workdir, load: Callable[[str], Taskset]) -> Fork:
  """Makes a branch in a run directory that was opened with `Workdir(…, branching=True)`.

  If this fails, everything that was written is removed.

  Args:
    config: the branch's configuration, as returned by `settle`.
    load: returns the taskset with a given name.

  Raises:
    UserError: the parent cannot be branched from, or the configuration does not fit it.
  """
  try:
    origin = find_origin(branch, config)
    taken = take_over(origin, config, workdir)
    _check_parked(origin, config, taken.host)
    prepared = prepare(config, workdir.path, load)
    mesh = build_mesh(config.learner.mesh)
    stages = build_stages(config, mesh, prepared.spec.vocab_size, prepared.lengths)
    model = build_model(model_spec(config, prepared.spec), policy_options(config), mesh)
    stage = next(stage for stage in stages if stage.name == taken.host['stage'])
    check_shapes(origin, workdir, committed_like(stage, model, mesh))
    if names := unknown_bests(taken.host, config, stages):
      raise UserError(
        f'--branch_from={branch.run}:{origin.step}: a later stage begins with the best weights of '
        f'{names[0]} (init_from), but the commit has no evaluation of that stage; name other '
        'weights, or branch from a commit before its end'
      )
    bests = committed_bests(taken.host, config, stages)
    _take_needed(origin, workdir, commits_needed(config, stages, origin.step, bests))
    for built, configured in zip(stages, config.stages, strict=True):
      if configured.waits_for_rows and origin.step <= built.start:
        # The parent selected the stage's rows after the commit. The branch selects its own rows
        # when the stage begins.
        (workdir.path / static_file(configured)).unlink(missing_ok=True)
    complete(origin, config, workdir, taken)
  except BaseException:
    workdir.discard()
    raise
  return origin


def _misfit(branch: Branch, step: int, problems: list[tuple[Refused, Reset | None]]) -> UserError:
  """Returns an error that states why the configuration does not fit the commit, and the remedy."""
  listed = '; '.join(str(problem) for problem, _ in problems[:5])
  more = f'; and {len(problems) - 5} more' if len(problems) > 5 else ''
  flags = reset_flags(problems)
  if flags is None:
    remedy = "leave the parent's values, or start another run with --init_from"
  else:
    remedy = f"add {' '.join(flags)}, or leave the parent's values"
  return UserError(
    f'--branch_from={branch.run}:{step}: the configuration does not fit this commit: {listed}{more}'
    f'; {remedy}'
  )


def take_over(origin: Fork, config: Config, workdir: Workdir) -> Taken:
  """Links or copies the parent's store, logs, tokenizer and arrays into the directory of a branch.

  Returns:
    The files of the branch's first commit, which `complete` commits.

  Raises:
    UserError: the parent's commit, store or logs are damaged or missing, the directory contains a
      run or is a link, or the disk is full.
  """
  run, path, reset = origin.branch.run, workdir.path, origin.branch.reset
  with _reported(origin, path):
    if path.is_symlink() or (path / events.FILE).exists():
      raise UserError(
        f'{path}: holds a run or is a link, and the branch is made in a directory of this name; '
        'move it away, or choose another --workdir'
      )
    for old in path.iterdir():
      if old.name != 'lock':
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    # Copy the store before taking the commit. As long as the commit exists, the parent's store
    # contains everything that the commit needs. So if the commit can still be taken afterwards, the
    # copy is complete.
    if 'store' in reset:
      copying.begin(path / 'replay', step=origin.step, max_uses=config.max_uses)
    else:
      copying.copy(run / 'replay', path / 'replay', commit=origin.step, max_uses=config.max_uses)
    taken = _checkpoints(path).take(_checkpoints(run), origin.step)
    _logs(run, path, taken.host)
    _link_tree(run / TOKENIZER, path / TOKENIZER)
    if not _may_change_rows(origin.changes):
      _link_tree(run / DATA, path / DATA)
    elif 'data' not in reset:
      _link_tree(run / DATA, path / DATA, of=_row_files(config, taken.host['stage']))
    attempt = _attempt(run)
    write_durably(path / ATTEMPT, str(attempt))
    entries = history.until(history.read(run), origin.step)
    if not entries:
      entries = (history.Entry(step=1, attempt=0, time=_now(), config=origin.config),)
    entry = history.Entry(
      step=origin.step + 1,
      attempt=attempt + 1,
      time=_now(),
      config=to_json(config),
      changes=origin.changes,
      parent=origin.parent,
    )
    history.write(path, (*entries, entry))
    write_configuration(path, config)
    return taken


def _take_needed(origin: Fork, workdir: Workdir, steps: Collection[int]) -> None:
  """Links or copies the commits at `steps`, whose weights the branch needs for later stages or as
  its reward model.
  """
  parent, branch = _checkpoints(origin.branch.run), _checkpoints(workdir.path)
  for step in sorted({*steps} - {origin.step}):
    if step not in parent.steps():
      raise UserError(
        f'--branch_from={origin.branch.run}:{origin.step}: the branch needs the weights of step '
        f'{step} (init_from of a stage, or of reward_model), and the run keeps only the commits '
        f'{parent.steps()}; name other weights, or branch from an earlier commit'
      )
    with _reported(origin, workdir.path):
      taken = branch.take(parent, step)
      branch.commit_taken(taken, taken.host)


def complete(origin: Fork, config: Config, workdir: Workdir, taken: Taken) -> None:
  """Commits the files that were taken over, and gives the branch its final directory name."""
  path, reset, host = workdir.path, origin.branch.reset, dict(taken.host)
  with _reported(origin, path):
    if 'data' in reset:
      host['batches'] = None
    elif 'store' in reset and host['batches'] is not None:
      _forget_ended(host['batches'])
    if _algorithm(origin.config, host['stage']) != _algorithm(to_json(config), host['stage']):
      host['algorithm_state'] = None
    if host['best'] and host['best'][1] != origin.step:
      host['best'] = None  # The commit of the best evaluation may not have been copied.
    host |= {
      'reset_optimizer': 'optimizer' in reset or host.get('reset_optimizer', False),
      'attempt': _attempt(path),
      'store': copying.name(path / 'replay'),
      'files': made_files(path),
    }
    _checkpoints(path).commit_taken(taken, host)
    for folder in sorted(path.rglob('*/')):
      sync(folder)  # Makes the folder's links durable.
    sync(path)
    workdir.place()


def check_shapes(origin: Fork, workdir: Workdir, wanted: Mapping[str, Any]) -> None:
  """Raises UserError if the commit's parameters do not fit the branch's model or algorithm.

  Args:
    wanted: shapes of the arrays that the branch would restore from the commit, as returned by
      `state.committed_like`.
  """
  committed = _checkpoints(workdir.path).shapes(origin.step)
  where = f'--branch_from={origin.branch.run}:{origin.step}'
  if committed.keys() != wanted.keys():
    raise UserError(
      f'{where}: the commit contains {sorted(committed)}, but the algorithm of the stage needs '
      f'{sorted(wanted)}; end this stage at the commit (its `steps`), and add a stage with the new '
      'algorithm'
    )
  for role, state in wanted.items():
    shapes = {name: x.shape for name, x in flatten(getattr(state, 'params', state)).items()}
    for name in sorted(shapes.keys() | committed[role].keys()):
      if shapes.get(name) != committed[role].get(name):
        raise UserError(
          f'{where}: another model: parameter {name} of {role} has shape '
          f'{committed[role].get(name)} in the commit, and the configuration makes it '
          f"{shapes.get(name)}; keep the parent's model"
        )


def _check_parked(origin: Fork, config: Config, host: Mapping[str, Any]) -> None:
  """Raises UserError if the commit has partial rollouts that wait to be continued, and the branch
  would not continue them.
  """
  if config.rollout.partial is not None or 'data' in origin.branch.reset:
    return
  parked = sum(group.get('parked', False) for group in _groups(host['batches']))
  if parked:
    raise UserError(
      f'--branch_from={origin.branch.run}:{origin.step}: {parked} groups of this commit wait to be '
      "continued, but the configuration has no rollout.partial; keep the parent's value, or add "
      '--reset_data'
    )


def _checkpoints(path: pathlib.Path) -> Checkpoints:
  return Checkpoints(path / 'checkpoints', CheckpointConfig(), leads=True)


@contextlib.contextmanager
def _reported(origin: Fork, path: pathlib.Path):
  """Converts an OSError in the block to a UserError."""
  try:
    yield
  except OSError as error:
    raise UserError(
      f'--branch_from={shlex.quote(str(origin.branch.run))}:{origin.step}: cannot be taken over '
      f'({error.strerror or error}: {error.filename or path}); restore the file or make room, then '
      'give the same command again'
    ) from error


def _logs(run: pathlib.Path, path: pathlib.Path, host: Mapping[str, Any]) -> None:
  """Copies the parent's metrics up to the commit, and links all its transcripts. The branch removes
  the transcripts of later steps when it starts.
  """
  offset = host['metrics_offset']
  with (run / METRICS_FILE).open('rb') as source, (path / METRICS_FILE).open('wb') as target:
    remaining = offset
    while block := source.read(min(remaining, 1 << 20)):
      target.write(block)
      remaining -= len(block)
  if remaining:
    raise UserError(
      f'{run / METRICS_FILE}: has {offset - remaining:,} bytes, and the commit at step '
      f'{host["step"]} recorded {offset:,}; restore it from a copy'
    )
  sync(path / METRICS_FILE)
  for logs in (ROLLOUTS_DIR, EVALS_DIR):
    _link_tree(run / logs, path / logs)


def _link_tree(
  source: pathlib.Path, target: pathlib.Path, *, of: Sequence[str] | None = None
) -> None:
  """Links or copies the files below `source`, if it exists, except unfinished ones (`.tmp`).

  Args:
    of: names, without suffix, of the files to link. If None, all files are linked.
  """
  for file in sorted(source.rglob('*')):
    named = of is None or any(file.name.startswith(f'{name}.') for name in of)
    if named and file.is_file() and file.suffix != '.tmp':
      link_or_copy(file, target / file.relative_to(source))


def _may_change_rows(made: Sequence[Change]) -> bool:
  """Returns whether changes of the configuration may alter the static rows of a stage
  (demonstrations, preference pairs or examples), so that the branch cannot take over the parent's
  rows.

  The rows also depend on the evaluations, because the processor `dedup` drops tasks that occur in
  evaluations.

  Args:
    made: differences between the parent's and the branch's configuration.
  """
  parts = ('tasksets', 'evaluation', 'preferences', 'examples', 'rollout.max_', 'stages.')
  return any(
    change.key.startswith(parts) and not change.key.endswith(('.steps', '.peak_lr'))
    for change in made
  )


def _row_files(config: Config, stage_name: str) -> tuple[str, ...]:
  """Returns the names, without suffix, of the files with the static rows that a stage reads."""
  source = next(stage.source for stage in config.stages if stage.name == stage_name)
  named = isinstance(source, Pairs | Examples)
  return (stage_name, *((source.train, source.held_out or source.train) if named else ()))


def _forget_ended(batches: Any) -> None:
  """Marks all groups in flight as unfinished, so that the branch generates their samples again.

  The samples of groups that had finished are in the parent's store, and the branch begins with an
  empty store. Groups that wait to be continued (partial rollouts) keep waiting, and then start
  again from their prompts.
  """
  for group in _groups(batches):
    group['ended'] = False


def _groups(batches: Any) -> Sequence[dict[str, Any]]:
  """Returns the groups that were in flight at a commit; none if its stage trains on static data.

  Args:
    batches: committed state of the source of batches.
  """
  state = (batches or {}).get('rollouts', batches or {})
  return state.get('explorer', {}).get('groups', ())


def _algorithm(config: Mapping[str, Any], stage_name: str) -> str:
  return next(
    stage['algorithm']['name'] for stage in config['stages'] if stage['name'] == stage_name
  )


def _attempt(path: pathlib.Path) -> int:
  """Returns the number of the last attempt (start) of the run in `path`."""
  text = (path / ATTEMPT).read_text()[:20].strip()
  if not text.isdecimal():
    raise UserError(f'{path / ATTEMPT}: holds {text!r}, wanted the number of the last start')
  return int(text)


def _now() -> float:
  return round(time.time(), 3)
