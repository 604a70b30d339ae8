"""Equality with TRL's SFTTrainer, live: the same rows and weights give the same tokens, the same
losses, step for step, and the same weights.

tests/peers/trl_sft.py runs TRL in an environment of its own. The run of docs/start/chat_sft.py is
compared as it is, in float32, TRL taking the rows of its batches in their order; all forms of rows
are compared in float64, on the loader and the update alone.
"""

import json
import os
import subprocess

import jax
import numpy as np
import pytest
from job import chat_sft_run, plans
from job import rows as metrics_of
from paths import PEERS_PYTHON, ROOT
from safetensors.numpy import load_file

from jaxrl_llm.api import Config
from jaxrl_llm.batching.plan import StepPlan, plan_shape
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.data.load import RowLoader
from jaxrl_llm.data.streams import all_rows
from jaxrl_llm.learner.algorithm import Setting
from jaxrl_llm.learner.optimizer import OptimizerConfig, build_optimizer
from jaxrl_llm.learner.state import init_state, place_params
from jaxrl_llm.learner.supervised import SftConfig, sft
from jaxrl_llm.learner.update import build_update
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.replay.segments import write_segment
from jaxrl_llm.tasks.example_tokens import example_samples
from jaxrl_llm.tasks.examples import ExamplesConfig, load_examples
from jaxrl_llm.tasks.tokenizer import Tokenizer
from jaxrl_llm.weights.hf import read_spec
from jaxrl_llm.weights.layout import to_hf
from jaxrl_llm.weights.safetensors_files import load_params

pytestmark = pytest.mark.full
STEPS, BATCH, LONGEST = 20, 4, 256
ADAM = OptimizerConfig(peak_lr=2e-3, weight_decay=0.1, max_grad_norm=1e9, skip_grad_norm=1e9)
"""Without clipping, because torch adds 1e-6 to the norm by which it divides."""


def arguments(adam, **further):
  """SFTConfig's, of an OptimizerConfig."""
  return {
    'learning_rate': adam.peak_lr,
    'lr_scheduler_type': adam.schedule,
    'warmup_steps': adam.warmup_steps,
    'adam_beta1': adam.b1,
    'adam_beta2': adam.b2,
    'adam_epsilon': adam.eps,
    'weight_decay': adam.weight_decay,
    'max_grad_norm': adam.max_grad_norm,
    'optim': 'adamw_torch',
    **further,
  }


def messages_of(folder):
  lines = (folder / 'chat.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def form(chat, name):
  """A conversation as a row of some form; of a text, the words of its messages."""
  messages = chat['messages']
  texts = [message['content'] or 'none' for message in messages]
  match name:
    case 'messages' | 'all tokens':
      return {'messages': messages, 'tools': json.dumps(chat.get('tools'))}
    case 'conversational completion':
      return {'prompt': messages[:-1], 'completion': messages[-1:]}
    case 'text completion':
      return {'prompt': ' '.join(texts[:-1]), 'completion': f' {texts[-1]}'}
  return {'text': ' '.join(texts)}


FORMS = {
  'messages': ({}, {'assistant_only_loss': True}),
  'conversational completion': ({}, {}),
  'text completion': ({}, {}),
  'text': ({}, {}),
  'all tokens': ({'loss_on': 'all'}, {}),
}
"""Our fields and TRL's arguments that mean the same, by form."""


def rows_of(folder, name):
  return [form(chat, name) for chat in messages_of(folder)[2 : 2 + 8 * 3 : 3]]


def cases(found):
  """What TRL is to train: the run that is in `found`, and each form of rows."""
  model, chats = str(found / 'checkpoint'), messages_of(found)
  (stage,) = from_json(json.loads((found / 'run' / 'config.json').read_text()), Config).stages
  batch = stage.source.sequences_per_batch
  order = [row['uid'] for plan in plans(found / 'run', 'sft') for row in plan['rows']]
  numbers = [int(uid.split(':')[1]) for uid in order[: STEPS * batch]]
  made = {
    'run': {
      'model': model,
      'dtype': 'float32',
      'rows': [form(chats[i], 'messages') for i in numbers],
      'batch': batch,
      'steps': STEPS,
      'arguments': arguments(
        stage.optimizer, max_steps=stage.steps, max_length=512, assistant_only_loss=True
      ),
    }
  }
  for name, (_, theirs) in FORMS.items():
    made[name] = {
      'model': model,
      'dtype': 'float64',
      'rows': rows_of(found, name),
      'batch': BATCH,
      'steps': STEPS,
      'arguments': arguments(ADAM, max_steps=STEPS, max_length=LONGEST, **theirs),
    }
  return made


@pytest.fixture(scope='module')
def trl(tmp_path_factory):
  if not PEERS_PYTHON.exists():
    pytest.skip('.venv-peers is missing: launch/install_peers.sh makes it')
  made, folder = cases(chat_sft_run()), tmp_path_factory.mktemp('trl')
  (folder / 'cases.json').write_text(json.dumps(made))
  command = [PEERS_PYTHON, ROOT / 'tests/peers/trl_sft.py', folder / 'cases.json', folder]
  # A model this small is computed faster by one thread, and other tests run beside it.
  environ = os.environ | {'OMP_NUM_THREADS': '1'}
  process = subprocess.run(
    command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600
  )
  assert process.returncode == 0, process.stderr[-3000:]
  return {name: dict(np.load(folder / f'{name}.npz')) for name in made}


def test_a_run_has_the_losses_of_the_same_run_in_trl(trl):
  theirs, ours = trl['run'], metrics_of(chat_sft_run() / 'run')[:STEPS]
  losses = np.array([row['actor/sft_loss'] for row in ours])
  np.testing.assert_allclose(losses[0], theirs['losses'][0], rtol=1e-6)
  np.testing.assert_allclose(losses, theirs['losses'], rtol=1e-4)
  assert losses[-1] < 0.8 * losses[0], 'it learns, so that the updates were compared too'


class Training:
  """Our update in float64 on the checkpoint; one program for all forms."""

  def __init__(self, folder):
    self.mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    self.spec = read_spec(folder / 'checkpoint')
    self.model = build_model(self.spec, ModelOptions(dtype='float64'))
    self.optimizer = build_optimizer(ADAM, STEPS)
    self.shape = plan_shape(rows=BATCH, ranks=1, chunks=2, chunk_len=LONGEST)
    host = load_params(folder / 'checkpoint', self.spec, dtype='float32')
    self.host = jax.tree.map(lambda x: np.asarray(x, np.float64), host)
    self.update = None

  def begin(self):
    return init_state(place_params(self.model, self.mesh, self.host), self.optimizer, self.mesh)

  def run(self, workdir, samples):
    """The losses of STEPS steps over the samples in their order, and the weights after them."""
    write_segment(workdir, 'rows.arrayrecord', [encode(sample) for sample in samples])
    rows, loader = all_rows(workdir, 'rows.arrayrecord'), RowLoader(workdir, self.mesh)
    algorithm, state, losses = sft(SftConfig(), Setting(max_response_length=1)), self.begin(), []
    self.update = self.update or build_update(
      self.model,
      algorithm.loss,
      self.optimizer,
      ADAM,
      self.mesh,
      state,
      updates=STEPS,
      token_chunk=LONGEST,
    )
    for step in range(STEPS):
      first = step * BATCH % len(rows)
      plan = StepPlan(
        step=step,
        stage='sft',
        rows=rows[first : first + BATCH],
        optimizer_steps=(tuple(range(BATCH)),),
      )
      packed = next(loader.steps(plan, self.shape))
      state, report = self.update(state, packed.chunks, packed.used, {})
      loss = report.stats['actor/sft_loss']
      losses.append(float(loss.total) / float(loss.count))
    return losses, dict(to_hf(jax.device_get(state.params), self.spec))


@pytest.fixture(scope='module')
def training():
  with jax.enable_x64(True):
    return Training(chat_sft_run())


@pytest.mark.parametrize('name', FORMS)
def test_each_form_of_rows_gives_trls_tokens_losses_and_weights(trl, training, tmp_path, name):
  fields, _ = FORMS[name]
  folder, theirs = chat_sft_run(), trl[name]
  file = tmp_path / 'rows.jsonl'
  file.write_text('\n'.join(json.dumps(row) for row in rows_of(folder, name)))
  examples = load_examples(ExamplesConfig(name='rows', source=str(file), **fields))
  tokenizer = Tokenizer.from_directory(folder / 'checkpoint')
  samples, _ = example_samples(examples, tokenizer, LONGEST)
  found = [[sample.tokens.tolist(), sample.loss_mask.tolist()] for sample in samples]
  assert found == json.loads(str(theirs['trained_on']))[: len(found)]
  with jax.enable_x64(True):
    losses, weights = training.run(tmp_path, samples)
  np.testing.assert_allclose(losses, theirs['losses'], rtol=1e-8)
  before = load_file(folder / 'checkpoint' / 'model.safetensors')
  for key, ours in weights.items():
    moved = np.linalg.norm(theirs[f'weights/{key}'] - before[key])
    assert moved > 0
    assert np.linalg.norm(ours - theirs[f'weights/{key}']) <= 1e-6 * moved, key
