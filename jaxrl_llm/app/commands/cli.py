"""Commands by name: `jaxrl NAME --flag=value ...`. In a checkout, `python launch/NAME.py` runs the
same command.

  jaxrl train        trains a configuration; the same command resumes the run
  jaxrl serve        provides vLLM servers, an explorer, a reward model, sandboxes or an inbox
  jaxrl launch       launches a training job on this machine or a cluster: Slurm, Kubernetes, ssh
  jaxrl evaluate     evaluates the commits of a run
  jaxrl report       rebuilds a run's report.html
  jaxrl sweep        runs the trials of a sweep file: grids, random and guided search, seeds
  jaxrl compare      writes a page that compares runs
  jaxrl score        scores a file of completions with one scorer
  jaxrl curate       selects the tasks that are worth training on
  jaxrl rate         has a language model rate tasks: quality, difficulty, priority
  jaxrl buffer       inspects a run's replay store
  jaxrl feedback     attaches delayed rewards, such as verdicts of people, to samples of a run
  jaxrl experts      adds expert rows (answers to imitate) to a run, even while it is active
  jaxrl replay       repeats one update of a run and compares the results bit for bit
  jaxrl fetch        copies an archived commit of a run to a run directory
  jaxrl convert      checks or changes a Hugging Face model directory
  jaxrl import-verl  converts a verl script or YAML file to a configuration file
  jaxrl import-trl   converts a TRL command, YAML or Python file to a configuration file
  jaxrl tokenizer    builds a tokenizer from the text of a taskset
  jaxrl install      creates the environment of vLLM servers, or of compilers for other devices

`jaxrl NAME --help` describes a command.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import signal
import sys
from collections.abc import Sequence

import jaxrl_llm

COMMANDS = (
  *(
    'train',
    'serve',
    'launch',
    'evaluate',
    'report',
    'sweep',
    'compare',
    'score',
    'curate',
    'rate',
    'buffer',
    'feedback',
    'experts',
    'replay',
    'fetch',
    'convert',
    'import-verl',
    'import-trl',
    'tokenizer',
  ),
  'install',
)
_HANDLE_SIGNALS = ('train', 'score', 'sweep')
"""Names of the commands that install their own Ctrl-C handler once they run."""


def launch(name: str, argv: Sequence[str]) -> int:
  """Runs a command and returns its exit code.

  The command's module is imported here and not at the top of the file, because scorer workers also
  import `cli`, and need none of the commands.
  """
  if name in _HANDLE_SIGNALS:
    # Until the command takes over, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  # The objects that imports create are permanent. Garbage collections would visit all of them
  # repeatedly, which took 2 of the 17 s of CPU time of a small job.
  gc.disable()
  try:
    command = importlib.import_module(f'{__package__}.{name.replace("-", "_")}')
  finally:
    gc.freeze()
    gc.enable()
  return command.main(argv)


def main() -> int:
  """Runs the console command `jaxrl` and returns its exit code."""
  name, *rest = sys.argv[1:] or ['--help']
  if name in ('--help', '-h', 'help'):
    print(__doc__.strip())
    return 0
  if name == '--version':
    print(jaxrl_llm.__version__)
    return 0
  if name not in COMMANDS:
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f'did you mean {close[0]!r}?' if close else f'wanted one of {", ".join(COMMANDS)}'
    sys.stderr.write(f'error: {name}: no such command; {hint}\n')
    return 2
  return launch(name, [f'jaxrl {name}', *rest])


if __name__ == '__main__':
  sys.exit(main())
