"""Runs vLLM servers to which a trainer attaches: `jaxrl serve --role=vllm`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import platform
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from absl import flags, logging

from jaxrl_llm.app.serve.listening import (
  check_addresses_file,
  define_registering,
  lease_of,
  open_registry,
  registering,
  token_of,
  write_addresses,
)
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError, UserError, first_cause
from jaxrl_llm.core.net.connections import read_key
from jaxrl_llm.core.net.front import Front
from jaxrl_llm.core.net.registry import Kind, Registry, service_name
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.direct import SigningFront
from jaxrl_llm.rollout.vllm.discovery import fingerprint
from jaxrl_llm.rollout.vllm.pull.store import Store
from jaxrl_llm.rollout.vllm.server import (
  WORKER,
  WORKER_MODULE,
  OwnedServer,
  parse_options,
  server_commands,
)
from jaxrl_llm.weights.hf import read_spec

FLAGS = flags.FlagValues()
_MODEL = flags.DEFINE_string(
  'model', None, "Directory with the policy's config.json.", flag_values=FLAGS
)
_MODEL_DEADLINE = flags.DEFINE_float(
  'model_deadline_s',
  0.0,
  'Seconds to wait until a trainer has written the config.json of --model.',
  lower_bound=0,
  flag_values=FLAGS,
)
_SERVERS = flags.DEFINE_integer(
  'servers',
  1,
  'Number of servers; they share the cores of this machine equally.',
  flag_values=FLAGS,
)
_ENVIRONMENT = flags.DEFINE_string(
  'environment',
  VllmConfig.environment,
  'Virtual environment with vLLM installed.',
  flag_values=FLAGS,
)
_DTYPE = flags.DEFINE_enum(
  'dtype',
  'bfloat16',
  ['float32', 'bfloat16'],
  'Data type of weights and activations.',
  flag_values=FLAGS,
)
_LENGTH = flags.DEFINE_integer(
  'max_model_len',
  None,
  "Maximum sequence length in tokens; default: the model's.",
  flag_values=FLAGS,
)
_LOAD = flags.DEFINE_enum(
  'load',
  'dummy',
  ['dummy', 'auto'],
  'dummy: wait for weights from a trainer; auto: load the weights of --model.',
  flag_values=FLAGS,
)
_DEVICES = flags.DEFINE_list(
  'devices',
  [],
  'CUDA_VISIBLE_DEVICES of each server, for example 0,1 for two servers.',
  flag_values=FLAGS,
)
_TRANSFER = flags.DEFINE_enum(
  'transfer',
  'files',
  ['files', 'nccl'],
  'Weight transfer, as in rollout.vllm.transfer.',
  flag_values=FLAGS,
)
_CACHE = flags.DEFINE_integer(
  'cpu_cache_gib',
  VllmConfig.cpu_cache_gib,
  'Size of the KV cache of each server in GiB; used only on CPUs.',
  flag_values=FLAGS,
)
_LOGS = flags.DEFINE_string(
  'logs',
  'logs',
  "Directory for the servers' logs; {host} and {pid} stand for this host and process.",
  flag_values=FLAGS,
)
_HOST = flags.DEFINE_string(
  'host',
  None,
  'Address at which the fronts listen; default: no fronts, only unix sockets.',
  flag_values=FLAGS,
)
_PORT = flags.DEFINE_integer(
  'port', 8400, 'Port of the first front; 0 = free ports.', flag_values=FLAGS
)
_TOKEN = flags.DEFINE_string(
  'token_file',
  None,
  "File with the bearer token (mode 600), required with --host; default: the registry's key.",
  flag_values=FLAGS,
)
_CERT = flags.DEFINE_string('tls_cert', None, 'TLS certificate, PEM.', flag_values=FLAGS)
_KEY = flags.DEFINE_string(
  'tls_key', None, 'Private key of the certificate, PEM.', flag_values=FLAGS
)
_PLAIN = flags.DEFINE_bool(
  'allow_plaintext',
  False,
  'Allow fronts without TLS on addresses other than loopback.',
  flag_values=FLAGS,
)
_ROOT = flags.DEFINE_string(
  'publish_root',
  None,
  'With --host: directory that must contain all weights that servers load.',
  flag_values=FLAGS,
)
_PULL_ROOT = flags.DEFINE_string(
  'pull_root',
  None,
  'With --host: directory in memory for weights that this host fetches '
  '(rollout.vllm.transfer=pull); default: one of this user in /dev/shm.',
  flag_values=FLAGS,
)
_CA_FILE = flags.DEFINE_string(
  'ca_file',
  None,
  'CA certificates with which this host verifies those from which it fetches weights; default: the '
  "system's.",
  flag_values=FLAGS,
)
_WORKER = flags.DEFINE_string(
  'worker_file',
  None,
  'Python file whose class Worker replaces that of the worker extension (jaxrl_llm_worker).',
  flag_values=FLAGS,
)
_FILE = flags.DEFINE_string(
  'addresses_file',
  None,
  'File for a JSON list of the addresses, written once all servers are ready.',
  flag_values=FLAGS,
)

_ROLE = flags.DEFINE_enum(
  'registered_as',
  'vllm',
  ['vllm', 'judge'],
  'With --registry: vllm, to sample from the policy; judge, to judge (needs --load=auto).',
  flag_values=FLAGS,
)
define_registering(FLAGS)

_START_DEADLINE_S = 900.0
_MAX_RESTARTS = 3
_STEADY_S = 60.0
"""Seconds of uninterrupted service after which a server's count of successive failures is reset."""


Lend = Callable[[int, str], contextlib.AbstractAsyncContextManager[None]]
"""Function that returns a context manager for the server with a given number and address. The
server is registered while the context is open.
"""


async def serve(
  servers: list[OwnedServer],
  fronts: list[FrontConfig | None],
  lend: Lend,
  store: Store | None = None,
) -> None:
  """Serves until SIGINT or SIGTERM. Raises RunError if a server keeps failing.

  Args:
    store: store of weights that this host fetches; None if there are no fronts.
  """
  stop = asyncio.Event()
  for number in (signal.SIGINT, signal.SIGTERM):
    asyncio.get_running_loop().add_signal_handler(number, stop.set)
  addresses: list[str] = []
  async with contextlib.AsyncExitStack() as stack:
    if store is not None:
      stack.push_async_callback(store.close)
    for server in servers:
      stack.push_async_callback(server.close)
    for server, config in zip(servers, fronts, strict=True):
      # Start the front before the server, so that a port in use is reported at once.
      front = config and await _open_front(stack, config, server.address, store)
      addresses.append(front.address if front else server.address)
    for server in servers:
      server.start()
    # Wait 'signal': unbounded: a service runs until a signal stops it.
    stopped = asyncio.create_task(stop.wait())
    async with asyncio.TaskGroup() as group:
      keepers = [
        group.create_task(keep_up(server, functools.partial(lend, i, addresses[i])))
        for i, server in enumerate(servers)
      ]
      announcer = group.create_task(announce(servers, addresses))
      # Wait 'signal': unbounded: a service runs until a signal stops it.
      await asyncio.wait({stopped, *keepers}, return_when=asyncio.FIRST_COMPLETED)
      for task in (announcer, *keepers):
        task.cancel()


async def _open_front(
  stack: contextlib.AsyncExitStack, config: FrontConfig, upstream: str, store: Store
) -> Front:
  """Opens the front of a server, which signs the server's answers to requests with tickets."""
  signing = SigningFront(upstream, read_key(config.token_file, '--token_file'))
  stack.push_async_callback(signing.close)
  front = Front(
    config,
    upstream=upstream,
    publish_roots=() if _ROOT.value is None else (_ROOT.value, str(store.root)),
    handlers={**store.handlers, **signing.handlers},
    ticketed=signing.ticketed,
  )
  return await stack.enter_async_context(front)


async def announce(servers: list[OwnedServer], addresses: list[str]) -> None:
  await asyncio.gather(*(server.ready(deadline_s=_START_DEADLINE_S) for server in servers))
  for server, address in zip(servers, addresses, strict=True):
    print(f'{server.name} listens at {address}', flush=True)
  print(
    f"--config.rollout.engine=vllm --config.rollout.vllm.addresses='{json.dumps(addresses)}'",
    flush=True,
  )
  write_addresses(_FILE.value, addresses)


async def keep_up(
  server: OwnedServer, lend: Callable[[], contextlib.AbstractAsyncContextManager[None]]
) -> None:
  """Restarts a server whenever it ends. Raises RunError after more than `_MAX_RESTARTS` failures in
  a row.

  Args:
    lend: returns a context manager that registers the server while it runs.
  """
  loop, failures = asyncio.get_running_loop(), 0
  await server.ready(deadline_s=_START_DEADLINE_S)
  while True:
    since = loop.time()
    async with lend():
      # Wait 'server': unbounded: a server runs until it fails and is restarted.
      while server.is_running():
        await asyncio.sleep(0.5)
    failures = 1 if loop.time() - since > _STEADY_S else failures + 1
    logging.error('%s ended: %s', server.name, server.last_lines())
    if failures > _MAX_RESTARTS:
      raise RunError(
        f'{server.name}: ended {failures} times in a row; its last lines: {server.last_lines()}'
      )
    await server.stop()
    server.start()
    try:
      await server.ready(deadline_s=_START_DEADLINE_S)
    except RunError as error:  # The error counts as another failure. The other servers continue.
      logging.error('%s', error)
      await server.stop()


def _run(options: Sequence[str]) -> int:
  logging.set_verbosity(-1)
  if not _MODEL.value:
    raise UserError("--model is missing: wanted a directory with the policy's config.json")
  model = pathlib.Path(_MODEL.value).absolute()
  deadline = time.monotonic() + _MODEL_DEADLINE.value
  while not (model / 'config.json').exists() and time.monotonic() < deadline:
    time.sleep(0.2)
  if not (model / 'config.json').exists():
    raise UserError(f'--model={_MODEL.value}: has no config.json; wanted a model directory')
  if _ROLE.value == 'judge' and _LOAD.value == 'dummy':
    raise UserError('--registered_as=judge: a judge needs its own weights; add --load=auto')
  config = VllmConfig(
    environment=_ENVIRONMENT.value,
    servers=_SERVERS.value,
    devices=tuple(_DEVICES.value),
    transfer=_TRANSFER.value,
    cpu_cache_gib=_CACHE.value,
    args=parse_options(options),
  )
  check_addresses_file(_FILE.value)
  worker = pathlib.Path(_WORKER.value) if _WORKER.value else WORKER
  if not worker.is_file():
    raise UserError(f'--worker_file={worker}: is not a file')
  module = worker.stem if _WORKER.value else WORKER_MODULE
  commands = server_commands(
    config,
    model,
    dtype=_DTYPE.value,
    max_model_len=_LENGTH.value,
    load_format=_LOAD.value,
    worker_files={module: worker},
    worker_class=f'{module}.Worker',
  )
  place = _LOGS.value.replace('{host}', platform.node()).replace('{pid}', str(os.getpid()))
  logs = pathlib.Path(place).absolute()
  if _HOST.value and not FLAGS.registry:
    token_of(_TOKEN.value, None)
  digests = _digests(model) if FLAGS.registry else {}
  registry = open_registry(FLAGS.registry, FLAGS.name)
  fronts = [front_config(i, registry) for i in range(len(commands))]
  try:
    logs.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(
      f'{logs}: --logs cannot be created ({error.strerror}); name another directory'
    ) from None
  store = _store(registry)
  servers = [
    OwnedServer(
      command,
      name=f'vllm-{i}',
      log=logs / f'vllm-{i}.log',
      remove=() if store is None else (store.directory,),
    )
    for i, command in enumerate(commands)
  ]
  for server in servers:
    print(f'{server.name}: {server.line}', flush=True)
  try:
    asyncio.run(serve(servers, fronts, functools.partial(_lend, registry, digests), store))
  except BaseExceptionGroup as group:
    raise first_cause(group) from None
  return 0


def _digests(model: pathlib.Path) -> dict[str, str]:
  """Returns digests by which clients recognise the model of this service. They cover the policy's
  shapes and tokenizer, or only config.json if the model is a judge.
  """
  if _ROLE.value == 'judge':
    return {'config': hashlib.sha256((model / 'config.json').read_bytes()).hexdigest()[:16]}
  file = model / 'tokenizer.json'
  return fingerprint(read_spec(model), file.read_bytes() if file.exists() else None)


def _lend(
  registry: Registry | None, digests: Mapping[str, str], i: int, address: str
) -> contextlib.AbstractAsyncContextManager[None]:
  kind = Kind(_ROLE.value)
  # Create a new lease each time, because a restarted server counts as a new server.
  name = f'{FLAGS.name}-{i}' if FLAGS.name else service_name(f'{kind}-{i}')
  return registering(registry, lease_of(kind, address, name, digests))


def _store(registry: Registry | None) -> Store | None:
  """Creates the store of weights that this host fetches; returns None if there are no fronts."""
  if not _HOST.value:
    return None
  root = _PULL_ROOT.value or f'/dev/shm/jaxrl_llm-pulled-{os.getuid()}'
  key = read_key(token_of(_TOKEN.value, registry), '--token_file')
  return Store(
    pathlib.Path(root).absolute(), key=key, ca_file=_CA_FILE.value, allow_plaintext=_PLAIN.value
  )


def front_config(i: int, registry: Registry | None) -> FrontConfig | None:
  if not _HOST.value:
    return None
  return FrontConfig(
    host=_HOST.value,
    port=_PORT.value and _PORT.value + i,
    token_file=token_of(_TOKEN.value, registry),
    tls_cert=_CERT.value,
    tls_key=_KEY.value,
    allow_plaintext=_PLAIN.value,
  )


def parse(argv: Sequence[str], document: str | None = None) -> list[str]:
  """Parses the flags of `jaxrl serve --role=vllm` and returns vLLM's own options after `--`."""
  split = argv.index('--') if '--' in argv else len(argv)
  parse_flags(argv[:split], FLAGS, document, takes_config=False)
  return list(argv[split + 1 :])


def run(argv: Sequence[str], document: str | None = None) -> int:
  """Runs the command and returns its exit code. `document` is the description that --help
  prints.
  """
  return script.exit_code(lambda: _run(parse(argv, document)))
