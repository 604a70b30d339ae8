"""Exported adapters, live: the peft library loads them below our own weights, and its logits are
ours.
"""

import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import PEERS_PYTHON, ROOT

from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import LoraConfig, ModelOptions
from jaxrl_llm.weights.hf import export
from jaxrl_llm.weights.peft import export_adapter

pytestmark = pytest.mark.full

PAD, EOS = 0, 1
CASES = {
  'qwen2': (tiny('qwen2', 40), ModelOptions(lora=LoraConfig(rank=4, alpha=12))),
  'qwen3 scanned': (
    tiny('qwen3', 40),
    ModelOptions(lora=LoraConfig(rank=3, alpha=7), scan_layers=True),
  ),
  'llama some targets': (
    tiny('llama', 40, tie_word_embeddings=False),
    ModelOptions(lora=LoraConfig(rank=2, alpha=2, targets=('down', 'query'))),
  ),
  'reward model': (
    tiny('llama', 40, head='scalar'),
    ModelOptions(lora=LoraConfig(rank=4, alpha=8)),
  ),
}


def tokens_of(name):
  return np.random.default_rng(len(name)).integers(2, 40, (3, 12))


def logits(model, tree, tokens):
  """At every position, or, of a reward model, at the last one."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = model.apply(tree, jnp.asarray(tokens), positions, jnp.ones(tokens.shape, jnp.int32))
  found = np.asarray(hidden @ model.head_kernel(tree).T)
  return found if model.spec.head == 'lm' else found[:, -1]


def write(folder, name):
  """Base, adapter and merged model as a run leaves them behind; our own logits of base and adapted
  model.
  """
  spec, options = CASES[name]
  model = build_model(spec, options)
  trained, base = lora.split(jax.jit(model.init)(jax.random.key(0)), spec, options)
  rng = np.random.default_rng(7)
  trained = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), trained)
  whole = lora.join(trained, base)

  def write_model(part, tree):
    return export(folder / part, tree, spec, tokenizer_dir=None, eos_ids=(EOS,), pad_id=PAD)

  # A base is a language model, or at least has an output of its own; the trained one comes with the
  # adapter.
  write_model(
    'base',
    lora.join(base, {'head': {'kernel': np.zeros((1, spec.hidden_size), np.float32)}})
    if spec.head == 'scalar'
    else base,
  )
  write_model('merged', lora.merge(whole, options.lora))
  leaves = flatten(jax.device_get(trained)).items()
  export_adapter(folder / 'adapter', leaves, spec, options.lora, base=str(folder / 'base'))
  np.save(folder / 'tokens.npy', tokens_of(name))
  return logits(model, whole, tokens_of(name))


@pytest.fixture(scope='module')
def ours_and_theirs(tmp_path_factory):
  if not PEERS_PYTHON.exists():
    pytest.skip('.venv-peers is missing: launch/install_peers.sh makes it')
  folder = tmp_path_factory.mktemp('peft')
  ours = {name: write(folder / 'cases' / name, name) for name in CASES}
  command = [
    PEERS_PYTHON,
    ROOT / 'tests/peers/peft_logits.py',
    folder / 'cases',
    folder / 'results.npz',
  ]
  process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
  assert process.returncode == 0, process.stderr[-3000:]
  # It says so where it finds weights that it has no use for, or misses some.
  assert 'missing' not in process.stderr.lower() and 'unexpected' not in process.stderr.lower(), (
    process.stderr[-3000:]
  )
  return ours, dict(np.load(folder / 'results.npz'))


@pytest.mark.parametrize('name', CASES)
def test_peft_gives_our_logits_beside_and_merged(ours_and_theirs, name):
  ours, theirs = ours_and_theirs
  for kind in ('adapted', 'merged by peft', 'merged'):
    np.testing.assert_allclose(
      theirs[f'{name}/{kind}'], ours[name], rtol=0, atol=2e-5, err_msg=kind
    )
  assert np.abs(theirs[f'{name}/base'] - ours[name]).max() > 0.05
