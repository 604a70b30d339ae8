"""Builds the `EngineSpec` of vLLM servers: their commands, replicas and publication folder."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence

import jax

from jaxrl_llm.core.disk import write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.connections import read_key
from jaxrl_llm.core.net.registry import Kind, Watch
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.rollout.engine import EngineSetting, EngineSpec, Run
from jaxrl_llm.rollout.vllm.adapter_folder import AdapterFolder
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.delta_folder import DeltaFolder
from jaxrl_llm.rollout.vllm.device_transfer import DeviceFeed, DeviceTransfer
from jaxrl_llm.rollout.vllm.discovery import Discovery, fingerprint
from jaxrl_llm.rollout.vllm.fleet import Fleet
from jaxrl_llm.rollout.vllm.nccl import Libraries
from jaxrl_llm.rollout.vllm.publication import PublicationFolder
from jaxrl_llm.rollout.vllm.pull.distributor import Distributor, PullTransfer
from jaxrl_llm.rollout.vllm.replica import Replica
from jaxrl_llm.rollout.vllm.server import (
  OwnedServer,
  ServerCommand,
  nccl_library,
  server_commands,
)
from jaxrl_llm.rollout.vllm.share_writer import VllmShareWriter
from jaxrl_llm.rollout.vllm.transfer import Transfer, build_transfer
from jaxrl_llm.weights.hf import write_config

PUBLISHED = 'vllm/published'
"""File in the run directory that contains the path of the publication folder."""
SERVED = 'vllm/served'
"""File in the run directory with the addresses of attached servers that were used, one per line."""
SHARED_MEMORY = pathlib.Path('/dev/shm')
_PUBLISHES = re.compile(r'jaxrl_llm-[0-9a-f]{16}')
"""Pattern of the names of publication folders."""


def vllm_engine(config: VllmConfig) -> EngineSpec:
  """Returns the spec of an engine over vLLM servers, which the trainer starts or attaches to."""
  return EngineSpec(
    build=lambda setting, run: _fleet(config, setting, run),
    served=True,
    adapters=config.lora == 'adapter',
    dtype=config.dtype,
    addresses=config.addresses if config.discover is None else ('those in the registry',),
    may_change=(
      *(
        'environment',
        'servers',
        'addresses',
        'discover',
        'key_file',
        'ca_file',
        'env',
        'devices',
        'publish_dir',
        'transfer',
        'feed',
        'source',
        'full_every',
        'compare',
        'max_in_flight',
        'lengths',
        'min_length',
        'dispatch',
        'stream',
      ),
      *(
        'transfer_deadline_s',
        'start_deadline_s',
        'latency_s',
        'min_tokens_per_s',
        'max_retries',
        'max_restarts',
      ),
    ),
    unsupported=config.unsupported,
    commands=lambda setting: _lines(config, setting),
    share_writer=VllmShareWriter,
    compares_on_devices=config.compare == 'devices',
    check_devices=lambda setting, devices: _check_feed(config, devices),
  )


def _check_feed(config: VllmConfig, devices: Sequence[jax.Device]) -> None:
  """Raises UserError if weights are to be sent from the memory of devices that cannot.

  Args:
    devices: devices of the trainer's process.
  """
  if config.feed == 'files':
    return
  remedy = 'set rollout.vllm.feed=files'
  platform, count = devices[0].platform, jax.process_count()
  if platform not in ('gpu', 'cuda'):
    raise UserError(
      f"rollout.vllm.feed: 'devices' sends from NVIDIA GPUs, but the trainer is on {platform!r}; "
      f'{remedy}'
    )
  if count > 1:
    raise UserError(
      f"rollout.vllm.feed: 'devices' needs a trainer of one process, but this one has {count}; "
      f'{remedy}'
    )


def _fleet(config: VllmConfig, setting: EngineSetting, run: Run) -> Fleet:
  published = publish_directory(config, setting.workdir)
  discovery = None
  source = _source(config, setting) if config.transfer == 'pull' else None
  distributor = None if source is None else Distributor(source)
  feed = None
  if config.feed == 'devices':
    dtype = _dtype(config, setting)
    feed = DeviceFeed(setting.spec, dtype, jax.local_devices()[0], run)
  transfers = functools.partial(_transfer, config, setting, distributor=distributor, feed=feed)
  if config.discover is not None:
    replicas, discovery = [], _discovery(config, setting, transfers)
  elif config.addresses:
    key, served = read_key(config.key_file, 'rollout.vllm.key_file'), _served(setting)
    replicas = [
      Replica(
        f'vllm-{i}',
        client=VllmClient(address, key=key, ca_file=config.ca_file, name=f'vllm-{i}'),
        server=None,
        transfer=transfers(i),
        keeps_cache=config.kv == 'keep',
        has_served=address in served,
      )
      for i, address in enumerate(config.addresses)
    ]
  else:
    replicas = _owned(config, setting, published, transfers)
  _write_model(config, setting)
  # In a configured directory, the folder must be readable by servers of other users. In shared
  # memory, only servers of this user read it, so it is private.
  layout = dict(
    dtype=_dtype(config, setting),
    private=config.publish_dir is None,
    source=source,
  )
  if _adapter_rank(config, setting):
    folder = AdapterFolder(published, setting.spec, lora=setting.lora, **layout)
  elif config.full_every > 1:
    folder = DeltaFolder(published, setting.spec, **layout, full_every=config.full_every)
  else:
    folder = PublicationFolder(published, setting.spec, **layout)
  return Fleet(
    replicas,
    config,
    spec=setting.spec,
    folder=folder,
    adapter_rank=_adapter_rank(config, setting),
    dtype=_dtype(config, setting),
    max_length=setting.max_length,
    seed=setting.seed,
    run=run,
    check_tokenizer=lambda replica: _check_and_record(replica, setting),
    direct=setting.direct,
    discovery=discovery,
    feed=feed,
  )


def _source(config: VllmConfig, setting: EngineSetting) -> FrontConfig:
  """Returns the address and token with which the trainer serves weights to the hosts that fetch
  them. The token is the one that the servers require of the trainer.
  """
  token_file = config.source.token_file or config.key_file
  if token_file is None and setting.registry is not None:
    token_file = str(setting.registry.key_file)
  if token_file is None:
    raise UserError(
      "rollout.vllm.transfer: 'pull' needs the token that the servers require; name its file in "
      'rollout.vllm.key_file'
    )
  return dataclasses.replace(config.source, token_file=token_file)


def _discovery(
  config: VllmConfig, setting: EngineSetting, transfers: Callable[[int], Transfer]
) -> Discovery:
  if (registry := setting.registry) is None:
    raise UserError(
      'rollout.vllm.discover: the run has no registry; set --config.registry={}, or '
      'rollout.vllm.addresses'
    )
  key = read_key(config.key_file, 'rollout.vllm.key_file') or registry.key

  def build(name: str, address: str, number: int) -> Replica:
    client = VllmClient(address, key=key, ca_file=config.ca_file, name=name)
    transfer, keeps_cache = transfers(number), config.kv == 'keep'
    return Replica(name, client=client, server=None, transfer=transfer, keeps_cache=keeps_cache)

  return Discovery(
    Watch(registry, Kind.VLLM),
    required=config.discover,
    fingerprint=fingerprint(setting.spec, setting.tokenizer.files.get('tokenizer.json')),
    build=build,
    tell=setting.on_server,
  )


def publish_directory(config: VllmConfig, workdir: pathlib.Path) -> pathlib.Path:
  """Returns the path of this attempt's publication folder, in shared memory or in the configured
  directory. Removes the folder of an earlier attempt (start of the run) that was killed.

  The folder's name is random, because guard processes of a killed attempt may still be about to
  remove its folder, and because runs on several hosts may share the directory.
  """
  root = config.publish_dir
  if root is None and not SHARED_MEMORY.is_dir():
    raise UserError(
      f'{SHARED_MEMORY}: missing on this machine; name a directory in rollout.vllm.publish_dir'
    )
  record = workdir / PUBLISHED
  if record.exists():
    earlier = pathlib.Path(record.read_text(errors='replace'))
    if _PUBLISHES.fullmatch(earlier.name):  # A truncated record could name an unrelated directory.
      shutil.rmtree(earlier, ignore_errors=True)
  directory = pathlib.Path(root or SHARED_MEMORY).absolute() / f'jaxrl_llm-{secrets.token_hex(8)}'
  record.parent.mkdir(parents=True, exist_ok=True)
  write_durably(record, str(directory))
  return directory


def _commands(config: VllmConfig, setting: EngineSetting) -> list[ServerCommand]:
  """Returns the commands of the servers that the trainer starts. The model directory need not exist
  yet.
  """
  return server_commands(
    config,
    _model(setting),
    dtype=_dtype(config, setting),
    max_model_len=setting.max_length,
    adapter_rank=_adapter_rank(config, setting),
  )


def _lines(config: VllmConfig, setting: EngineSetting) -> Mapping[str, str]:
  """Returns the shell commands of the servers that the trainer starts, keyed by server name.
  Placeholders stand for paths that are created when a server starts.
  """
  lines = {}
  for i, command in enumerate([] if config.attached else _commands(config, setting)):
    variables = [
      f'{name}={value}' for name, value in command.variables(pathlib.Path('MODULES')).items()
    ]
    lines[f'vllm-{i}'] = shlex.join(['env', *variables, *command.argv(pathlib.Path('SOCKET'))])
  return lines


def _adapter_rank(config: VllmConfig, setting: EngineSetting) -> int:
  """Returns the rank of the adapters that the servers load, or 0 if they load whole weights."""
  return setting.lora.rank if setting.lora is not None and config.lora == 'adapter' else 0


def _model(setting: EngineSetting) -> pathlib.Path:
  """Returns the directory in which servers find the policy's config.json."""
  return setting.workdir.absolute() / 'vllm'


def _write_model(config: VllmConfig, setting: EngineSetting) -> None:
  """Writes the config.json that the servers need. Servers that the same job starts on other hosts
  wait for this file.
  """
  directory, unfinished = _model(setting), _model(setting) / 'unfinished'
  unfinished.mkdir(parents=True, exist_ok=True)
  write_config(
    unfinished,
    setting.spec,
    dtype=_dtype(config, setting),
    eos_ids=setting.tokenizer.stop_ids,
    pad_id=setting.tokenizer.pad_id,
  )
  for file in unfinished.iterdir():
    file.replace(directory / file.name)
  unfinished.rmdir()


def _dtype(config: VllmConfig, setting: EngineSetting) -> str:
  """Returns the data type in which the servers store and receive weights."""
  return setting.dtype if config.dtype == 'policy' else config.dtype


def _owned(
  config: VllmConfig,
  setting: EngineSetting,
  published: pathlib.Path,
  transfers: Callable[[int], Transfer],
) -> list[Replica]:
  commands, logs = _commands(config, setting), setting.workdir.absolute() / 'logs'
  servers = [
    OwnedServer(command, name=f'vllm-{i}', log=logs / f'vllm-{i}.log', remove=(published,))
    for i, command in enumerate(commands)
  ]
  return [
    Replica(
      s.name,
      client=VllmClient(s.address, name=s.name),
      server=s,
      transfer=transfers(i),
      keeps_cache=config.kv == 'keep',
    )
    for i, s in enumerate(servers)
  ]


def _transfer(
  config: VllmConfig,
  setting: EngineSetting,
  i: int,
  *,
  distributor: Distributor | None,
  feed: DeviceFeed | None,
) -> Transfer:
  """Builds the transfer of server number `i`."""
  if distributor is not None:
    return PullTransfer(distributor)
  if feed is not None:
    library = nccl_library(config)
    return DeviceTransfer(feed, lambda: Libraries.load(library))
  return build_transfer(config, i, log=setting.workdir.absolute() / 'logs' / f'vllm-{i}-sender.log')


def _served(setting: EngineSetting) -> list[str]:
  """Returns the addresses of attached servers that earlier attempts used."""
  record = setting.workdir / SERVED
  return record.read_text(errors='replace').splitlines() if record.exists() else []


async def _check_and_record(replica: Replica, setting: EngineSetting) -> None:
  """Calls `_check_tokenizer`, and records the address of an attached server that passes."""
  await _check_tokenizer(replica, setting)
  address, served = replica.client.address, _served(setting)
  if replica.server is None and address not in served:
    write_durably(setting.workdir / SERVED, ''.join(f'{each}\n' for each in (*served, address)))


async def _check_tokenizer(replica: Replica, setting: EngineSetting) -> None:
  """Raises UserError if the server's tokenizer and the policy's encode a prompt differently. A
  server without a tokenizer passes this check.
  """
  served, wanted = (
    await replica.client.tokenize(setting.text),
    setting.tokenizer.encode(setting.text),
  )
  if served is not None and served != wanted:
    raise UserError(
      f'engine {replica.name} ({replica.client.address}): encodes {setting.text[:40]!r} as tokens '
      f"{served[:8]}, but the policy's tokenizer encodes it as {wanted[:8]}; serve it with the "
      "policy's tokenizer"
    )
