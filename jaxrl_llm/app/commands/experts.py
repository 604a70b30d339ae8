"""Adds expert rows, which are answers to imitate, to a run of the algorithm `mix`, in addition to
its demonstrations. The run may be active or stopped.

jaxrl experts --workdir=runs/x                                 # numbers of rows added so far
jaxrl experts --workdir=runs/x --add=FILE.jsonl --who=ann      # the rows of a file
jaxrl experts --workdir=runs/x --from_run=runs/y --select=best # rollouts of another run

Each line of a file has `prompt` (a text or messages) and `answer`, or `tokens` and `prompt_len`,
and optionally `rewards`, `task`, `taskset`, `domain`, `origin` and `who`. When the command returns,
all accepted rows are on disk. The run takes them before its next batch, in the order of their
arrival, and trains on each of them at most `experts.max_uses` times (by default once). If any rows
are refused, their locations and the reasons are printed, the other rows are added, and the exit
code is 1. The same row is added only once, so a file may be added again.

To correct an answer of the run: jaxrl feedback --workdir=DIR --uid=UID --correction=TEXT
--who=NAME.

With --json, each of these commands prints one JSON document.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.app.offline.experts import Run, add_file, add_run
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.replay import experts
from jaxrl_llm.replay.browse import snapshot

FLAGS = flags.FlagValues()
flags.DEFINE_string('workdir', None, 'Directory of the run.', flag_values=FLAGS)
flags.DEFINE_string('add', None, 'Add the rows of this file, as JSON Lines.', flag_values=FLAGS)
flags.DEFINE_string(
  'who', None, 'Name of the person or program that adds the rows.', flag_values=FLAGS
)
flags.DEFINE_string(
  'from_run', None, 'Add rollouts of the run in this directory.', flag_values=FLAGS
)
flags.DEFINE_list(
  'stages',
  [],
  'Stages of the other run whose rollouts are added; by default, all.',
  flag_values=FLAGS,
)
flags.DEFINE_enum(
  'select',
  'best',
  ['best', 'above', 'shortest_correct'],
  'Samples to add from each group: the one with the highest reward, those with at least '
  '--min_reward, or the shortest correct one.',
  flag_values=FLAGS,
)
flags.DEFINE_float('min_reward', 1.0, 'Minimum reward for --select=above.', flag_values=FLAGS)
flags.DEFINE_bool('json', False, 'Print one JSON document.', flag_values=FLAGS)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv), as_json=script.asks_json(argv))


def _main(argv: Sequence[str]) -> int:
  parse_flags(argv, FLAGS, __doc__, takes_config=False)
  if FLAGS.workdir is None:
    raise UserError('--workdir is missing; usage: jaxrl experts --workdir=DIR --add=FILE')
  workdir = pathlib.Path(FLAGS.workdir)
  if FLAGS.add is not None and FLAGS.from_run is not None:
    raise UserError('--add: cannot be combined with --from_run; give one of them')
  if FLAGS.add is None and FLAGS.from_run is None:
    with snapshot(workdir / 'replay') as (index, _):
      accounts = experts.account(index, workdir / 'replay')
    script.show(
      accounts._asdict(),
      [accounts.line or 'no expert rows have been added', *accounts.problems],
      as_json=FLAGS.json,
    )
    return 1 if accounts.problems else 0
  run = Run(workdir)
  if FLAGS.add is not None:
    report = add_file(run, pathlib.Path(FLAGS.add), FLAGS.who)
  else:
    selection = SelectionConfig(kind=FLAGS.select, min_reward=FLAGS.min_reward)
    who = FLAGS.who or 'jaxrl experts'
    other = pathlib.Path(FLAGS.from_run).expanduser()
    report = add_run(run, other, FLAGS.stages, selection, who)
  script.show(report._asdict(), report.lines, as_json=FLAGS.json)
  return 1 if report.refused else 0
