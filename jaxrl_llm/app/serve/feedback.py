"""Accepts delayed rewards over HTTP: `jaxrl serve --role=feedback`.

`POST /feedback` accepts a verdict, `{"uid": …, "value": …, "who": …}` and optionally `scorer` and
`attempt`. Status 200 means that the verdict is on disk.

Invariant: the server checks no token, so it listens on a unix socket that only its own user can
reach. Other users go through an HTTP proxy that checks a token (`core.net.front`).
"""

from __future__ import annotations

import asyncio
import pathlib
import signal
from collections.abc import Mapping, Sequence

from absl import flags
from aiohttp import web

from jaxrl_llm.app.serve.listening import (
  define_listening,
  open_registry,
  read_front,
  write_addresses,
)
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.net.listener import listening
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.replay.browse import snapshot
from jaxrl_llm.replay.inbox import Refusal, attach, read_verdict

FEEDBACK_PATH = '/feedback'
ROUTES = (('GET', '/health'), ('POST', FEEDBACK_PATH))
"""(method, path) of every route."""
MAX_BODY = 64 << 10
"""Maximum size of a request body in bytes."""
STATUSES: Mapping[Refusal, int] = {'invalid': 400, 'unknown': 404, 'conflict': 409, 'late': 410}
"""HTTP status of each refusal."""

FLAGS = flags.FlagValues()
flags.DEFINE_string('workdir', None, 'Directory of the run.', flag_values=FLAGS)
define_listening(FLAGS)


def application(directory: pathlib.Path) -> web.Application:
  """Returns the application that attaches verdicts to samples of a store.

  Args:
    directory: directory of the store, `<workdir>/replay`.
  """
  # Serialises transactions, because SQLite permits only one writer at a time.
  turn = asyncio.Lock()

  async def health(request: web.Request) -> web.Response:
    return web.json_response({'store': str(directory)})

  async def post(request: web.Request) -> web.Response:
    try:
      verdict = read_verdict(await request.json())
    except (UserError, ValueError) as error:
      return _answer(400, f'body: {str(error) or type(error).__name__}')
    except RecursionError:
      return _answer(400, 'body: nested too deeply, wanted an object with uid, value and who')
    async with turn:
      try:
        (reply,) = await asyncio.to_thread(attach, directory, [verdict])
      except (RunError, UserError) as error:
        # The verdict is not attached, but a retry may succeed.
        return _answer(503, str(error))
    return _answer(200 if reply.refused is None else STATUSES[reply.refused], reply.line)

  app = web.Application(client_max_size=MAX_BODY)
  app.router.add_get('/health', health)
  app.router.add_post(FEEDBACK_PATH, post)
  return app


def _answer(status: int, line: str) -> web.Response:
  return web.json_response({'result' if status == 200 else 'error': line}, status=status)


async def serve(directory: pathlib.Path, front: FrontConfig | None) -> None:
  """Accepts verdicts until SIGINT or SIGTERM."""
  stop = asyncio.Event()
  for number in (signal.SIGINT, signal.SIGTERM):
    asyncio.get_running_loop().add_signal_handler(number, stop.set)
  async with listening(application(directory), name='feedback', front=front, routes=ROUTES) as (
    address,
    public,
  ):
    print(f'feedback on {directory} is accepted at {public or address}', flush=True)
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
  if FLAGS.workdir is None:
    raise UserError('--workdir is missing; usage: jaxrl serve --role=feedback --workdir=DIR')
  directory = pathlib.Path(FLAGS.workdir) / 'replay'
  with snapshot(directory):  # Raises UserError if there is no store.
    pass
  front = read_front(FLAGS, open_registry(FLAGS.registry, FLAGS.name))
  asyncio.run(serve(directory, front))
  return 0
