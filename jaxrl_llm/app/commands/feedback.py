"""Attaches delayed rewards, such as human verdicts, to samples that wait for them. The run may be
active or stopped.

jaxrl feedback --workdir=runs/x                                 # which groups wait
jaxrl feedback --workdir=runs/x --uid=UID --value=1 --who=ann   # one verdict
jaxrl feedback --workdir=runs/x --uid=UID --correction=TEXT --who=ann  # a corrected answer
jaxrl feedback --workdir=runs/x --import=FILE.jsonl             # many verdicts and corrections
jaxrl feedback --workdir=runs/x --export=FILE.jsonl             # the groups that wait
jaxrl feedback --workdir=runs/x --page=FILE.html                # a page on which people judge them
jaxrl feedback --workdir=runs/x --pairs=FILE.jsonl              # preference pairs from all verdicts

When the command returns, all accepted verdicts are on disk. Each line of an imported file has
`uid`, `value` and `who` (a verdict), or `chosen`, `rejected` and `who` (a comparison), and
optionally `scorer` and `attempt`; or `uid`, `correction` and `who` (a corrected answer to any
sample of the run, which becomes an expert row, as with jaxrl experts). If any lines are refused,
their locations and the reasons are printed, the other lines are attached, and the exit code is 1.
A file may be imported repeatedly. The exported pairs can train DPO and reward models.

With --json, each of these commands prints one JSON document.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.app.offline.experts import Correction, Run, add_corrections
from jaxrl_llm.app.offline.feedback import (
  export_groups,
  export_pairs,
  import_file,
  waiting_groups,
)
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay.inbox import LateVerdict, attach

FLAGS = flags.FlagValues()
flags.DEFINE_string('workdir', None, 'Directory of the run.', flag_values=FLAGS)
flags.DEFINE_string(
  'uid', None, 'Sample to which the verdict or correction belongs.', flag_values=FLAGS
)
flags.DEFINE_float('value', None, 'Value of the verdict.', flag_values=FLAGS)
flags.DEFINE_string(
  'correction',
  None,
  'Corrected answer to the task of the sample; it becomes an expert row.',
  flag_values=FLAGS,
)
flags.DEFINE_string('who', None, 'Name of the person or program that judges.', flag_values=FLAGS)
flags.DEFINE_string(
  'scorer',
  None,
  'Scorer of the verdict; needed only if the run has several delayed scorers.',
  flag_values=FLAGS,
)
flags.DEFINE_string(
  'import', None, 'Attach the verdicts in this file, as JSON Lines.', flag_values=FLAGS
)
flags.DEFINE_string(
  'export', None, 'Write the groups that wait to this file, as JSON Lines.', flag_values=FLAGS
)
flags.DEFINE_string(
  'page', None, 'Write an HTML page on which people judge the groups.', flag_values=FLAGS
)
flags.DEFINE_string(
  'pairs', None, 'Write preference pairs to this file, as JSON Lines.', flag_values=FLAGS
)
flags.DEFINE_bool('json', False, 'Print one JSON document.', flag_values=FLAGS)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv), as_json=script.asks_json(argv))


def _main(argv: Sequence[str]) -> int:
  parse_flags(argv, FLAGS, __doc__, takes_config=False)
  if FLAGS.workdir is None:
    raise UserError('--workdir is missing; usage: jaxrl feedback --workdir=DIR')
  directory = pathlib.Path(FLAGS.workdir) / 'replay'
  if FLAGS['import'].value is not None:
    imported = import_file(directory, pathlib.Path(FLAGS['import'].value))
    script.show(imported.to_json(), imported.lines, as_json=FLAGS.json)
    return 1 if imported.refused else 0
  if FLAGS.export is not None or FLAGS.page is not None:
    return _export(directory)
  if FLAGS.pairs is not None:
    made = export_pairs(directory, pathlib.Path(FLAGS.pairs))
    script.show(
      {**made._asdict(), 'file': FLAGS.pairs},
      [f'{made.pairs} pairs written to {FLAGS.pairs}', *made.lines],
      as_json=FLAGS.json,
    )
    return 0
  if FLAGS.uid is not None:
    return _attach(directory)
  for name in ('value', 'correction', 'who', 'scorer'):
    if FLAGS[name].value is not None:
      raise UserError(f'--{name}: only with --uid=UID')
  groups = waiting_groups(directory)
  script.show(
    {'groups': [dataclasses.asdict(group) for group in groups]},
    [group.line for group in groups] or ['no group waits for delayed rewards'],
    as_json=FLAGS.json,
  )
  return 0


def _attach(directory: pathlib.Path) -> int:
  if FLAGS.correction is not None:
    return _correct(directory.parent)
  for name in ('value', 'who'):
    if FLAGS[name].value is None:
      raise UserError(f'--{name} is missing; a verdict has --uid, --value and --who')
  verdict = LateVerdict(uid=FLAGS.uid, value=FLAGS.value, who=FLAGS.who, scorer=FLAGS.scorer)
  (reply,) = attach(directory, [verdict])
  if reply.refused is not None:
    raise UserError(reply.line)
  script.show(dataclasses.asdict(reply), [reply.line], as_json=FLAGS.json)
  return 0


def _correct(workdir: pathlib.Path) -> int:
  for name in ('value', 'scorer'):
    if FLAGS[name].value is not None:
      raise UserError(
        f'--{name}: cannot be combined with --correction; attach a verdict in a separate command'
      )
  if FLAGS.who is None:
    raise UserError('--who is missing; a correction has --uid, --correction and --who')
  correction = Correction(FLAGS.uid, FLAGS.correction, FLAGS.who)
  report = add_corrections(Run(workdir), [('--correction', correction)])
  if report.refused:
    raise UserError(report.refused[0])
  script.show(report._asdict(), report.lines, as_json=FLAGS.json)
  return 0


def _export(directory: pathlib.Path) -> int:
  file, page = (None if name is None else pathlib.Path(name) for name in (FLAGS.export, FLAGS.page))
  groups = export_groups(directory, file, page)
  written = [str(path) for path in (file, page) if path is not None]
  script.show(
    {'groups': groups, 'files': written},
    [f'{groups} groups written to {", ".join(written)}'],
    as_json=FLAGS.json,
  )
  return 0
