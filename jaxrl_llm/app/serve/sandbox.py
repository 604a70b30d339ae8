"""Runs programs, each in a sandbox, for the code scorers of other hosts: `jaxrl serve
--role=sandbox`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.app.serve.listening import (
  define_listening,
  lease_of,
  open_registry,
  read_front,
  registering,
  write_addresses,
)
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.net.listener import listening
from jaxrl_llm.core.net.registry import Kind, Registry
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.rewards.sandbox.server import ROUTES, SandboxServer

FLAGS = flags.FlagValues()
flags.DEFINE_integer(
  'programs',
  None,
  'Maximum number of concurrent programs; default: one per core.',
  lower_bound=1,
  flag_values=FLAGS,
)
flags.DEFINE_enum(
  'isolation',
  'auto',
  ['auto', 'namespaces', 'bubblewrap', 'none'],
  'Isolation of programs; none: only limits apply.',
  flag_values=FLAGS,
)
define_listening(FLAGS)


async def serve(
  server: SandboxServer,
  front: FrontConfig | None,
  registry: Registry | None = None,
  name: str | None = None,
) -> None:
  """Serves sandboxes until SIGINT or SIGTERM. If there is a registry, the service registers as
  `name`.
  """
  stop = asyncio.Event()
  for number in (signal.SIGINT, signal.SIGTERM):
    asyncio.get_running_loop().add_signal_handler(number, stop.set)
  async with listening(server.application(), name='sandbox', front=front, routes=ROUTES) as (
    address,
    public,
  ):
    print(f'sandboxes ({server.isolation}) listen at {public or address}', flush=True)
    async with registering(registry, lease_of(Kind.SANDBOX, public or address, name)):
      write_addresses(FLAGS.addresses_file, [public or address])
      # Wait 'signal': unbounded: a service runs until a signal stops it.
      await stop.wait()


def run(argv: Sequence[str], document: str | None = None) -> int:
  """Runs the command and returns its exit code. `document` is the description that --help
  prints.
  """
  return script.exit_code(lambda: _run(argv, document))


def _run(argv: Sequence[str], document: str | None) -> int:
  parse_flags(argv, FLAGS, document, takes_config=False)
  registry = open_registry(FLAGS.registry, FLAGS.name)
  front = read_front(FLAGS, registry)
  server = SandboxServer(isolation=FLAGS.isolation, at_once=FLAGS.programs or os.cpu_count() or 1)
  try:
    asyncio.run(serve(server, front, registry, FLAGS.name))
  finally:
    server.close()
  return 0
