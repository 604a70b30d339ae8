"""Fake servers in their own processes, for benchmarks of the quickstart's job."""

import contextlib
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import load_file
from jaxrl_llm.models.families import tiny
from jaxrl_llm.weights.hf import write_config

ROOT = pathlib.Path(__file__).parents[1]
VOCABULARY = 29
"""Vocabulary size of the quickstart: its letters and marks."""


@contextlib.contextmanager
def fake_servers(
  folder: pathlib.Path, *, median_s: float, sigma: float, count: int = 2
) -> Iterator[list[str]]:
  """Yields addresses of servers that sample from the quickstart's model and add a lognormal delay
  per completion.
  """
  policy = load_file(str(ROOT / 'configs' / 'quickstart.py'), Config).policy
  write_config(
    folder, tiny(policy.family, VOCABULARY, **policy.model), dtype='float32', eos_ids=[1], pad_id=0
  )
  sockets = [folder / f'{i}.sock' for i in range(count)]
  latency = [f'--latency_median_s={median_s}', f'--latency_sigma={sigma}']
  command = [
    sys.executable,
    str(ROOT / 'tests' / 'support' / 'fake_vllm'),
    f'--model={folder}',
    '--max_model_len=64',
    *latency,
  ]
  processes = [
    subprocess.Popen([*command, f'--uds={socket}'], stdout=subprocess.DEVNULL) for socket in sockets
  ]
  try:
    while not all(socket.exists() for socket in sockets):
      if any(process.poll() is not None for process in processes):
        raise SystemExit('a fake server ended at its start; see above')
      time.sleep(0.1)
    yield [f'unix:{socket}' for socket in sockets]
  finally:
    for process in processes:
      process.kill()
      process.wait()
