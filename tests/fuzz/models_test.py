"""Model directories, changed in every way: read, or refused in one line, and left as they are."""

import contextlib
import json
import struct

import numpy as np
import pytest
from fuzzing import (
  COUNTS,
  MANY,
  SEEDED,
  TEXTS,
  bounded,
  changed,
  check_line,
  damaged,
  encoded,
  fuzz,
  json_bytes,
  quiet,
  state_of,
)
from hypothesis import strategies as st

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.tasks.rendering import RenderError, TemplateProcess
from jaxrl_llm.tasks.tokenizer import Tokenizer, build_bpe_tokenizer, build_character_tokenizer
from jaxrl_llm.weights.hf import read_special_tokens
from jaxrl_llm.weights.hf_config import read_spec, write_config
from jaxrl_llm.weights.safetensors_files import load_params, save_params
from jaxrl_llm.weights.tables import entries

SMALL = dict(
  hidden_size=8,
  intermediate_size=8,
  num_hidden_layers=1,
  num_attention_heads=1,
  num_key_value_heads=1,
)
SPECS = {family: tiny(family, 20, head_dim=8, **SMALL) for family in ('llama', 'qwen2', 'qwen3')}
USER = [{'role': 'user', 'content': 'abc'}]


def parameters(spec):
  import jax

  shapes = jax.eval_shape(build_model(spec).init, jax.random.key(0))
  return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


@pytest.fixture(params=['whole', 'sharded'])
def model(request, tmp_path):
  directory, spec = tmp_path / 'model', SPECS['llama']
  save_params(
    directory, parameters(spec), spec, shard_bytes=10**9 if request.param == 'whole' else 600
  )
  write_config(directory, spec, dtype='float32', eos_ids=[1], pad_id=0)
  return directory


def told(read, directory):
  """The result of `read`, or None where the directory is refused."""
  before = state_of(directory)
  try:
    with quiet() as log, bounded():
      return read(directory)
  except UserError as error:
    check_line(str(error))
    return None
  finally:
    log.check()
    assert state_of(directory) == before


def loaded(directory):
  """Specification, parameters and special tokens."""
  spec = read_spec(directory)
  assert all(np.prod(entry.shape) > 0 for entry, _ in zip(entries(spec), range(1000)))
  return spec, load_params(directory, spec), read_special_tokens(directory)


def check_loaded(found):
  if found is not None:
    spec, params, special = found
    assert all(np.isfinite(leaf).all() for leaf in flatten(params).values())
    assert all(0 <= token < spec.vocab_size for token in special.eos_ids)


GENERATION = {
  'bos_token_id': 2,
  'eos_token_id': [1, 3],
  'pad_token_id': 0,
  'temperature': 0.7,
  'do_sample': True,
}
ROPES = (
  {'rope_theta': 10_000.0, 'rope_scaling': {'type': 'linear', 'factor': 2.0}},
  {'rope_parameters': {
    'rope_type': 'llama3', 'rope_theta': 1e5, 'factor': 8.0, 'low_freq_factor': 1.0,
    'high_freq_factor': 4.0, 'original_max_position_embeddings': 64,
  }},
  {'sliding_window': 32, 'use_sliding_window': True,
   'max_window_layers': 3, 'layer_types': ['full_attention']},
  {'architectures': ['LlamaForSequenceClassification'], 'id2label': {'0': 'a'}, 'num_labels': 1},
)  # fmt: skip


@COUNTS
@pytest.mark.parametrize('model', ['whole'], indirect=True)
def test_any_config_is_that_of_the_weights_or_refused(model, count):
  configs = []
  for spec in SPECS.values():
    write_config(model, spec, dtype='float32', eos_ids=[1], pad_id=0)
    configs.append(json.loads((model / 'config.json').read_text()))
  configs += [{**configs[0], **more} for more in ROPES]

  def check(config, generation):
    (model / 'config.json').write_bytes(config)
    (model / 'generation_config.json').write_bytes(generation)
    check_loaded(told(loaded, model))

  generations = st.one_of(st.just(json_bytes(GENERATION)), encoded(GENERATION))
  fuzz(
    check,
    count,
    config=st.sampled_from(range(len(configs))).flatmap(lambda i: encoded(configs[i])),
    generation=generations,
  )


@COUNTS
@pytest.mark.parametrize('model', ['whole'], indirect=True)
def test_any_file_of_weights_is_read_or_refused(model, count):
  """Changes of the header's JSON, and of the bytes; also numbers that are not finite."""
  file = model / 'model.safetensors'
  whole = file.read_bytes()
  (length,) = struct.unpack('<Q', whole[:8])
  header, body = json.loads(whole[8 : 8 + length]), whole[8 + length :]

  @st.composite
  def files(draw):
    match draw(st.integers(0, 3)):
      case 0:
        return draw(damaged(whole))
      case 1:
        place, value = draw(st.integers(0, len(body) // 4 - 1)), draw(st.floats(width=32))
        return (
          whole[: 8 + length] + body[: 4 * place] + struct.pack('<f', value) + body[4 * place + 4 :]
        )
    data = draw(encoded(header))
    size = draw(st.sampled_from([len(data), len(data), len(data), 0, 7, 1 << 62, len(data) + 8]))
    return struct.pack('<Q', size) + data + body

  def check(data):
    file.write_bytes(data)
    check_loaded(told(loaded, model))

  fuzz(check, count, data=files())


@COUNTS
@pytest.mark.parametrize('model', ['sharded'], indirect=True)
def test_any_index_of_weights_is_followed_within_the_directory_or_refused(model, count):
  index = json.loads((model / 'model.safetensors.index.json').read_text())
  shard = sorted(model.glob('model-*.safetensors'))[0]
  (model.parent / shard.name).write_bytes(shard.read_bytes())
  first = next(name for name, file in index['weight_map'].items() if file == shard.name)
  outside = (
    f'../{shard.name}',
    f'{model.parent}/{shard.name}',
    f'./../{shard.name}',
    'link.safetensors',
    'fifo.safetensors',
  )

  def check(data, path):
    (model / 'model.safetensors.index.json').write_bytes(data)
    check_loaded(told(loaded, model))
    named = {**index['weight_map'], first: path}
    (model / 'model.safetensors.index.json').write_bytes(json_bytes({'weight_map': named}))
    assert told(loaded, model) is None

  fuzz(check, count, data=encoded(index), path=st.sampled_from(outside))


@pytest.fixture(scope='module')
def tokenizers(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizers')
  build_character_tokenizer(['abc >'], folder / 'character', template='chatml')
  build_bpe_tokenizer(['abc abc >', 'naïve'], folder / 'bpe', vocab_size=280, template='plain')
  return {
    place.name: {file.name: file.read_bytes() for file in place.iterdir()}
    for place in folder.iterdir()
  }


def used(directory):
  """A tokenizer that works on one text, or refuses it."""
  tokenizer = Tokenizer.from_directory(directory)
  with contextlib.suppress(UserError):
    prompt, answer = tokenizer.render_answer(USER, 'ab')
    assert all(isinstance(token, int) for token in [*prompt, *answer])
    tokenizer.decode([*prompt, *answer])
    tokenizer.check_fits(10_000, 'the model')
  return tokenizer


@COUNTS
@pytest.mark.parametrize(
  'name', ['tokenizer.json', 'tokenizer_config.json', 'generation_config.json']
)
def test_any_tokenizer_is_used_or_refused(tmp_path, tokenizers, name, count):
  """Chat templates stay as they are: those of others need a process each."""
  directory = tmp_path / 'tokenizer'
  directory.mkdir()

  def check(kind, data):
    files = tokenizers[kind]
    for file, content in files.items():
      (directory / file).write_bytes(content)
    given = json.loads(files.get(name, json_bytes({'eos_token_id': [1, 2]})))
    if name == 'tokenizer.json' and kind == 'bpe' and data.draw(st.booleans()):
      # Most of it is the vocabulary.
      rest = {key: value for key, value in given.items() if key != 'model'}
      rest = data.draw(changed(rest))
      content = json_bytes({**rest, 'model': given['model']} if isinstance(rest, dict) else rest)
    else:
      content = data.draw(encoded(given))
    (directory / name).write_bytes(content)
    told(used, directory)

  fuzz(check, count, kind=st.sampled_from(['character', 'bpe']), data=st.data())


TEMPLATES = (
  "{% for m in messages %}{{ m['content'] }}{% endfor %}",
  '{{ messages[0].content ~ eos_token }}{% if add_generation_prompt %}>{% endif %}',
)
HOSTILE = (
  '{{ 1 / 0 }}', '{{ "x" * 10 ** 10 }}', '{% for i in range(10 ** 9) %}{% endfor %}',
  '{{ messages.__class__.__mro__ }}',
  '{{ ().__class__.__bases__[0].__subclasses__() '
  '}}', '{{ cycler.__init__.__globals__.os.system("touch x") }}',
  '{% include "/etc/passwd" '
  '%}', '{% import "os" as os %}', '{{ raise_exception("a\nb") }}', '{{ undefined.a.b }}',
  '{% macro m() %}{{ m() }}{% endmacro %}{{ m() '
  '}}', '{{ messages | tojson }}', '{%', '{{ "' + 'a' * 5000, '\ud800',
  '{% generation %}a{% endgeneration %}',
  '{% set x %}{% generation %}{{ "a" * 99 }}{% endgeneration %}{% endset %}b',
  '{% for i in range(10 ** 6) %}{% generation %}a{% endgeneration %}{% endfor %}',
  '{{ messages[0].content.format(messages) '
  '}}', '{{ lipsum(10 ** 6) }}', '', '{% set x = namespace(a=1) %}{{ x.a }}',
)  # fmt: skip


@pytest.mark.parametrize(
  'count',
  [
    pytest.param(SEEDED // 8, marks=pytest.mark.full),
    pytest.param(MANY // 20, marks=pytest.mark.acceptance),
  ],
)
def test_any_chat_template_renders_or_is_refused(count):
  """Each has a process, so that there are fewer of them."""
  pieces = st.one_of(
    st.sampled_from(HOSTILE),
    st.sampled_from(TEMPLATES),
    st.sampled_from(TEXTS),
    st.text(max_size=9),
  )

  def check(template):
    process = TemplateProcess(template)
    try:
      with bounded(), contextlib.closing(_Stopping(process)):
        text, marks = process.render(
          USER, add_generation_prompt=True, variables={'eos_token': '<eos>'}
        )
        assert all(0 <= start < end <= len(text) for start, end in marks)
    except RenderError as error:
      check_line(str(error))

  fuzz(check, count, template=st.lists(pieces, min_size=1, max_size=3).map(''.join))


class _Stopping:
  def __init__(self, process):
    self.close = process._stop


@COUNTS
def test_any_conversation_renders_or_is_refused(count):
  process = TemplateProcess(TEMPLATES[0] + "{{ '' if messages[0]['content'] else 1 / 0 }}")
  messages = [{'role': 'system', 'content': 'a'}, *USER]

  def check(given):
    try:
      with bounded():
        process.render(given, add_generation_prompt=True, variables={})
    except RenderError as error:
      check_line(str(error))

  texts = st.one_of(
    st.sampled_from([text for text in TEXTS if text]), st.text(min_size=1, max_size=5)
  )
  given = st.lists(
    st.tuples(st.sampled_from(['user', 'system', 'tool', '']), texts), min_size=1, max_size=3
  )
  fuzz(
    check,
    count,
    given=given.map(lambda some: [{'role': role, 'content': text} for role, text in some]),
  )
  assert process.render(messages, add_generation_prompt=True, variables={}).text == 'aabc'
  process._stop()
