"""Runs the doctor for the command line: prints its findings, and ends cleanly when interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import sys

import jax

from jaxrl_llm.app.doctor.examine import examine
from jaxrl_llm.app.doctor.findings import Finding, Findings, FindingStatus
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core import disk, script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.waits import unless
from jaxrl_llm.runtime.machine import use_compilation_cache


def diagnose(config: Config, workdir: pathlib.Path, *, as_json: bool = False) -> int:
  """Examines a run and prints the findings.

  Returns the exit code: 0 if no check failed, otherwise 1.

  Args:
    as_json: whether to print the findings to standard output as one JSON list. The findings are
      then also printed as lines of text, to standard error.
  """
  if int(os.environ.get('JAX_NUM_PROCESSES', '1')) > 1 or jax.process_count() > 1:
    raise UserError(
      '--doctor: needs a single process, but this is one of several processes of a job; start it '
      'outside of the job'
    )
  file = sys.stderr if as_json else sys.stdout
  findings = Findings(lambda finding: _tell(finding, file))
  with contextlib.ExitStack() as opened:
    if not config.compilation_cache:
      # Each program is compiled twice: once to run it, and once to measure its memory. The second
      # compilation reads the result of the first one from this cache.
      programs = opened.enter_context(disk.scratch('jaxrl_llm-programs-'))
      use_compilation_cache(str(programs))
    stopped_by = script.run_async(_stoppable(config, workdir, findings))
  if stopped_by:
    name = signal.Signals(stopped_by).name
    sys.stderr.write(f'stopped by {name}: the findings are incomplete\n')
    if as_json:
      script.print_json({'error': f'stopped by {name}'})
    # A thread may still be compiling a program, and a normal exit would wait for it.
    script.leave_at_once(128 + stopped_by)
  if as_json:
    script.print_json([finding.to_json() for finding in findings])
  else:
    counts = {status: sum(f.status == status for f in findings) for status in FindingStatus}
    print(', '.join(f'{count} {status}' for status, count in counts.items()))
  return 1 if findings.failed() else 0


def _tell(finding: Finding, file) -> None:
  print(finding.line, file=file, flush=True)


async def _stoppable(config: Config, workdir: pathlib.Path, findings: Findings) -> int:
  """Examines the run until it is done, or until SIGINT or SIGTERM arrives.

  Returns 0, or the number of the signal that has ended the examination.
  """
  loop = asyncio.get_running_loop()
  stop = loop.create_future()

  def on_signal(number: int) -> None:
    if stop.done():
      signal.signal(number, signal.SIG_DFL)
      signal.raise_signal(number)
    sys.stderr.write(f'{signal.Signals(number).name}: ending (after a second signal, at once)\n')
    stop.set_result(number)

  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, on_signal, number)

  async def work() -> bool:
    await examine(config, workdir, findings)
    return True

  done = await unless(stop, work())
  return 0 if done else stop.result()
