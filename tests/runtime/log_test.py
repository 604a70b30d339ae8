"""Log writers get each row once, whatever happens to the run, and cannot stop it."""

import asyncio
import json
import subprocess
import sys
import time

import pytest
from pages import code

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import writers
from jaxrl_llm.runtime.log.config import LoggingConfig, LogWriterConfig, WandbConfig
from jaxrl_llm.runtime.log.follow import State
from jaxrl_llm.runtime.log.writers import LocalWriter, LogWriters, open_writers


class Run:
  """A start of a run: what its keeper and its resources do with the logs."""

  def __init__(self, workdir, config, *, committed=0):
    workdir.mkdir(exist_ok=True)
    (workdir / 'config.json').write_text('{"seed": 7}')
    self._metrics = writers.MetricsWriter(workdir, committed=committed)
    self._copies = open_writers(config, workdir, name='spell')
    self.notes, self.metrics = [], {}

  def write(self, *steps):
    for step in steps:
      row = self._metrics.write('grpo', step, {'x': step / 2, 'bad': float('nan')})
      self.notes += self._copies.write(row)
      self.metrics = self._copies.take_metrics()
    return self._metrics.sync()

  def close(self):
    self._metrics.close()
    asyncio.run(self._copies.close())


def lines_of(file, *, close_s=20.0, **options):
  options = {'file': str(file), **options}
  kind = f'fixtures.log_writers:{options.pop("kind", "Lines")}'
  writer = LogWriterConfig(kind=kind, name='lines', options=options)
  return LoggingConfig(tensorboard=False, writers=(writer,), close_s=close_s)


def read(file):
  return [json.loads(line) for line in file.read_text().splitlines()]


def steps_in(file):
  return [row['step'] for row in read(file) if 'step' in row] if file.exists() else []


@pytest.mark.full
def test_each_row_is_written_once_in_order_through_resumes(tmp_path):
  run, file = tmp_path / 'run', tmp_path / 'rows'
  first = Run(run, lines_of(file))
  committed = first.write(1, 2)
  first.write(3, 4)  # written, but lost with the process: the run goes back to the commit
  first.close()
  second = Run(run, lines_of(file), committed=committed)
  second.write(3, 4, 5)
  second.close()
  rows = read(file)
  assert [row['step'] for row in rows if 'step' in row] == [1, 2, 3, 4, 5]
  assert rows[1] == {'index': 0, 'step': 1, 'x': 0.5}  # NaN is no value
  opened = {'opened': 'spell', 'seed': 7}
  assert [row for row in rows if 'step' not in row] == [opened, {'closed': True}] * 2


@pytest.mark.full
def test_a_writer_that_is_added_later_gets_the_rows_before_it(tmp_path):
  run, file = tmp_path / 'run', tmp_path / 'rows'
  first = Run(run, LoggingConfig(tensorboard=False))
  committed = first.write(1, 2, 3)
  first.close()
  second = Run(run, lines_of(file), committed=committed)
  second.write(4)
  second.close()
  assert steps_in(file) == [1, 2, 3, 4]


@pytest.mark.full
def test_a_writer_that_raises_is_one_line_and_a_count(tmp_path, caplog):
  run, file = tmp_path / 'run', tmp_path / 'rows'
  start = Run(run, lines_of(file, refuses=[1, 2, 4]))
  deadline = time.monotonic() + 60
  step = 0
  while not start.metrics.get('run/logging/lines/lost_rows') and time.monotonic() < deadline:
    step += 1
    start.write(step)
    time.sleep(0.02)  # polls
  (note,) = start.notes
  assert note.startswith('log writer lines: ValueError: step ')
  assert note.endswith(f'is refused; the run continues, see {run}/logs/log-lines.log')
  start.write(*range(step + 1, step + 5))
  start.close()
  assert len(start.notes) == 1
  wanted = [s for s in range(1, step + 5) if s not in (1, 2, 4)]
  assert steps_in(file) == wanted
  assert f'3 of {step + 4} rows are lost' in caplog.text
  second = Run(run, lines_of(file), committed=None)  # the three stay lost, and are no new loss
  second.write(step + 5)
  second.close()
  assert second.metrics == {} and read(file)[-2]['step'] == step + 5


@pytest.mark.full
def test_a_writer_without_a_connection_is_one_line_and_gets_the_rows_later(
  tmp_path, caplog, monkeypatch
):
  monkeypatch.setenv('LINES_TOKEN', 'a1b2c3d4e5')
  run, file = tmp_path / 'run', tmp_path / 'rows'
  start = Run(run, lines_of(file, opens=False))
  start.write(1, 2)
  start.close()
  (line,) = [record.getMessage() for record in caplog.records]
  assert line.startswith(
    'log writer lines: 2 of 2 rows are not written; starting the run again writes them; '
    'ConnectionError: no route to host for …; see '
  )
  # The secret is in none of the files of the run.
  held = [path.read_text() for path in run.rglob('*') if path.is_file()]
  assert any('no route' in text for text in held) and 'a1b2c3d4e5' not in ''.join(held)
  second = Run(run, lines_of(file), committed=None)
  second.write(3)
  second.close()
  assert steps_in(file) == [1, 2, 3]


@pytest.mark.full
def test_a_writer_that_hangs_never_blocks_the_run(tmp_path, caplog):
  run, file = tmp_path / 'run', tmp_path / 'rows'
  start = Run(run, lines_of(file, kind='Hangs', close_s=0.5))
  start.write(1, 2, 3, 4)
  deadline = time.monotonic() + 60
  while len(steps_in(file)) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)  # polls
  start.write(5, 6)
  start.close()
  said = (
    '3 of 6 rows are not written; starting the run again writes them; it did not finish within '
    '0.5 s'
  )
  assert said in caplog.text and start.notes == []
  second = Run(run, lines_of(file), committed=None)
  second.close()
  assert steps_in(file) == [1, 2, 3, 4, 5, 6]


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(UserError, match=r"^logging\.wandb: needs wandb.*'jaxrl_llm\[logging\]'$"):
    LoggingConfig(wandb=WandbConfig()).check()


@pytest.mark.parametrize(
  ('writer', 'message'),
  [
    ({'kind': 'wandb'}, "kind 'wandb', wanted 'module:attribute'"),
    ({'kind': 'no_module:A'}, "log writer 'no_module:A': no module 'no_module'"),
    ({'kind': 'fixtures.log_writers:Nothing'}, "has no 'Nothing'"),
    ({'kind': 'fixtures.log_writers:Lines', 'options': {'path': 'x'}}, r"the options \['path'\]"),
    ({'kind': 'fixtures.log_writers:Lines', 'name': '../x'}, 'is also the name of a directory'),
  ],
)
def test_a_wrong_writer_is_one_line_before_the_run(writer, message):
  with pytest.raises(UserError, match=message) as error:
    LoggingConfig(writers=(LogWriterConfig(**writer),)).check()
  assert '\n' not in str(error.value)


def test_two_writers_of_one_name_are_refused():
  writer = LogWriterConfig(kind='a:wandb')
  with pytest.raises(UserError, match="2 are called 'wandb'"):
    LoggingConfig(wandb=WandbConfig(), writers=(writer,))


@pytest.mark.full
def test_the_mlflow_writer_of_the_page_continues_its_run(tmp_path, monkeypatch):
  mlflow = pytest.importorskip('mlflow', reason='MLflow is not one of the tests’ packages')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', f'sqlite:///{tmp_path}/mlflow.db')
  (tmp_path / 'mlflow_writer.py').write_text(code('docs/guides/logging.md', 'mlflow_writer.py'))
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.chdir(tmp_path)  # MLflow writes files there.
  writer = LogWriterConfig(kind='mlflow_writer:MLflowWriter', options={'experiment': 'spelling'})
  config = LoggingConfig(tensorboard=False, writers=(writer,))
  for committed, steps in ((0, (1, 2)), (None, (3,))):
    start = Run(tmp_path / 'run', config, committed=committed)
    start.write(*steps)
    start.close()
  client = mlflow.MlflowClient()
  experiment = client.get_experiment_by_name('spelling')
  (found,) = client.search_runs([experiment.experiment_id])
  history = client.get_metric_history(found.info.run_id, 'x')
  assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_a_run_without_writers_does_not_read_its_log(tmp_path):
  (tmp_path / writers.METRICS_FILE).mkdir()  # Whatever opens it fails.
  copies = open_writers(LoggingConfig(tensorboard=False), tmp_path, name='spell')
  assert copies.write({'stage': 'grpo', 'training/global_step': 1}) == []
  assert copies.take_metrics() == {}
  asyncio.run(copies.close())


def test_no_library_of_a_writer_is_imported_before_it_is_used():
  code = 'import sys, jaxrl_llm.runtime.log.writers; print({"wandb", "mlflow"} & {*sys.modules})'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert done.stdout == 'set()\n'


@pytest.mark.parametrize('text', ['[]', '{"rows": "3"}', '{"rows": 1, "more": 2}', '{'])
def test_damaged_progress_is_one_line_that_names_the_file(tmp_path, text):
  (tmp_path / 'progress.json').write_text(text)
  with pytest.raises(
    UserError, match=r'progress\.json: contains no valid state of a log writer'
  ) as error:
    State.read(tmp_path)
  assert '\n' not in str(error.value)


def test_a_full_disk_at_the_end_is_one_line(tmp_path, caplog):
  class Full:
    def close(self):
      raise OSError(28, 'No space left on device')

  asyncio.run(LogWriters([LocalWriter('tensorboard', Full())]).close())
  assert 'log writer tensorboard: [Errno 28] No space left' in caplog.text
