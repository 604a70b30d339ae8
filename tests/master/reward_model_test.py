"""A reward model as a service: what it says of many sequences at once is what the model says of
each alone.
"""

import asyncio
import itertools
import json
import threading
import types

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.app.serve.reward import MAX_STEPS, ROUTES, application, load, step_ends
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.listener import listening
from jaxrl_llm.learner.state import place_params
from jaxrl_llm.master.reward_model import Batcher, RewardModel, RewardRole
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.tasks.tokenizer import build_character_tokenizer
from jaxrl_llm.weights.hf import export

SPEC = with_head(tiny('llama', 32, tie_word_embeddings=True), 'scalar')
LENGTHS = (1, 7, 24, 3, 23, 7, 1, 3, 7, 24)
"""Each several times: the model alone is compiled for each."""
SEQUENCES = [
  [int(t) for t in np.random.default_rng(i).integers(1, 32, n)] for i, n in enumerate(LENGTHS)
]


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(
    np.asarray, jax.jit(build_model(SPEC, ModelOptions()).init)(jax.random.key(1))
  )


@pytest.fixture(scope='module')
def alone(params):
  """Of each sequence by itself, unpadded."""
  model, found = build_model(SPEC, ModelOptions()), []

  @jax.jit
  def hidden_of(params, tokens):
    return model.apply(params, tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))

  for sequence in SEQUENCES:
    hidden = hidden_of(params, jnp.array([sequence], jnp.int32))
    found.append(
      float(np.asarray(hidden)[0, -1].astype(np.float64) @ np.asarray(params['head']['kernel'])[0])
    )
  return found


def on_mesh(params, sequences=16, **mesh):
  built = build_mesh(MeshConfig(**mesh))
  model = build_model(SPEC, ModelOptions(), built)
  return RewardModel(
    model, place_params(model, built, params), built, max_length=24, sequences=sequences
  )


@pytest.mark.parametrize('mesh', [dict(fsdp=8), dict(data=2, fsdp=2, tensor=2)])
def test_packed_on_a_mesh_each_sequence_gets_what_it_gets_alone(params, alone, mesh):
  model = on_mesh(params, **mesh)
  np.testing.assert_allclose(model(SEQUENCES), alone, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(model(SEQUENCES[3:4]), alone[3:4], rtol=1e-5, atol=1e-6)


def test_callers_that_come_together_share_passes_and_one_that_leaves_disturbs_nobody(params, alone):
  async def check():
    device = DeviceThread()
    batcher = Batcher(on_mesh(params, sequences=4), device)
    asked = [asyncio.create_task(batcher.score(sequence)) for sequence in SEQUENCES]
    await asyncio.sleep(0)
    asked[1].cancel()
    running = asyncio.create_task(batcher.run())
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(found[1], asyncio.CancelledError) and batcher.passes == 3
    np.testing.assert_allclose(
      [f for i, f in enumerate(found) if i != 1], [*alone[:1], *alone[2:]], rtol=1e-5, atol=1e-6
    )
    with pytest.raises(
      UserError, match='25 tokens with the prompt, the reward model accepts at most 24'
    ):
      await batcher.score([1] * 25)
    running.cancel()
    device.close()

  asyncio.run(check())


def test_the_trainers_role_cuts_passes_and_leaves_out_what_is_too_long(params, alone):
  role = RewardRole(on_mesh(params, sequences=4, fsdp=8), None)
  asked = [*SEQUENCES[:5], [], *SEQUENCES[5:]]
  found = role.score(params, asked)
  assert found.pop(5) is None
  np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-6)
  assert role.score(params, [[], []]) == [None, None]


def test_a_completion_that_the_reward_model_cannot_read_costs_its_own_score_alone(params, tmp_path):
  tokenizer = build_character_tokenizer(['abc>'], tmp_path / 'tokenizer', template='plain')
  role = RewardRole(on_mesh(params, sequences=4, fsdp=8), tokenizer)

  def member(uid, completion):
    task = types.SimpleNamespace(prompt=({'role': 'user', 'content': 'a>'},))
    sample = types.SimpleNamespace(uid=uid)
    return types.SimpleNamespace(sample=sample, task=task, completion=completion)

  members = [member('read', 'abc'), member('foreign', 'aé'), member('long', 'a' * 99)]
  rendered = role.render(members)
  scores = role.score(params, [tokens for tokens, _ in rendered])
  verdicts = role.verdicts(members, rendered, scores)
  assert verdicts['read'].value is not None and verdicts['read'].evidence['tokens'] > 5
  assert [verdicts[uid].value for uid in ('foreign', 'long')] == [None, None]
  assert 'é' in verdicts['foreign'].evidence['error']
  assert 'reward_model.max_length' in verdicts['long'].evidence['error']


class Slow(RewardModel):
  """Says each sequence's length, once it may."""

  max_length, sequences = 24, 2

  def __init__(self):
    self.called, self.go = threading.Event(), threading.Event()

  def __call__(self, sequences):
    self.called.set()
    assert sequences and self.go.wait(30)
    return [float(len(sequence)) for sequence in sequences]


def test_callers_that_leave_in_the_middle_of_a_pass_or_all_of_them_disturb_nobody():
  async def check():
    device, model = DeviceThread(), Slow()
    batcher = Batcher(model, device)
    running = asyncio.create_task(batcher.run())
    leaves, stays = (asyncio.create_task(batcher.score([1] * length)) for length in (3, 5))
    await asyncio.to_thread(model.called.wait, 30)
    others = [asyncio.create_task(batcher.score([1])) for _ in range(2)]
    await asyncio.sleep(0)
    for one in (leaves, *others):
      one.cancel()
    model.go.set()
    async with asyncio.timeout(30):
      assert (await stays, await batcher.score([1] * 7)) == (5.0, 7.0)
    assert batcher.passes == 2
    running.cancel()
    device.close()

  asyncio.run(check())


def steps_of(body) -> dict | str:
  """What a service says of a request whose model gives each sequence its length."""

  async def check():
    device, model = DeviceThread(), Slow()
    model.go.set()
    batcher, tokenizer = Batcher(model, device), Characters()
    running = asyncio.create_task(batcher.run())
    served = application(batcher, tokenizer, max_length=model.max_length, step_separator='; ')
    async with listening(served, name='test', front=None, routes=ROUTES) as (address, _):
      connector = aiohttp.UnixConnector(address.removeprefix('unix:'))
      async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post('http://service/score', json=body) as response,
      ):
        said = await (response.json() if response.status == 200 else response.text())
    running.cancel()
    device.close()
    return said

  return asyncio.run(check())


class Characters:
  """Renders each message as its characters, and the answer with a stop token."""

  def render_answer(self, messages, answer):
    return [1] * sum(len(message['content']) for message in messages), [1] * (len(answer) + 1)


def test_each_step_of_a_completion_has_the_score_of_the_answer_up_to_its_end():
  said = steps_of({'prompt': 'abc', 'completion': 'one; two;  ; x'})
  # 3 characters of the prompt, the answer up to the step's end, and the stop token.
  assert said['step_values'] == [3 + 5 + 1, 3 + 13 + 1, 3 + 14 + 1]
  assert (said['value'], said['evidence']) == (18.0, {'tokens': 18})
  assert steps_of({'prompt': 'abc', 'completion': ''})['step_values'] == [4]
  assert steps_of({'prompt': 'abc', 'completion': '; ; a'})['step_values'] == [9]


def test_the_steps_of_a_conversation_are_the_policys_turns():
  talk = [('user', 'ab'), ('assistant', 'c'), ('tool', 'def'), ('assistant', 'gh')]
  transcript = [{'role': role, 'content': content} for role, content in talk]
  body = {'prompt': transcript[:1], 'completion': 'gh', 'transcript': transcript}
  assert steps_of(body)['step_values'] == [2 + 1 + 1, 2 + 1 + 3 + 2 + 1]
  assert 'does not begin with the prompt' in steps_of(body | {'prompt': 'other'})
  assert '0 turns of the assistant' in steps_of(body | {'transcript': transcript[:1]})
  assert 'wanted JSON with prompt' in steps_of(body | {'transcript': [3]})
  assert 'accepts at most 24' in steps_of({'prompt': 'a', 'completion': 'b; ' * 20})


def test_steps_by_hand():
  assert step_ends('a\n\nb\n\n', '\n\n') == [3, 6]
  assert step_ends('a b', '\n\n') == [3] and step_ends('', '\n\n') == [0]
  many = step_ends('x;' * 1000, ';')
  assert len(many) == MAX_STEPS and many[:3] == [2, 4, 6] and many[-1] == 2000


def test_other_models_than_reward_models_are_refused(params):
  spec = tiny('llama', 32, tie_word_embeddings=True)
  with pytest.raises(UserError, match="has head 'lm'"):
    RewardModel(build_model(spec), {}, build_mesh(MeshConfig()), max_length=8)


@pytest.fixture(scope='module')
def exported(params, tmp_path_factory):
  directory = tmp_path_factory.mktemp('reward')
  tokenizer = build_character_tokenizer(
    ['abcdefghijklmnopqrstuvwxyz>. '], directory / 'tokenizer', template='plain'
  )
  assert tokenizer.vocab_size <= 32
  how = dict(
    tokenizer_dir=directory / 'tokenizer', eos_ids=tokenizer.stop_ids, pad_id=tokenizer.pad_id
  )
  export(directory / 'hf', params, SPEC, **how)
  return directory / 'hf'


def test_over_http_prompt_and_answer_are_rendered_as_for_training_and_scored(exported, params):
  async def check():
    model, tokenizer = load(str(exported), dtype='float32', max_length=40, sequences=8, tensor=2)
    device = DeviceThread()
    batcher = Batcher(model, device)
    running = asyncio.create_task(batcher.run())
    served = application(batcher, tokenizer, max_length=model.max_length)
    async with listening(served, name='test', front=None, routes=ROUTES) as (address, _):
      connector = aiohttp.UnixConnector(address.removeprefix('unix:'))
      async with aiohttp.ClientSession(connector=connector) as session:

        async def post(body):
          async with session.post('http://service/score', data=body) as response:
            return response.status, await response.text()

        prompt = [{'role': 'user', 'content': 'spell it>'}]
        asked = [
          json.dumps({'prompt': p, 'completion': c})
          for p in (prompt, 'spell it>')
          for c in ('ti', 'it')
        ]
        answers = [json.loads(text)['value'] for _, text in await asyncio.gather(*map(post, asked))]
        rendered = [
          [*itertools.chain(*tokenizer.render_answer(prompt, text))] for text in ('ti', 'it')
        ]
        np.testing.assert_allclose(answers, [*model(rendered)] * 2, rtol=1e-6)
        assert answers[0] != answers[1]
        assert 'step_values' not in json.loads((await post(asked[0]))[1])
        for body, told in (
          (b'{', 'wanted JSON with prompt'),
          (b'[]', 'wanted JSON with prompt'),
          (b'[' * 100_000, 'wanted JSON with prompt'),
          (b'{"prompt": "a", "completion": "\\ud800"}', 'text that UTF-8 cannot encode'),
          (b'{"prompt": "a", "completion": 3}', 'completion that is not text'),
          (b'{"prompt": [], "completion": "a"}', 'empty prompt'),
          (
            json.dumps({'prompt': 'a', 'completion': 'b' * 60}).encode(),
            'the reward model accepts at most 40',
          ),
          # Not even tokenized.
          (
            json.dumps({'prompt': 'a', 'completion': 'b' * 10_240}).encode(),
            '10241 characters exceed the 40',
          ),
        ):
          status, text = await post(body)
          assert status == 400 and told in text and '\n' not in text, text
    running.cancel()
    device.close()

  asyncio.run(check())
