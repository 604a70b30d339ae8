"""Scores a file of completions with one scorer, to try the scorer before a run.

jaxrl score --scorer=answer --rows=FILE.jsonl --out=SCORES.jsonl  # mode from the ground truths
jaxrl score --scorer=answer --options.mode=numeric --rows=FILE.jsonl --out=SCORES.jsonl
jaxrl score --scorer=verl --options.function=my_reward.py:compute_score \\
  --rows=FILE.jsonl --out=SCORES.jsonl

A row has verl's form {"prompt", "completion", "reward_model": {"style", "ground_truth"}} or, for
code, the form {"prompt"?, "completion", "tests", "entry_point"?}. --scorer is a name that `jaxrl
train --list` prints, or 'module:attribute' of a custom scorer (the current directory is on the
import path). SCORES.jsonl gets one score per row, in row order. It is not written if a row is
invalid. Options: --options='{"mode": "numeric"}' or --options.mode=numeric; a value that is not
JSON is taken as text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from absl import flags, logging
from rich.console import Console
from rich.progress import Progress

from jaxrl_llm.app.commands.option_flags import read_options, split_options
from jaxrl_llm.app.composition.scorers import CHOOSERS, build_scorer, choose
from jaxrl_llm.app.offline.scoring import Summary, read_attempts, score_file
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.waits import unless
from jaxrl_llm.rewards.api import ByTrainer, Delayed, RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.scorers.verifier.scorer import check_verifiers

FLAGS = flags.FlagValues()
flags.DEFINE_string(
  'scorer', None, "Name from jaxrl train --list, or 'module:attribute'.", flag_values=FLAGS
)
flags.DEFINE_string('rows', None, 'File of rows, .jsonl or .parquet.', flag_values=FLAGS)
flags.DEFINE_string('out', None, 'File to write the scores to.', flag_values=FLAGS)
flags.DEFINE_string(
  'options', '{}', 'Scorer options, a JSON object; or --options.KEY=VALUE.', flag_values=FLAGS
)
flags.DEFINE_integer('workers', RewardsConfig.workers, 'Worker processes.', flag_values=FLAGS)
flags.DEFINE_float(
  'deadline_s', ScorerConfig.deadline_s, 'Time limit of a call in seconds.', flag_values=FLAGS
)
flags.DEFINE_integer(
  'memory_limit_mib',
  RewardsConfig.memory_limit_mib,
  'Maximum address space of a worker in MiB; 0: no limit.',
  flag_values=FLAGS,
)
USAGE = 'usage: jaxrl score --scorer=NAME --rows=FILE.jsonl --out=FILE.jsonl'

_INTERVAL_S = 10.0
"""Seconds between progress lines if there is no terminal."""


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  flag_args, overrides = split_options(argv)
  parse_flags(flag_args, FLAGS, __doc__, takes_config=False)
  for name in ('scorer', 'rows', 'out'):
    if FLAGS[name].value is None:
      raise UserError(f'--{name} is missing; {USAGE}')
  logging.set_verbosity(-1)
  if os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())
  options = read_options(FLAGS.options, overrides)
  config = ScorerConfig(name=FLAGS.scorer, options=options, deadline_s=FLAGS.deadline_s)
  rewards = RewardsConfig(
    scorers=(config,), workers=FLAGS.workers, memory_limit_mib=FLAGS.memory_limit_mib
  )
  rows, out = pathlib.Path(FLAGS.rows), pathlib.Path(FLAGS.out)
  _check_out(out, rows)
  scorer = build_scorer(config, '--scorer')
  if isinstance(scorer, Delayed | ByTrainer):
    raise UserError(
      f'--scorer={FLAGS.scorer}: gives scores only in a run; to score a file with a reward model, '
      'serve it (jaxrl serve --role=reward) and use --scorer=http'
    )
  attempts = read_attempts(rows)
  chosen = choose(config, lambda: [attempt.task.truth for attempt in attempts])
  if chosen.why:
    config = chosen.scorer
    scorer, rewards = (
      build_scorer(config, '--scorer'),
      dataclasses.replace(rewards, scorers=(config,)),
    )
  check_verifiers([attempt.task for attempt in attempts], (config,))
  with _Progress(len(attempts)) as progress:
    summary, stopped_by = script.run_async(
      _stoppable(lambda: score_file(scorer, rewards, attempts, out, progress.done))
    )
  if summary is None:
    sys.stderr.write('stopped: nothing was written\n')
    return 128 + stopped_by
  print(summary.line(config.name))
  if config.implementation in CHOOSERS:
    print(chosen.line())
  print(f'scores written: {out}')
  if warning := summary.warning(config, attempts):
    sys.stderr.write(f'{one_line(warning)}\n')
  return 0


async def _stoppable(work: Callable[[], Awaitable[Summary]]) -> tuple[Summary | None, int]:
  """Runs `work` until it completes or a signal stops it.

  Returns:
    (result of `work`, 0), or (None, number of the signal) after Ctrl-C or SIGTERM.
  """
  loop = asyncio.get_running_loop()
  stop = loop.create_future()
  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, lambda number=number: stop.done() or stop.set_result(number))
  summary = await unless(stop, work())
  return summary, stop.result() if summary is None else 0


def _check_out(out: pathlib.Path, rows: pathlib.Path) -> None:
  """Raises UserError, before scoring, if `out` cannot be written or is the rows file."""
  if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
    raise UserError(
      f'--out={out}: {out.parent} is not a writable directory; create it, or choose another'
    )
  if out.exists() and not out.is_file():
    raise UserError(f'--out={out}: is not a regular file; choose another name')
  if out.resolve() == rows.resolve():
    raise UserError(
      f'--out={out}: is the file of --rows, which is never overwritten; choose another name'
    )


class _Progress:
  """Shows a progress bar on a terminal; elsewhere, prints a line every `_INTERVAL_S` seconds."""

  def __init__(self, total: int):
    self._total, self._printed = total, time.monotonic()
    console = Console(stderr=True)
    self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    self._task = self._bar.add_task('scoring', total=total)

  def __enter__(self) -> _Progress:
    self._bar.start()
    return self

  def __exit__(self, *raised: object) -> None:
    self._bar.stop()

  def done(self, count: int) -> None:
    self._bar.update(self._task, completed=count)
    if self._bar.disable and time.monotonic() - self._printed > _INTERVAL_S:
      self._printed = time.monotonic()
      print(f'{count} of {self._total} rows scored', flush=True)
