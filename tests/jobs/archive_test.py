"""Archives: a host that has nothing else resumes the run."""

import json
import shutil

import job
import object_store
import pytest

from jaxrl_llm.replay.audit import audit
from jaxrl_llm.runtime.archive import Archive, ArchiveConfig

pytestmark = pytest.mark.full


def marker_of(archive: Archive, step: int) -> dict:
  return json.loads((archive._root / 'commits' / f'{step}.json').read_text())


def test_a_fresh_host_resumes_bit_for_bit_from_an_object_store_alone(tmp_path, monkeypatch):
  for name, value in object_store.serve().items():
    monkeypatch.setenv(name, value)
  server = job.environment(**object_store.serve())
  config = ArchiveConfig(location='s3://bucket/runs/quick')
  archive, flag = Archive(config), f'--config.archive.location={config.location}'
  first, second = tmp_path / 'first', tmp_path / 'second'
  # Killed twice: it resumes from its own directory, and then from the archive.
  for rows in (5, 12):
    process = job.start(first, flag, environ=server)
    job.wait_for_rows(first, rows, process)
    job.kill(process)
  shutil.rmtree(first)
  archived = archive.steps()
  assert archived and archived[-1] >= 6
  done = job.train(second, flag, environ=server)
  assert f'fetched the commit at step {archived[-1]}' in ' '.join(done.stdout.split())
  job.assert_equal_runs(second, job.quick_run())
  report = audit(second / 'replay')
  assert report.ok, report
  # The archive has the exported model, too, and nothing that no commit needs.
  last = Archive(config)
  markers = [marker_of(last, step) for step in last.steps()]
  assert (
    last.steps() == job.commits(second) and {'hf/config.json', 'report.html'} <= markers[-1].keys()
  )
  named = {f'{digest}-{size}' for files in markers for digest, size in files.values()}
  assert named == {path.name for path in (last._root / 'objects').iterdir()}
  costs = [row['perf/archive_bytes'] for row in job.rows(second) if 'perf/archive_bytes' in row]
  assert costs and all(cost > 0 for cost in costs)
  # A command that would change the run is refused, as it is in the run's own directory.
  refused = job.train(tmp_path / 'third', flag, '--config.seed=5', expect=2, environ=server)
  assert 'seed' in refused.stderr
  fetched = job.call(
    'launch/fetch.py',
    f'--archive={config.location}',
    f'--workdir={tmp_path / "copy"}',
    environ=server,
  )
  assert str(tmp_path / 'copy') in ' '.join(fetched.stdout.split())
  assert job.newest_arrays(tmp_path / 'copy') == job.newest_arrays(second)
