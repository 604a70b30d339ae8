"""Looks into a run's replay store, also while the run writes to it.

python launch/buffer.py --workdir=runs/quickstart                     # what is there
python launch/buffer.py --workdir=runs/quickstart --state=dropped     # samples, those that changed last first
python launch/buffer.py --workdir=runs/quickstart --task=ID
python launch/buffer.py --workdir=runs/quickstart --uid=UID           # what became of one
python launch/buffer.py --workdir=runs/quickstart --audit             # does everything add up? exit 1 where it does not
python launch/buffer.py --workdir=runs/quickstart --clear_quarantine  # removes what nothing claims
"""

import pathlib
import sys

from absl import flags

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay import browse, quarantine
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.tables import QUARANTINE

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.')
AUDIT = flags.DEFINE_bool('audit', False, 'Recompute from the files that every sample is accounted for exactly once.')
STATE = flags.DEFINE_string('state', None, 'Samples in this state.')
TASK = flags.DEFINE_string('task', None, 'Samples of this task, by its id.')
LIMIT = flags.DEFINE_integer('limit', 20, 'Samples that are listed.', lower_bound=1)
CLEAR = flags.DEFINE_bool('clear_quarantine', False, 'Remove the files in replay/quarantine, which nothing claims.')
UID = flags.DEFINE_string('uid', None, 'One sample: what became of it.')


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(f'argument {argv[1]!r} is not a flag; usage: launch/buffer.py --workdir=DIR [--audit]')
  if WORKDIR.value is None:
    raise UserError('--workdir is missing; usage: launch/buffer.py --workdir=DIR [--audit]')
  directory = pathlib.Path(WORKDIR.value) / 'replay'
  if CLEAR.value:
    removed = quarantine.clear(directory)
    print(f'removed {sum(removed.values()) / 1e6:,.1f} MB in {len(removed):,} files from {directory / QUARANTINE}')
    return
  if AUDIT.value:
    report = audit(directory)
    print(*report.lines, sep='\n')
    sys.exit(0 if report.ok else 1)
  if UID.value is not None:
    print(*browse.history(directory, UID.value), sep='\n')
  elif STATE.value is not None or TASK.value is not None:
    for line in browse.asked(directory, TASK.value) if TASK.value is not None else ():
      print(line)
    for entry in browse.find(directory, state=STATE.value, task=TASK.value, limit=LIMIT.value):
      version = '' if entry.version is None else f', version {entry.version}'
      print(
        f'{entry.uid}  {entry.state}  {entry.partition}, attempt {entry.attempt}, issued at step {entry.step}'
        f'{version}, used {entry.uses} times'
      )
  else:
    print(*browse.summary(directory), sep='\n')


if __name__ == '__main__':
  script.run(main)
