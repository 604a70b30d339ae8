"""Launches a training job on this machine or on a cluster.

  jaxrl launch slurm --config=FILE --workdir=DIR --nodes=4 --gpus=8 [--submit]
  jaxrl launch slurm --status=ID | --logs=ID | --cancel=ID

The launchers are local, ssh, slurm, jobset, and custom ones given as 'module:attribute'. Without
--submit, the text of the job is printed and nothing is started. The flags --rollout_nodes,
--explorers and --sandboxes add services to the job. Trainer and services find each other through
the registry, a folder in the run directory. The registry's key is part of the printed text (ssh,
jobset) or written by --submit (local, slurm).

`jaxrl launch NAME --help` also lists the flags of the launcher NAME.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from jaxrl_llm.app.cluster.compose import Layout, compose
from jaxrl_llm.app.cluster.job import Launcher
from jaxrl_llm.config.annotations import field_types, members, nearest
from jaxrl_llm.config.documents import field_documents
from jaxrl_llm.config.load import parse_flags, split_argv
from jaxrl_llm.config.own import own_part
from jaxrl_llm.config.text import parse_text
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError

LAUNCHERS = {
  'local': 'jaxrl_llm.app.cluster.local',
  'ssh': 'jaxrl_llm.app.cluster.ssh',
  'slurm': 'jaxrl_llm.app.cluster.slurm',
  'jobset': 'jaxrl_llm.app.cluster.jobset',
}
"""Names of the modules that define the launchers (`LAUNCHER`), keyed by the launcher's name."""
_PROGRAM = (sys.executable, '-P', '-m', 'jaxrl_llm')
"""Command that runs `jaxrl`, even if it is not on the PATH."""
_ACTIONS = ('submit', 'status', 'logs', 'cancel')


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  program, *rest = argv
  if not rest or rest[0].startswith('-'):
    if {'--help', '-h', '-help'} & set(rest):
      print(__doc__.strip())
      return 0
    raise UserError(
      f'no launcher is named; wanted jaxrl launch {"|".join(LAUNCHERS)} --config=FILE'
    )
  launcher = find_launcher(rest[0])
  absl_argv, config_spec, overrides = split_argv([f'{program} {rest[0]}', *rest[1:]])
  values = _flags(launcher)
  parse_flags(absl_argv, values, __doc__)
  options = _read(launcher.Options, values)
  actions = [name for name in _ACTIONS if values[name].value]
  if len(actions) > 1:
    raise UserError(f'--{actions[0]}: cannot be combined with --{actions[1]}; give one of them')
  if actions in (['status'], ['logs'], ['cancel']):
    return _act(launcher, actions[0], values[actions[0]].value, options)
  if config_spec is None:
    raise UserError('--config=FILE.py[:VARIANT]: missing; try --config=quickstart')
  job = compose(
    config_spec,
    overrides,
    _read(Layout, values),
    program=_PROGRAM,
    workdir=values.workdir,
    one_machine=launcher.one_machine,
  )
  text = launcher.text(job, options)
  if not actions:
    sys.stdout.write(text)
    return 0
  job_id = launcher.submit(text, job, options)
  print(f'submitted job {job_id}; its run directory is {job.workdir}', file=sys.stderr)
  print(job_id)
  return 0


def find_launcher(name: str) -> Launcher:
  """Returns the launcher with the given name, or a user-defined one, given as
  'module:attribute'.
  """
  if ':' in name:
    launcher = own_part(name, 'launcher')
  elif name in LAUNCHERS:
    launcher = importlib.import_module(LAUNCHERS[name]).LAUNCHER
  else:
    raise UserError(
      f"launcher {name!r}: unknown; {nearest(name, LAUNCHERS)}; a custom one is 'module:attribute'"
    )
  if not isinstance(launcher, Launcher) or not dataclasses.is_dataclass(launcher.Options):
    raise UserError(
      f'launcher {name!r}: wanted a Launcher whose Options are a dataclass, got {launcher!r:.200}'
    )
  return launcher


def _act(launcher: Launcher, action: str, job_id: str, options: Any) -> int:
  if action == 'status':
    print(launcher.status(job_id, options))
  elif action == 'logs':
    launcher.logs(job_id, options)
  else:
    launcher.cancel(job_id, options)
  return 0


def _flags(launcher: Launcher) -> flags.FlagValues:
  """Returns the flags of the command. Each field of `Layout` and of the launcher's options has a
  flag of the same name.
  """
  values = flags.FlagValues()
  flags.DEFINE_string(
    'workdir', None, 'Run directory; by default runs/<name of the configuration>.',
    flag_values=values,
  )  # fmt: skip
  flags.DEFINE_bool('submit', False, 'Start the job, and print its id.', flag_values=values)
  for action, help_text in (
    ('status', 'Print the state of the job with this id.'),
    ('logs', 'Print the output of the job with this id.'),
    ('cancel', 'End the job with this id; its trainer commits.'),
  ):
    flags.DEFINE_string(action, None, help_text, flag_values=values)
  for cls in (Layout, launcher.Options):
    documents = field_documents(cls)
    for field in dataclasses.fields(cls):
      if field.name in values:
        raise UserError(
          f'launcher {launcher.name!r}: its option {field.name} has the name of a flag that all '
          'launchers share; rename it'
        )
      _define(field, field_types(cls)[field.name], documents.get(field.name, ''), values)
  return values


def _define(
  field: dataclasses.Field, annotation: Any, document: str, values: flags.FlagValues
) -> None:
  text = ' '.join(document.split())
  if annotation is bool:
    flags.DEFINE_bool(field.name, field.default, text, flag_values=values)
  elif annotation == tuple[str, ...]:
    flags.DEFINE_multi_string(
      field.name, [*field.default], f'{text} May be repeated.', flag_values=values
    )
  else:
    shown = '' if field.default in (None, dataclasses.MISSING) else f' Default: {field.default}.'
    flags.DEFINE_string(field.name, None, f'{text}{shown}', flag_values=values)


def _read(cls: type, values: flags.FlagValues) -> Any:
  """Returns a dataclass built from the values of its flags. A field whose flag is not set keeps its
  default.
  """
  fields = {}
  for field in dataclasses.fields(cls):
    value, annotation = values[field.name].value, field_types(cls)[field.name]
    if isinstance(value, bool):
      fields[field.name] = value
    elif isinstance(value, list):
      fields[field.name] = tuple(value)
    elif value is not None:
      is_text = str in members(annotation)
      fields[field.name] = value if is_text else parse_text(value, annotation, f'--{field.name}')
    elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
      raise UserError(f'--{field.name}: missing; see --help')
  return cls(**fields)
