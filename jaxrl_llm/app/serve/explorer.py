"""Program of an explorer, a process that runs the rollout workflow for process 0 of a run.

It is started by `jaxrl serve --role=explorer`, or by the run itself.

Explorers load no model and use no device.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import signal
import sys
from collections.abc import Sequence

from absl import flags, logging

from jaxrl_llm.app.composition.workflows import build_workflow
from jaxrl_llm.app.serve.listening import define_registering, open_registry
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError, UserError, first_cause
from jaxrl_llm.core.net.client import Lost
from jaxrl_llm.core.net.connections import read_key
from jaxrl_llm.core.net.registry import (
  LOOK_S,
  Kind,
  Lease,
  Registry,
  Watch,
  registered,
  service_name,
)
from jaxrl_llm.rollout.explorers.explorer import Evicted, Link, explore

FLAGS = flags.FlagValues()
flags.DEFINE_string(
  'master', None, 'Address of the run: unix:PATH, or the URL of its front.', flag_values=FLAGS
)
flags.DEFINE_string(
  'key_file', None, 'File whose first line is the bearer token.', flag_values=FLAGS
)
flags.DEFINE_string('ca_file', None, 'Certificate authority for https, PEM.', flag_values=FLAGS)
flags.DEFINE_bool(
  'allow_plaintext',
  False,
  'With --registry: send the key to http addresses of other hosts.',
  flag_values=FLAGS,
)
define_registering(FLAGS)
_AGAIN_S = 1.0
"""Seconds to wait before exploring again after a master was lost or replaced."""


def command(master: str, name: str) -> list[str]:
  """Returns the command that starts an explorer process with this Python interpreter.

  Args:
    master: address of the run's master.
    name: name of the explorer.
  """
  return [sys.executable, '-P', '-m', __name__, f'--master={master}', f'--name={name}']


def _link(address: str, key: str | None) -> Link:
  name = FLAGS.name or platform.node() or 'explorer'
  return Link(address, key=key, ca_file=FLAGS.ca_file, name=name)


async def _explore_for(registry: Registry, key: str) -> None:
  """Explores for the registered run, and then for each run that replaces it in the registry, until
  SIGTERM.
  """
  this = asyncio.current_task()
  asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
  lease = Lease(kind=Kind.EXPLORER, name=FLAGS.name or service_name('explorer'))
  watch = Watch(registry, Kind.MASTER)
  with contextlib.suppress(asyncio.CancelledError):
    async with registered(registry, lease):
      logging.info('waiting for a run in %s', registry.directory)
      while True:
        await _explore_once(await _master(watch), watch, key)
        await asyncio.sleep(_AGAIN_S)


async def _master(watch: Watch) -> Lease:
  """Waits until a run is registered, and returns the lease (registry entry) of the newest run."""
  # Wait 'master': unbounded: an explorer waits as long as no run is registered.
  while not (masters := await watch.look_async()):
    await asyncio.sleep(LOOK_S)
  return masters[-1]


async def _explore_once(master: Lease, watch: Watch, key: str) -> None:
  """Runs the workflow of one run until its master (process 0) is unreachable, or is no longer the
  newest master in the registry.
  """
  logging.info('exploring for %s at %s', master.name, master.address)
  exploring = asyncio.create_task(explore(_link(master.address, key), build_workflow))
  replaced = asyncio.create_task(_replaced(master, watch))
  try:
    # Wait 'master': unbounded: an explorer works as long as its master does.
    await asyncio.wait({exploring, replaced}, return_when=asyncio.FIRST_COMPLETED)
    if exploring.done():
      exploring.result()
  except Exception as error:
    cause = first_cause(error)
    if isinstance(cause, Evicted) or not isinstance(cause, RunError | Lost):
      raise
    logging.warning('%s is lost: %s', master.name, cause)
  finally:
    for task in (exploring, replaced):
      task.cancel()
    await asyncio.gather(exploring, replaced, return_exceptions=True)


async def _replaced(master: Lease, watch: Watch) -> None:
  """Returns when the given master is no longer the newest in the registry."""
  while True:
    await asyncio.sleep(LOOK_S)
    masters = await watch.look_async()
    if not masters or masters[-1].id != master.id:
      logging.info('%s has left the registry, or a newer run has joined', master.name)
      return


def run(argv: Sequence[str], document: str | None = None) -> int:
  """Runs the command and returns its exit code. `document` is the description that --help
  prints.
  """
  return script.exit_code(lambda: _run(argv, document))


def _run(argv: Sequence[str], document: str | None) -> int:
  parse_flags(argv, FLAGS, document, takes_config=False)
  if (FLAGS.master is None) == (FLAGS.registry is None):
    raise UserError(
      '--master and --registry: wanted one of them, the address that the run prints or the '
      "job's registry"
    )
  key = read_key(FLAGS.key_file, '--key_file')
  registry = open_registry(FLAGS.registry, FLAGS.name, allow_plaintext=FLAGS.allow_plaintext)
  logging.set_verbosity(logging.INFO)
  try:
    if registry is None:
      asyncio.run(explore(_link(FLAGS.master, key), build_workflow))
    else:
      asyncio.run(_explore_for(registry, key or registry.key))
  except KeyboardInterrupt:
    return 130
  return 0


if __name__ == '__main__':
  sys.exit(run(sys.argv))
