"""Memory of a process that loads, publishes and exports a model: no more than its share of the
parameters, and a bound that does not grow with the model.
"""

import json
import socket
import subprocess
import sys
from typing import NamedTuple

import job
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.families import tiny
from jaxrl_llm.weights.hf import write_config
from jaxrl_llm.weights.tables import entries

MARGIN = 300_000_000
"""Bytes beyond the process's share of the parameters."""


class Size(NamedTuple):
  hidden: int
  layers: int


SMALL, LARGE = Size(1024, 3), Size(2048, 13)
"""About 0.2 and 2 GB in bfloat16."""


def write_model(directory, size):
  spec = tiny(
    'llama', 32_000, hidden_size=size.hidden, intermediate_size=4 * size.hidden,
    num_hidden_layers=size.layers, num_attention_heads=size.hidden // 64,
    num_key_value_heads=size.hidden // 64, head_dim=64, tie_word_embeddings=False,
  )  # fmt: skip
  directory.mkdir()
  write_config(directory, spec, dtype='bfloat16', eos_ids=[1], pad_id=0)
  random = np.random.default_rng(0).normal(size=1 << 20).astype(ml_dtypes.bfloat16)
  tensors = {
    entry.hf: np.roll(np.resize(random, entry.shape), number)
    for number, entry in enumerate(entries(spec))
  }
  save_file(tensors, directory / 'model.safetensors', metadata={'format': 'pt'})
  return sum(tensor.nbytes for tensor in tensors.values())


def grow(directory, reader, processes):
  """What each process printed, by phase."""
  command = [sys.executable, 'tests/support/resident.py', str(directory), reader, str(processes)]
  devices = f'--xla_force_host_platform_device_count={8 // processes}'
  env = job.environment(XLA_FLAGS=devices) | {'PYTHONPATH': str(job.ROOT)}
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    port = listener.getsockname()[1]
  started = [
    subprocess.Popen(
      [*command, str(process), str(port)], cwd=job.ROOT, env=env, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    for process in range(processes)
  ]  # fmt: skip
  ended = [process.communicate(timeout=1800) for process in started]
  assert all(process.returncode == 0 for process in started), ended
  reports = [[json.loads(line) for line in out.splitlines() if line[:1] == '{'] for out, _ in ended]
  for process, phases in enumerate(reports):
    for report in phases:
      anonymous, files, shared = (f'{growth / 1e6:,.0f}' for growth in report['growth'])
      print(
        f'{reader}, process {process} of {processes}, {report["phase"]}: holds '
        f'{report["held"] / 1e6:,.0f} MB, anonymous memory grew by {anonymous}, mapped files by '
        f'{files}, shared memory by {shared}'
      )
  return reports


def check_float32_reader(directory, processes):
  """Whoever reads everything in float32 needs more."""
  for (report,) in grow(directory, 'float32', processes):
    assert report['growth'][0] > report['held'] + MARGIN, report


@pytest.mark.parametrize(
  ('size', 'processes'),
  [
    pytest.param(SMALL, 1, marks=pytest.mark.full),
    pytest.param(LARGE, 1, marks=pytest.mark.acceptance),
    pytest.param(SMALL, 8, marks=pytest.mark.acceptance),
    pytest.param(LARGE, 8, marks=pytest.mark.acceptance),
  ],
)
def test_a_process_needs_its_share_of_the_parameters_and_no_more(tmp_path, size, processes):
  nbytes = write_model(tmp_path / 'model', size)
  for phases in grow(tmp_path, 'shards', processes):
    assert [report['phase'] for report in phases] == ['load', 'publish', 'export']
    for report in phases:
      # The scales of norms are on every device.
      assert report['held'] == pytest.approx(nbytes / processes, rel=0.01)
      assert report['growth'][0] <= report['held'] + MARGIN, report
  before = load_file(tmp_path / 'model' / 'model.safetensors')
  for folder in (tmp_path / 'published' / '0.1', tmp_path / 'exported'):
    paths = sorted(folder.glob('*.safetensors'))
    assert len(paths) == processes
    after = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert after.keys() == before.keys()
    assert all(after[name].tobytes() == before[name].tobytes() for name in before)
  if size is SMALL:  # With 2 GB, it would need more memory than the machine of the tests can spare.
    check_float32_reader(tmp_path, processes)
