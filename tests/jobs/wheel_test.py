"""The built wheel in an empty environment, outside of the checkout: every command works there."""

import subprocess
import sys

import job
import pytest

pytestmark = pytest.mark.acceptance


def test_a_wheel_trains_resumes_reports_and_converts_outside_of_the_checkout(tmp_path):
  uv = [sys.executable, '-m', 'uv']
  source, env = tmp_path / 'source', tmp_path / 'env'
  # A wheel has what is committed, and building writes into the tree.
  subprocess.run(['git', 'clone', '--quiet', job.ROOT, source], check=True)
  subprocess.run(
    [*uv, 'build', '--quiet', '--wheel', '--out-dir', tmp_path / 'dist', source], check=True
  )
  subprocess.run([sys.executable, '-m', 'venv', env], check=True)
  (wheel,) = (tmp_path / 'dist').glob('*.whl')
  constraints = (
    ['--constraint', job.ROOT / 'constraints' / 'py311.txt'] if sys.version_info < (3, 12) else []
  )
  install = [
    *uv,
    'pip',
    'install',
    '--quiet',
    '--python',
    env / 'bin' / 'python',
    f'{wheel}[reasoning-gym]',
    *constraints,
  ]
  light = [wheel if word == f'{wheel}[reasoning-gym]' else word for word in install]
  subprocess.run(light, check=True)
  place = tmp_path / 'elsewhere'
  place.mkdir()
  variables = {name: value for name, value in job.environment().items() if name != 'PYTHONPATH'}

  def jaxrl(*arguments: str, code: int = 0) -> str:
    command = [env / 'bin' / 'jaxrl', *arguments]
    done = subprocess.run(
      command, cwd=place, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr

  assert 'grpo' in jaxrl('train', '--list') and 'jaxrl report' in jaxrl('--help')
  train = ('train', '--config=quickstart', *job.QUICK[1:], '--workdir=run')
  assert "pip install 'jaxrl_llm[reasoning-gym]'" in jaxrl(*train, code=2)
  subprocess.run(install, check=True)
  assert 'report.html' in jaxrl(*train)
  metrics = (place / 'run' / 'metrics.jsonl').read_bytes()
  jaxrl(*train)  # Finished: nothing changes.
  assert (place / 'run' / 'metrics.jsonl').read_bytes() == metrics
  assert jaxrl('report', '--workdir=run').startswith('run/report.html')
  assert 'bfloat16' in jaxrl('convert', '--source=run/hf', '--target=converted', '--dtype=bfloat16')
  assert 'audit ok' in jaxrl('buffer', '--workdir=run', '--audit')
  assert 'jaxrl install --environment=aot' in jaxrl(
    *train, '--dry_run', '--topology=v5e:2x2', code=2
  )
  assert 'libtpu' in jaxrl('install', '--environment=aot')
  assert 'compiled in' in jaxrl(*train, '--dry_run', '--topology=v5e:2x2')
