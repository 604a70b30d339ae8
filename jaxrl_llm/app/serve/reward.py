"""Reward model service for scorers of kind `http`: `jaxrl serve --role=reward`.

Request: `{prompt, completion, …}`, as scorers of kind `http` send it; `prompt` is a text or a list
of chat messages. Response: `{value, evidence}`, or status 400 with a one-line reason if the request
cannot be scored.

With `--step_separator`, the response also has `step_values`, one value for each step, as a process
reward model would return. The value of a step is the score of the answer up to the end of the step.
If the request has `transcript`, the messages of a whole conversation, the steps are the assistant's
turns after the prompt. Otherwise, the separator divides the completion into steps. In both cases,
`value` is the last step value.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from absl import flags, logging
from aiohttp import web

from jaxrl_llm.app.composition.reward_role import find_reward_model
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
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.listener import listening
from jaxrl_llm.core.net.registry import Kind
from jaxrl_llm.learner.loading import read_params
from jaxrl_llm.master.reward_model import Batcher, RewardModel
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.tasks.tokenizer import Tokenizer

FLAGS = flags.FlagValues()
flags.DEFINE_string(
  'model', None, 'Reward model: a directory, hub id, or run that trained it.', flag_values=FLAGS
)
flags.DEFINE_enum(
  'dtype',
  'bfloat16',
  ['float32', 'bfloat16'],
  'Data type of weights and activations.',
  flag_values=FLAGS,
)
flags.DEFINE_integer(
  'max_length',
  None,
  "Maximum length of prompt and answer in tokens; default: the model's.",
  1,
  flag_values=FLAGS,
)
flags.DEFINE_integer('sequences', 32, 'Sequences per forward pass.', 1, flag_values=FLAGS)
flags.DEFINE_integer(
  'tensor',
  1,
  'Number of devices that share heads and MLPs; the other devices shard the weights.',
  1,
  flag_values=FLAGS,
)
flags.DEFINE_string(
  'step_separator',
  None,
  'Text at which a step ends (\\n is a line break); responses then have a value per step.',
  flag_values=FLAGS,
)
define_listening(FLAGS)
MAX_STEPS = 64
"""Maximum number of steps that get a separate value. In a completion, the last of these steps
includes the remaining text. A transcript with more steps is refused.
"""
_CHARACTERS = 256
"""Length in characters assumed for the longest token of a vocabulary. A text that has more than
this number of characters for each permitted token is certainly too long.
"""
PATHS = ('/', '/score')
ROUTES = (('GET', '/health'), *(('POST', path) for path in PATHS))


def load(
  source: str, *, dtype: str, max_length: int | None, sequences: int, tensor: int
) -> tuple[RewardModel, Tokenizer]:
  """Loads a reward model on all devices of this process, and its tokenizer.

  Raises:
    UserError: `source` does not contain a reward model.
  """
  files = find_reward_model(source, '--model')
  spec, tokenizer = files.spec, files.tokenizer()
  mesh = build_mesh(MeshConfig(tensor=tensor))
  model = files.model(dtype, mesh)
  params = read_params(model, mesh, files.directory, spec)
  longest = min(max_length or spec.max_position_embeddings, spec.max_position_embeddings)
  return RewardModel(model, params, mesh, max_length=longest, sequences=sequences), tokenizer


def application(
  batcher: Batcher, tokenizer: Tokenizer, *, max_length: int, step_separator: str | None = None
) -> web.Application:
  """Builds the web application.

  Args:
    max_length: maximum length in tokens of a sequence, prompt included. Texts that are certainly
      too long are rejected without being tokenized.
    step_separator: text that ends a step of a completion. If None, responses have no step values.
  """
  # Tokenize in a thread, because long texts would block the event loop. Use only one thread,
  # because tokenizers are not thread-safe.
  encoder = ThreadPoolExecutor(1, thread_name_prefix='tokenizer')

  def encode(data: bytes) -> list[list[int]]:
    answers = _read(data, step_separator)
    prompt, completion = answers[-1]
    characters = sum(len(message['content']) for message in prompt) + len(completion)
    if characters > max_length * _CHARACTERS:
      raise UserError(
        f'{characters} characters exceed the {max_length} tokens that the reward model accepts'
      )
    # The longest sequence is first, so that a request that is too long costs only one rendering.
    sequences = []
    for prompt, completion in reversed(answers):
      before, after = tokenizer.render_answer(prompt, completion)
      if len(before) + len(after) > max_length:
        raise UserError(
          f'{len(before) + len(after)} tokens with the prompt, the reward model accepts at most '
          f'{max_length}'
        )
      sequences.append([*before, *after])
    return sequences[::-1]

  async def score(request: web.Request) -> web.Response:
    try:
      data = await request.read()
      sequences = await asyncio.get_running_loop().run_in_executor(encoder, encode, data)
      values = await asyncio.gather(*map(batcher.score, sequences))
    except UserError as error:
      return web.Response(status=400, text=str(error))
    answer = {'value': values[-1], 'evidence': {'tokens': len(sequences[-1])}}
    return web.json_response(
      answer if step_separator is None else {**answer, 'step_values': values}
    )

  served = web.Application(client_max_size=16 << 20)
  served.router.add_get('/health', _healthy)
  for path in PATHS:
    served.router.add_post(path, score)
  return served


async def _healthy(request: web.Request) -> web.Response:
  return web.Response(text='ok')


Answer = tuple[tuple[dict[str, str], ...], str]
"""Pair of the messages before an answer, and the answer."""


def _read(data: bytes, step_separator: str | None = None) -> list[Answer]:
  """Returns the answers to score, in order. Without a separator there is one answer, otherwise one
  for each step.
  """
  try:
    body = json.loads(data)
    prompt, completion = body['prompt'], body['completion']
    messages = [{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else prompt
    turns = tuple({'role': str(m['role']), 'content': str(m['content'])} for m in messages)
    conversation = tuple(
      {'role': str(m['role']), 'content': str(m['content'])} for m in body.get('transcript') or ()
    )
  except (ValueError, KeyError, TypeError, RecursionError):
    raise UserError(
      f'got {data[:80]!r}, wanted JSON with prompt (a text or messages) and completion'
    ) from None
  if not isinstance(completion, str) or not turns:
    raise UserError('got a completion that is not text, or an empty prompt')
  try:
    ''.join([*(message['content'] for message in (*turns, *conversation)), completion]).encode()
  except UnicodeEncodeError as error:
    raise UserError(
      f'got text that UTF-8 cannot encode ({error.reason}), which tokenizers do not accept'
    ) from None
  if step_separator is None:
    return [(turns, completion)]
  if conversation:
    return _turns(turns, conversation)
  return [(turns, completion[:end]) for end in step_ends(completion, step_separator)]


def step_ends(completion: str, separator: str) -> list[int]:
  """Returns the positions, in characters, at which the steps of a completion end. A step ends with
  a separator or with the completion. A blank step is merged into the previous step, or into the
  next one if it is the first. Blank text after the last step is left out.
  """
  ends, start = [], 0
  while len(ends) < MAX_STEPS - 1 and (at := completion.find(separator, start)) >= 0:
    blank = not completion[start:at].strip()
    start = at + len(separator)
    if not blank:
      ends.append(start)
    elif ends:
      ends[-1] = start
  if completion[start:].strip() or not ends:
    ends.append(len(completion))
  return ends


def _turns(
  prompt: Sequence[dict[str, str]], conversation: Sequence[dict[str, str]]
) -> list[Answer]:
  """Returns each turn of the assistant after the prompt, with the messages before it."""
  if [*conversation[: len(prompt)]] != [*prompt]:
    raise UserError('got a transcript that does not begin with the prompt')
  answers = [
    (tuple(conversation[:number]), message['content'])
    for number, message in enumerate(conversation)
    if message['role'] == 'assistant' and number >= len(prompt)
  ]
  if not 0 < len(answers) <= MAX_STEPS:
    raise UserError(
      f'got a transcript with {len(answers)} turns of the assistant after the prompt, wanted 1 to '
      f'{MAX_STEPS}'
    )
  return answers


async def serve(
  model: RewardModel,
  tokenizer: Tokenizer,
  front: Any,
  ready: Callable[[str], contextlib.AbstractAsyncContextManager[None]],
  step_separator: str | None = None,
) -> None:
  """Serves until SIGINT or SIGTERM.

  Args:
    step_separator: text that ends a step of a completion. If None, responses have no step values.
    ready: called with the service's address. Returns a context manager that is held open while the
      service runs.
  """
  stop, device = asyncio.Event(), DeviceThread()
  for number in (signal.SIGINT, signal.SIGTERM):
    asyncio.get_running_loop().add_signal_handler(number, stop.set)
  await device.run(model, [[tokenizer.pad_id]])  # Compiles the model's program.
  batcher = Batcher(model, device)
  where = listening(
    application(batcher, tokenizer, max_length=model.max_length, step_separator=step_separator),
    name='reward',
    front=front,
    routes=ROUTES,
  )
  try:
    async with where as (address, public), ready(public or address):
      running = asyncio.create_task(batcher.run())
      # Wait 'signal': unbounded: a service runs until a signal stops it.
      stopped = asyncio.create_task(stop.wait())
      # Wait 'signal': unbounded: a service runs until a signal stops it.
      await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
      running.cancel()
      with contextlib.suppress(asyncio.CancelledError):
        await running  # Wait 'cancelled': short, since the task has just been cancelled.
  finally:
    device.close()


def run(argv: Sequence[str], document: str | None = None) -> int:
  """Runs the command and returns its exit code. `document` is the description that --help
  prints.
  """
  return script.exit_code(lambda: _run(argv, document))


def _run(argv: Sequence[str], document: str | None) -> int:
  parse_flags(argv, FLAGS, document, takes_config=False)
  if FLAGS.model is None:
    raise UserError(
      '--model is missing; wanted a reward model: a directory, a hub id, or a run that trained it'
    )
  separator = FLAGS.step_separator
  if separator is not None:
    separator = separator.replace('\\n', '\n').replace('\\t', '\t')
    if not separator:
      raise UserError('--step_separator is empty; wanted the text at which a step ends')
  registry = open_registry(FLAGS.registry, FLAGS.name)
  front = read_front(FLAGS, registry)
  logging.set_verbosity(-1)
  settings = {name: FLAGS[name].value for name in ('dtype', 'max_length', 'sequences', 'tensor')}
  model, tokenizer = load(FLAGS.model, **settings)

  fingerprint: dict[str, str] = {}
  if registry is not None:
    fingerprint = {'model': find_reward_model(FLAGS.model, '--model').fingerprint()}

  @contextlib.asynccontextmanager
  async def ready(address: str) -> AsyncIterator[None]:
    url = address if address.startswith('unix:') else f'{address}/'
    options = {'addresses': [url]} if registry is None else {'discover': FLAGS.name or '*'}
    print(f'{FLAGS.model} scores on {jax.device_count()} devices at {address}', flush=True)
    print(f"use it as a scorer: kind 'http', options {json.dumps(options)}", flush=True)
    async with registering(registry, lease_of(Kind.REWARD, url, FLAGS.name, fingerprint)):
      write_addresses(FLAGS.addresses_file, [url])
      yield

  asyncio.run(serve(model, tokenizer, front, ready, separator))
  return 0
