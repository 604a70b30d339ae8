"""Configuration of vLLM servers."""

from __future__ import annotations

import dataclasses
import socket
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.rollout.api import Sampling

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
    self._check_numbers()
    self._check_servers()
    self._check_lengths()
    self._check_transfer()
    if self.feed == 'devices':
      self._check_feed()
    self._check_args()

  def _check_numbers(self) -> None:
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

  def _check_servers(self) -> None:
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
    elsewhere = next((a for a in self.addresses if _is_elsewhere(a)), None)
    if elsewhere is not None and self.transfer == 'files' and self.publish_dir is None:
      raise UserError(
        f'rollout.vllm.addresses: {elsewhere} reads published weights as files, which by default '
        "lie in this host's shared memory; name a directory that both hosts see in "
        'rollout.vllm.publish_dir (/dev/shm if the server is on this host), or set '
        'rollout.vllm.transfer=pull or nccl'
      )

  def _check_transfer(self) -> None:
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

  def _check_args(self) -> None:
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
    for name, least in (
      ('lengths', min(lengths, default=None)),
      ('min_length', self.min_length),
    ):
      if least is not None and least < 2:
        raise UserError(f'rollout.vllm.{name}: {least}, wanted at least 2')

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
