"""A job that is attached to fake vLLM servers."""

import contextlib
import json
import threading
import time

import job
import serving
import warm
from paths import SUPPORT

from jaxrl_llm.models.families import tiny
from jaxrl_llm.weights.hf import write_config

SHAPE = {**serving.SHAPE, 'tie_word_embeddings': False, 'rope_theta': 1e4}
POLICY = (f'--config.policy.model={json.dumps(SHAPE)}',)


@contextlib.contextmanager
def fake_servers(folder, count, model=SHAPE, options=()):
  """Starts `count` fake servers of a model of this shape, and yields (process, address) of each.

  Args:
    options: further options of each server's command line.
  """
  write_config(
    folder, tiny('llama', serving.VOCAB, **model), dtype='float32', eos_ids=[1], pad_id=0
  )
  sockets = [folder / f'{i}.sock' for i in range(count)]
  processes = [
    warm.start(
      [
        *(str(SUPPORT / 'fake_vllm'), f'--model={folder}', f'--uds={socket}'),
        *('--max_model_len=64', *options),
      ],
      cwd=job.ROOT,
      env=job.environment(),
      piped=False,
    )
    for socket in sockets
  ]
  try:
    deadline = time.monotonic() + 120
    while not all(socket.exists() for socket in sockets):
      assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
      time.sleep(0.02)
    yield [(process, f'unix:{socket}') for process, socket in zip(processes, sockets)]
  finally:
    for process in processes:
      process.kill()
      process.wait()


def flags_of(servers, model=SHAPE):
  """Returns the flags of a job that is attached to servers of `fake_servers`."""
  addresses = json.dumps([address for _, address in servers])
  return (
    '--config.rollout.engine=vllm',
    f'--config.rollout.vllm.addresses={addresses}',
    f'--config.policy.model={json.dumps(model)}',
  )


@contextlib.contextmanager
def fakes(folder, count=2, model=SHAPE):
  """Starts fake servers, and yields the flags of a job that is attached to them."""
  with fake_servers(folder, count, model) as servers:
    yield flags_of(servers, model)
    assert all(process.poll() is None for process, _ in servers), (
      'attached servers outlive a trainer'
    )


class Restarted:
  """Two fake servers in directories `a` and `b` of a folder. A server that ends is started again.

  Attributes:
    processes: (process, address) of each server, by its directory's name.
  """

  def __init__(self, folder, *options):
    """
    Args:
      options: further options of both servers.
    """
    self._folder, self._options = folder, options
    self._stack, self._ending = contextlib.ExitStack(), threading.Event()
    self.processes = {}

  @property
  def flags(self):
    """Flags of a job that is attached to the servers."""
    return flags_of([*self.processes.values()])

  def __enter__(self):
    for name in ('a', 'b'):
      (self._folder / name).mkdir()
      self._start(name)
    self._watch = threading.Thread(target=self._restart)
    self._watch.start()
    return self

  def _start(self, name):
    folder = self._folder / name
    (folder / '0.sock').unlink(missing_ok=True)
    ((process, address),) = self._stack.enter_context(
      fake_servers(folder, 1, options=self._options)
    )
    self.processes[name] = process, address

  def _restart(self):
    while not self._ending.wait(0.05):
      for name, (process, _) in self.processes.items():
        if process.poll() is not None:
          self._start(name)

  def __exit__(self, *error):
    self._ending.set()
    self._watch.join()
    self._stack.close()
