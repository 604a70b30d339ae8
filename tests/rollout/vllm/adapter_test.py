"""Adapters on their way to servers: what they stand on is sent once, each version is named, looked
at and proven.

The server here knows vLLM's routes and no model; that real ones answer so is shown in
tests/jobs/vllm_test.py.
"""

import asyncio
import contextlib

import jax
import numpy as np
import pytest
from aiohttp import web
from clocks import simulated
from safetensors.numpy import load_file

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Lost, Refused
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import LoraConfig, ModelOptions
from jaxrl_llm.rollout.api import Probe, Request
from jaxrl_llm.rollout.vllm.adapter_folder import AdapterFolder
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.publication import read_checked
from jaxrl_llm.rollout.vllm.replica import Replica, Unproven
from jaxrl_llm.rollout.vllm.server import lora_rank
from jaxrl_llm.weights.checksums import checksums
from jaxrl_llm.weights.peft import WEIGHTS, export_adapter
from jaxrl_llm.weights.tables import entries

LORA = LoraConfig(rank=2, alpha=4, targets=('query', 'down'))
SPEC = tiny('llama', 20, num_hidden_layers=1, hidden_size=8, intermediate_size=12, head_dim=4)
OPTIONS = ModelOptions(lora=LORA)
A, B, C = (Version(0, step) for step in range(3))
SEQUENCE = np.arange(5, dtype=np.int32)[None]


@pytest.fixture(scope='module')
def params():
  return jax.device_get(build_model(SPEC, OPTIONS).init(jax.random.key(0)))


@pytest.fixture
def folder(tmp_path):
  return AdapterFolder(tmp_path / 'published', SPEC, lora=LORA, dtype='float32')


def leaves(params, step, *, base):
  """Of a version, whose B is its step; all arrays, or the adapters' alone."""
  trained, frozen = lora.split(params, SPEC, OPTIONS)
  trained = {
    name: x + step if name.endswith('lora_b') else x for name, x in flatten(trained).items()
  }
  return sorted((flatten(frozen) | trained).items() if base else trained.items())


def probe(step):
  """What the server makes of any tokens when it holds that step's adapter."""
  return Probe(
    sequences=SEQUENCE, logprobs=np.where(np.arange(5) > 0, -np.float32(1 + step), 0)[None]
  )


def test_arrays_of_adapters_may_come_in_parts(folder, params, tmp_path):
  def parts(step, *, base):
    for name, leaf in leaves(params, step, base=base):
      yield from ((name, leaf[at : at + 3]) for at in range(0, len(leaf), 3))

  other = AdapterFolder(tmp_path / 'other', SPEC, lora=LORA, dtype='float32')
  for version in (A, B):
    base = version is A
    whole = other.write(version, leaves(params, version.step, base=base))
    assert folder.write(version, parts(version.step, base=base)).files == whole.files


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (lambda name, leaf: [], 'the adapters lack'),
    (lambda name, leaf: [(name, leaf), (name, leaf[:1])], 'has shape'),
    (lambda name, leaf: [(name, leaf[:, :-1])], 'has shape'),
    (lambda name, leaf: [(f'{name}_2', leaf)], 'is not among the parameters'),
  ],
)
def test_an_adapter_of_other_parameters_leaves_no_file(params, tmp_path, change, words):
  first, *rest = leaves(params, 0, base=False)
  with pytest.raises(UserError, match=words):
    export_adapter(tmp_path, [*rest, *change(*first)], SPEC, LORA, base=None)
  assert [path.name for path in tmp_path.iterdir()] == ['adapter_config.json']


@pytest.mark.full
def test_a_base_is_published_once_and_stays_while_an_adapter_stands_on_it(folder, params):
  first = folder.write(A, leaves(params, 0, base=True))
  later = [folder.write(version, leaves(params, version.step, base=False)) for version in (B, C)]
  assert [p.adapter for p in (first, *later)] == ['policy-0-0', 'policy-0-1', 'policy-0-2']
  assert first.base is later[0].base is later[1].base and first.base.adapter is None
  assert set(first.base.digests) == {entry.hf for entry in entries(SPEC)}
  assert len({p.label for p in (first, *later)}) == 3
  folder.keep_only(later[1], later[0])
  assert not first.directory.exists()
  for publication in later:
    arrays = read_checked(publication.files, publication.directory)
    name = 'base_model.model.model.layers.0.mlp.down_proj.lora_B.weight'
    np.testing.assert_array_equal(
      arrays[name], np.full_like(arrays[name], publication.version.step)
    )
    assert (
      sum(array.nbytes for array in arrays.values()) == publication.nbytes < first.base.nbytes / 2
    )
  read_checked(first.base.files, first.base.directory)
  with pytest.raises(UserError, match='not a parameter of an adapter'):
    folder.write(Version(0, 3), leaves(params, 3, base=True))


class Server:
  """vLLM's routes. What it makes of tokens is -(1 + step), by the B of the adapter that is
  asked.
  """

  def __init__(self):
    self.log, self.adapters, self.held, self.refuse, self.step_off = [], {}, {}, None, 0
    self.going_on = asyncio.Event()
    self.going_on.set()

  @contextlib.asynccontextmanager
  async def standing(self, tmp_path):
    application = web.Application()
    application.router.add_route('*', '/{path:.*}', self._answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / 's')).start()
    client = VllmClient(f'unix:{tmp_path / "s"}', name='stub')
    replica = Replica('stub', client=client, server=None)
    replica.slices = [{entry.hf: {'slice': None} for entry in entries(SPEC)}]
    try:
      yield replica
    finally:
      await client.close()
      await runner.cleanup()

  async def _answer(self, request):
    body = await request.json() if request.can_read_body else {}
    path = request.path.rpartition('/')[2]
    if path == 'update_weights':
      return self._update(**body['update_info'])
    if path in ('load_lora_adapter', 'unload_lora_adapter'):
      return self._adapter(path, **body)
    if path == 'generate':
      return await self._generate(**body)
    found = {
      'pause': {'status': 'paused'},
      'resume': {'status': 'resumed'},
      'reset_prefix_cache': {'success': True},
    }
    if path in ('pause', 'resume'):
      self.log.append(path)
    if path == 'collective_rpc':
      self.log.append('digests')
      return web.json_response({'results': [self.held]})
    return web.json_response(found.get(path, {}))

  def _update(self, directory, files, adapter=None):
    try:
      arrays = read_checked(files, directory)
    except ValueError as error:
      return web.json_response({'error': {'message': str(error)}}, status=500)
    self.log.append(f'look at {adapter}' if adapter else 'base')
    if not adapter:
      self.held = {name: checksums(array)[None] for name, array in arrays.items()}
    return web.json_response({})

  def _adapter(self, path, lora_name, lora_path=None, load_inplace=None):
    self.log.append(f'{path.partition("_")[0]} {lora_name}')
    if path.startswith('un'):
      del self.adapters[lora_name]
      return web.Response(text=f"Success: LoRA adapter '{lora_name}' removed successfully.")
    if self.refuse:
      return web.json_response({'error': {'message': self.refuse}}, status=400)
    assert load_inplace is True
    arrays = load_file(f'{lora_path}/{WEIGHTS}')
    self.adapters[lora_name] = float(
      next(x for name, x in arrays.items() if 'lora_B' in name).flat[0]
    )
    return web.Response(text=f"Success: LoRA adapter '{lora_name}' added successfully.")

  async def _generate(self, token_ids, sampling_params, model='policy', request_id=None):
    if model not in self.adapters:
      return web.json_response(
        {'error': {'message': f'The model `{model}` does not exist.'}}, status=404
      )
    logprob = -(1 + self.adapters[model] + self.step_off)
    await self.going_on.wait()
    if 'prompt_logprobs' in sampling_params:
      rows = [None, *({str(token): {'logprob': logprob}} for token in token_ids[1:])]
      return web.json_response({'prompt_logprobs': rows, 'choices': []})
    tokens = [3] * sampling_params['max_tokens']
    choice = {
      'token_ids': tokens,
      'logprobs': {'content': [{'token_id': 3, 'logprob': logprob}] * len(tokens)},
      'finish_reason': 'length',
      # The label that the server was given last, whoever draws.
      'weight_versions': [{'version': 'the newest', 'start': 0, 'end': len(tokens)}],
    }
    return web.json_response({'choices': [choice]})


REQUEST = Request(uid='r', prompt=(1, 2), max_tokens=4, key=(1,))


async def take(replica, publication, step=None):
  step = publication.version.step if step is None else step
  await replica.take(publication, probe(step), tolerance=1e-6, deadline_s=10)


async def drawn(replica):
  completion = await replica.client.generate(REQUEST, 0, seed=0, deadline_s=10)
  (segment,) = completion.segments
  return segment.version, float(completion.logprobs[0])


def published(folder, params):
  return [
    folder.write(version, leaves(params, version.step, base=version == A)) for version in (A, B, C)
  ]


def test_a_server_gets_the_base_once_and_each_adapter_under_its_name(folder, params, tmp_path):
  async def main():
    server, (a, b, c) = Server(), published(folder, params)
    async with server.standing(tmp_path) as replica:
      await take(replica, a)
      assert server.log == [
        'pause',
        'base',
        'look at policy-0-0',
        'load policy-0-0',
        'digests',
        'resume',
      ]
      assert await drawn(replica) == (A, -1.0)
      server.log.clear()
      server.going_on.clear()
      early = asyncio.create_task(drawn(replica))
      await asyncio.sleep(0.05)
      taking = asyncio.create_task(take(replica, b))
      await asyncio.sleep(0.05)
      server.going_on.set()
      await taking
      assert server.log == ['pause', 'look at policy-0-1', 'load policy-0-1', 'resume']
      # What was asked of the adapter before ends under it, and is called so.
      assert await early == (A, -1.0) and await drawn(replica) == (B, -2.0)
      await take(replica, c)
      assert server.log[-2:] == ['unload policy-0-0', 'resume'] and set(server.adapters) == {
        'policy-0-1',
        'policy-0-2',
      }
      # Another process behind the address holds neither.
      server.adapters.clear()
      with pytest.raises(Lost, match='does not exist'):
        await drawn(replica)
      replica.forget()
      server.log.clear()
      await take(replica, c)
      assert 'base' in server.log and await drawn(replica) == (C, -3.0)

  simulated(main())


def test_an_adapter_that_is_not_what_was_announced_leaves_the_one_before(folder, params, tmp_path):
  async def main():
    server, (a, b, c) = Server(), published(folder, params)
    async with server.standing(tmp_path) as replica:
      await take(replica, a)
      file = b.directory / WEIGHTS
      data = file.read_bytes()
      file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
      server.log.clear()
      with pytest.raises(Refused, match='as read, announced was'):
        await take(replica, b)
      assert server.log == ['pause', 'resume'] and await drawn(replica) == (A, -1.0)
      server.refuse = 'LoRA rank 2 is greater than max_lora_rank 1'
      with pytest.raises(Refused, match='max_lora_rank'):
        await take(replica, c)
      assert await drawn(replica) == (A, -1.0) and replica.version == A
      server.refuse, server.step_off = None, 1
      with pytest.raises(Unproven, match='probe'):
        await take(replica, c)
      assert replica.version is None and replica.client.adapter is None

  asyncio.run(main())


def test_a_loaded_base_is_digested(folder, params, tmp_path):
  async def main():
    server, (a, *_) = Server(), published(folder, params)
    async with server.standing(tmp_path) as replica:
      update = server._update
      server._update = lambda **info: (
        update(**info),
        server.held.update({'model.norm.weight': 'x'}),
      )[0]
      with pytest.raises(Unproven, match=r'model\.norm\.weight'):
        await take(replica, a)

  asyncio.run(main())


def test_ranks_are_rounded_up_to_those_of_vllm():
  assert [lora_rank(rank) for rank in (1, 2, 8, 9, 300, 512)] == [1, 8, 8, 16, 320, 512]
  with pytest.raises(UserError, match='rank 512 at most'):
    lora_rank(513)


def test_a_whole_publication_is_sent_and_digested_each_time_and_what_adapters_stand_on_once(
  folder, params, tmp_path
):
  """What a server was seen to hold says nothing of what it holds: equal weights, published again,
  are looked at.
  """

  async def main():
    server, (a, *_) = Server(), published(folder, params)
    whole = a.base
    async with server.standing(tmp_path) as replica:
      for _ in range(2):
        server.log.clear()
        await replica.take(whole, None, tolerance=1e-6, deadline_s=10)
        assert server.log == ['pause', 'base', 'digests', 'resume']
      # It says that it has read, and writes nothing.
      server._update = lambda **info: web.json_response({})
      server.held = server.held | {'model.norm.weight': 'x'}
      with pytest.raises(Unproven, match=r'model\.norm\.weight'):
        await replica.take(whole, None, tolerance=1e-6, deadline_s=10)

  asyncio.run(main())
