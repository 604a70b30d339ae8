"""config.json: published files by hand, both forms, and every setting that would change the numbers
refused.
"""

import dataclasses
import json

import pytest
import transformers
from logs import absl_lines

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models import families
from jaxrl_llm.models.families import FAMILIES, tiny
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.models.spec import ModelSpec, RopeScaling
from jaxrl_llm.weights import hf_config
from jaxrl_llm.weights.hf_config import read_spec, write_config

# The published files of Qwen2.5-0.5B-Instruct, Llama-3.2-1B and Qwen3-0.6B, in their v4 form.
QWEN2 = {
  'architectures': ['Qwen2ForCausalLM'],
  'attention_dropout': 0.0,
  'bos_token_id': 151643,
  'eos_token_id': 151645,
  'hidden_act': 'silu',
  'hidden_size': 896,
  'initializer_range': 0.02,
  'intermediate_size': 4864,
  'max_position_embeddings': 32768,
  'max_window_layers': 21,
  'model_type': 'qwen2',
  'num_attention_heads': 14,
  'num_hidden_layers': 24,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-06,
  'rope_theta': 1000000.0,
  'sliding_window': 32768,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.43.1',
  'use_cache': True,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
LLAMA = {
  'architectures': ['LlamaForCausalLM'],
  'attention_bias': False,
  'attention_dropout': 0.0,
  'bos_token_id': 128000,
  'eos_token_id': 128001,
  'head_dim': 64,
  'hidden_act': 'silu',
  'hidden_size': 2048,
  'initializer_range': 0.02,
  'intermediate_size': 8192,
  'max_position_embeddings': 131072,
  'mlp_bias': False,
  'model_type': 'llama',
  'num_attention_heads': 32,
  'num_hidden_layers': 16,
  'num_key_value_heads': 8,
  'pretraining_tp': 1,
  'rms_norm_eps': 1e-05,
  'rope_scaling': {
    'factor': 32.0,
    'high_freq_factor': 4.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  },
  'rope_theta': 500000.0,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'vocab_size': 128256,
}
QWEN3 = {
  'architectures': ['Qwen3ForCausalLM'],
  'attention_bias': False,
  'head_dim': 128,
  'hidden_act': 'silu',
  'hidden_size': 1024,
  'initializer_range': 0.02,
  'intermediate_size': 3072,
  'max_position_embeddings': 40960,
  'max_window_layers': 28,
  'model_type': 'qwen3',
  'num_attention_heads': 16,
  'num_hidden_layers': 28,
  'num_key_value_heads': 8,
  'rms_norm_eps': 1e-06,
  'rope_scaling': None,
  'rope_theta': 1000000,
  'sliding_window': None,
  'tie_word_embeddings': True,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
# Mistral-7B-v0.3.
MISTRAL = {
  'architectures': ['MistralForCausalLM'],
  'attention_dropout': 0.0,
  'bos_token_id': 1,
  'eos_token_id': 2,
  'hidden_act': 'silu',
  'hidden_size': 4096,
  'initializer_range': 0.02,
  'intermediate_size': 14336,
  'max_position_embeddings': 32768,
  'model_type': 'mistral',
  'num_attention_heads': 32,
  'num_hidden_layers': 32,
  'num_key_value_heads': 8,
  'rms_norm_eps': 1e-05,
  'rope_theta': 1000000.0,
  'sliding_window': None,
  'tie_word_embeddings': False,
  'torch_dtype': 'bfloat16',
  'vocab_size': 32768,
}
PUBLISHED = {'qwen2': QWEN2, 'llama': LLAMA, 'qwen3': QWEN3, 'mistral': MISTRAL}
SMALL = {
  'hidden_size': 96,
  'intermediate_size': 80,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'vocab_size': 50,
}


def write(directory, values, **changes):
  values = {name: value for name, value in {**values, **changes}.items() if value != 'absent'}
  (directory / 'config.json').write_text(json.dumps(values))
  return directory


def refusal(directory, values, **changes):
  with pytest.raises(UserError) as caught:
    read_spec(write(directory, values, **changes))
  error = str(caught.value)
  assert '\n' not in error and error.startswith(str(directory / 'config.json'))
  return error


def test_published_files_are_read(tmp_path):
  assert read_spec(write(tmp_path, QWEN2)) == ModelSpec(
    family='qwen2',
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,  # 896 / 14
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
    qkv_bias=True,
    qk_norm=False,
  )
  assert read_spec(write(tmp_path, LLAMA)) == ModelSpec(
    family='llama',
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    rope_theta=5e5,
    rope_scaling=RopeScaling(
      kind='llama3',
      factor=32.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=8192,
    ),
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
    qkv_bias=False,
    qk_norm=False,
  )
  qwen3 = read_spec(write(tmp_path, QWEN3))
  assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.rope_theta) == (
    128,
    True,
    False,
    1e6,
  )


@pytest.mark.parametrize('family', PUBLISHED)
def test_both_forms_mean_the_same(tmp_path, family):
  v4 = PUBLISHED[family]
  spec = read_spec(write(tmp_path, v4))
  # transformers 5 itself brings the file to its newer form.
  transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
  v5 = json.loads((tmp_path / 'config.json').read_text())
  assert 'rope_parameters' in v5 and 'rope_theta' not in v5 and 'rope_scaling' not in v5
  assert read_spec(tmp_path) == spec
  write_config(tmp_path, spec, dtype='bfloat16')
  assert read_spec(tmp_path) == spec


@pytest.mark.parametrize('old', ['type', 'rope_type'])
def test_linear_scaling_in_either_spelling(tmp_path, old):
  spec = read_spec(write(tmp_path, QWEN2, rope_scaling={old: 'linear', 'factor': 4}))
  assert spec.rope_scaling == RopeScaling(kind='linear', factor=4.0)


@pytest.mark.parametrize('family', FAMILIES)
def test_absent_keys_mean_what_they_mean_to_transformers(tmp_path, family):
  values = {**SMALL, 'model_type': family, **FAMILIES[family].full_attention}
  del values['num_key_value_heads']
  if family != 'llama':
    # the others' defaults are 32 and 8 key/value heads
    values |= {'num_attention_heads': 32, 'hidden_size': 128}
  spec = read_spec(write(tmp_path, values))
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  for name in (
    'num_key_value_heads',
    'max_position_embeddings',
    'rms_norm_eps',
    'tie_word_embeddings',
  ):
    assert getattr(spec, name) == getattr(config, name), name
  assert spec.rope_theta == config.rope_parameters['rope_theta'] == 10000.0
  # 128 / 32 and 96 / 4; Qwen3's default is a number.
  assert spec.head_dim == {'qwen2': 4, 'qwen3': 128, 'llama': 24, 'mistral': 4}[family]


def test_null_heads_mean_one_each(tmp_path):
  values = {**SMALL, 'model_type': 'qwen3', 'num_key_value_heads': None}
  assert read_spec(write(tmp_path, values)).num_key_value_heads == 4


def test_original_context_defaults_to_the_context(tmp_path):
  scaling = {
    name: value for name, value in LLAMA['rope_scaling'].items() if not name.startswith('original')
  }
  spec = read_spec(write(tmp_path, LLAMA, rope_scaling=scaling))
  assert spec.rope_scaling.original_max_position_embeddings == 131072
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  assert config.rope_parameters['original_max_position_embeddings'] == 131072


def test_biases_follow_the_family(tmp_path):
  llama = read_spec(write(tmp_path, LLAMA, attention_bias=True, mlp_bias=True))
  assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
  qwen2 = read_spec(write(tmp_path, QWEN2))
  assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False)


REFUSED = {
  'model_type': (
    QWEN2,
    {'model_type': 'mamba'},
    'model_type is "mamba", wanted one of qwen2, qwen3, llama, mistral',
  ),
  'no model_type': (QWEN2, {'model_type': 'absent'}, 'model_type is null'),
  'class': (
    QWEN2,
    {'architectures': ['Qwen2ForQuestionAnswering']},
    'wanted one of Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2ForTokenClassification',
  ),
  "another family's class": (
    QWEN2,
    {'architectures': ['LlamaForSequenceClassification']},
    'wanted one of Qwen2',
  ),
  'two classes': (
    QWEN2,
    {'architectures': ['Qwen2ForCausalLM', 'Qwen2ForTokenClassification']},
    'wanted one of',
  ),
  'labels by default': (
    LLAMA,
    {'architectures': ['LlamaForSequenceClassification']},
    'num_labels is null, wanted 1',
  ),
  'labels by number': (
    LLAMA,
    {'architectures': ['LlamaForTokenClassification'], 'num_labels': 3},
    'num_labels is 3, wanted 1',
  ),
  'labels by name': (
    LLAMA,
    {
      'architectures': ['LlamaForSequenceClassification'],
      'id2label': {'0': 'a', '1': 'b'},
      'num_labels': 1,
    },
    'id2label is {"0": "a", "1": "b"}, wanted one label',
  ),
  'labels that disagree': (
    LLAMA,
    {'architectures': ['LlamaForSequenceClassification'], 'id2label': {'0': 'a'}, 'num_labels': 2},
    'num_labels is 2, wanted 1',
  ),
  'activation': (LLAMA, {'hidden_act': 'gelu'}, 'hidden_act is "gelu"'),
  'window': (QWEN2, {'use_sliding_window': True}, 'sliding window'),
  'window layers': (
    QWEN3,
    {'layer_types': ['full_attention', 'sliding_attention']},
    'sliding window',
  ),
  'window in llama': (LLAMA, {'sliding_window': 4096}, 'sliding window'),
  'window in mistral': (MISTRAL, {'sliding_window': 4096}, 'sliding window'),
  'window by default': (MISTRAL, {'sliding_window': 'absent'}, 'sliding window'),
  'window whatever the layers': (
    MISTRAL,
    {'sliding_window': 4096, 'layer_types': ['full_attention'] * 32},
    'sliding window',
  ),
  'bias in mistral': (
    MISTRAL,
    {'attention_bias': True},
    'attention_bias is true, wanted false: mistral has no biases',
  ),
  'yarn': (
    QWEN2,
    {'rope_scaling': {'type': 'yarn', 'factor': 4.0}},
    'rope_scaling.rope_type is "yarn"',
  ),
  'dynamic': (
    QWEN2,
    {
      'rope_theta': 'absent',
      'rope_parameters': {'rope_type': 'dynamic', 'factor': 2.0, 'rope_theta': 1e4},
    },
    'rope_parameters.rope_type is "dynamic", wanted one of default, linear, llama3',
  ),
  'per layer type': (
    QWEN2,
    {'rope_parameters': {'full_attention': {'rope_type': 'default'}}},
    'rope_parameters.full_attention',
  ),
  'mrope': (
    QWEN2,
    {'rope_scaling': {'rope_type': 'default', 'mrope_section': [16]}},
    'rope_scaling.mrope_section',
  ),
  'partial': (LLAMA, {'partial_rotary_factor': 0.5}, 'partial_rotary_factor is 0.5'),
  'two thetas': (QWEN2, {'rope_parameters': {'rope_theta': 1e4}}, 'rope_theta is 1e+06'),
  'two originals': (
    LLAMA,
    {'original_max_position_embeddings': 4096},
    'is 4096, wanted 8192, as in rope_scaling',
  ),
  'two forms': (
    LLAMA,
    {'rope_parameters': {'rope_type': 'default', 'rope_theta': 5e5}},
    'disagree',
  ),
  'no factor': (QWEN2, {'rope_scaling': {'type': 'linear'}}, 'factor is missing'),
  'bias': (QWEN2, {'attention_bias': False}, 'attention_bias is false'),
  'mlp bias': (QWEN3, {'mlp_bias': True}, 'mlp_bias is true'),
  'quantized': (LLAMA, {'quantization_config': {'bits': 4}}, 'quantization_config'),
  'bidirectional': (QWEN2, {'is_causal': False}, 'bidirectional'),
  'missing size': (LLAMA, {'hidden_size': 'absent'}, 'hidden_size is missing'),
  'wrong type': (LLAMA, {'vocab_size': '100'}, 'vocab_size is "100", wanted a positive int'),
  'not whole': (LLAMA, {'num_hidden_layers': 1.5}, 'num_hidden_layers is 1.5'),
  'flag': (
    LLAMA,
    {'tie_word_embeddings': 'yes'},
    'tie_word_embeddings is "yes", wanted true or false',
  ),
  'heads': (LLAMA, {'num_key_value_heads': 5}, '32 heads cannot share 5'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_would_change_the_numbers_is_refused(tmp_path, case):
  values, changes, message = REFUSED[case]
  assert message in refusal(tmp_path, values, **changes)


def test_windows_that_are_off_are_no_windows(tmp_path):
  assert (
    read_spec(
      write(tmp_path, QWEN2, use_sliding_window=True, max_window_layers=24)
    ).num_hidden_layers
    == 24
  )
  assert (
    read_spec(write(tmp_path, QWEN2, layer_types=['full_attention'] * 24)).num_hidden_layers == 24
  )


def test_unreadable_files_are_named(tmp_path):
  with pytest.raises(UserError, match=r'config\.json: no such file'):
    read_spec(tmp_path)
  (tmp_path / 'config.json').write_text('{"model_type": ')
  with pytest.raises(UserError, match=r'config\.json: cannot be read as JSON'):
    read_spec(tmp_path)
  (tmp_path / 'config.json').write_text('[]')
  with pytest.raises(UserError, match='holds a list, wanted a JSON object'):
    read_spec(tmp_path)


SPECS = {
  'qwen2': {},
  'qwen3': {'qkv_bias': True, 'o_bias': True, 'tie_word_embeddings': False},
  'llama': {
    'mlp_bias': True,
    'rope_scaling': RopeScaling(kind='llama3', factor=8.0, original_max_position_embeddings=64),
  },
  'mistral': {},
}


@pytest.mark.parametrize('family', SPECS)
def test_transformers_reads_what_is_written(tmp_path, family):
  spec = tiny(family, 50, hidden_size=96, rope_theta=12345.0, rms_norm_eps=3e-5, **SPECS[family])
  write_config(tmp_path, spec, dtype='bfloat16', bos_id=1, eos_ids=(2, 3), pad_id=0)
  assert read_spec(tmp_path) == spec
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  assert str(config.dtype).removeprefix('torch.') == 'bfloat16', (
    'a torch dtype where torch is installed'
  )
  assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, [2, 3], 0)
  assert (config.head_dim, config.rms_norm_eps, config.rope_parameters['rope_theta']) == (
    32,
    3e-5,
    12345.0,
  )
  if spec.rope_scaling:
    assert config.rope_parameters == {
      'rope_type': 'llama3',
      'rope_theta': 12345.0,
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 64,
    }
  config.save_pretrained(tmp_path / 'again')
  assert read_spec(tmp_path / 'again') == spec


@pytest.mark.parametrize(
  ('family', 'fields'),
  [
    ('qwen2', {'qkv_bias': False}),
    ('qwen2', {'o_bias': True}),
    ('qwen2', {'mlp_bias': True}),
    ('llama', {'qkv_bias': True}),
    ('llama', {'qk_norm': True}),
    ('qwen3', {'qk_norm': False}),
    ('llama', {'hidden_size': 66}),
    ('mistral', {'qkv_bias': True, 'o_bias': True}),
  ],
)
def test_what_hugging_face_cannot_express_is_not_written(tmp_path, family, fields):
  with pytest.raises(UserError, match='Hugging Face'):
    write_config(tmp_path, tiny(family, 50, **fields), dtype='float32')
  assert not list(tmp_path.iterdir())


LABELS = (
  {'id2label': {'0': 'LABEL_0'}},
  {'num_labels': 1},
  {'id2label': {'0': 'quality'}, 'num_labels': 1},
)
CLASSES = {
  'lm': 'ForCausalLM',
  'scalar': 'ForSequenceClassification',
  'value': 'ForTokenClassification',
}


@pytest.mark.parametrize('head', CLASSES)
@pytest.mark.parametrize('labels', LABELS, ids=str)
def test_the_class_says_which_head(tmp_path, head, labels):
  spec = read_spec(write(tmp_path, QWEN3, architectures=[f'Qwen3{CLASSES[head]}'], **labels))
  # A file of the class of one output may say that embeddings are tied; there is nothing that they
  # could be tied to.
  assert (spec.head, spec.tie_word_embeddings) == (head, head == 'lm')


def test_without_a_class_it_is_a_language_model(tmp_path):
  for nothing in ('absent', None, []):
    assert read_spec(write(tmp_path, QWEN2, architectures=nothing)).head == 'lm'


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('head', CLASSES)
@pytest.mark.parametrize('tied', [True, False])
def test_heads_are_written_and_read(tmp_path, family, head, tied):
  pytest.importorskip('torch')  # Without it transformers names no class.
  spec = with_head(tiny(family, 50, tie_word_embeddings=tied), head)
  write_config(tmp_path, spec, dtype='float32', eos_ids=(2,), pad_id=0)
  assert read_spec(tmp_path) == spec
  values = json.loads((tmp_path / 'config.json').read_text())
  (name,) = values['architectures']
  assert (
    name.endswith(CLASSES[head]) and getattr(transformers, name).config_class.model_type == family
  )
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  assert config.num_labels == (2 if head == 'lm' else 1)
  assert config.problem_type == (None if head == 'lm' else 'regression')
  assert getattr(config, 'classifier_dropout', None) == (0 if head == 'value' else None)
  config.save_pretrained(tmp_path / 'again')
  assert read_spec(tmp_path / 'again') == spec


@pytest.mark.parametrize('head', ['scalar', 'value'])
def test_a_family_without_the_class_is_refused(tmp_path, monkeypatch, head):
  generative = dataclasses.replace(FAMILIES['llama'], architectures={'lm': 'LlamaForCausalLM'})
  for module in (families, hf_config):
    monkeypatch.setattr(module, 'FAMILIES', FAMILIES | {'llama': generative})
  with pytest.raises(
    UserError, match=f'no class for a llama model with a {head} head; the families qwen2, qwen3'
  ):
    write_config(tmp_path, with_head(tiny('llama', 50), head), dtype='float32', pad_id=0)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ('tokens', 'pad', 'said'),
  [
    ({'pad_id': 0, 'bos_id': 1, 'eos_ids': (2,)}, 0, []),
    ({'bos_id': 1, 'eos_ids': (2,)}, 1, ['names token 1']),
    ({'bos_id': 0, 'eos_ids': (2,)}, 0, ['names token 0']),
    ({'eos_ids': (2, 3)}, 2, ['names token 2', 'token 2 is both padding and an end of text']),
    ({'pad_id': 3, 'eos_ids': (2, 3)}, 3, ['token 3 is both padding and an end of text']),
  ],
  ids=str,
)
def test_a_reward_model_always_has_a_padding_token(tmp_path, tokens, pad, said):
  with absl_lines() as lines:
    write_config(tmp_path, with_head(tiny('qwen2', 50), 'scalar'), dtype='float32', **tokens)
  assert json.loads((tmp_path / 'config.json').read_text())['pad_token_id'] == pad
  assert len(lines) == len(said) and all(
    part in line for part, line in zip(said, lines, strict=True)
  ), lines


def test_a_reward_model_without_any_special_token_is_refused(tmp_path):
  with pytest.raises(UserError, match='set a padding token'):
    write_config(tmp_path, with_head(tiny('qwen2', 50), 'scalar'), dtype='float32')
  assert not list(tmp_path.iterdir())
  for head in ('lm', 'value'):
    write_config(tmp_path, with_head(tiny('qwen2', 50), head), dtype='float32')
    assert json.loads((tmp_path / 'config.json').read_text())['pad_token_id'] is None
