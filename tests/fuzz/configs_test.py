"""Configurations, changed in every way: each is built and written down, or refused in one line."""

import json
import sys

import jax
from fuzzing import (
  COUNTS,
  NUMBERS,
  TEXTS,
  bounded,
  changed,
  check_line,
  damaged,
  encoded,
  fuzz,
  quiet,
  state_of,
)
from hypothesis import strategies as st
from paths import FIXTURES, ROOT

from jaxrl_llm.app.commands.option_flags import read_options, split_options
from jaxrl_llm.app.composition.scorers import SCORERS, build_scorers
from jaxrl_llm.app.composition.stages import build_processors, build_stages
from jaxrl_llm.app.composition.workdir import Workdir
from jaxrl_llm.app.offline.reopen import config_of_run
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import apply_overrides, difference, load_config, load_file
from jaxrl_llm.config.own import own_part
from jaxrl_llm.config.values import check_types, from_json, to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.rewards.api import RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.pool.live import parse

CONFIGS = {
  name: load_file(str(ROOT / 'configs' / name), Config)
  for name in (
    'quickstart.py',
    'ppo.py',
    'dpo.py',
    'mix.py',
    'lora.py',
    'grpo.py:dapo',
    'asynchronous.py',
    'opmd.py',
  )
}
MESH = build_mesh(MeshConfig(), jax.devices()[:1])
VALUES = st.one_of(
  st.sampled_from([text for text in TEXTS if len(text) < 1000]),
  st.sampled_from([str(number) for number in NUMBERS]),
  st.sampled_from(
    [
      '1e5000',
      '9' * 5000,
      '1e999999999999999999999',
      '1,2',
      '(0.9, 0.9)',
      '[1',
      '{"a": 1}',
      '[[]]',
      'none',
    ]
  ),
  st.floats().map(str),
  st.integers().map(str),
  st.text(max_size=10),
)


def keys_of(tree, prefix=''):
  """The dotted keys of a configuration's JSON."""
  for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
    if isinstance(value, dict) and isinstance(value.get('name'), str) and prefix:
      name = value['name'] if isinstance(tree, list) else name
    yield f'{prefix}{name}'
    if isinstance(value, dict | list):
      yield from keys_of(value, f'{prefix}{name}.')


@st.composite
def overrides(draw, config):
  """A few, for keys that there are and for some that there are not."""
  keys = [*keys_of(to_json(config))]
  found = {}
  for _ in range(draw(st.integers(1, 3))):
    key = draw(st.sampled_from(keys))
    match draw(st.integers(0, 9)):
      case 0:
        key += draw(
          st.sampled_from(
            ['.', '.name', '.0', '.x.y.z', '..', '.-1', ' ', '.' + '9' * 5000, '\n', '.\ud800']
          )
        )
      case 1:
        key = draw(st.text(max_size=6))
    found[key] = draw(VALUES)
  return found


def refused(call):
  """None where the call is well, else its one line."""
  try:
    with quiet() as log, bounded():
      call()
  except UserError as error:
    check_line(str(error))
    return str(error)
  finally:
    log.check()


def check_config(config):
  """An accepted configuration can be written, read again and built, or building it is refused."""
  check_types(config)
  assert from_json(json.loads(json.dumps(to_json(config))), Config) == config
  assert difference(config, config) == []
  refused(lambda: build_scorers(config.rewards))
  for source in (stage.source for stage in config.stages if stage.explores):
    refused(lambda source=source: build_processors(source.processors))
  refused(lambda: build_stages(config, MESH, 64, {}))


@COUNTS
def test_any_override_is_taken_or_refused(count):
  def check(name, data):
    given = data.draw(overrides(CONFIGS[name]))
    refused(lambda: check_config(apply_overrides(CONFIGS[name], given)))

  fuzz(check, count, name=st.sampled_from([*CONFIGS]), data=st.data())


@COUNTS
def test_any_command_line_is_taken_or_refused(count):
  """Also of launch/score.py, which has options of its own."""
  from absl import flags

  values = flags.FlagValues()
  flags.DEFINE_string('workdir', None, '', flag_values=values)
  flags.DEFINE_integer('port', 0, '', 0, 65535, flag_values=values)
  flags.DEFINE_bool('dry_run', False, '', flag_values=values)
  words = st.one_of(
    st.sampled_from([
      f'--config={ROOT}/configs/quickstart.py', '--config', '--config.', '--config=',
      '--config.seed=3', '--port', '--port=99999', '--dry_run=perhaps', '--nodry_run', '--', '-',
      '--workdir', '--wrokdir=x', '--flagfile=/dev/null', '--options.a=1', '--options.a.b',
      '--config.stages.grpo', 'stray', '--config=x.py:y', '--config.seed=' + '9' * 5000,
    ]),
    st.sampled_from([text for text in TEXTS if len(text) < 1000]),
    st.text(max_size=8).map(lambda text: f'--{text}'),
  )  # fmt: skip

  def check(argv):
    values.unparse_flags()
    refused(lambda: load_config(['train.py', *argv], Config, flag_values=values))
    _, options = split_options(
      [word for word in argv if '=' in word or not word.startswith('--options')]
    )
    refused(lambda: read_options('{}', options))

  fuzz(check, count, argv=st.lists(words, max_size=5))


FILE = b"""import math
VALUES = {'a': [1, 2]}
def get_config(variant: str = ''):
  return math.sqrt(len(VALUES['a']))
"""
BODIES = (
  'raise ValueError("first\\nsecond")', 'raise KeyError', 'import nothing_of_this_name',
  'from math import nothing', 'raise RecursionError', 'def get_config(): return get_config()',
  'get_config = 3', 'def get_config(a, b): pass',
  'def get_config(variant): raise Exception(variant)',
  'class E(Exception):\n  def __str__(self): return "a\\nb"\nraise E',
  'def get_config(**k): return k', '\x00', 'x = ' + '(' * 500, '1' * 5000, '# coding: nothing\n',
  "'\\ud800'.encode()", 'from __future__ import nothing', 'assert False, "\\x1b[2J"',
  'def get_config(variant="\\n"): return variant',
)  # fmt: skip


@COUNTS
def test_any_file_is_a_configuration_or_refused(tmp_path, count):
  file = tmp_path / 'fuzzed.py'
  files = st.one_of(
    damaged(FILE), st.sampled_from(BODIES).map(lambda text: text.encode()), st.just(FILE)
  )

  def check(content, variant):
    file.write_bytes(content)
    assert refused(lambda: load_file(f'{file}{variant}', Config)), (
      'none of these gives a configuration'
    )

  variants = st.one_of(
    st.just(''), st.sampled_from([text for text in TEXTS if len(text) < 1000]).map(':{}'.format)
  )
  try:
    fuzz(check, count, content=files, variant=variants)
  finally:
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


@COUNTS
def test_the_written_configuration_of_a_run_is_read_or_refused(tmp_path, count):
  """Reads the run again, and starts it a second time, which leaves it as it is."""
  config = CONFIGS['ppo.py']
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  (tmp_path / 'checkpoints' / '1' / 'COMMIT').touch()
  workdir = Workdir(tmp_path)

  def check(data):
    (tmp_path / 'config.json').write_bytes(data)
    before = state_of(tmp_path)
    refused(lambda: check_config(config_of_run(tmp_path)))
    if refused(lambda: workdir.adopt(config)):
      assert state_of(tmp_path) == before

  former = json.loads((FIXTURES / 'config_before_sources.json').read_text())
  fuzz(check, count, data=st.one_of(encoded(to_json(config)), encoded(former)))


@COUNTS
def test_the_file_that_changes_scorers_in_a_run_is_taken_or_refused(count):
  good = {
    'workers': 4,
    'addresses': {'judge': ['http://127.0.0.1:8000'], 'code': ['unix:/a', 'https://b:1']},
  }

  def check(data):
    refused(lambda: parse(data.decode('utf-8', 'replace')))

  fuzz(check, count, data=encoded(good))


OWN = {
  'broken': 'this is no Python',
  'raising': 'raise ZeroDivisionError("a\\nb")',
  'empty': '',
  'importing': 'import missing_x',
  'escaping': 'raise ImportError("\\x1b[2J")',
  'good': 'value = 3\ndef scorer(**options): return lambda attempt: 1.0',
}


@COUNTS
def test_any_name_of_a_part_of_ones_own_is_taken_or_refused(tmp_path, monkeypatch, count):
  for name, text in OWN.items():
    (tmp_path / f'{name}_part.py').write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  modules = st.one_of(
    st.sampled_from([f'{name}_part' for name in OWN]), st.sampled_from(TEXTS), st.text(max_size=5)
  )
  names = st.tuples(
    modules,
    st.sampled_from(['', ':', ':value', ':scorer', ':a.b', ':__class__', ':\ud800', ':a:b']),
  )

  def check(name):
    refused(lambda: own_part(''.join(name), 'scorer'))

  fuzz(check, count, name=names)


@COUNTS
def test_any_options_of_a_scorer_are_taken_or_refused(count):
  """Values of the wrong kind and out of range; a scorer that is built says nothing yet."""
  options = {
    'answer': {
      'mode': 'numeric',
      'units': 'refused',
      'absolute_tolerance': 0.1,
      'extraction': ['boxed'],
      'tag': 'answer',
    },
    'verifier': {'extraction': 'whole', 'partial_credit': True, 'isolation': 'auto'},
    'code': {'limits': {'wall_s': 1.0}, 'addresses': ['unix:/a'], 'extraction': 'last'},
    'judge': {'addresses': ['http://127.0.0.1:1'], 'model': 'm', 'retries': 1},
    'http': {'addresses': ['http://127.0.0.1:1/'], 'retries': 1},
    'length': {'max_tokens': 9, 'limit': 3},
    'overlong': {'limit': 9, 'buffer': 3},
    'format': {'pattern': '<think>.*', 'tags': ['think']},
    'repetition': {'ngram': 3, 'penalty': 0.1},
    'language': {'language': 'en'},
  }
  cases = [(name, options.get(name, {'a': 1})) for name in SCORERS]

  def check(case, data):
    name, given = case
    given = data.draw(changed(given))
    given = given if isinstance(given, dict) else {'a': given}

    def build():
      (config,) = from_json([{'name': name, 'options': given}], tuple[ScorerConfig, ...])
      build_scorers(RewardsConfig(scorers=(config,)))

    refused(build)

  fuzz(check, count, case=st.sampled_from(cases), data=st.data())


def test_the_configurations_that_are_fuzzed_are_good():
  """So that refusals are of the changes."""
  for config in CONFIGS.values():
    check_config(config)
    assert refused(lambda config=config: build_stages(config, MESH, 64, {})) is None
