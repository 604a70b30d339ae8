"""Every test process has eight CPU devices, and signatures are checked against their array
annotations.
"""

import contextlib
import gc
import os
import pathlib
import shutil
import subprocess
import tempfile

import programs
from paths import ROOT, TESTS

os.environ['XLA_FLAGS'] = ' '.join(
  (os.environ.get('XLA_FLAGS', ''), programs.CHEAP, '--xla_force_host_platform_device_count=8')
)
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import job
import psutil
import pytest
import times
from jaxtyping import install_import_hook

_PACKAGE = ROOT / 'jaxrl_llm'
# Only modules with array annotations: the hook costs time for each module that it rewrites.
install_import_hook(
  [
    '.'.join(path.relative_to(_PACKAGE.parent).with_suffix('').parts)
    for path in sorted(_PACKAGE.rglob('*.py'))
    if 'jaxtyping' in path.read_text()
  ],
  'beartype.beartype',
)


_LONGEST = (
  'jobs/vllm_test.py',
  'jobs/quickstart_test.py',
  'jobs/vllm_owned_test.py',
  'jobs/soak_test.py',
  'jobs/distributed_test.py',
  'jobs/algorithms_test.py',
  'jobs/attached_test.py',
  'jobs/main_test.py',
  'jobs/topology_test.py',
  'learner/losses_test.py',
  'weights/hf_test.py',
  'benchmarks_test.py',
  'jobs/resume_test.py',
  'rewards/sandbox/sandbox_test.py',
  'learner/update_test.py',
  'ops/logprobs_test.py',
  'rewards/scorers/code_test.py',
  'jobs/partial_test.py',
  'jobs/judged_test.py',
  'jobs/explorers_test.py',
  'rollout/vllm/transfer_test.py',
  'launch/scripts_test.py',
  'peers/losses_test.py',
)
"""Files that take minutes: dealt out first, so that no worker is left alone with one at the end."""


def pytest_configure(config):
  config.pluginmanager.register(times, 'times')


@pytest.hookimpl(wrapper=True)
def pytest_collection():
  """Switches the garbage collector off: nearly every object that collection makes stays."""
  gc.disable()
  try:
    return (yield)
  finally:
    gc.enable()


def pytest_collection_modifyitems(items):
  place = {name: number for number, name in enumerate(_LONGEST)}
  items.sort(key=lambda item: place.get(item.path.relative_to(TESTS).as_posix(), len(place)))


@pytest.fixture(scope='session', autouse=True)
def _shared_by_the_session(tmp_path_factory):
  """Shares compiled programs and finished runs among all workers of the session."""
  base = tmp_path_factory.getbasetemp()
  session = base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base
  os.environ[job.SESSION] = str(session)
  jax.config.update('jax_compilation_cache_dir', str(session / 'test_programs'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.05)


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """The tokenizer of `exploring`'s tasks."""
  from exploring import make_tokenizer

  return make_tokenizer(tmp_path_factory.mktemp('tokenizer'))


@pytest.fixture
def memory():
  """A new directory in shared memory."""
  with tempfile.TemporaryDirectory(prefix='jaxrl-test-', dir='/dev/shm') as folder:
    yield pathlib.Path(folder)


@pytest.fixture
def store(tmp_path):
  """A new, empty store."""
  from exploring import new_store

  with contextlib.closing(new_store(tmp_path / 'replay')) as opened:
    yield opened


@pytest.fixture(scope='module')
def certificate(tmp_path_factory):
  """(certificate, key, the same key encrypted) for 127.0.0.1."""
  if shutil.which('openssl') is None:
    pytest.skip('the openssl command is missing, which makes the certificate of this test')
  folder = tmp_path_factory.mktemp('tls')
  cert, key, locked = (str(folder / name) for name in ('cert.pem', 'key.pem', 'locked.pem'))
  made = f'req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=test'
  for command in (
    f'{made} -addext subjectAltName=IP:127.0.0.1',
    f'rsa -aes256 -passout pass:secret -in {key} -out {locked}',
  ):
    subprocess.run(['openssl', *command.split()], check=True, capture_output=True)
  return cert, key, locked


_MAPS, _BYTES = 10_000, 512 << 20
"""Memory maps of a process, of which the kernel grants it 65,530, and growth of its memory: from
there on, programs are freed.
"""


@pytest.fixture(scope='session')
def _freed_at():
  """The process's memory when programs were freed last."""
  return {'bytes': psutil.Process().memory_info().rss}


@pytest.fixture(scope='module', autouse=True)
def _forget_programs(_freed_at):
  """Frees compiled programs after a file if there are many: doing so takes 0.7 s."""
  yield
  maps, memory = pathlib.Path('/proc/self/maps'), psutil.Process().memory_info().rss
  many = maps.exists() and maps.read_bytes().count(b'\n') > _MAPS
  if many or memory > _freed_at['bytes'] + _BYTES:
    jax.clear_caches()
    gc.collect()
    _freed_at['bytes'] = psutil.Process().memory_info().rss
