"""Program that counts the bytes that a trainer and its servers' workers read, write and digest for
each published version.

  counted_publish.py FOLDER

The trainer's side is a real fleet, which publishes files in `FOLDER` to four servers over HTTP:
first whole weights only, then whole weights and deltas. The servers are fake ones of two
tensor-parallel ranks each, and each rank runs the real worker extension on torch modules with the
attributes of vLLM's layers. Two of the servers prove what they have loaded by digests, as on CPUs,
and two by checksums, as on GPUs.

This is a program of its own because it replaces xxhash and safetensors' reader, by wrappers that
count and otherwise do the same, before anything else imports them. Every rank has its own copy of
the worker's module, and so its own counts. Prints one line of JSON for each version.
"""

import asyncio
import collections
import contextlib
import json
import pathlib
import sys
import types

import safetensors.numpy
import xxhash

OPEN, XXHASH = safetensors.safe_open, xxhash


class Counts:
  """Counts of one side: the trainer or a rank."""

  def __init__(self):
    self.clear()

  def clear(self):
    self.read = 0
    """Number of bytes of tensors that were read from files."""
    self.digested = 0
    """Number of bytes that were digested."""
    self.digests = []
    """The digests, in the order of their completion."""

  def take(self):
    """Returns the counts since the last call, as JSON."""
    taken = {
      'read': self.read,
      'digested': self.digested,
      'digests': dict(collections.Counter(self.digests)),
    }
    self.clear()
    return taken


@contextlib.contextmanager
def counting(counts):
  """Lets modules that are imported meanwhile use a counting xxhash and reader."""

  class Hasher:
    """As xxhash.xxh3_128."""

    def __init__(self):
      self._hasher = XXHASH.xxh3_128()

    def update(self, data):
      counts.digested += memoryview(data).nbytes
      self._hasher.update(data)

    def hexdigest(self):
      counts.digests.append(value := self._hasher.hexdigest())
      return value

  def hexdigest(data):
    hasher = Hasher()
    hasher.update(data)
    return hasher.hexdigest()

  class Part:
    """As a slice of safetensors' reader."""

    def __init__(self, part):
      self._part = part

    def __getitem__(self, index):
      tensor = self._part[index]
      counts.read += tensor.nbytes
      return tensor

  class Opened:
    """As safetensors' reader."""

    def __init__(self, *args, **options):
      self._opened = OPEN(*args, **options)

    def __enter__(self):
      self._opened.__enter__()
      return self

    def __exit__(self, *error):
      return self._opened.__exit__(*error)

    def keys(self):
      return self._opened.keys()

    def get_tensor(self, name):
      tensor = self._opened.get_tensor(name)
      counts.read += tensor.nbytes
      return tensor

    def get_slice(self, name):
      return Part(self._opened.get_slice(name))

  module = types.ModuleType('xxhash')
  module.__dict__.update(vars(XXHASH), xxh3_128=Hasher, xxh3_128_hexdigest=hexdigest)
  sys.modules['xxhash'], safetensors.safe_open = module, Opened
  try:
    yield
  finally:
    sys.modules['xxhash'], safetensors.safe_open = XXHASH, OPEN


TRAINER = Counts()
with counting(TRAINER):
  import fleets
  import numpy as np
  import serving
  import torch
  import vllm_layers
  from fake_vllm import FakeServer
  from fake_vllm.answers import to_json
  from fake_vllm.requests import read_json
  from fake_vllm.weights import Worker, WorkerError

  from jaxrl_llm.core.types import Version
  from jaxrl_llm.models.families import tiny
  from jaxrl_llm.rollout.api import Probe, Weights
  from jaxrl_llm.rollout.vllm.shares import delta_file
  from jaxrl_llm.weights.tables import entries

SERVERS, RANKS = 4, 2
VERSIONS = {1: 2, 3: 3}
"""Number of versions, keyed by the interval at which whole weights are published."""
SPEC = tiny(
  'qwen2',
  500,
  hidden_size=256,
  intermediate_size=512,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=64,
  tie_word_embeddings=True,
)


class RankWorker:
  """One worker of a server: the extension's commands, on the modules of a rank."""

  def __init__(self, number, *, device):
    self.counts, self._device = Counts(), device
    self.files = self.live = {}
    """Counts until the last proof of the loaded weights, and of this proof."""
    with counting(self.counts):
      module = vllm_layers.load_worker()
    self._model = vllm_layers.decoder(SPEC, vllm_layers.Rank(number, RANKS))
    self._views = lambda: module.hf_views(self._model)
    self._worker = module.Worker()
    self._worker.model_runner = types.SimpleNamespace(model=self._model)
    self._worker.vllm_config = types.SimpleNamespace(
      model_config=types.SimpleNamespace(logprobs_mode='processed_logprobs'),
      speculative_config=None,
    )
    self._receiver = module.Receiver()
    self._worker.weight_transfer_engine = types.SimpleNamespace(
      receiver=self._receiver, parse_update_info=self._parsed
    )

  @staticmethod
  def _parsed(info):
    empty = {'directory': '', 'files': {}, 'slices': {}, 'label': '', 'deltas': []}
    return types.SimpleNamespace(**{**empty, **info})

  def receive(self, info):
    self._receiver.receive(self._views(), self._parsed(info))

  def call(self, method, *args):
    if method in ('jaxrl_digests', 'jaxrl_checksums'):
      self.files = self.counts.take()
      answer = getattr(self._worker, method)(*args)
      self.live = {'method': method, **self.counts.take()}
      return answer
    answer = getattr(self._worker, method)(*args)
    return {**answer, 'device': self._device} if method == 'jaxrl_weights' else answer

  def parts(self):
    """Yields (name, index of this rank's part in the whole tensor, view of the part)."""
    for name, view in self._views().items():
      index = [slice(None)] * view.tensor.dim()
      if view.dim is not None:
        index[view.dim] = slice(view.start, view.start + view.tensor.shape[view.dim])
      yield name, tuple(index), view.tensor.numpy()


class RankWorkers(Worker):
  """All workers of a server."""

  def __init__(self, core, *, device):
    super().__init__(core)
    self.ranks = [RankWorker(number, device=device) for number in range(RANKS)]

  async def update(self, info):
    if not self._updating:
      raise WorkerError('start_weight_update must be called before update_weights.')
    try:
      await asyncio.gather(*(asyncio.to_thread(rank.receive, info) for rank in self.ranks))
    except ValueError as error:
      self._updating = False
      raise WorkerError(str(error)) from None
    tensors = {entry.hf: np.full(entry.shape, np.nan, np.float32) for entry in entries(SPEC)}
    for rank in self.ranks:
      for name, index, part in rank.parts():
        tensors[name][index] = part
    await self._core.load(tensors)

  async def call(self, method, *args):
    return await asyncio.gather(
      *(asyncio.to_thread(rank.call, method, *args) for rank in self.ranks)
    )


class Server(FakeServer):
  """A fake server whose weights are those of its tensor-parallel ranks."""

  def __init__(self, number):
    policy = fleets.Marked(number, SPEC)
    super().__init__(policy, max_model_len=serving.LENGTH, vocab_size=SPEC.vocab_size)
    self._worker = RankWorkers(self._core, device='cpu' if number % 2 == 0 else 'cuda')

  async def _rpc(self, request):
    body = await read_json(request)
    return to_json({'results': await self._worker.call(body['method'], *body.get('args', ()))})

  @property
  def ranks(self):
    return self._worker.ranks


def tensors_of(step):
  """Returns the tensors of a version. One element in 50 differs from the version before, and
  the last of each tensor, too.
  """
  tensors = dict(fleets.tensors(0, SPEC))
  for number in range(1, step + 1):
    random = np.random.default_rng(number)
    for name, tensor in tensors.items():
      tensors[name] = np.where(random.random(tensor.shape) < 0.02, -tensor, tensor)
      tensors[name].flat[-1] += 1
  return tensors


def weights_of(tensors, version):
  sequences = np.random.default_rng(0).integers(0, SPEC.vocab_size, (2, 6), np.int32)
  logprobs = [[0.0, *fleets.score(sequence, tensors)] for sequence in sequences]
  return Weights(
    version=version,
    leaves=[(entry.unrolled, tensors[entry.hf]) for entry in entries(SPEC)],
    probe=Probe(sequences=sequences, logprobs=np.array(logprobs, np.float32)),
  )


def digest(array):
  return XXHASH.xxh3_128_hexdigest(np.ascontiguousarray(array).tobytes())


def written_bytes():
  """Returns the number of bytes that this process has passed to write calls."""
  lines = pathlib.Path('/proc/self/io').read_text().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith('wchar'))


def report(publication, tensors, servers, written):
  """Returns the counts of a version, and the size in bytes of each part of it, keyed by the digest
  that the part should have: computed here, from the tensors and the delta's file.
  """
  directory, changes = publication.directory, {}
  if publication.deltas:
    directory = publication.deltas[-1].directory
    changes = safetensors.numpy.load((directory / delta_file(0)).read_bytes())
  slices, ranks = [], []
  for rank in [rank for server in servers for rank in server.ranks]:
    parts = [(name, tensors[name][index]) for name, index, _ in rank.parts()]
    slices += [part for name, part in parts if part.shape != tensors[name].shape]
    held = sizes(part for _, part in parts)
    ranks.append({'holds': held, 'files': rank.files, 'live': rank.live})
  return {
    'is_delta': bool(publication.deltas),
    'nbytes': publication.nbytes,
    'tensors': sizes(tensors.values()),
    'slices': sizes(slices),
    'changes': sizes(changes.values()),
    'file_size': sum(path.stat().st_size for path in directory.glob('*.safetensors')),
    'written': written,
    'trainer': TRAINER.take(),
    'ranks': ranks,
  }


def sizes(arrays):
  return {digest(array): array.nbytes for array in arrays}


async def publish(folder, full_every):
  """Publishes versions, and prints the report of each."""
  folder.mkdir()
  servers = [Server(number) for number in range(SERVERS)]
  addresses = [
    await server.start(uds=str(folder / f'{n}.sock')) for n, server in enumerate(servers)
  ]
  model = types.SimpleNamespace(spec=SPEC)
  try:
    async with serving.attached(model, addresses, folder, full_every=full_every) as fleet:
      for step in range(VERSIONS[full_every]):
        tensors = tensors_of(step)
        weights = weights_of(tensors, Version(0, step))
        TRAINER.clear()
        before = written_bytes()
        await fleet.load(weights)
        written = written_bytes() - before
        assert all(server.label.startswith(f'0.{step}-') for server in servers)
        print(json.dumps(report(fleet._updates.current.publication, tensors, servers, written)))
  finally:
    for server in servers:
      await server.close()


async def main(folder):
  for full_every in VERSIONS:
    await publish(folder / f'{full_every}', full_every)


if __name__ == '__main__':
  torch.set_num_threads(1)
  asyncio.run(main(pathlib.Path(sys.argv[1])))
