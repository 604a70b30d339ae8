"""Against transformers: the same logits both ways, the same bits, and directories that load
unchanged.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logs import absl_lines
from parameters import assert_same_bits, random_params
from paths import ROOT
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxrl_llm.app.commands.cli import launch
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models import heads
from jaxrl_llm.models.api import build_model, stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions, RopeScaling
from jaxrl_llm.weights import hf
from jaxrl_llm.weights.hf_config import write_config

LENGTH = 300
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 64,
}
# head_dim 32 is not hidden 96 / 4 heads; 4 query heads share 2 key/value heads.
SIZES = {
  'vocab_size': 101,
  'hidden_size': 96,
  'intermediate_size': 176,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 32,
  'max_position_embeddings': 512,
}
CASES = {
  'qwen2 tied, theta 1e6': ('qwen2', True, {'rope_type': 'default', 'rope_theta': 1e6}, {}),
  'qwen2 untied, linear': (
    'qwen2',
    False,
    {'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 1e4},
    {},
  ),
  'qwen3 tied, llama3': ('qwen3', True, {**LLAMA3, 'rope_theta': 1e6}, {}),
  'qwen3 untied, biases': (
    'qwen3',
    False,
    {'rope_type': 'default', 'rope_theta': 3e4},
    {'attention_bias': True},
  ),
  'llama tied': (
    'llama',
    True,
    {'rope_type': 'default', 'rope_theta': 1e4},
    {'num_key_value_heads': 4},
  ),
  'llama untied, llama3, biases': (
    'llama',
    False,
    {**LLAMA3, 'rope_theta': 5e5},
    {'attention_bias': True, 'mlp_bias': True, 'rms_norm_eps': 1e-2},
  ),
  'mistral untied': (
    'mistral',
    False,
    {'rope_type': 'default', 'rope_theta': 1e6},
    {'sliding_window': None},
  ),
}
CONFIGS = {
  'qwen2': 'Qwen2Config',
  'qwen3': 'Qwen3Config',
  'llama': 'LlamaConfig',
  'mistral': 'MistralConfig',
}
FULL_ATTENTION = {'mistral': {'sliding_window': None}}
"""Arguments of those classes whose default is a window."""


@pytest.fixture(scope='module', autouse=True)
def _peers():
  """Imported for this file's tests only: collecting them needs neither."""
  global torch, transformers
  torch = pytest.importorskip('torch')
  import transformers


def make_peer(family, tied, rope, fields):
  """A model of transformers in which every parameter is random: biases, norms and positions all
  matter.
  """
  config = getattr(transformers, CONFIGS[family])(
    **{**SIZES, **fields}, tie_word_embeddings=tied, rope_parameters=dict(rope)
  )
  config._attn_implementation = 'eager'
  torch.manual_seed(0)
  peer = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for name, parameter in peer.named_parameters():
      parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if 'norm' in name else 0.0))
  return peer


def tokens_of(length=LENGTH, batch=2):
  return np.random.default_rng(1).integers(0, SIZES['vocab_size'], (batch, length))


def peer_logits(peer, tokens):
  with torch.no_grad():
    return peer(torch.from_numpy(tokens)).logits.float().numpy()


def our_logits(params, spec, tokens, *, scan_layers=False):
  model = build_model(spec, ModelOptions(scan_layers=scan_layers))
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  params = jax.tree.map(jnp.asarray, params)
  hidden = jax.jit(model.apply)(
    params, jnp.asarray(tokens, jnp.int32), positions, jnp.ones_like(positions)
  )
  return np.asarray(hidden @ model.head_kernel(params).T)


def error_of(logits, wanted):
  """Largest difference, in units of the largest logit."""
  return float(np.abs(logits - wanted).max() / np.abs(wanted).max())


@pytest.fixture(scope='module', params=CASES)
def peer_directory(request, tmp_path_factory):
  peer = make_peer(*CASES[request.param])
  directory = tmp_path_factory.mktemp('peer')
  peer.save_pretrained(directory)
  return peer, directory


@pytest.mark.full
@pytest.mark.parametrize('scan_layers', [False, True])
def test_logits_are_those_of_transformers(peer_directory, scan_layers):
  peer, directory = peer_directory
  tokens = tokens_of()
  wanted = peer_logits(peer, tokens)
  spec = hf.read_spec(directory)
  params = hf.load_params(directory, spec, scan_layers=scan_layers)
  assert error_of(our_logits(params, spec, tokens, scan_layers=scan_layers), wanted) < 1e-4


@pytest.mark.parametrize(
  'change',
  [{'rope_theta': 1.1e4}, {'rope_scaling': None}, {'rms_norm_eps': 1e-2}],
  ids=lambda change: next(iter(change)),
)
def test_the_logits_would_show_a_setting_that_is_not_honoured(change):
  scaling = RopeScaling(kind='llama3', factor=8.0, original_max_position_embeddings=64)
  spec = tiny(
    'llama', 101, rope_theta=1e4, rope_scaling=scaling, rms_norm_eps=1e-6, num_hidden_layers=3
  )
  other = tiny(
    'llama',
    101,
    num_hidden_layers=3,
    **{'rope_theta': 1e4, 'rope_scaling': scaling, 'rms_norm_eps': 1e-6, **change},
  )
  params, tokens = random_params(spec), tokens_of(batch=1)
  assert error_of(our_logits(params, other, tokens), our_logits(params, spec, tokens)) > 1e-3


def write_tokenizer(directory):
  """A word-level tokenizer with a chat template, made without our own code."""
  vocabulary = {'<pad>': 0, '<eos>': 1, '<unk>': 2, **{f'w{i}': i for i in range(3, 101)}}
  raw = Tokenizer(models.WordLevel(vocabulary, unk_token='<unk>'))
  raw.pre_tokenizer = pre_tokenizers.Whitespace()
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=raw, pad_token='<pad>', eos_token='<eos>', unk_token='<unk>'
  )
  tokenizer.chat_template = (
    "{% for m in messages %}w7 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% "
    'endif %}'
  )
  tokenizer.save_pretrained(directory)
  return tokenizer


EXPORTS = {
  'qwen2': {'rope_theta': 1e6, 'tie_word_embeddings': True},
  'qwen3': {'rope_scaling': RopeScaling(kind='linear', factor=4.0), 'tie_word_embeddings': False},
  'llama': {
    'rope_scaling': RopeScaling(kind='llama3', factor=8.0, original_max_position_embeddings=64),
    'rope_theta': 5e5,
    'tie_word_embeddings': True,
  },
  'mistral': {'rope_theta': 1e6, 'tie_word_embeddings': False},
}
FAMILIES = [
  *('qwen2', 'llama'),
  *(pytest.param(family, marks=pytest.mark.full) for family in ('qwen3', 'mistral')),
]


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('shard_bytes', [hf.SHARD_BYTES, 100_000])
def test_transformers_loads_an_export_unchanged(tmp_path, family, shard_bytes):
  spec = tiny(family, **SIZES, **EXPORTS[family])
  params, tokenizer = random_params(spec), write_tokenizer(tmp_path / 'tokenizer')
  target = tmp_path / 'export'
  hf.export(
    target,
    stack_layers(params),
    spec,
    tokenizer_dir=tmp_path / 'tokenizer',
    eos_ids=(1, 4),
    pad_id=0,
    shard_bytes=shard_bytes,
  )
  assert (target / 'model.safetensors.index.json').exists() == (shard_bytes == 100_000)
  peer, report = transformers.AutoModelForCausalLM.from_pretrained(
    target, attn_implementation='eager', output_loading_info=True
  )
  assert not any(
    report[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys', 'error_msgs')
  ), report
  assert peer.dtype == torch.float32
  assert (peer.generation_config.eos_token_id, peer.generation_config.pad_token_id) == ([1, 4], 0)
  tokens = tokens_of()
  assert error_of(our_logits(params, spec, tokens), peer_logits(peer, tokens)) < 1e-4

  # For a qwen2 model transformers ignores the tokenizer's own class: the warning tested below.
  auto = transformers.PreTrainedTokenizerFast if family == 'qwen2' else transformers.AutoTokenizer
  loaded = auto.from_pretrained(target)
  messages = [{'role': 'user', 'content': 'w5 w6'}]
  ids = loaded.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=False
  )
  assert ids == [7, 5, 6, 9]
  assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (1, 0, len(tokenizer))


AUTO = {'scalar': 'AutoModelForSequenceClassification', 'value': 'AutoModelForTokenClassification'}
PAD = 0


def padded(lengths):
  """Sequences on the left, padding (which occurs nowhere else) on the right: tokens, and 1 where
  they are.
  """
  tokens = np.random.default_rng(1).integers(1, SIZES['vocab_size'], (len(lengths), max(lengths)))
  within = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
  return np.where(within, tokens, PAD), within.astype(np.int64)


def our_outputs(params, spec, tokens, within, *, scan_layers=False):
  """A value per token."""
  model = build_model(spec, ModelOptions(scan_layers=scan_layers))
  params = jax.tree.map(jnp.asarray, params)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  hidden = jax.jit(model.apply)(
    params, jnp.asarray(tokens, jnp.int32), positions, jnp.asarray(within, jnp.int32)
  )
  return np.asarray(heads.outputs(hidden, model.head_kernel(params))[..., 0])


def assert_same_outputs(peer, ours, tokens, within):
  """`peer`, a classifier of transformers, on one padded batch: scores of sequences, or values of
  their tokens.
  """
  with torch.no_grad():
    got = (
      peer.eval()(torch.from_numpy(tokens), attention_mask=torch.from_numpy(within))
      .logits[..., 0]
      .numpy()
    )
  if got.ndim == 1:
    wanted = ours[np.arange(len(tokens)), within.sum(1) - 1]
  else:
    got, wanted = got[within > 0], ours[within > 0]
  assert wanted.std() > 0.1, 'outputs that hardly differ show nothing'
  np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('head', AUTO)
@pytest.mark.parametrize('scan_layers', [False, True])
def test_transformers_loads_reward_models_and_critics_unchanged(
  tmp_path, family, head, scan_layers
):
  spec = heads.with_head(tiny(family, **SIZES, **EXPORTS[family]), head)
  params = random_params(spec)
  lay = stack_layers if scan_layers else lambda params: params
  hf.export(
    tmp_path, lay(params), spec, tokenizer_dir=None, eos_ids=(1,), pad_id=PAD, shard_bytes=100_000
  )
  assert not (tmp_path / 'generation_config.json').exists()
  assert hf.read_special_tokens(tmp_path) == hf.SpecialTokens(bos_id=None, eos_ids=(1,), pad_id=PAD)
  auto = getattr(transformers, AUTO[head])
  peer, report = auto.from_pretrained(
    tmp_path, attn_implementation='eager', output_loading_info=True
  )
  assert not any(
    report[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys', 'error_msgs')
  ), report
  assert peer.config.num_labels == 1 and peer.dtype == torch.float32
  tokens, within = padded((17, 60, 1, 41))
  ours = our_outputs(lay(params), spec, tokens, within, scan_layers=scan_layers)
  assert_same_outputs(peer, ours, tokens, within)

  assert hf.read_spec(tmp_path) == spec
  assert_same_bits(hf.load_params(tmp_path, spec, scan_layers=scan_layers), lay(params))


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('head', AUTO)
@pytest.mark.parametrize('tied', [False, True])
def test_reward_models_and_critics_of_transformers_are_read(tmp_path, family, head, tied):
  config = getattr(transformers, CONFIGS[family])(
    **SIZES,
    num_labels=1,
    pad_token_id=PAD,
    tie_word_embeddings=tied,
    **FULL_ATTENTION.get(family, {}),
  )
  peer = getattr(transformers, AUTO[head]).from_config(config, attn_implementation='eager')
  with torch.no_grad():
    for name, parameter in peer.named_parameters():
      if name != 'score.bias':
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if 'norm' in name else 0.0))
  peer.save_pretrained(tmp_path / 'peer')
  spec = hf.read_spec(tmp_path / 'peer')
  assert spec.head == head
  params = hf.load_params(tmp_path / 'peer', spec)
  tokens, within = padded((17, 60, 1, 41))
  assert_same_outputs(peer, our_outputs(params, spec, tokens, within), tokens, within)
  hf.export(tmp_path / 'ours', params, spec, tokenizer_dir=None, eos_ids=(1,), pad_id=PAD)
  assert_same_bits(
    load_file(tmp_path / 'peer' / 'model.safetensors'),
    load_file(tmp_path / 'ours' / 'model.safetensors'),
  )

  if head == 'value':
    with torch.no_grad():
      peer.score.bias.fill_(0.5)
    peer.save_pretrained(tmp_path / 'peer')
    error = refusal(hf.load_params, tmp_path / 'peer', spec)
    assert (
      error.startswith(f'{tmp_path}/peer: score.bias is 0.5, wanted 0')
      and 'would shift all values' in error
    )


def test_a_reward_model_over_a_language_model_leaves_nothing_of_it(tmp_path):
  spec = tiny('qwen2', 50, tie_word_embeddings=False)
  hf.export(tmp_path, random_params(spec), spec, tokenizer_dir=None, eos_ids=(1,), pad_id=3)
  scorer = heads.with_head(spec, 'scalar')
  params = heads.replace_head(
    random_params(spec), scorer, heads.fresh_head(scorer, jax.random.key(0))
  )
  hf.export(tmp_path, params, scorer, tokenizer_dir=None, eos_ids=(1,), pad_id=0)
  assert hf.read_spec(tmp_path) == scorer
  assert_same_bits(hf.load_params(tmp_path, scorer), params)
  assert hf.read_special_tokens(tmp_path).pad_id == 0


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('scan_layers', [False, True])
def test_files_round_trip_to_the_bit(tmp_path, peer_directory, dtype, scan_layers):
  peer, _ = peer_directory
  source, target = tmp_path / 'source', tmp_path / 'target'
  peer.to({'float32': torch.float32, 'bfloat16': torch.bfloat16}[dtype]).save_pretrained(source)
  peer.to(torch.float32)
  spec = hf.read_spec(source)
  params = hf.load_params(source, spec, scan_layers=scan_layers, dtype=dtype)
  hf.save_params(target, params, spec, dtype=dtype)
  assert_same_bits(load_file(source / 'model.safetensors'), load_file(target / 'model.safetensors'))
  again = hf.load_params(target, spec, scan_layers=scan_layers, dtype=dtype)
  assert_same_bits(params, again)


@pytest.mark.parametrize('family', EXPORTS)
def test_a_tokenizer_that_transformers_would_misread_is_told(tmp_path, family):
  write_tokenizer(tmp_path / 'tokenizer')
  spec = tiny(family, **SIZES)
  with absl_lines() as said:
    hf.export(
      tmp_path / 'x',
      random_params(spec),
      spec,
      tokenizer_dir=tmp_path / 'tokenizer',
      eos_ids=(1,),
      pad_id=0,
    )
  loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / 'x')
  misread = loaded.encode('w5 w6') != [5, 6]
  assert misread == (family == 'qwen2') == any('Qwen2Tokenizer' in line for line in said)


def refusal(call, *args, kind=UserError, **kwargs):
  with pytest.raises(kind) as caught:
    call(*args, **kwargs)
  assert '\n' not in str(caught.value)
  return str(caught.value)


def test_a_tokenizer_directory_without_one_is_refused(tmp_path):
  (tmp_path / 'empty').mkdir()
  spec = tiny('llama', 50)
  error = refusal(
    hf.export,
    tmp_path / 'x',
    random_params(spec),
    spec,
    tokenizer_dir=tmp_path / 'empty',
    eos_ids=(),
    pad_id=None,
  )
  assert 'holds no tokenizer' in error and not (tmp_path / 'x').exists()


def test_special_tokens_come_from_the_generation_config_first(tmp_path):
  (tmp_path / 'config.json').write_text(
    '{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": null}'
  )
  assert hf.read_special_tokens(tmp_path) == hf.SpecialTokens(bos_id=1, eos_ids=(2,), pad_id=None)
  (tmp_path / 'generation_config.json').write_text(
    '{"eos_token_id": [2, 3], "bos_token_id": null, "pad_token_id": 0}'
  )
  assert hf.read_special_tokens(tmp_path) == hf.SpecialTokens(bos_id=1, eos_ids=(2, 3), pad_id=0)


def test_directories_resolve_to_themselves_and_wrong_paths_are_named(tmp_path, monkeypatch):
  assert hf.resolve(str(tmp_path)) == tmp_path
  (tmp_path / 'file').write_text('')
  assert 'is a file' in refusal(hf.resolve, tmp_path / 'file')
  for wrong in (str(tmp_path / 'absent'), './absent', '../absent', 'a/b/c', 'absent/', '~/absent'):
    assert refusal(hf.resolve, wrong).startswith(f'{wrong}: no such directory')
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'runs').mkdir()
  assert 'not a hub id either' in refusal(hf.resolve, 'runs/quickstart')


def run_python(*args, **environment):
  # A closed port of this machine: refused at once, as without a network.
  away = {'HF_ENDPOINT': 'http://127.0.0.1:9', 'HF_HUB_OFFLINE': '0', 'JAX_PLATFORMS': 'cpu'}
  return subprocess.run(
    [sys.executable, *args],
    cwd=ROOT,
    env=os.environ | away | environment,
    capture_output=True,
    text=True,
    timeout=120,
  )


def convert(*flags, **environment):
  return run_python('launch/convert.py', *flags, **environment)


def test_convert_reads_checks_and_writes(tmp_path):
  source, target = tmp_path / 'source', tmp_path / 'target'
  peer = make_peer(*CASES['qwen3 untied, biases'])
  peer.generation_config.temperature, peer.generation_config.do_sample = 0.7, True
  peer.save_pretrained(source, max_shard_size='100KB')
  write_tokenizer(source)
  assert len(list(source.glob('*.safetensors'))) > 1
  ran = convert(f'--source={source}', f'--target={target}', '--dtype=bfloat16')
  assert ran.returncode == 0, ran.stderr
  assert (
    f'read {source}: qwen3, 3 layers, {sum(p.numel() for p in peer.parameters()):,} parameters'
    in ran.stdout
  )
  loaded = transformers.AutoModelForCausalLM.from_pretrained(target)
  assert loaded.dtype == torch.bfloat16 and loaded.generation_config.temperature == 0.7
  for (name, wanted), got in zip(peer.named_parameters(), loaded.parameters(), strict=True):
    assert torch.equal(wanted.to(torch.bfloat16), got), name
  assert transformers.AutoTokenizer.from_pretrained(target).eos_token_id == 1


def test_convert_fails_in_one_line(tmp_path, capsys):
  source = tmp_path / 'source'
  source.mkdir()
  write_config(source, tiny('llama', 50), dtype='float32')
  (source / 'model.safetensors').write_bytes(b'short')
  cases = {
    (f'--source={source}', f'--target={tmp_path}/t'): 'truncated or corrupt safetensors file',
    (f'--source={source}', f'--target={source}'): '--target is the same directory as --source',
    (
      f'--source={source}',
      f'--target={tmp_path}/t',
      '--dtpye=float32',
    ): '--dtpye: unknown flag; did you mean --dtype?',
  }

  def check(code, said, message):
    assert code == 2 and message in said, said
    assert said.count('\n') == 1 and said.startswith('error: '), said
    assert not (tmp_path / 't').exists()

  for flags, message in cases.items():
    check(launch('convert', ['convert', *flags]), capsys.readouterr().err, message)
  # The hub's address is read at the first import.
  ran = convert(
    '--source=Qwen/Qwen3-0.6B', f'--target={tmp_path}/t', HF_HOME=str(tmp_path / 'cache')
  )
  check(ran.returncode, ran.stderr, 'the hub cannot be reached')


@pytest.mark.full
def test_no_torch_comes_with_the_weights():
  ran = run_python(
    '-c',
    "import sys, jaxrl_llm.weights.hf; print(sorted({'torch', 'transformers'} & set(sys.modules)))",
  )
  assert ran.stdout == '[]\n', ran.stderr
