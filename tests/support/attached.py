"""A job that is attached to fake vLLM servers."""

import contextlib
import json
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
def fake_servers(folder, count, model=SHAPE):
  """Starts `count` fake servers of a model of this shape, and yields (process, address) of each."""
  write_config(
    folder, tiny('llama', serving.VOCAB, **model), dtype='float32', eos_ids=[1], pad_id=0
  )
  sockets = [folder / f'{i}.sock' for i in range(count)]
  processes = [
    warm.start(
      [str(SUPPORT / 'fake_vllm'), f'--model={folder}', f'--uds={socket}', '--max_model_len=64'],
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
