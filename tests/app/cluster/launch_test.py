"""`jaxrl launch`: flags to a job, and what it refuses in one line with nothing started."""

import dataclasses

import pytest

from jaxrl_llm.app.cluster.job import Job, Launcher
from jaxrl_llm.app.commands import launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnOptions:
  """Settings of a user's own launcher."""

  queue: str = 'default'
  """Queue."""
  retries: int = 1
  """Retries."""
  mails: tuple[str, ...] = ()
  """Addresses."""
  fast: bool = False
  """Whether it is fast."""


def own_text(job: Job, options: OwnOptions) -> str:
  return f'{job.name} {job.trainer.nodes} {options}\n'


def submit(text: str, job: Job, options: OwnOptions) -> str:
  return f'id-of-{job.name}'


def tell(job_id: str, options: OwnOptions) -> str:
  print(f'told of {job_id}')
  return f'state of {job_id}'


OWN = Launcher(
  name='own', Options=OwnOptions, text=own_text, submit=submit, status=tell, logs=tell, cancel=tell
)
NO_LAUNCHER = 'none'
HERE = f'{__name__}:OWN'


def run(capsys, *arguments: str) -> tuple[int, str, str]:
  code = launch.main(['jaxrl launch', *arguments])
  captured = capsys.readouterr()
  return code, captured.out, captured.err


def test_the_text_of_a_launcher_of_ones_own_with_its_options(capsys, tmp_path):
  flags = ('--queue=a b', '--retries=3', '--mails=x', '--mails=y', '--fast', '--nodes=2')
  code, out, _ = run(capsys, HERE, '--config=quickstart', f'--workdir={tmp_path / "run"}', *flags)
  options = OwnOptions(queue='a b', retries=3, mails=('x', 'y'), fast=True)
  assert (code, out) == (0, f'quickstart 2 {options}\n')
  assert not (tmp_path / 'run').exists()


def test_the_id_is_all_that_submission_prints_on_the_output(capsys, tmp_path):
  code, out, _ = run(capsys, HERE, '--config=quickstart', f'--workdir={tmp_path}', '--submit')
  assert (code, out) == (0, 'id-of-quickstart\n')


@pytest.mark.parametrize('action', ['status', 'logs', 'cancel'])
def test_a_submitted_job_is_asked_for_by_its_id(capsys, action):
  code, out, _ = run(capsys, HERE, f'--{action}=17')
  assert code == 0 and 'told of 17' in out
  assert ('state of 17' in out) == (action == 'status')


@pytest.mark.parametrize(
  ('arguments', 'line'),
  [
    ((), 'no launcher is named'),
    (('slrum', '--config=quickstart'), "launcher 'slrum': unknown; did you mean 'slurm'?"),
    (('no.such:LAUNCHER',), "no module 'no'"),
    ((f'{__name__}:NO_LAUNCHER',), 'wanted a Launcher whose Options are a dataclass'),
    ((HERE,), '--config=FILE.py[:VARIANT]: missing'),
    ((HERE, '--config=quickstart', '--nods=2'), '--nods: unknown flag; did you mean --nodes?'),
    ((HERE, '--config=quickstart', '--retries=x'), "--retries: got 'x', wanted an integer"),
    ((HERE, '--config=quickstart', '--nodes=0'), '--nodes=0: wanted at least 1'),
    ((HERE, '--config=nowhere.py'), 'nowhere.py: no such configuration file'),
    ((HERE, '--status=1', '--logs=1'), '--status: cannot be combined with --logs'),
    ((HERE, '--config=quickstart', 'extra'), 'extra: unexpected argument'),
  ],
)
def test_what_cannot_be_launched_is_one_line(capsys, arguments, line):
  code, out, err = run(capsys, *arguments)
  assert (code, out) == (2, '')
  assert err.startswith('error: ') and err.count('\n') == 1 and line in err, err
