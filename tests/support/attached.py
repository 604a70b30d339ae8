"""A job that is attached to fake vLLM servers."""

import contextlib
import json
import subprocess
import sys
import time

import job
import serving
from paths import SUPPORT

from jaxrl_llm.models.families import tiny
from jaxrl_llm.weights.hf import write_config

SHAPE = {**serving.SHAPE, 'tie_word_embeddings': False, 'rope_theta': 1e4}
POLICY = (f'--config.policy.model={json.dumps(SHAPE)}',)


@contextlib.contextmanager
def fake_servers(folder, count):
  """(process, address) of each of some servers of `POLICY`."""
  write_config(
    folder, tiny('llama', serving.VOCAB, **SHAPE), dtype='float32', eos_ids=[1], pad_id=0
  )
  sockets = [folder / f'{i}.sock' for i in range(count)]
  processes = [
    subprocess.Popen(
      [
        sys.executable,
        str(SUPPORT / 'fake_vllm'),
        f'--model={folder}',
        f'--uds={socket}',
        '--max_model_len=64',
      ],
      env=job.environment(),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
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


@contextlib.contextmanager
def fakes(folder, count=2):
  """Flags of a job that is attached to servers."""
  with fake_servers(folder, count) as servers:
    addresses = json.dumps([address for _, address in servers])
    yield ('--config.rollout.engine=vllm', f'--config.rollout.vllm.addresses={addresses}', *POLICY)
    assert all(process.poll() is None for process, _ in servers), (
      'attached servers outlive a trainer'
    )
