"""CPU time that the master spends on a sample, by thread, process and part.

  .venv/bin/python benchmarks/master.py [--before=DIRECTORY] [--samples=64] [--tokens=16384] \\
    [--steps=2] [--explorers=none,master,direct,followed]

Fake servers answer `--samples` samples of `--tokens` tokens per step. The master has the parts that
it has in a run: fleet, workflow, explorer, store, batches, and the logs of a step. Scorers answer
at once, nothing is trained, and the trainer's logprobs are all -1. With `--before`, a checkout of
an earlier commit does the same work in turn with this one, and its samples must be the same.
Figures are CPU time, because other work may share the cores: of the thread of the event loop, of
other threads (among them the loops that receive answers and messages of explorers, and the thread
that stores groups), and of child processes. A callback is one call of the event loop. The number of
callbacks does not depend on other work, except for those of timers, about eight per second.
"""

import asyncio
import asyncio.events
import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import importlib
import inspect
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

_ROOT = pathlib.Path(__file__).parents[1]
_TREE = pathlib.Path(os.environ.get('MASTER_TREE', _ROOT))
# The tree under measurement hides the package of the environment.
sys.path[:0] = [str(_TREE), *(str(_TREE / 'tests' / part) for part in ('support', 'tools'))]

import numpy as np  # noqa: E402
from absl import app, flags  # noqa: E402

_BEFORE = flags.DEFINE_string('before', None, 'Checkout of an earlier commit to compare with.')
_SAMPLES = flags.DEFINE_integer('samples', 64, 'Samples per step.')
_TOKENS = flags.DEFINE_integer('tokens', 16_384, 'Tokens per sample.')
_STEPS = flags.DEFINE_integer('steps', 2, 'Measured steps.')
_SIZE = flags.DEFINE_integer('group_size', 8, 'Samples per group.')
_SERVERS = flags.DEFINE_integer('servers', 2, 'Fake servers.')
_STREAM = flags.DEFINE_integer(
  'stream', 256, 'rollout.vllm.stream of trees that have it; 0 for whole answers.'
)
_EXPLORERS = flags.DEFINE_list(
  'explorers',
  ['none'],
  'Who runs the workflow and fetches the answers; each value is a side. none: the master. master: '
  'an explorer process runs it, and the master fetches. direct: the explorer fetches. followed: '
  'another run explores, without explorer processes, and the measured master trains on what that '
  'run has shared (`Followed`).',
)
_TRANSCRIPTS = flags.DEFINE_integer(
  'transcript_tokens', 100_000, 'logging.transcript_tokens of trees that have it.'
)
_ROUNDS = flags.DEFINE_integer('rounds', 1, 'Runs of each side.')
_TOKEN = 'token-of-this-benchmark-0123456789'
_PROMPT = 512
_PIECE = 256
"""Number of tokens that a server samples at a time. An event of a stream has at least this many
tokens.
"""
_HOSTS, _CORES = 64, 16
_OTHERS = {
  'loop of answers': 'responses',
  'loop of messages': 'messages',
  'thread that stores groups': 'settling',
}
"""Prefixes of the names of some threads, keyed by their row in the table. Their time is included in
that of 'other threads'.
"""
_DONE = 'measured '

PARTS = {
  'parse answers': (
    'rollout.vllm.client:parse_json',
    'rollout.vllm.answer:_parse',
    'rollout.vllm.answer:_parse_events',
  ),
  'check answers': ('rollout.vllm.client:_completion', 'rollout.vllm.answer:_checked'),
  'check signatures': ('core.net.tickets:TicketKeys.is_signed',),
  'check samples of explorers': ('rollout.explorers.crew:read_steps',),
  'decode text': ('rollout.workflow:completion_text',),
  'build samples': ('rollout.workflow:rollout_sample',),
  'encode samples': ('replay.writer:encode',),
  'read shared samples': (
    'replay.shared:SharedBatches.read',
    'replay.shared:SharedBatches.samples',
  ),
  'store groups': (
    'master.exploring.explorer:Explorer._admit',
    'replay.writer:StepWriter.append',
  ),
  'seal': ('replay.writer:StepWriter.seal',),
  'metrics': ('master.keeper:step_metrics',),
  'transcripts': (
    'master.keeper:rollout_rows',
    'runtime.writers:RolloutsWriter.write',
    'runtime.rollouts:RolloutsWriter.write',
  ),
}
"""Functions whose CPU time is measured separately, in any thread. Functions that a tree lacks are
skipped.
"""


class Parts:
  """CPU seconds of parts of the work, excluding the parts nested inside each."""

  def __init__(self):
    self.seconds = collections.Counter()
    self._lock, self._within = threading.Lock(), threading.local()
    for part, names in PARTS.items():
      for name in names:
        with contextlib.suppress(ImportError, AttributeError):
          self._wrap(part, *name.split(':'))

  def _wrap(self, part: str, module: str, path: str) -> None:
    *owners, name = path.split('.')
    owner = functools.reduce(getattr, owners, importlib.import_module(f'jaxrl_llm.{module}'))
    call = getattr(owner, name)
    if inspect.iscoroutinefunction(call):
      return

    @functools.wraps(call)
    def timed(*args, **kwargs):
      outer = getattr(self._within, 'inner', 0.0)
      self._within.inner, began = 0.0, time.thread_time()
      try:
        return call(*args, **kwargs)
      finally:
        seconds = time.thread_time() - began
        with self._lock:
          self.seconds[part] += seconds - self._within.inner
        self._within.inner = outer + seconds

    setattr(owner, name, timed)


class Callbacks:
  """The callbacks of the event loop: their number, and the longest in CPU seconds of its thread."""

  def __init__(self):
    self.count, self.seconds, self.name = 0, 0.0, ''
    run, loop_thread = asyncio.events.Handle._run, threading.get_ident()

    def timed(handle):
      if threading.get_ident() != loop_thread:  # The callback is that of another event loop.
        run(handle)
        return
      self.count += 1
      waits = waiting(handle)
      began = time.thread_time()
      run(handle)
      if (seconds := time.thread_time() - began) > self.seconds:
        self.seconds, self.name = seconds, f'{handle!r} {" > ".join(waits)}'

    asyncio.events.Handle._run = timed


def waiting(handle: asyncio.Handle) -> list[str]:
  """Returns the function and line of each coroutine that the callback resumes, outermost first."""
  task, waits = getattr(handle._callback, '__self__', None), []
  coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
  while (frame := getattr(coroutine, 'cr_frame', None)) is not None:
    waits.append(f'{frame.f_code.co_qualname}:{frame.f_lineno}')
    coroutine = coroutine.cr_await
  return waits


@functools.cache
def answer(count: int, seed: int) -> tuple[list[int], list[float]]:
  """Returns letters, without a stop token, and their logprobs."""
  draws = np.random.default_rng(seed)
  logprobs = -draws.exponential(size=count).astype(np.float32)
  return draws.integers(0, 8, count).tolist(), logprobs.astype(float).tolist()


async def serve(uds: str) -> None:
  """Runs one fake server, behind a front if there are explorers."""
  import fleets
  from fake_vllm import FakeServer, Scripted

  backend = Scripted(
    lambda prompt, params, index: answer(params.max_tokens, params.seed % 8),
    fleets.tensors(fleets.GARBAGE),
    score=fleets.score,
    piece=_PIECE,
  )
  length = _TOKENS.value + _PROMPT
  server = FakeServer(backend, max_model_len=length, vocab_size=fleets.VOCAB)
  await server.start(uds=uds)
  if _EXPLORERS.value not in (['none'], ['followed']):
    await open_front(uds)
  await server.ended.wait()  # The wait 'client' is bounded by the benchmark, which kills it.


async def open_front(uds: str) -> None:
  """Opens a front that signs, and writes its address to a file beside the server's socket."""
  from jaxrl_llm.core.net.front import Front
  from jaxrl_llm.core.net.token_server import FrontConfig
  from jaxrl_llm.rollout.vllm.direct import SigningFront

  token = pathlib.Path(f'{uds}.token')
  token.touch(mode=0o600)
  token.write_text(_TOKEN)
  signing, config = SigningFront(f'unix:{uds}', _TOKEN), FrontConfig(token_file=str(token))
  handlers, ticketed = signing.handlers, signing.ticketed
  front = Front(config, upstream=f'unix:{uds}', handlers=handlers, ticketed=ticketed)
  address = await front.start()
  unfinished = pathlib.Path(f'{uds}.unfinished')
  unfinished.write_text(address)
  unfinished.rename(f'{uds}.front')


@contextlib.asynccontextmanager
async def fleet_over(sockets: list[str], folder: pathlib.Path):
  """Opens a fleet of the servers, which serves its first version."""
  import fleets
  import serving

  serving.LENGTH = _TOKENS.value + _PROMPT
  addresses = [f'unix:{socket}' for socket in sockets]
  config = {'latency_s': 3600.0}
  if any(field.name == 'stream' for field in dataclasses.fields(serving.VllmConfig)):
    config['stream'] = _STREAM.value or None
  if _EXPLORERS.value in (['none'], ['followed']):
    opening = serving.attached(fleets.MODEL, addresses, folder, **config)
  else:
    is_direct = _EXPLORERS.value == ['direct']
    fronts = [pathlib.Path(f'{socket}.front').read_text() for socket in sockets]
    opening = serving.fleet_of(fleets.MODEL, replicas(fronts), folder, direct=is_direct, **config)
  async with opening as fleet:
    await fleet.load(fleets.weights(fleets.A))
    yield fleet


def replicas(fronts: list[str]) -> list:
  from jaxrl_llm.rollout.vllm.client import VllmClient
  from jaxrl_llm.rollout.vllm.replica import Replica

  names = {f'vllm-{i}': address for i, address in enumerate(fronts)}
  clients = [VllmClient(address, key=_TOKEN, name=name) for name, address in names.items()]
  return [Replica(client.name, client=client, server=None) for client in clients]


def make_crew(hub, tokenizer, max_tokens: int, *, folder: pathlib.Path):
  """Returns a crew of one explorer process."""
  from jaxrl_llm.app.serve.explorer import command
  from jaxrl_llm.rollout.explorers.crew import Crew, ExplorersConfig
  from jaxrl_llm.rollout.explorers.explorer import Welcome
  from jaxrl_llm.rollout.untrusted import Bounds
  from jaxrl_llm.rollout.workflow import SingleTurn, WorkflowConfig, turns_of

  welcome = Welcome(
    workflow=WorkflowConfig(),
    max_tokens=max_tokens,
    max_steps=1,
    max_prompt=_PROMPT,
    tokenizer=tokenizer.files,
  )
  return Crew(
    hub,
    ExplorersConfig(
      groups=_SAMPLES.value // _SIZE.value,
      direct=_EXPLORERS.value == ['direct'],
      silent_s=3600.0,
    ),
    welcome=welcome.row(),
    text=SingleTurn(hub, tokenizer, max_tokens=max_tokens).text,
    turns=functools.partial(turns_of, tokenizer),
    bounds=Bounds(vocab_size=tokenizer.vocab_size, max_length=max_tokens + _PROMPT),
    logs=folder / 'logs',
    command=command,
  )


@contextlib.asynccontextmanager
async def started(workflow):
  """Runs the crew, if the workflow is one."""
  if not hasattr(workflow, 'start'):
    yield
    return
  try:
    await workflow.start()
    yield
    if _EXPLORERS.value == ['direct']:  # The figures are those of what they say they are.
      assert workflow.counts == {'direct_delivered': workflow.counts['direct_delivered']}
  finally:
    await workflow.close()


def make_tasks() -> list:
  import exploring

  from jaxrl_llm.core.records.task import Task

  letters = [exploring.LETTERS[i % 8] for i in range(_PROMPT - 8)]
  return [
    Task(
      taskset='train',
      domain='general',
      prompt=({'role': 'user', 'content': ''.join(letters) + f'{i:08o}'.translate(_DIGITS)},),
      truth='a',
      fields={},
    )
    for i in range(_SAMPLES.value // _SIZE.value)
  ]


def make_exploration(fleet, tokenizer, store, folder: pathlib.Path):
  import exploring

  options = {}
  if _EXPLORERS.value not in (['none'], ['followed']):
    options['make'] = functools.partial(make_crew, folder=folder)
  return exploring.Exploration(
    tokenizer,
    store,
    lambda attempt: float(hash_of(attempt.completion) % 2),
    engine=fleet,
    tasks=make_tasks(),
    max_tokens=_TOKENS.value,
    groups_per_batch=_SAMPLES.value // _SIZE.value,
    group_size=_SIZE.value,
    collect_deadline_s=3600.0,
    **options,
  )


@contextlib.asynccontextmanager
async def run_over(sockets: list[str], folder: pathlib.Path):
  """Runs the master over the servers. Yields its batches and the logs that a step writes to."""
  import exploring

  from jaxrl_llm.master.batches import RolloutBatches

  store = exploring.new_store(folder / 'replay')
  tokenizer = exploring.make_tokenizer(folder / 'tokenizer')
  async with fleet_over(sockets, folder) as fleet:
    exploration = make_exploration(fleet, tokenizer, store, folder)
    batches = RolloutBatches(exploration.explorer)
    async with started(exploration.runner.workflow), batches.running():
      yield batches, open_logs(folder, store, tokenizer, batches)


@contextlib.asynccontextmanager
async def run_that_follows(sockets: list[str], folder: pathlib.Path):
  """Lets another run explore all batches and share them, and then runs a master that follows it.
  Yields its batches and the logs that a step writes to.
  """
  import exploring

  from jaxrl_llm.master.following import FollowedBatches, FollowedConfig
  from jaxrl_llm.replay.shared import SharedBatches, vocabulary_digest
  from jaxrl_llm.rollout.untrusted import Bounds, checked_sample
  from jaxrl_llm.rollout.workflow import completion_text

  store = exploring.new_store(folder / 'replay')
  tokenizer = exploring.make_tokenizer(folder / 'tokenizer')
  await share(sockets, folder, tokenizer, follower=store.name)
  length = _TOKENS.value + _PROMPT
  bounds = Bounds(vocab_size=tokenizer.vocab_size, max_length=length)
  batches = FollowedBatches(
    FollowedConfig(
      stage='grpo',
      where='stages.grpo.source',
      groups_per_batch=_SAMPLES.value // _SIZE.value,
      group_size=_SIZE.value,
      bound=_STEPS.value,
      longest=length,
      max_steps=1,
      vocabulary=vocabulary_digest(tokenizer.vocabulary),
      deadline_s=3600.0,
    ),
    [SharedBatches(folder / 'explorer', functools.partial(checked_sample, bounds=bounds))],
    store=store,
    tasks={task.uid: task for task in make_tasks()},
    render=lambda task: tokenizer.render_prompt(task.prompt),
    text=lambda sample: completion_text(
      tokenizer, sample.tokens[sample.prompt_len :], sample.finish_reason
    ),
    exported=lambda step: 'weights',
  )
  async with batches.running():
    yield batches, open_logs(folder, store, tokenizer, batches)


async def share(sockets: list[str], folder: pathlib.Path, tokenizer, *, follower: str) -> None:
  """Explores all batches and shares them with the run whose store is named `follower`."""
  import exploring

  from jaxrl_llm.batching.plan import StepPlan
  from jaxrl_llm.master.sharing import SharingBatches
  from jaxrl_llm.replay.shared import Opening, SharedVersion, vocabulary_digest, write_opening

  store = exploring.new_store(folder / 'explorer')
  vocabulary = vocabulary_digest(tokenizer.vocabulary)
  opening = Opening(store=store.name, attempt=store.attempt, step=0, vocabulary=vocabulary)
  write_opening(store.directory, opening)
  async with fleet_over(sockets, folder) as fleet:
    batches = SharingBatches(
      make_exploration(fleet, tokenizer, store, folder).explorer,
      store=store,
      version_of=lambda attempt: SharedVersion(
        run=follower, attempt=attempt, step=0, digest='weights'
      ),
      taken_versions=lambda: 0,
      committed=lambda: 0,
    )
    async with batches.running():
      for step in range(_STEPS.value + 1):
        batches.advance(step, step)
        rows, _ = await batches.next()
        plan = StepPlan(step=step, stage='grpo', rows=tuple(rows))
        batches.record(plan)
        batches.trained(plan)
  store.close()


def open_logs(folder: pathlib.Path, store, tokenizer, batches):
  from jaxrl_llm.master.keeper import Logs
  from jaxrl_llm.runtime.writers import MetricsWriter, RolloutsWriter

  options = {}
  if any(field.name == 'transcript_tokens' for field in dataclasses.fields(Logs)):
    options['transcript_tokens'] = _TRANSCRIPTS.value
  return Logs(
    metrics=MetricsWriter(folder, committed=None),
    rollouts=RolloutsWriter(folder),
    evals=None,
    progress=None,
    store=store,
    batches={'grpo': batches},
    evaluator=None,
    suites=(),
    decode=functools.partial(tokenizer.decode, skip_special=False),
    machine_metrics=dict,
    **options,
  )


_DIGITS = str.maketrans('01234567', 'abcdefgh')


def hash_of(text: str) -> int:
  return hashlib.blake2b(text.encode()).digest()[0]


async def write(logs, batches, step: int) -> list:
  """Takes a batch and writes the logs that a step writes."""
  from jaxrl_llm.batching.plan import StepPlan
  from jaxrl_llm.learner.algorithm import Annotation
  from jaxrl_llm.master import keeper
  from jaxrl_llm.master.trainer import Batch, Updated

  rows, counts = await batches.next()
  plan = StepPlan(step=step, stage='grpo', rows=tuple(rows), counts=counts)
  ones = np.ones(len(rows))
  batch = Batch(plan, Annotation(ones, ones.astype(bool), {}), [])
  logprobs = {i: -np.ones(row.length, np.float32) for i, row in enumerate(rows)}
  updated, stage = Updated({}, logprobs, True), collections.namedtuple('Stage', 'name')('grpo')
  seconds = {'step': 1.0, 'gen': 1.0}
  spent = {} if 'spent' in inspect.signature(keeper.write_step).parameters else 1.0
  done = keeper.write_step(logs, stage, step + 1, batch, updated, seconds, spent)
  if inspect.isawaitable(done):
    await done
  return [member.sample for member in batches.taken().values()]


async def measure(sockets: list[str], folder: pathlib.Path) -> dict:
  """Returns CPU seconds by thread, process and part, the number of callbacks, the longest of them,
  and a digest of all samples.
  """
  parts, callbacks, digest, samples = Parts(), Callbacks(), hashlib.blake2b(), []
  freeze, collect_if_due = collections_of_garbage()
  opened = run_that_follows if _EXPLORERS.value == ['followed'] else run_over
  async with opened(sockets, folder) as (batches, logs):
    batches.advance(0, 0)
    for step in range(_STEPS.value + 1):
      samples += await write(logs, batches, step)
      collect_if_due()
      if step == 0:  # The first step imports and opens what is used.
        parts.seconds.clear()
        freeze()  # As a run does when its set-up is complete.
        await asyncio.sleep(0)  # The collection does not count as a callback.
        callbacks.count, callbacks.seconds = 0, 0.0
        began = usage()
      if step < _STEPS.value:
        batches.advance(step + 1, step + 1)
    spent = {name: value - began[name] for name, value in usage().items()}
    called = callbacks.count
  for sample in sorted(samples, key=lambda sample: sample.uid):
    for array in (sample.tokens, sample.behaviour_logprobs, sample.loss_mask):
      digest.update(array.tobytes())
  count = _STEPS.value * _SAMPLES.value
  spent['other threads'] = spent.pop('process') - spent['event loop']
  return {
    'other threads': {name: spent.pop(name) / count * 1e3 for name in _OTHERS},
    'threads': {name: seconds / count * 1e3 for name, seconds in spent.items()},
    'parts': {part: parts.seconds[part] / count * 1e3 for part in PARTS},
    'callbacks': called / count,
    'longest': [callbacks.seconds * 1e3, callbacks.name],
    'digest': digest.hexdigest()[:16],
  }


def collections_of_garbage() -> tuple[Callable[[], None], Callable[[], None]]:
  """Returns the functions by which a run of the tree controls garbage collections: one for the end
  of the set-up, and one for the end of each step.
  """
  try:
    from jaxrl_llm.core import garbage
  except ImportError:  # An earlier tree.
    return (lambda: (gc.collect(), gc.freeze())), (lambda: None)
  return garbage.freeze, garbage.collect_if_due


def usage() -> dict[str, float]:
  children = resource.getrusage(resource.RUSAGE_CHILDREN)
  return {
    'event loop': time.thread_time(),
    'process': time.process_time(),
    'child processes': children.ru_utime + children.ru_stime,
    **{name: thread_seconds(thread) for name, thread in _OTHERS.items()},
  }


def thread_seconds(name: str) -> float:
  """CPU seconds of the threads whose names begin with `name`."""
  idents = [thread.ident for thread in threading.enumerate() if thread.name.startswith(name)]
  return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


@contextlib.contextmanager
def servers(folder: pathlib.Path, explorers: str):
  sockets = [str(folder / f'{i}.sock') for i in range(_SERVERS.value)]
  options = [f'--tokens={_TOKENS.value}', f'--explorers={explorers}']
  command = [sys.executable, __file__, 'serve', *options]
  processes = [subprocess.Popen([*command, socket]) for socket in sockets]
  ready = (
    sockets if explorers in ('none', 'followed') else [f'{socket}.front' for socket in sockets]
  )
  try:
    while not all(pathlib.Path(file).exists() for file in ready):
      if any(process.poll() is not None for process in processes):
        raise SystemExit('a fake server ended at its start; see above')
      time.sleep(0.1)
    yield sockets
  finally:
    for process in processes:
      process.kill()
      process.wait()


def measured(tree: pathlib.Path, explorers: str) -> dict:
  """Measures a tree in a separate process."""
  with tempfile.TemporaryDirectory() as directory:
    folder = pathlib.Path(directory)
    names = ('samples', 'tokens', 'steps', 'group_size', 'stream', 'transcript_tokens')
    options = [f'--{name}={flags.FLAGS[name].value}' for name in names]
    options.append(f'--explorers={explorers}')
    with servers(folder, explorers) as sockets:
      done = subprocess.run(
        [sys.executable, __file__, 'measure', *options, directory, *sockets],
        env=os.environ | {'MASTER_TREE': str(tree), 'JAX_PLATFORMS': 'cpu'},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
      )
  (line,) = (line for line in done.stdout.splitlines() if line.startswith(_DONE))
  return json.loads(line.removeprefix(_DONE))


def table(sides: dict[str, dict]) -> None:
  print(f'| CPU ms per sample of {_TOKENS.value} tokens | {" | ".join(sides)} |')
  print(f'|---{"|---" * len(sides)}|')
  for kind in ('threads', 'other threads', 'parts'):
    for name in next(iter(sides.values()))[kind]:
      print(f'| {name} | {" | ".join(f"{side[kind][name]:.1f}" for side in sides.values())} |')
    if kind == 'threads':
      totals = [sum(side[kind].values()) for side in sides.values()]
      print(f'| all together | {" | ".join(f"{total:.1f}" for total in totals)} |')
  counts = [f'{side["callbacks"]:.1f}' for side in sides.values()]
  print(f'| callbacks of the event loop | {" | ".join(counts)} |')
  longest = [f'{side["longest"][0]:.0f}' for side in sides.values()]
  print(f'| longest callback | {" | ".join(longest)} |')
  for name, side in sides.items():
    threads = {'event loop': side['threads']['event loop'], **side['other threads']}
    total, busiest = sum(side['threads'].values()), max(threads, key=threads.get)
    rate = _TOKENS.value * 1e3 / max(threads[busiest], total / _CORES)
    print(
      f'{name}: longest callback {side["longest"][1]}; busiest thread: {busiest}; '
      f'computed for {_CORES} cores: {rate / 1e6:.2f} million tokens per second, '
      f'{rate / _HOSTS:,.0f} of each of {_HOSTS} hosts'
    )


def main(argv: list[str]) -> None:
  role, *arguments = argv[1:] or ['compare']
  if role == 'serve':
    asyncio.run(serve(*arguments))
  elif role == 'measure':
    folder, *sockets = arguments
    print(_DONE + json.dumps(asyncio.run(measure(sockets, pathlib.Path(folder)))))
  else:
    trees = {}
    for how in _EXPLORERS.value:
      suffix = '' if how == 'none' else f', explorers: {how}'
      if _BEFORE.value:
        trees[f'before{suffix}'] = pathlib.Path(_BEFORE.value), how
      trees[f'now{suffix}'] = _ROOT, how
    for _ in range(_ROUNDS.value):
      sides = {name: measured(tree.resolve(), how) for name, (tree, how) in trees.items()}
      table(sides)
      if len({side['digest'] for side in sides.values()}) > 1:
        raise SystemExit('the two sides have different samples')


if __name__ == '__main__':
  app.run(main)
