"""Commits are whole or absent, come back bit for bit on any mesh, and survive kills, flipped bytes
and full disks.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paths import ROOT

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.parallel.rules import replicated, sharding
from jaxrl_llm.runtime import checkpoint
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, CheckpointFailed, Checkpoints

HOST = {'step': 1, 'sampler': {'taken': [1, 2]}, 'best': [0.1, 7], 'text': 'één'}
ONE_LINE = '^[^\n]*$'


def checkpoints(path, *, leads=True, **config) -> Checkpoints:
  return Checkpoints(path / 'checkpoints', CheckpointConfig(**config), leads=leads)


def whole(mesh, tree):
  return jax.device_put(tree, replicated(mesh))


def state_on(mesh, seed=0, columns=8):
  """Sharded float32 and bfloat16 with the values that copying through text or another dtype would
  lose.
  """
  rng = np.random.default_rng(seed)
  odd = np.array([[-0.0, np.nan, np.inf, np.finfo(np.float32).smallest_subnormal]] * 4, np.float32)
  host = {
    'kernel': rng.normal(size=(16, columns)).astype(np.float32),
    'half': jnp.asarray(rng.normal(size=(8, 4)), jnp.bfloat16),
    'odd': odd,
  }
  params = {
    name: jax.device_put(value, sharding(mesh, ('vocab', 'embed'), value.shape))
    for name, value in host.items()
  }
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  count = whole(mesh, jnp.int32(seed))
  return {'train': {'params': params, 'opt_state': optimizer.init(params), 'updates': count}}


def assert_same_bits(got, wanted):
  assert jax.tree.structure(got) == jax.tree.structure(wanted)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def files_of(path):
  return sorted(file for file in path.rglob('*') if file.is_file())


@pytest.fixture(scope='module')
def mesh():
  return build_mesh(MeshConfig(data=1, fsdp=4, tensor=2))


@pytest.fixture
def one(mesh):
  """A small state."""
  return {'x': whole(mesh, jnp.arange(100.0))}


def test_a_commit_comes_back_bit_for_bit_on_the_same_shardings(tmp_path, mesh):
  state = state_on(mesh, seed=3)
  checkpoints(tmp_path).save(1, state, HOST)
  again = checkpoints(tmp_path)
  assert again.steps() == [1]
  restored = again.restore(1, jax.eval_shape(lambda x: x, state))
  assert_same_bits(restored, state)
  assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, state)
  assert again.host(1) == HOST


def test_moments_are_rounded_once_to_the_stated_dtype_and_nothing_else_is(tmp_path, mesh):
  state = state_on(mesh, seed=3, columns=1024)  # Large beside the files' own metadata.
  rng = np.random.default_rng(0)
  state['train']['opt_state'] = jax.tree.map(
    lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding) if x.ndim else x,
    state['train']['opt_state'],
  )
  sizes = []
  for name, dtype in (('whole', 'float32'), ('rounded', 'bfloat16')):
    saved = checkpoints(tmp_path / name, moments_dtype=dtype)
    saved.save(1, state, HOST)
    arrays = tmp_path / name / 'checkpoints' / '1' / 'arrays'
    sizes.append(sum(file.stat().st_size for file in files_of(arrays)))
  moments = 2 * 16 * 1024
  assert sizes[0] - sizes[1] > 1.5 * moments  # Two bytes fewer each, less what differs by chance.
  restored = checkpoints(tmp_path / 'rounded').restore(1, jax.eval_shape(lambda x: x, state))
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(x.dtype) if x.ndim else x, state['train']['opt_state']
  )
  assert_same_bits(restored, {'train': {**state['train'], 'opt_state': rounded}})
  assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, state)


@pytest.mark.parametrize('shape', [(8, 1, 1), (2, 2, 2), (1, 1, 1)])
def test_a_commit_comes_back_bit_for_bit_on_another_mesh(tmp_path, mesh, shape):
  state = state_on(mesh, seed=1)
  checkpoints(tmp_path).save(1, state, None)
  data, fsdp, tensor = shape
  other = build_mesh(
    MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor]
  )
  like = state_on(other, seed=2)
  restored = checkpoints(tmp_path).restore(1, like)
  assert_same_bits(restored, state)
  assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, like)


def test_a_part_of_a_commit_comes_back_alone_and_only_if_the_whole_is_intact(tmp_path, mesh):
  saved, state = checkpoints(tmp_path), state_on(mesh)
  saved.save(1, state, HOST)
  like = {'train': {'params': state['train']['params']}}
  part = saved.restore_part(1, like)
  assert_same_bits(part, like)
  assert part['train']['params']['kernel'].sharding == like['train']['params']['kernel'].sharding
  file = max((tmp_path / 'checkpoints' / '1' / 'arrays').rglob('*'), key=lambda p: p.stat().st_size)
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 1
  file.write_bytes(data)
  with pytest.raises(UserError):
    saved.restore_part(1, like)


def test_a_commit_holds_the_state_at_its_beginning_whatever_training_does_meanwhile(tmp_path, mesh):
  state, host = state_on(mesh, seed=3)['train']['params'], {'taken': [1, 2]}
  wanted = jax.tree.map(lambda x: np.array(x), state)
  saved = checkpoints(tmp_path)
  writing = saved.begin(1, state, host)
  host['taken'].append(3)
  shardings = jax.tree.map(lambda x: x.sharding, state)
  update = jax.jit(
    lambda tree: jax.tree.map(lambda x: x * 0 + 7, tree), donate_argnums=0, out_shardings=shardings
  )
  updated = jax.block_until_ready(update(state))
  assert saved.steps() == []
  writing.finish()
  assert saved.steps() == [1]
  assert saved.host(1) == {'taken': [1, 2]}
  assert_same_bits(saved.restore(1, updated), wanted)


def test_commits_are_kept_by_age_too(tmp_path, one):
  keeps = checkpoints(tmp_path, keep=1, keep_hours=2.0)
  for step, age_hours in ((1, 3), (2, 1), (3, 0)):
    keeps.save(step, one, None)
    if age_hours:
      then = time.time() - age_hours * 3600
      os.utime(tmp_path / 'checkpoints' / str(step) / 'COMMIT', (then, then))
  assert keeps.steps() == [2, 3]


def test_a_file_that_another_process_has_digested_and_that_is_gone_fails_the_commit(tmp_path, one):
  saved = checkpoints(tmp_path)
  writing = saved.begin(1, one, HOST)
  with pytest.raises(CheckpointFailed, match=ONE_LINE), pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      checkpoint, '_collect_digests', lambda path, names: {'arrays/ocdbt.process_1/d/x': (1, 'a')}
    )
    writing.finish()
  assert saved.steps() == []


def test_a_directory_without_commit_file_is_removed_at_the_next_start(tmp_path, one):
  first = checkpoints(tmp_path)
  first.save(1, one, HOST)
  first.save(2, one, HOST)
  directory = tmp_path / 'checkpoints'
  (directory / '2' / 'COMMIT').unlink()
  (directory / '3').mkdir()
  (directory / '3' / 'host.json').write_text('{}')
  again = checkpoints(tmp_path)
  assert again.steps() == [1]
  again.clean()
  assert [p.name for p in directory.iterdir()] == ['1']
  assert_same_bits(again.restore(1, one), one)
  again.save(2, one, HOST)
  assert again.steps() == [1, 2]


def test_only_process_0_commits(tmp_path, one):
  other = checkpoints(tmp_path, leads=False)
  other.save(1, one, None)
  assert other.steps() == []
  assert not list(tmp_path.rglob('host.json'))


def test_a_run_without_checkpoints_has_none(tmp_path):
  empty = checkpoints(tmp_path)
  empty.clean()
  assert empty.steps() == []


def test_steps_are_numbers_in_order_whatever_else_lies_there(tmp_path, one):
  keeps = checkpoints(tmp_path, keep=9)
  for step in (2, 10, 9):
    keeps.save(step, one, None)
  copy = tmp_path / 'checkpoints' / '10 (copy)'
  copy.mkdir()
  (copy / 'COMMIT').write_text('{}')
  assert keeps.steps() == [2, 9, 10]


def test_every_flipped_byte_is_reported_in_one_line(tmp_path, one):
  saved = checkpoints(tmp_path)
  saved.save(1, one, HOST)
  path = tmp_path / 'checkpoints' / '1'
  files = files_of(path)
  assert len(files) > 5
  for file in files:
    good = file.read_bytes()
    for at in {0, len(good) // 2, len(good) - 1} if good else ():
      flipped = bytearray(good)
      flipped[at] ^= 0x10
      file.write_bytes(flipped)
      with pytest.raises(UserError, match=ONE_LINE) as caught:
        saved.restore(1, one)
      assert str(path) in str(caught.value)
      assert file.name == 'COMMIT' or str(file) in str(caught.value)
    file.write_bytes(good)
  assert_same_bits(saved.restore(1, one), one)


@pytest.mark.parametrize(
  'damage', [lambda f: f.unlink(), lambda f: f.write_bytes(f.read_bytes()[:-1])]
)
def test_a_lost_or_cut_file_is_found(tmp_path, one, damage):
  saved = checkpoints(tmp_path)
  saved.save(1, one, HOST)
  largest = max(files_of(tmp_path / 'checkpoints' / '1' / 'arrays'), key=lambda f: f.stat().st_size)
  damage(largest)
  with pytest.raises(UserError, match=ONE_LINE):
    saved.restore(1, one)


def test_the_host_part_is_checked_before_anybody_acts_on_it(tmp_path, one):
  """It holds the offset to which metrics are cut: a wrong one would destroy them."""
  saved = checkpoints(tmp_path)
  saved.save(1, one, {'metrics_offset': 4096})
  file = tmp_path / 'checkpoints' / '1' / 'host.json'
  file.write_text(file.read_text().replace('4096', '1096'))
  with pytest.raises(UserError, match=r'host\.json'):
    saved.host(1)


@pytest.mark.parametrize(
  ('newest', 'keep', 'left'),
  [
    # Steps to keep in addition, at each of the commits 1, 2, 3, 4, 5.
    (2, [()] * 5, [4, 5]),
    (1, [(1,), (2,), (2,), (2,), (2,)], [2, 5]),
    (2, [(1,), (1,), (1,), (1,), (5,)], [4, 5]),  # The old best goes when a better one comes.
    (3, [(), (2,), (2,), (2,), (2,)], [2, 3, 4, 5]),
    (3, [(), (), (), (4,), (4,)], [3, 4, 5]),  # The best is among the newest.
    (1, [(), (2,), (2, 3), (2, 3), (2, 3)], [2, 3, 5]),
    (9, [()] * 5, [1, 2, 3, 4, 5]),
  ],
)
def test_the_newest_and_the_needed_are_kept(tmp_path, one, newest, keep, left):
  keeps = checkpoints(tmp_path, keep=newest)
  for step in range(1, 6):
    keeps.save(step, one, {'step': step}, keep=keep[step - 1])
  assert keeps.steps() == left
  assert sorted(int(p.name) for p in (tmp_path / 'checkpoints').iterdir()) == left
  for step in left:
    assert keeps.host(step) == {'step': step}
    assert_same_bits(keeps.restore(step, one), one)


@pytest.mark.parametrize(
  'bad',
  [
    *({'keep': 0}, {'keep': -1}, {'every_steps': 0}),
    *({'keep_hours': -1.0}, {'keep_hours': float('nan')}, {'every_minutes': 0.0}),
  ],
)
def test_a_number_that_would_keep_or_commit_nothing_is_refused(bad):
  with pytest.raises(UserError, match=f'^checkpoint.{next(iter(bad))}: '):
    CheckpointConfig(**bad)


def test_a_commit_never_changes(tmp_path, one):
  saved = checkpoints(tmp_path)
  saved.save(1, one, HOST)
  before = {file: file.read_bytes() for file in files_of(tmp_path)}
  with pytest.raises(RuntimeError, match='already committed'):
    saved.save(1, {'x': one['x'] + 1}, {})
  assert {file: file.read_bytes() for file in files_of(tmp_path)} == before


def assert_nothing_lost(saved, path, one, before, caught, reason):
  assert caught.value.exit_code == RunError.exit_code == 1
  message = str(caught.value)
  assert '\n' not in message
  assert f'({reason})' in message
  assert str(path / 'checkpoints' / '2') in message
  assert 'newest commit is step 1' in message
  assert {file: file.read_bytes() for file in files_of(path)} == before
  assert [p.name for p in (path / 'checkpoints').iterdir()] == ['1']
  assert_same_bits(saved.restore(1, one), one)


@pytest.fixture
def small_disk(tmp_path):
  disk = tmp_path / 'disk'
  disk.mkdir()
  mounted = subprocess.run(
    ['mount', '-t', 'tmpfs', '-o', 'size=400k', 'tmpfs', disk], capture_output=True, check=False
  )
  if mounted.returncode:
    pytest.skip('no right to mount a small file system')
  yield disk
  subprocess.run(['umount', disk], check=True)


@pytest.mark.parametrize('what', ['arrays', 'host'])
def test_a_full_disk_is_one_line_and_loses_nothing(small_disk, mesh, one, what, capfd):
  saved = checkpoints(small_disk)
  saved.save(1, one, HOST)
  before = {file: file.read_bytes() for file in files_of(small_disk)}
  noise = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
  state = {'x': whole(mesh, noise)} if what == 'arrays' else one
  host = {'big': 'x' * 500_000} if what == 'host' else HOST
  with pytest.raises(CheckpointFailed) as caught:
    saved.save(2, state, host)
  assert_nothing_lost(saved, small_disk, one, before, caught, 'No space left on device')
  assert 'Traceback' not in capfd.readouterr().err
  saved.save(2, one, HOST)  # space was found: the run goes on
  assert saved.steps() == [1, 2]


def test_a_file_that_may_not_grow_is_one_line_and_loses_nothing(tmp_path, mesh, one):
  saved = checkpoints(tmp_path)
  saved.save(1, one, HOST)
  before = {file: file.read_bytes() for file in files_of(tmp_path)}
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
  try:
    with pytest.raises(CheckpointFailed) as caught:
      # Also one of the eight parts that devices write for themselves is too large for a file.
      saved.save(2, {'x': whole(mesh, np.random.default_rng(0).normal(size=2_000_000))}, HOST)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert_nothing_lost(saved, tmp_path, one, before, caught, 'File too large')
  failed = tmp_path / 'checkpoints' / '2'
  (failed / 'late').mkdir(parents=True)  # As a write that ends much later does.
  saved.save(3, one, HOST)
  assert not failed.exists() and saved.steps() == [1, 3]


FAILER = """
import gc, pathlib, resource, sys
import numpy as np
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, CheckpointFailed, Checkpoints
saved = Checkpoints(pathlib.Path(sys.argv[1]), CheckpointConfig(), leads=True)
noise = {str(i): np.random.default_rng(i).normal(size=100_000 if i == 3 else 20_000) \
for i in range(40)}
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
for step in range(1, 11):
  try:
    saved.save(step, noise, {})
  except CheckpointFailed as error:
    print(error)
  gc.collect()
"""


@pytest.mark.full
def test_writes_that_go_on_after_the_first_error_leave_and_print_nothing(tmp_path):
  env = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
  done = subprocess.run(
    [sys.executable, '-c', FAILER, str(tmp_path)],
    env={**env, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.stderr == ''
  lines = done.stdout.splitlines()
  assert len(lines) == 10
  assert all('(File too large); there is no earlier commit' in line for line in lines)
  assert list(tmp_path.iterdir()) == []


SAVER = """
import pathlib, sys
import jax.numpy as jnp
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints
saved = Checkpoints(pathlib.Path(sys.argv[1]) / 'checkpoints', CheckpointConfig(keep=2), leads=True)
for step in range(1, 10_000):
  saved.save(step, {'x': jnp.full(1 << 21, float(step))}, {'step': step})
"""


def kill_while_saving(path, ready) -> None:
  """Starts a process that saves without end, and kills it as soon as `ready` says so."""
  env = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
  saver = subprocess.Popen(
    [sys.executable, '-c', SAVER, str(path)], env={**env, 'PYTHONPATH': str(ROOT)}
  )
  try:
    while not ready():
      assert saver.poll() is None
      time.sleep(0.001)
  finally:
    saver.send_signal(signal.SIGKILL)
    saver.wait()


def assert_every_commit_is_whole(path) -> None:
  saved = checkpoints(path)
  saved.clean()
  steps = saved.steps()
  assert steps
  assert sorted(int(p.name) for p in (path / 'checkpoints').iterdir()) == steps
  for step in steps:
    restored = saved.restore(step, {'x': jnp.zeros(1 << 21)})
    np.testing.assert_array_equal(np.asarray(restored['x']), np.full(1 << 21, step, np.float32))
    assert saved.host(step) == {'step': step}
  saved.save(steps[-1] + 1, {'x': jnp.zeros(1 << 21)}, {})


@pytest.mark.full
def test_a_process_killed_in_the_middle_of_a_save_leaves_the_commits_before_it(tmp_path):
  target = tmp_path / 'checkpoints' / '2'

  def in_the_middle():
    return target.exists() and not (target / 'COMMIT').exists() and bool(files_of(target))

  kill_while_saving(tmp_path, in_the_middle)
  assert not (target / 'COMMIT').exists()
  assert_every_commit_is_whole(tmp_path)


KILLED = """
import os, pathlib, signal, sys
import jax.numpy as jnp
from jaxrl_llm.runtime import checkpoint
def killing(name):
  function = getattr(checkpoint, name)
  def call(*args, **kwargs):
    if any('checkpoints/2' in str(arg) for arg in args):
      os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **kwargs)
  setattr(checkpoint, name, call)
saved = checkpoint.Checkpoints(
  pathlib.Path(sys.argv[1]) / 'checkpoints', checkpoint.CheckpointConfig(keep=2), leads=True
)
saved.save(1, {'x': jnp.full(1 << 21, 1.0)}, {'step': 1})
killing(sys.argv[2])
writing = saved.begin(2, {'x': jnp.full(1 << 21, 2.0)}, {'step': 2})
print((pathlib.Path(sys.argv[1]) / 'checkpoints' / '2').exists(), flush=True)
writing.finish()
"""


@pytest.mark.full
@pytest.mark.parametrize('step', ['_commit', '_digest'])
def test_a_process_killed_between_two_steps_of_the_writer_leaves_the_commit_before(tmp_path, step):
  env = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
  killed = subprocess.run(
    [sys.executable, '-c', KILLED, str(tmp_path), step],
    env={**env, 'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    text=True,
    timeout=300,
  )
  assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, 'True\n')
  assert checkpoints(tmp_path).steps() == [1]
  assert_every_commit_is_whole(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize('seed', range(6))
def test_a_process_killed_at_a_random_moment_leaves_whole_commits(tmp_path, seed):
  delay_s = np.random.default_rng(seed).uniform(0, 0.5)
  first = []

  def later():
    if (tmp_path / 'checkpoints' / '1' / 'COMMIT').exists():
      first.append(time.monotonic())
    return first and time.monotonic() - first[0] > delay_s

  kill_while_saving(tmp_path, later)
  assert_every_commit_is_whole(tmp_path)


PAIR = """
import os, pathlib, resource, sys
import jax, numpy as np
from jax.experimental import multihost_utils
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.parallel.rules import sharding
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints
path, rank, port, limited = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update('jax_enable_recoverability', True)
jax.distributed.initialize(f'127.0.0.1:{port}', 2, rank, heartbeat_timeout_seconds=20)
saved = Checkpoints(path / 'checkpoints', CheckpointConfig(), leads=rank == 0)
host = np.random.default_rng(0).normal(size=(1 << 10, 1 << 9)).astype(np.float32)
cut = sharding(build_mesh(MeshConfig(fsdp=2)), ('embed', None), host.shape)
state = {'x': jax.make_array_from_callback(host.shape, cut, lambda index: host[index])}
code = 0
try:
  saved.save(1, state, {'step': 1})
  multihost_utils.sync_global_devices('committed')
  if str(rank) in limited:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
  if limited:
    saved.save(2, state, {'step': 2})
  else:
    (part,) = saved.restore(1, state)['x'].addressable_shards
    assert np.array_equal(part.data, host[part.index])
except UserError as error:
  sys.stderr.write(f'{error}' + chr(10))
  code = error.exit_code
except Exception as error:
  sys.stderr.write(f'{type(error).__name__}: {error}' + chr(10))
  code = 75
sys.stderr.flush()
os._exit(code)
"""


def pair(path, limited: str) -> tuple[list[int], list[str]]:
  """Exit codes and stderr of two processes of one job that save together; those in `limited` meet a
  full disk.
  """
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  env = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', PAIR, str(path), str(rank), str(port), limited],
      env={**env, 'PYTHONPATH': str(ROOT)},
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    for rank in (0, 1)
  ]
  try:
    errors = [process.communicate(timeout=120)[1] for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  return [process.returncode for process in processes], errors


@pytest.mark.full
def test_what_two_processes_commit_together_one_restores(tmp_path, mesh):
  codes, errors = pair(tmp_path, '')
  assert codes == [0, 0], errors
  host = np.random.default_rng(0).normal(size=(1 << 10, 1 << 9)).astype(np.float32)
  like = {'x': jax.device_put(np.zeros_like(host), sharding(mesh, ('vocab', 'embed'), host.shape))}
  np.testing.assert_array_equal(np.asarray(checkpoints(tmp_path).restore(1, like)['x']), host)


@pytest.mark.full
def test_two_processes_on_a_full_disk_both_end_and_keep_what_was_committed(tmp_path):
  codes, errors = pair(tmp_path, '01')
  assert 1 in codes, errors
  assert 0 not in codes, errors
  assert any('File too large' in error for error in errors)
  saved = checkpoints(tmp_path)
  assert saved.steps() == [1]
  assert saved.host(1) == {'step': 1}
