"""Real vLLM servers for tests: their models, their processes, and fleets of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import job
import numpy as np
import psutil
import times
from paths import FIXTURES, ROOT

from jaxrl_llm.core.types import Version
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.rollout.api import Request, Weights
from jaxrl_llm.rollout.engine import EngineSetting
from jaxrl_llm.rollout.probe import Prober
from jaxrl_llm.rollout.vllm.adapter_folder import AdapterFolder
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.delta_folder import DeltaFolder
from jaxrl_llm.rollout.vllm.fleet import Fleet
from jaxrl_llm.rollout.vllm.publication import PublicationFolder, digest
from jaxrl_llm.rollout.vllm.replica import Replica
from jaxrl_llm.rollout.vllm.server import OwnedServer, server_commands
from jaxrl_llm.rollout.vllm.spec import PUBLISHED
from jaxrl_llm.tasks.tokenizer import TokenizerConfig, build_tokenizer
from jaxrl_llm.weights.hf import to_hf, write_config
from jaxrl_llm.weights.layout import dtype_of

ENVIRONMENT = os.environ.get('JAXRL_LLM_VLLM_ENVIRONMENT', str(ROOT / '.venv-vllm'))
VOCAB = 29
"""Size of the vocabulary. It equals that of the quickstart's tokenizer, so that the quickstart's
job can run on a test's servers.
"""
LENGTH = 400
"""Maximum number of tokens of a sequence. It spans several blocks of vLLM's cache, which have 128
tokens on CPUs.
"""
FAULTY, COUNTING = (
  {name: FIXTURES / f'{name}.py'} for name in ('faulty_worker', 'counting_worker')
)
SHAPE = dict(
  hidden_size=64,
  intermediate_size=96,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=32,
  max_position_embeddings=512,
  # A wide initialization gives sharp distributions, which differ clearly between weights.
  initializer_range=0.2,
)


def model_of(family: str, *, tied: bool, vocab: int = VOCAB):
  return build_model(tiny(family, vocab, **SHAPE, tie_word_embeddings=tied), ModelOptions())


TIED = model_of('qwen2', tied=True)


def setting_of(spec, folder: pathlib.Path, *, dtype: str) -> EngineSetting:
  """Setting of a run of this model, with which its engine is built."""
  return EngineSetting(
    spec=spec,
    dtype=dtype,
    param_dtype='float32',
    lora=None,
    max_length=LENGTH,
    seed=3,
    tokenizer=build_tokenizer(TokenizerConfig(), ['1+1=2'], folder / 'tokenizer'),
    text='1+1',
    workdir=folder,
  )


def servers_of(
  model,
  folder: pathlib.Path,
  *,
  count: int,
  worker=None,
  load='dummy',
  dtype='float32',
  adapter_rank=0,
  **args,
):
  """Returns servers of a model that are not started yet. For load='dummy', the model's config.json
  is written to `folder`. Otherwise `folder` must contain it and the weights.

  Args:
    worker: file of another worker extension, such as `FAULTY`, keyed by module name.
  """
  (module,) = worker or {'jaxrl_llm_worker'}
  folder.mkdir(exist_ok=True)
  if load == 'dummy':
    write_config(folder, model.spec, dtype=dtype, eos_ids=[1], pad_id=0)
  commands = server_commands(
    VllmConfig(environment=ENVIRONMENT, servers=count, args=args),
    folder,
    dtype=dtype,
    max_model_len=LENGTH,
    load_format=load,
    adapter_rank=adapter_rank,
    worker_files=worker,
    worker_class=f'{module}.Worker',
  )
  return [
    OwnedServer(c, name=f'vllm-{i}', log=folder / f'vllm-{i}.log') for i, c in enumerate(commands)
  ]


@contextlib.asynccontextmanager
async def attached(model, servers, folder: pathlib.Path, *, dtype: str = 'float32', **config):
  """Yields a started fleet over running servers. The servers outlive the fleet."""
  addresses = [server if isinstance(server, str) else server.address for server in servers]
  replicas = [
    Replica(
      f'vllm-{i}',
      client=VllmClient(address, name=f'vllm-{i}'),
      server=None,
      keeps_cache=config.get('kv') == 'keep',
    )
    for i, address in enumerate(addresses)
  ]
  async with fleet_of(model, replicas, folder, dtype=dtype, **config) as fleet:
    yield fleet


@contextlib.asynccontextmanager
async def fleet_of(
  model,
  replicas,
  folder: pathlib.Path,
  *,
  dtype='float32',
  seed: int = 3,
  lora=None,
  discovery=None,
  released=None,
  direct=False,
  **config,
):
  """
  Args:
    direct: whether explorers fetch completions themselves.
    lora: options of the adapters that are published. If None, whole weights are published.
    released: argument of a release before the start. If None, the fleet is not released.
  """
  settings = VllmConfig(environment=ENVIRONMENT, **config)
  kind = PublicationFolder
  if settings.full_every > 1:
    kind = functools.partial(DeltaFolder, full_every=settings.full_every)
  if lora is not None:
    kind = functools.partial(AdapterFolder, lora=lora)
  source = settings.source if settings.transfer == 'pull' else None
  kind = functools.partial(kind, source=source)
  fleet = Fleet(
    replicas,
    settings,
    spec=model.spec,
    folder=kind(folder / 'published', model.spec, dtype=dtype),
    adapter_rank=0 if lora is None else lora.rank,
    dtype=dtype,
    max_length=LENGTH,
    seed=seed,
    run=asyncio.to_thread,
    discovery=discovery,
    direct=direct,
  )
  if released is not None:
    await fleet.release(released)
  try:
    await fleet.start()
    yield fleet
  finally:
    await fleet.close()


def weights(model, seed: int, version: Version) -> Weights:
  """Returns random weights with their probe."""
  return weights_of(model, params_of(model, seed), version)


def params_of(model, seed: int):
  return model.init(jax.random.key(seed))


@functools.cache
def _prober(spec) -> Prober:
  mesh = build_mesh(MeshConfig(), jax.devices()[:1])
  return Prober(build_model(spec, ModelOptions()), mesh, max_length=LENGTH)


def weights_of(model, params, version: Version) -> Weights:
  params = jax.tree.map(jnp.asarray, params)
  return Weights(
    version=version,
    leaves=Weights.of(params, version).leaves,
    probe=_prober(model.spec).probe(params),
  )


def moved(params, step: int, *, share: float = 0.01):
  """Returns the parameters after a step that changes a share of the elements slightly."""
  random = np.random.default_rng(step)
  return jax.tree.map(
    lambda x: np.where(random.random(x.shape) < share, x * np.float32(1.01), x), params
  )


def digests_of(model, params, dtype: str = 'float32'):
  """Returns the digests that a server should report after it was given whole weights."""
  to = dtype_of(dtype)
  return {name: digest(tensor.astype(to)) for name, tensor in to_hf(params, model.spec)}


def request(number: int, *, length: int = 5, **fields) -> Request:
  prompt = tuple(np.random.default_rng(number).integers(2, VOCAB, length).tolist())
  return Request(
    **{'uid': f'r{number}', 'prompt': prompt, 'max_tokens': 24, 'key': (number, 9), **fields}
  )


async def ask(engine, asked: Request) -> list:
  """Returns the completions, ordered by sample index."""
  found = {index: completion async for index, completion in engine.generate(asked)}
  return [found[i] for i in range(asked.samples)]


@functools.cache
def _logits(spec):
  """Returns a function for logits in float64, for sequences of LENGTH tokens. It is compiled once
  per model.
  """
  model = build_model(spec, ModelOptions(dtype='float64', param_dtype='float64'))

  def logits(params, tokens, count):
    positions = jnp.arange(LENGTH)[None]
    hidden = model.apply(params, tokens[None], positions, (positions < count).astype(jnp.int32))
    return hidden[0] @ model.head_kernel(params).T

  return jax.jit(logits)


def forward(model, params, tokens, *, temperature: float = 1.0) -> np.ndarray:
  """Returns the logprob of each token given those before it, computed with the project's model. The
  first is 0.
  """
  logprobs = distributions(model, params, tokens, temperature=temperature)
  return np.r_[0.0, logprobs[np.arange(len(tokens) - 1), np.asarray(tokens[1:], int)]]


def distributions(model, params, tokens, *, temperature: float = 1.0) -> np.ndarray:
  """Returns logprobs of the whole vocabulary after each of `tokens`, computed with the project's
  model.

  float64 is needed: in float32, logprobs are wrong by up to 1e-5, which is also the tolerance for
  engines.
  """
  tokens, count = np.asarray(tokens, np.int32), len(tokens)
  padded = np.pad(tokens, (0, LENGTH - count))
  with jax.enable_x64(True):
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    logits = np.asarray(_logits(model.spec)(exact, padded, count))[:count] / temperature
  logits -= logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


async def fault(address: str, name: str, value) -> None:
  client = VllmClient(address)
  await client.call('POST', '/collective_rpc', {'method': 'jaxrl_fault', 'args': [name, value]})
  await client.close()


def descendants(pid: int) -> dict[int, str]:
  """Returns the command lines of all processes that a process started, directly or not, keyed by
  pid.
  """
  children: dict[int, list[int]] = {}
  for status in pathlib.Path('/proc').glob('[0-9]*/stat'):
    with contextlib.suppress(OSError):
      fields = status.read_text().rpartition(')')[2].split()
      children.setdefault(int(fields[1]), []).append(int(status.parent.name))
  found: dict[int, str] = {}
  left = [pid]
  while left:
    for child in children.get(left.pop(), []):
      with contextlib.suppress(OSError):
        found[child] = (
          pathlib.Path(f'/proc/{child}/cmdline').read_bytes().replace(b'\0', b' ').decode()
        )
        left.append(child)
  return found


def children_of(pid: int) -> list[psutil.Process]:
  """Returns the children of a process. Waits up to 60 seconds for the first child."""
  deadline = time.monotonic() + 60
  while not (children := psutil.Process(pid).children()) and time.monotonic() < deadline:
    time.sleep(0.01)
  return children


def kill(pid: int) -> None:
  os.kill(pid, signal.SIGKILL)


def shared_memory(tree: dict[int, str]) -> set[str]:
  """Returns the files of /dev/shm that the processes have mapped."""
  found = set()
  for pid in tree:
    with contextlib.suppress(OSError):
      lines = pathlib.Path(f'/proc/{pid}/maps').read_text().splitlines()
      found |= {
        line.split(maxsplit=5)[5]
        for line in lines
        if '/dev/shm/' in line and '(deleted)' not in line
      }
  return found


def published(workdir: pathlib.Path) -> pathlib.Path:
  """Returns the directory in which a run publishes."""
  return pathlib.Path((workdir / PUBLISHED).read_text())


@dataclasses.dataclass(frozen=True)
class Address:
  """Address of a server that somebody else operates."""

  address: str


def serve(model, folder: pathlib.Path, *flags: str) -> subprocess.Popen:
  """Starts launch/serve.py with a model's config.json. When all servers are ready, it writes their
  addresses to a file.
  """
  (folder / 'model').mkdir()
  write_config(folder / 'model', model.spec, dtype='float32', eos_ids=[1], pad_id=0)
  own = (
    f'--model={folder / "model"}',
    f'--environment={ENVIRONMENT}',
    '--dtype=float32',
    f'--max_model_len={LENGTH}',
  )
  files = (f'--logs={folder / "logs"}', f'--addresses_file={folder / "addresses"}')
  command = [sys.executable, 'launch/serve.py', *own, *files, *flags]
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
  return subprocess.Popen(command, cwd=ROOT, env=job.environment(), **pipes)


def wait_for_addresses(folder: pathlib.Path, process: subprocess.Popen) -> list[str]:
  deadline = time.monotonic() + 600
  with times.phase('servers'):
    while not (folder / 'addresses').exists():
      if process.poll() is not None or time.monotonic() > deadline:
        raise AssertionError(
          f'serve.py: exit code {process.poll()}: {process.communicate()[0][-3000:]}'
        )
      time.sleep(0.1)
  return json.loads((folder / 'addresses').read_text())


async def started(servers):
  for server in servers:
    server.start()
  with times.phase('servers'):
    await asyncio.gather(*(server.ready(deadline_s=600) for server in servers))


def long_prompt(number):
  """Returns a prompt that is longer than two blocks of vLLM's cache."""
  return np.random.default_rng(number).integers(2, VOCAB, 300).tolist()


async def prompt_logprobs(server, tokens):
  client = VllmClient(server.address)
  try:
    return await client.prompt_logprobs(tokens, deadline_s=120)
  finally:
    await client.close()


async def loaded(server):
  client = VllmClient(server.address)
  try:
    return (await client.digests(deadline_s=60))[0]
  finally:
    await client.close()


def attached_job(pair):
  """Returns the flags of a job that trains the pair's model, with the pair as its servers."""
  shape = {**SHAPE, 'tie_word_embeddings': True}
  addresses = [server.address for server in pair]
  return (
    '--config.rollout.engine=vllm',
    f'--config.rollout.vllm.addresses={json.dumps(addresses)}',
    '--config.policy.family=qwen2',
    f'--config.policy.model={json.dumps(shape)}',
  )


def api_servers(pid):
  """Returns the pids of the API servers that a trainer's process started, in ascending order."""
  found = {
    p: line
    for p, line in descendants(pid).items()
    if 'api_server' in line and 'guard.py' not in line
  }
  parents = [p for p in sorted(found) if not any(p in descendants(other) for other in found)]
  return parents


def processes(tree: dict[int, str]) -> dict[int, str]:
  """Returns the processes that are servers or their guards."""
  return {pid: line for pid, line in tree.items() if 'vllm' in line.lower()}


def wait_until_gone(tree: dict[int, str], files: set[str]) -> None:
  """Waits until processes and files are gone. Raises AssertionError with the remaining ones after
  90 s.
  """
  deadline = time.monotonic() + 90
  while left := [
    *(line for pid, line in tree.items() if os.path.exists(f'/proc/{pid}')),
    *filter(os.path.exists, files),
  ]:
    assert time.monotonic() < deadline, left
    time.sleep(0.1)
