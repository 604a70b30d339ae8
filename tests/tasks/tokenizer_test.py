import json
import os
import subprocess
import sys

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.tasks import rendering
from jaxrl_llm.tasks.tokenizer import (
  Tokenizer,
  TokenizerConfig,
  build_bpe_tokenizer,
  build_character_tokenizer,
  build_tokenizer,
)

TEXTS = ['later>', 'retal', 'the cat sat on the mat, the cat spat\n', 'naïve 日本']
USER = [{'role': 'user', 'content': 'later>'}]
CHAT = [
  {'role': 'system', 'content': 'a cat'},
  *USER,
  {'role': 'assistant', 'content': 'retal'},
  *USER,
]


def build(kind, template, directory):
  return build_tokenizer(
    TokenizerConfig(kind=kind, template=template, vocab_size=320), TEXTS, directory
  )


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  return {
    (kind, template): (build(kind, template, path := tmp_path_factory.mktemp('tok')), path)
    for kind in ('character', 'bpe')
    for template in ('plain', 'chatml')
  }


@pytest.fixture(scope='module')
def byte_level(built):
  return built['bpe', 'chatml'][0]


def test_character_ids_are_the_sorted_characters_then_the_special_tokens(tmp_path):
  tokenizer = build_character_tokenizer(['cab>', 'a\n'], tmp_path, template='plain')
  # sorted: '\n' 0, '>' 1, 'a' 2, 'b' 3, 'c' 4; then <pad> 5, <eos> 6
  assert tokenizer.encode('abc>\n\n') == [2, 3, 4, 1, 0, 0]
  assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.stop_ids, tokenizer.vocab_size) == (
    5,
    6,
    (6,),
    7,
  )
  assert [tokenizer.token_text(i) for i in range(7)] == ['\n', '>', 'a', 'b', 'c', '<pad>', '<eos>']
  assert (
    tokenizer.decode([2, 0, 3, 6, 5]) == 'a\nb'
    and tokenizer.decode([2, 6], skip_special=False) == 'a<eos>'
  )


def test_lacking_character_is_named(built):
  tokenizer, _ = built['character', 'plain']
  with pytest.raises(
    UserError, match=r"lacks 'Z' \(U\+005A LATIN CAPITAL LETTER Z\), found in 'later Z>'"
  ):
    tokenizer.encode('later Z>')
  with pytest.raises(UserError, match=r'U\+000D'):
    tokenizer.encode('\r')
  assert tokenizer.decode(tokenizer.encode('cat<eos>'), skip_special=False) == 'cat<eos>'


@given(st.text(alphabet=sorted(set(''.join(TEXTS)))))
@settings(max_examples=200, deadline=None)
def test_character_text_round_trips(built, text):
  tokenizer, _ = built['character', 'plain']
  ids = tokenizer.encode(text)
  assert len(ids) == len(text) and tokenizer.decode(ids) == text


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_any_text_round_trips_through_bytes(byte_level, text):
  assert byte_level.decode(byte_level.encode(text), skip_special=False) == text


def test_every_byte_has_a_token(byte_level):
  # UTF-8 uses all bytes but C0, C1 and F5..FF; these code points meet each of the others
  code_points = [
    *range(0x80),
    *range(0x80, 0x800, 7),
    *range(0x800, 0xD800, 97),
    *range(0xE000, 0x110000, 4093),
  ]
  text = ''.join(map(chr, code_points)) + ''.join(chr(0x80 + i) for i in range(64))
  assert set(text.encode()) == set(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
  assert byte_level.decode(byte_level.encode(text), skip_special=False) == text


def test_bpe_learns_frequent_words_within_its_size(built):
  tokenizer, _ = built['bpe', 'plain']
  assert 258 < tokenizer.vocab_size <= 320
  assert len(tokenizer.encode(' the cat')) < len(' the cat') / 2


def test_plain_prompt_is_the_contents_and_an_answer_ends_with_eos(built):
  for kind in ('character', 'bpe'):
    tokenizer, _ = built[kind, 'plain']
    assert (
      tokenizer.decode(tokenizer.render_prompt(CHAT), skip_special=False)
      == 'a catlater>retal<eos>later>'
    )
    prompt, completion = tokenizer.render_answer(USER, 'retal')
    assert prompt == tokenizer.render_prompt(USER) == tokenizer.encode('later>')
    assert completion == [*tokenizer.encode('retal'), tokenizer.eos_id]


def test_chatml_is_what_its_users_expect(built):
  for kind in ('character', 'bpe'):
    tokenizer, _ = built[kind, 'chatml']
    turns = (
      '<|im_start|>system\na '
      'cat<|im_end|>\n<|im_start|>user\nlater><|im_end|>\n<|im_start|>assistant\n'
    )
    prompt, completion = tokenizer.render_answer(CHAT[:2], 'retal')
    assert prompt == tokenizer.render_prompt(CHAT[:2])
    assert tokenizer.decode(prompt, skip_special=False) == turns
    assert (
      tokenizer.decode(completion, skip_special=False) == 'retal<|im_end|>'
      and completion[-1] == tokenizer.eos_id
    )
    assert (
      tokenizer.decode([*prompt, *completion]) == 'system\na cat\nuser\nlater>\nassistant\nretal'
    )


def test_answer_that_ends_in_blanks_keeps_them(built):
  for tokenizer, _ in built.values():
    _, completion = tokenizer.render_answer(USER, 'cat \n')
    assert tokenizer.decode(completion) == 'cat \n' and completion[-1] == tokenizer.eos_id
    assert completion.count(tokenizer.eos_id) == 1


@pytest.mark.parametrize('kind', ['character', 'bpe'])
@pytest.mark.parametrize('template', ['plain', 'chatml'])
def test_saved_directory_is_the_same_tokenizer_in_transformers(built, tmp_path, kind, template):
  tokenizer, _ = built[kind, template]
  tokenizer.save(tmp_path / 'saved')
  for loader in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
    theirs = loader.from_pretrained(str(tmp_path / 'saved'))
    for text in [*TEXTS, 'the naïve mat']:
      assert theirs(text)['input_ids'] == tokenizer.encode(text)
      assert theirs.decode(tokenizer.encode(text)) == text
    rendered = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(rendered) == tokenizer.render_prompt(CHAT)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    assert theirs.decode(
      tokenizer.render_prompt(CHAT), skip_special_tokens=True
    ) == tokenizer.decode(tokenizer.render_prompt(CHAT))


def preceding(token, number):
  """A post-processor that puts a special token before a text."""
  special = {'SpecialToken': {'id': token, 'type_id': 0}}
  text, second = ({'Sequence': {'id': name, 'type_id': 0}} for name in 'AB')
  return {
    'type': 'TemplateProcessing',
    'single': [special, text],
    'pair': [special, text, second],
    'special_tokens': {token: {'id': token, 'ids': [number], 'tokens': [token]}},
  }


@pytest.mark.parametrize(
  'stored',
  [
    {},
    {'post_processor': preceding('<|im_start|>', 1)},
    {
      'truncation': {
        'max_length': 3,
        'stride': 0,
        'strategy': 'LongestFirst',
        'direction': 'Right',
      }
    },
    {
      'padding': {
        'strategy': {'Fixed': 64},
        'direction': 'Left',
        'pad_to_multiple_of': None,
        'pad_id': 0,
        'pad_type_id': 0,
        'pad_token': '<pad>',
      }
    },
  ],
  ids=['nothing', 'post-processor', 'truncation', 'padding'],
)
@pytest.mark.parametrize(
  'settings', [{}, {'split_special_tokens': True}, {'clean_up_tokenization_spaces': True}], ids=str
)
def test_texts_and_tokens_are_whole_whatever_settings_a_tokenizer_stores(
  built, tmp_path, stored, settings
):
  built['bpe', 'chatml'][0].save(tmp_path)
  change_json(tmp_path / 'tokenizer.json', **stored)
  change_json(tmp_path / 'tokenizer_config.json', **settings)
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
  tokenizer = Tokenizer.from_directory(tmp_path)
  text = "the cat , isn't .<|im_end|>"
  for special in (False, True):
    ids = theirs.encode(text, add_special_tokens=special)
    assert tokenizer.encode(text, add_special_tokens=special) == ids
  assert (len(ids) > len(tokenizer.encode(text))) == ('post_processor' in stored)
  ids = tokenizer.encode(text)
  for repeated in (1, 500):  # Many tokens are decoded in another way.
    assert tokenizer.decode(ids * repeated, skip_special=False) == text * repeated
    shown = theirs.decode(
      ids * repeated, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert tokenizer.decode(ids * repeated) == shown


def test_building_and_saving_are_deterministic(built, tmp_path):
  for (kind, template), (tokenizer, path) in built.items():
    build(kind, template, tmp_path / kind / template)
    tokenizer.save(tmp_path / 'saved' / kind / template)
    for copy in (tmp_path / kind / template, tmp_path / 'saved' / kind / template):
      assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
        p.name: p.read_bytes() for p in path.iterdir()
      }


def test_existing_tokenizer_is_taken_as_it_is(built, tmp_path):
  _, path = built['bpe', 'chatml']
  taken = build_tokenizer(TokenizerConfig(path=str(path)), ['ignored'], tmp_path / 'run')
  assert (tmp_path / 'run' / 'tokenizer.json').read_bytes() == (
    path / 'tokenizer.json'
  ).read_bytes()
  assert taken.encode('cat') == built['bpe', 'chatml'][0].encode('cat')


def test_generation_config_adds_stop_tokens(built, tmp_path):
  tokenizer, _ = built['character', 'chatml']
  tokenizer.save(tmp_path)
  (tmp_path / 'generation_config.json').write_text(
    json.dumps({'eos_token_id': [tokenizer.pad_id, tokenizer.eos_id]})
  )
  wanted = (tokenizer.eos_id, tokenizer.pad_id)
  assert Tokenizer.from_directory(tmp_path).stop_ids == wanted
  # A run keeps them with its copy of the tokenizer.
  build_tokenizer(TokenizerConfig(path=str(tmp_path)), [], tmp_path / 'run')
  assert Tokenizer.from_directory(tmp_path / 'run').stop_ids == wanted


def test_template_without_a_stop_token_still_ends_the_answer(built, tmp_path):
  tokenizer, _ = built['character', 'plain']
  tokenizer.save(tmp_path)
  (tmp_path / 'chat_template.jinja').write_text(
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
  )
  _, completion = Tokenizer.from_directory(tmp_path).render_answer(USER, 'cat')
  assert completion == [*tokenizer.encode('cat\n'), tokenizer.eos_id]


def test_directory_that_is_no_tokenizer_is_one_line(built, tmp_path):
  built['character', 'plain'][0].save(tmp_path / 'mute')
  (tmp_path / 'mute' / 'chat_template.jinja').unlink()
  built['character', 'plain'][0].save(tmp_path / 'refusing')
  (tmp_path / 'refusing' / 'chat_template.jinja').write_text(
    "{{ raise_exception('no system role') }}"
  )
  for make, message in [
    (lambda: Tokenizer.from_directory(tmp_path / 'none'), 'no tokenizer.json'),
    (lambda: Tokenizer.from_directory(tmp_path / 'mute'), 'no chat template'),
    (lambda: Tokenizer.from_directory(tmp_path / 'refusing').render_prompt(USER), 'no system role'),
    (
      lambda: build_bpe_tokenizer(TEXTS, tmp_path, vocab_size=100, template='plain'),
      'at least 258',
    ),
    (lambda: build_character_tokenizer([], tmp_path, template='plain'), 'empty'),
  ]:
    with pytest.raises(UserError, match=message):
      make()


def as_fifo(path):
  path.unlink(missing_ok=True)
  os.mkfifo(path)


def change_json(path, **changes):
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DEEP = '{"a": ' + '[' * 100_000 + ']' * 100_000 + '}'
HOSTILE = {
  'deep tokenizer': (
    'tokenizer.json',
    lambda path: path.write_text(DEEP),
    'tokenizer.json: nested more than 100',
  ),
  'deep settings': (
    'tokenizer_config.json',
    lambda path: path.write_text(DEEP),
    'tokenizer_config.json: nested more',
  ),
  'no object': (
    'tokenizer.json',
    lambda path: path.write_text('[]'),
    'tokenizer.json: holds a list, wanted a JSON',
  ),
  'panic': (
    'tokenizer.json',
    lambda path: change_json(
      path, normalizer={'type': 'Precompiled', 'precompiled_charsmap': 'BAAAAHg='}
    ),
    'cannot be read: Precompiled',
  ),
  'no model': (
    'tokenizer.json',
    lambda path: change_json(path, model={'type': 'x'}),
    'cannot be read',
  ),
  'FIFO': ('chat_template.jinja', as_fifo, 'chat_template.jinja is a FIFO, wanted a regular file'),
  'further FIFO': (
    'special_tokens_map.json',
    as_fifo,
    'special_tokens_map.json is a FIFO, wanted a regular file',
  ),
  'no text': (
    'generation_config.json',
    lambda path: path.write_text('{"eos'),
    'generation_config.json: Unterminated',
  ),
  'list': (
    'generation_config.json',
    lambda path: path.write_text('[]'),
    'generation_config.json: holds a list',
  ),
  'end': (
    'generation_config.json',
    lambda path: path.write_text('{"eos_token_id": [5, 1000000000]}'),
    'eos_token_id of generation_config.json has 1000000000, wanted ids of its',
  ),
  'text for an end': (
    'generation_config.json',
    lambda path: path.write_text('{"eos_token_id": "5"}'),
    'generation_config.json has 5, wanted ids',
  ),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_a_hostile_tokenizer_is_one_line(built, tmp_path, name):
  file, change, message = HOSTILE[name]
  built['character', 'chatml'][0].save(tmp_path)
  change(tmp_path / file)
  with pytest.raises(UserError) as raised:
    Tokenizer.from_directory(tmp_path)
  said = str(raised.value)
  assert (
    said.startswith(f'tokenizer {tmp_path}: ')
    and message in said
    and '\n' not in said
    and len(said) < 1000
  )


def test_used_tokens_that_a_model_lacks_are_refused_and_others_are_a_warning(
  built, tmp_path, caplog
):
  tokenizer, _ = built['character', 'plain']
  tokenizer.check_fits(tokenizer.vocab_size, 'the model')
  assert not caplog.records
  last = tokenizer.vocab_size - 1
  with pytest.raises(
    UserError, match=rf"token {last} \('<eos>'\), but the model has only {last} tokens"
  ):
    tokenizer.check_fits(last, 'the model')
  # An end token that the tokenizer has not is added to it, after all that the model knows.
  tokenizer.save(tmp_path)
  change_json(tmp_path / 'tokenizer_config.json', eos_token='<end>')
  with pytest.raises(UserError, match="'<end>'"):
    Tokenizer.from_directory(tmp_path).check_fits(tokenizer.vocab_size, 'the model')
  unused, _ = built['bpe', 'plain']
  tokenizer_json = json.loads(unused.files['tokenizer.json'])
  number = unused.vocab_size
  added = {**tokenizer_json['added_tokens'][0], 'id': number, 'content': '<unused>'}
  unused.save(tmp_path / 'unused')
  change_json(
    tmp_path / 'unused' / 'tokenizer.json', added_tokens=[*tokenizer_json['added_tokens'], added]
  )
  Tokenizer.from_directory(tmp_path / 'unused').check_fits(number, 'the model')
  assert f"token {number} ('<unused>')" in caplog.text and '1 tokens cannot be used' in caplog.text


@pytest.mark.parametrize('kind', ['character', 'bpe'])
def test_a_lone_surrogate_is_one_line(built, kind):
  for make in (
    Tokenizer.encode,
    lambda tokenizer, text: tokenizer.render_prompt([{'role': 'user', 'content': text}]),
  ):
    with pytest.raises(UserError, match='ud800') as raised:
      make(built[kind, 'plain'][0], 'the \ud800')
    assert '\n' not in str(raised.value)


ONE_OF_MANY = """
{%- macro again() %}{{ again() }}{% endmacro -%}
{%- set what, one = messages[0].content, messages|length -%}
{%- if what == 'zero' %}{{ 1 / 0 }}
{%- elif what == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor \
%}{% endfor %}
{%- elif what == 'power' %}{{ 9 ** (9 ** (8 + one)) }}
{%- elif what == 'memory' %}{{ 'x' * one * 10 ** 10 }}
{%- elif what == 'long' %}{{ 'x' * one * 20000000 }}
{%- elif what == 'recursion' %}{{ again() }}
{%- elif what == 'lines' %}{{ raise_exception('one\nline') }}
{%- else %}{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token \
}}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}{% endif %}"""


@pytest.mark.full
def test_a_template_that_fails_or_never_ends_is_one_line(built, tmp_path, monkeypatch):
  monkeypatch.setattr(rendering, 'LIMITS', rendering.RenderingLimits(cpu_s=1.0))
  built['bpe', 'plain'][0].save(tmp_path)
  (tmp_path / 'chat_template.jinja').write_text(ONE_OF_MANY)
  tokenizer = Tokenizer.from_directory(tmp_path)

  def refused(what, message):
    with pytest.raises(UserError) as raised:
      tokenizer.render_prompt([{'role': 'user', 'content': what}])
    said = str(raised.value)
    assert said.startswith(f'tokenizer {tmp_path}: its chat template refuses [') and message in said
    assert '\n' not in said and len(said) < 1000

  refused('zero', 'ZeroDivisionError: division by zero; correct the template')
  refused('memory', 'MemoryError')
  refused('long', 'gives 20,000,000 characters, wanted at most 16,777,216')
  refused('recursion', 'RecursionError')
  refused('lines', 'TemplateError: one line;')
  refused('loop', 'took more than 1 s of CPU time')
  # What transformers makes of it, also after a rendering that was ended.
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
  chat = [*CHAT, {'role': 'user', 'content': 'naïve\n日本 {{ 1 / 0 }} <eos>'}]
  wanted = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
  assert tokenizer.render_prompt(chat) == list(wanted)
  refused('power', 'took more than 1 s of CPU time')


def launch(*args):
  command = [sys.executable, str(ROOT / 'launch' / 'tokenizer.py'), *args]
  return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.mark.full
def test_launch_script_makes_a_directory_and_shows_a_round_trip(tmp_path):
  (tmp_path / 'train.jsonl').write_text('{"question": "2+3", "answer": "two and three: #### 5"}\n')
  done = launch(
    f'--source={tmp_path}/train.jsonl',
    '--prompt={question}=',
    '--truth={answer:after ####}',
    f'--target={tmp_path}/t',
  )
  assert done.returncode == 0, done.stderr
  # characters + 2 3 5 =, two special tokens: '+' 0, '2' 1, '3' 2, '5' 3, '=' 4, <pad> 5, <eos> 6
  assert (
    'vocabulary of 7 tokens' in done.stdout and "'2+3=5<eos>' <-> [1, 0, 2, 4, 3, 6]" in done.stdout
  )
  assert Tokenizer.from_directory(tmp_path / 't').encode('5=') == [3, 4]


@pytest.mark.full
def test_launch_script_says_bad_input_in_one_line(tmp_path):
  (tmp_path / 'train.jsonl').write_text('{"question": "2+3"}\n')
  done = launch(f'--source={tmp_path}/trian.jsonl', f'--target={tmp_path}/t')
  assert done.returncode == 2 and not (tmp_path / 't').exists()
  assert done.stderr.strip().splitlines() == [
    f'error: {tmp_path}/trian.jsonl: no such file; did you mean {tmp_path}/train.jsonl?'
  ]
