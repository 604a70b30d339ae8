"""Builds the rollout engine that a configuration names, with its servers and publication folder."""

from __future__ import annotations

import pathlib
import re
import secrets
import shutil
from collections.abc import Mapping

from jaxrl_llm.app.composition.prepare import Prepared
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.disk import write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.connections import read_key
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.api import Engine
from jaxrl_llm.rollout.embedded.engine import EmbeddedEngine
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.fleet import Fleet
from jaxrl_llm.rollout.vllm.publication import AdapterFolder, PublicationFolder
from jaxrl_llm.rollout.vllm.replica import Replica
from jaxrl_llm.rollout.vllm.server import Server, ServerCommand, VllmConfig, server_commands
from jaxrl_llm.rollout.vllm.transfer import Transfer, build_transfer
from jaxrl_llm.tasks.tokenizer import Tokenizer
from jaxrl_llm.weights.hf import write_config

ENGINES: Mapping[str, str] = {
  'embedded': 'JAX sampler in the trainer process',
  'vllm': 'vLLM servers, started by the trainer or attached by address',
}
PUBLISHED = 'vllm/published'
"""File in the run directory that holds the path of the publication folder."""
SHARED_MEMORY = pathlib.Path('/dev/shm')
_PUBLISHES = re.compile(r'jaxrl_llm-[0-9a-f]{16}')
"""Names of publication folders."""


def needs_proof(config: Config) -> bool:
  """Whether the engine's computation differs from the trainer's, so that a probe must show that the models agree."""
  return config.rollout.engine == 'vllm'


def publishes_adapters(config: Config) -> bool:
  """Whether the engine receives adapters instead of merged weights."""
  return config.policy.lora is not None and config.rollout.engine == 'vllm' and config.rollout.vllm.lora == 'adapter'


def build_engine(config: Config, workdir: pathlib.Path, prepared: Prepared, device: DeviceThread) -> Engine:
  """Builds process 0's engine without starting it."""
  longest = config.rollout.max_prompt_length + config.rollout.max_response_length
  if config.rollout.engine == 'embedded':
    options = ModelOptions(dtype=config.policy.dtype, param_dtype=config.policy.param_dtype)
    return EmbeddedEngine(
      build_model(prepared.spec, options),
      config.rollout.embedded,
      max_length=longest,
      seed=config.seed,
      run=device.run,
    )
  vllm = config.rollout.vllm
  published = publish_directory(vllm, workdir)
  if vllm.addresses:
    key = read_key(vllm.key_file, 'rollout.vllm.key_file')
    replicas = [
      Replica(
        f'vllm-{i}',
        client=VllmClient(address, key=key, ca_file=vllm.ca_file, name=f'vllm-{i}'),
        server=None,
        transfer=_transfer(config, workdir, i),
      )
      for i, address in enumerate(vllm.addresses)
    ]
  else:
    replicas = _owned(config, workdir, prepared, published)
  # Servers of other users may read a configured directory; shared memory is for this user's servers only.
  layout = dict(dtype=_dtype(config), private=vllm.publish_dir is None)
  if publishes_adapters(config):
    folder = AdapterFolder(published, prepared.spec, lora=config.policy.lora, **layout)
  else:
    folder = PublicationFolder(published, prepared.spec, **layout)
  return Fleet(
    replicas,
    vllm,
    spec=prepared.spec,
    folder=folder,
    adapter_rank=_adapter_rank(config),
    dtype=_dtype(config),
    max_length=longest,
    seed=config.seed,
    run=device.run,
    check_tokenizer=lambda replica: _check_tokenizer(replica, prepared),
  )


def publish_directory(config: VllmConfig, workdir: pathlib.Path) -> pathlib.Path:
  """Returns this start's own folder, in shared memory or below the configured directory; removes a killed start's.

  The name is random: the guards of a killed start may still be about to remove its folder, and runs on several hosts
  may share the directory.
  """
  root = config.publish_dir
  if root is None and not SHARED_MEMORY.is_dir():
    raise UserError(f'{SHARED_MEMORY}: missing on this machine; name a directory in rollout.vllm.publish_dir')
  record = workdir / PUBLISHED
  if record.exists():
    left = pathlib.Path(record.read_text(errors='replace'))
    if _PUBLISHES.fullmatch(left.name):  # A truncated record may name a folder in other use.
      shutil.rmtree(left, ignore_errors=True)
  directory = pathlib.Path(root or SHARED_MEMORY).absolute() / f'jaxrl_llm-{secrets.token_hex(8)}'
  record.parent.mkdir(parents=True, exist_ok=True)
  write_durably(record, str(directory))
  return directory


def owned_commands(config: Config, workdir: pathlib.Path) -> list[ServerCommand]:
  """Commands of the servers that the trainer starts; the model directory need not exist yet."""
  longest = config.rollout.max_prompt_length + config.rollout.max_response_length
  return server_commands(
    config.rollout.vllm,
    _model(workdir),
    dtype=_dtype(config),
    max_model_len=longest,
    adapter_rank=_adapter_rank(config),
  )


def _adapter_rank(config: Config) -> int:
  return config.policy.lora.rank if publishes_adapters(config) else 0


def _model(workdir: pathlib.Path) -> pathlib.Path:
  """Directory where the servers find the policy's config.json."""
  return workdir.absolute() / 'vllm'


def _dtype(config: Config) -> str:
  """Data type of the servers and of the weights published to them."""
  return config.policy.dtype if config.rollout.vllm.dtype == 'policy' else config.rollout.vllm.dtype


def _owned(config: Config, workdir: pathlib.Path, prepared: Prepared, published: pathlib.Path) -> list[Replica]:
  commands, tokenizer = owned_commands(config, workdir), prepared.tokenizer
  _model(workdir).mkdir(parents=True, exist_ok=True)
  write_config(
    _model(workdir),
    prepared.spec,
    dtype=_dtype(config),
    eos_ids=tokenizer.stop_ids,
    pad_id=tokenizer.pad_id,
  )
  servers = [
    Server(command, name=f'vllm-{i}', log=workdir.absolute() / 'logs' / f'vllm-{i}.log', remove=(published,))
    for i, command in enumerate(commands)
  ]
  return [
    Replica(s.name, client=VllmClient(s.address, name=s.name), server=s, transfer=_transfer(config, workdir, i))
    for i, s in enumerate(servers)
  ]


def _transfer(config: Config, workdir: pathlib.Path, i: int) -> Transfer:
  return build_transfer(config.rollout.vllm, i, log=workdir.absolute() / 'logs' / f'vllm-{i}-sender.log')


async def _check_tokenizer(replica: Replica, prepared: Prepared) -> None:
  """Raises UserError if the server's tokenizer differs from the policy's on a prompt; passes servers without one."""
  tokenizer: Tokenizer = prepared.tokenizer
  task = next(task for taskset in prepared.tasksets.values() for task in taskset.tasks)
  text = task.prompt[-1]['content']
  served, wanted = await replica.client.tokenize(text), tokenizer.encode(text)
  if served is not None and served != wanted:
    raise UserError(
      f'engine {replica.name} ({replica.client.address}): reads {text[:40]!r} as tokens {served[:8]}, the policy as '
      f"{wanted[:8]}; serve it with the policy's tokenizer"
    )
