"""Inspects a run's replay store, even while the run writes to it.

jaxrl buffer --workdir=runs/quickstart                     # summary
jaxrl buffer --workdir=runs/quickstart --state=dropped     # samples, most recently changed first
jaxrl buffer --workdir=runs/quickstart --task=ID           # samples of one task
jaxrl buffer --workdir=runs/quickstart --uid=UID           # history of one sample
jaxrl buffer --workdir=runs/quickstart --audit             # consistency; exit code 1 if it fails
jaxrl buffer --workdir=runs/quickstart --clear_quarantine  # deletes quarantined files
jaxrl buffer --workdir=runs/quickstart --rebuild           # rebuilds a damaged index
jaxrl buffer --workdir=runs/quickstart --export=FILE.jsonl # tokens, logprobs, scores of samples

When a run starts, files that the store's index does not list are moved to replay/quarantine.

--stage, --state, --task and --steps select the samples of an export. docs/guides/replay.md
describes the format. An export exits with code 1 if samples could not be read.

With --json, each of these commands prints one JSON document.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.app.composition.lock import lock
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay import browse, quarantine
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.export import Selection, export
from jaxrl_llm.replay.journal import rebuild
from jaxrl_llm.replay.tables import INDEX, QUARANTINE, Entry

FLAGS = flags.FlagValues()
flags.DEFINE_string('workdir', None, 'Directory of the run.', flag_values=FLAGS)
flags.DEFINE_bool(
  'audit',
  False,
  'Check the files: every sample must be accounted for exactly once.',
  flag_values=FLAGS,
)
flags.DEFINE_string('state', None, 'List or export samples in this state.', flag_values=FLAGS)
flags.DEFINE_string(
  'task', None, 'List or export samples of the task with this id.', flag_values=FLAGS
)
flags.DEFINE_string(
  'export', None, 'Write samples to this new file, as JSON Lines.', flag_values=FLAGS
)
flags.DEFINE_string('stage', None, 'Export samples of this stage.', flag_values=FLAGS)
flags.DEFINE_string(
  'steps',
  None,
  'Export samples that entered their state in these steps: FIRST:LAST or one number.',
  flag_values=FLAGS,
)
flags.DEFINE_integer(
  'limit', 20, 'Maximum number of samples to list.', lower_bound=1, flag_values=FLAGS
)
flags.DEFINE_bool(
  'clear_quarantine', False, 'Delete all files in replay/quarantine.', flag_values=FLAGS
)
flags.DEFINE_bool(
  'rebuild',
  False,
  'Rebuild the index from the journal, and keep the previous index. No run may be using the '
  'directory.',
  flag_values=FLAGS,
)
flags.DEFINE_string(
  'uid', None, 'Print the history of the sample with this uid.', flag_values=FLAGS
)
flags.DEFINE_bool('json', False, 'Print one JSON document.', flag_values=FLAGS)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv), as_json=script.asks_json(argv))


def _main(argv: Sequence[str]) -> int:
  parse_flags(argv, FLAGS, __doc__, takes_config=False)
  if FLAGS.workdir is None:
    raise UserError('--workdir is missing; usage: jaxrl buffer --workdir=DIR [--audit]')
  directory = pathlib.Path(FLAGS.workdir) / 'replay'
  if FLAGS.clear_quarantine:
    removed = quarantine.clear(directory)
    script.show(
      {'removed': removed},
      [
        f'removed {sum(removed.values()) / 1e6:,.1f} MB in {len(removed):,} files from '
        f'{directory / QUARANTINE}'
      ],
      as_json=FLAGS.json,
    )
    return 0
  if FLAGS.rebuild:
    return _rebuild(directory)
  if FLAGS.audit:
    report = audit(directory)
    script.show(dataclasses.asdict(report), report.lines, as_json=FLAGS.json)
    return 0 if report.ok else 1
  if FLAGS.export is not None:
    return _export(directory)
  for name in ('stage', 'steps'):
    if FLAGS[name].value is not None:
      raise UserError(f'--{name}: only with --export=FILE')
  if FLAGS.uid is not None:
    lines = browse.history(directory, FLAGS.uid)
    script.show({'uid': FLAGS.uid, 'history': lines}, lines, as_json=FLAGS.json)
  elif FLAGS.state is not None or FLAGS.task is not None:
    task = browse.asked(directory, FLAGS.task) if FLAGS.task is not None else []
    entries = browse.find(directory, state=FLAGS.state, task=FLAGS.task, limit=FLAGS.limit)
    samples = [{**entry._asdict(), 'state': str(entry.state)} for entry in entries]
    script.show(
      {'task': task, 'samples': samples}, [*task, *map(_line, entries)], as_json=FLAGS.json
    )
  else:
    holdings = browse.summary(directory)
    script.show(dataclasses.asdict(holdings), holdings.lines, as_json=FLAGS.json)
  return 0


def _rebuild(directory: pathlib.Path) -> int:
  if not directory.is_dir():
    raise UserError(f'--workdir={FLAGS.workdir}: it has no replay store')
  with lock(directory.parent, named=directory.parent):
    rebuilt = rebuild(directory)
    report = audit(directory)
  script.show(
    {'rebuilt': rebuilt._asdict(), 'audit': dataclasses.asdict(report)},
    [
      f'rebuilt {directory / INDEX} from {rebuilt.writes:,} writes of the journal; files of the '
      f'previous index, kept under new names: {", ".join(rebuilt.aside) or "none"}',
      *(
        [f'ignored the last {rebuilt.ignored:,} bytes of the journal: damaged or incomplete']
        if rebuilt.ignored
        else []
      ),
      *report.lines,
    ],
    as_json=FLAGS.json,
  )
  return 0 if report.ok else 1


def _export(directory: pathlib.Path) -> int:
  steps = None if FLAGS.steps is None else _steps(FLAGS.steps)
  selection = Selection(stage=FLAGS.stage, state=FLAGS.state, task=FLAGS.task, steps=steps)
  exported = export(directory, FLAGS.export, selection)
  without = ', '.join(f'{state} {count:,}' for state, count in exported.without_bytes.items())
  script.show(
    {'file': FLAGS.export, **dataclasses.asdict(exported)},
    [
      f'exported {exported.samples:,} samples, {exported.tokens:,} tokens, '
      f'{exported.size / 1e6:,.1f} MB to {FLAGS.export}',
      *([f'not exported, because the store lacks their tokens: {without}'] if without else []),
      *(f'PROBLEM {line}' for line in exported.lost),
    ],
    as_json=FLAGS.json,
  )
  return 1 if exported.lost else 0


def _steps(text: str) -> tuple[int, int]:
  """Parses 'FIRST:LAST' or a single step, and returns the first and the last step."""
  first, colon, last = text.partition(':')
  try:
    return int(first), int(last if colon else first)
  except ValueError:
    raise UserError(f'--steps={text}: wanted FIRST:LAST, two numbers, or one number') from None


def _line(entry: Entry) -> str:
  version = '' if entry.version is None else f', version {entry.version}'
  return (
    f'{entry.uid}  {entry.state}  {entry.partition}, attempt {entry.attempt}, issued at step '
    f'{entry.step}{version}, used {entry.uses} times'
  )
