"""Configuration files, overrides, their errors (one line each, in full), JSON and differences."""

import dataclasses
import enum
import functools
import json
import math
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.config.load import (
  ABSENT,
  apply_overrides,
  difference,
  load_config,
  load_file,
  parse_flags,
  parse_overrides,
  split_argv,
)
from jaxrl_llm.config.values import check_types, from_json, to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json


class Mode(enum.StrEnum):
  FAST = 'fast'
  EXACT = 'exact'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  kind: Literal['constant', 'cosine'] = 'constant'
  warmup: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
  peak_lr: float
  betas: tuple[float, float] = (0.9, 0.95)
  clip: float | None = 1.0
  schedule: Schedule = Schedule(kind='cosine')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
  low: float = 0.2
  high: float = 0.2

  def __post_init__(self):
    if self.low > self.high:
      raise ValueError(f'low {self.low} is above high {self.high}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  name: str
  steps: int
  optimizer: Optimizer | None = None
  engine: Clip | Schedule = Schedule()
  """A choice between two dataclasses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  name: str
  options: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  weights: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Root:
  name: str = 'run'
  seed: int | str = 0
  shuffle: bool = True
  limit: float = math.inf
  mode: Mode = Mode.FAST
  level: Literal[1, 2] = 1
  path: str | None = None
  remat: Literal['none', 'full'] | None = None
  clip: Clip = Clip()
  words: tuple[str, ...] = ()
  free: Any = None
  tasksets: tuple[Source, ...] = ()
  stages: tuple[Stage, ...] = ()


def root(**fields) -> Root:
  stages = (
    Stage(name='sft', steps=5),
    Stage(name='grpo', steps=7, optimizer=Optimizer(peak_lr=1e-3)),
  )
  return Root(
    stages=stages,
    tasksets=(Source(name='train', options={'low': 3}), Source(name='eval')),
    **fields,
  )


def override(**texts: str) -> Root:
  return apply_overrides(root(), {key.replace('__', '.'): text for key, text in texts.items()})


def message(call, *args) -> str:
  with pytest.raises(UserError) as caught:
    call(*args)
  assert caught.value.exit_code == 2
  assert '\n' not in str(caught.value)
  return str(caught.value)


def refusal(key: str, text: str) -> str:
  return message(apply_overrides, root(), {key: text})


@pytest.mark.parametrize(
  ('key', 'text', 'read', 'wanted'),
  [
    ('name', 'spell run', lambda c: c.name, 'spell run'),
    ('name', '7', lambda c: c.name, '7'),
    ('name', 'none', lambda c: c.name, 'none'),
    ('name', '"x"', lambda c: c.name, '"x"'),
    ('seed', '7', lambda c: c.seed, 7),
    ('seed', 'seven', lambda c: c.seed, 'seven'),
    ('shuffle', 'false', lambda c: c.shuffle, False),
    ('shuffle', 'True', lambda c: c.shuffle, True),
    ('limit', '3', lambda c: c.limit, 3.0),
    ('limit', '-inf', lambda c: c.limit, -math.inf),
    ('mode', 'exact', lambda c: c.mode, Mode.EXACT),
    ('mode', 'EXACT', lambda c: c.mode, Mode.EXACT),
    ('level', '2', lambda c: c.level, 2),
    ('path', 'none', lambda c: c.path, None),
    ('path', '"none"', lambda c: c.path, 'none'),
    ('path', 'a=b', lambda c: c.path, 'a=b'),
    ('remat', 'none', lambda c: c.remat, 'none'),
    ('remat', 'null', lambda c: c.remat, None),
    ('clip.low', '-1e-6', lambda c: c.clip.low, -0.000001),
    ('words', 'a, b', lambda c: c.words, ('a', 'b')),
    ('words', '(a,)', lambda c: c.words, ('a',)),
    ('words', '["a,b", "c"]', lambda c: c.words, ('a,b', 'c')),
    ('words', '', lambda c: c.words, ()),
    ('free.a.b', '[1, {"c": null}]', lambda c: c.free, {'a': {'b': [1, {'c': None}]}}),
    ('stages.1.steps', '10', lambda c: c.stages[1].steps, 10),
    ('stages.grpo.steps', '1_000', lambda c: c.stages[1].steps, 1000),
    ('stages.grpo.steps', '1e3', lambda c: c.stages[1].steps, 1000),
    ('stages.grpo.steps', '2.5e3', lambda c: c.stages[1].steps, 2500),
    ('stages.grpo.optimizer.betas', '0.9,0.99', lambda c: c.stages[1].optimizer.betas, (0.9, 0.99)),
    ('stages.grpo.optimizer.betas.1', '0.5', lambda c: c.stages[1].optimizer.betas, (0.9, 0.5)),
    ('stages.grpo.optimizer.clip', 'None', lambda c: c.stages[1].optimizer.clip, None),
    ('stages.grpo.optimizer', 'none', lambda c: c.stages[1].optimizer, None),
    (
      'stages.sft.optimizer',
      '{"peak_lr": 1}',
      lambda c: c.stages[0].optimizer,
      Optimizer(peak_lr=1.0),
    ),
    (
      'stages.sft.engine',
      '{"@type": "Clip", "high": 1}',
      lambda c: c.stages[0].engine,
      Clip(high=1.0),
    ),
    ('stages.sft.engine.warmup', '4', lambda c: c.stages[0].engine, Schedule(warmup=4)),
    (
      'tasksets.train.options.max_word_len',
      '7',
      lambda c: c.tasksets[0].options,
      {'low': 3, 'max_word_len': 7},
    ),
    ('tasksets.train.options.low', 'word', lambda c: c.tasksets[0].options, {'low': 'word'}),
    ('tasksets.train.options.low', '"7"', lambda c: c.tasksets[0].options, {'low': '7'}),
    ('tasksets.train.options.low', 'True', lambda c: c.tasksets[0].options, {'low': True}),
    ('tasksets.train.options', '{"a": 1}', lambda c: c.tasksets[0].options, {'a': 1}),
    ('tasksets.eval.weights.a', '2', lambda c: c.tasksets[1].weights, {'a': 2.0}),
  ],
)
def test_text_becomes_the_value_that_the_annotation_wants(key, text, read, wanted):
  value = read(apply_overrides(root(), {key: text}))
  assert (value, type(value)) == (wanted, type(wanted))


@pytest.mark.parametrize(
  ('key', 'text', 'line'),
  [
    ('shufle', 'true', "--config.shufle: Root has no field 'shufle'; did you mean 'shuffle'?"),
    ('clip.zzz', '1', "--config.clip.zzz: Clip has no field 'zzz'; available: low, high"),
    (
      'stages.grpo.optimizer.peek_lr',
      '1',
      "--config.stages.grpo.optimizer.peek_lr: Optimizer has no field 'peek_lr'; did you mean "
      "'peak_lr'?",
    ),
    ('stages.gpro.steps', '1', "--config.stages.gpro: no such element; did you mean 'grpo'?"),
    ('stages.2.steps', '1', '--config.stages.2: no such element; available: sft, grpo'),
    ('words.0', 'a', '--config.words.0: no such element; wanted a position: none, it is empty'),
    ('stages.grpo.steps', 'ten', "--config.stages.grpo.steps: got 'ten', wanted an integer"),
    ('stages.grpo.steps', '1.5', "--config.stages.grpo.steps: got '1.5', wanted an integer"),
    ('stages.grpo.steps', '15e-1', "--config.stages.grpo.steps: got '15e-1', wanted an integer"),
    (
      'stages.grpo.steps',
      '1e999999999',
      "--config.stages.grpo.steps: got '1e999999999', wanted an integer",
    ),
    (
      'stages.grpo.steps',
      f'1e{"9" * 30}',
      f"--config.stages.grpo.steps: got '1e{'9' * 30}', wanted an integer",
    ),
    ('stages.grpo.steps', '', "--config.stages.grpo.steps: got '', wanted an integer"),
    ('shuffle', '1', "--config.shuffle: got '1', wanted true or false"),
    ('limit', 'nan', "--config.limit: got 'nan', wanted a number"),
    (
      'mode',
      'exakt',
      "--config.mode: got 'exakt', wanted one of fast, exact; did you mean 'exact'?",
    ),
    ('level', '3', "--config.level: got '3', wanted one of 1, 2"),
    ('remat', 'half', "--config.remat: got 'half', wanted one of none, full or none"),
    ('clip', 'wide', "--config.clip: got 'wide', wanted a Clip"),
    ('clip', '{"low": "a"}', "--config.clip.low: got 'a' (str), wanted a number"),
    ('clip', '{"lo": 1}', "--config.clip.lo: Clip has no field 'lo'; did you mean 'low'?"),
    ('name.x', '1', "--config.name.x: --config.name is text and has no parts (now 'run')"),
    (
      'stages.grpo.optimizer.betas',
      '1',
      '--config.stages.grpo.optimizer.betas: got 1 elements, wanted 2: a tuple of (a number, a '
      'number)',
    ),
    (
      'stages.grpo.optimizer.betas',
      '1,x',
      "--config.stages.grpo.optimizer.betas.1: got 'x', wanted a number",
    ),
    ('tasksets.eval.weights.a', 'x', "--config.tasksets.eval.weights.a: got 'x', wanted a number"),
    (
      'tasksets.eval.options.a',
      '[1,',
      "--config.tasksets.eval.options.a: got '[1,', which is not JSON: Expecting value: line 1 "
      'column 4 (char 3)',
    ),
    (
      'stages.sft.optimizer.clip',
      '2',
      'config.stages.0.optimizer: Optimizer needs a value for peak_lr',
    ),
    ('clip.low', '0.5', 'config.clip: low 0.5 is above high 0.2'),
    (
      'stages.sft.engine',
      '{"low": 1}',
      '--config.stages.sft.engine: got @type None, wanted one of Clip, Schedule',
    ),
  ],
)
def test_each_bad_override_is_one_line(key, text, line):
  assert refusal(key, text) == line


@pytest.mark.parametrize(
  ('key', 'text', 'ending'),
  [
    ('stages.grpo.steps', '1' * 5000, "', wanted an integer"),
    (f'stages.{"9" * 5000}.steps', '1', ': no such element; available: sft, grpo'),
  ],
)
def test_a_number_that_python_does_not_read_is_one_line(key, text, ending):
  line = refusal(key, text)
  assert line.startswith('--config.stages.') and line.endswith(ending) and len(line) <= 4000


def test_an_absent_optional_part_starts_from_its_own_defaults():
  config = override(
    stages__sft__optimizer__schedule__warmup='9', stages__sft__optimizer__peak_lr='0.5'
  )
  # Optimizer's default schedule is cosine, though Schedule's own default kind is constant.
  assert config.stages[0].optimizer == Optimizer(
    peak_lr=0.5, schedule=Schedule(kind='cosine', warmup=9)
  )


def test_two_values_that_must_change_together_can():
  assert override(clip__low='0.5', clip__high='0.6').clip == Clip(low=0.5, high=0.6)


def test_elements_with_one_name_are_addressed_by_position():
  twice = Root(stages=(Stage(name='a', steps=1), Stage(name='a', steps=2)))
  assert message(apply_overrides, twice, {'stages.a.steps': '3'}) == (
    '--config.stages.a: 2 elements have this name; address one by position'
  )
  assert [stage.steps for stage in apply_overrides(twice, {'stages.1.steps': '3'}).stages] == [1, 3]


def test_overriding_leaves_the_given_configuration_alone():
  before = root(free={'a': [1]})
  changed = apply_overrides(before, {'free.a.0': '2', 'tasksets.train.options.low': '4'})
  assert (changed.free, changed.tasksets[0].options) == ({'a': [2]}, {'low': 4})
  assert (before.free, before.tasksets[0].options) == ({'a': [1]}, {'low': 3})


def test_split_argv_keeps_absl_flags_and_the_later_of_two():
  argv = [
    'train.py',
    '--config=a.py',
    '--workdir=w',
    '--config.a=1',
    '--config.b.c',
    '-2',
    '--config.a=3',
    '--config',
    'b.py:v',
  ]
  assert split_argv(argv) == (['train.py', '--workdir=w'], 'b.py:v', {'b.c': '-2', 'a': '3'})
  assert list(split_argv(argv)[2]) == ['b.c', 'a']
  assert split_argv(['t', '--configs=1', '--', '--config.a=1']) == (
    ['t', '--configs=1', '--', '--config.a=1'],
    None,
    {},
  )
  assert split_argv(['t', '--config.a=x=y\nz', '--config.b=']) == (
    ['t'],
    None,
    {'a': 'x=y\nz', 'b': ''},
  )


def test_an_override_without_a_value_is_refused():
  assert (
    message(split_argv, ['t', '--config.a', '--dry_run'])
    == '--config.a: no value given; write --config.a=VALUE'
  )
  assert (
    message(split_argv, ['t', '--config=']) == '--config=: no value given; write --config=VALUE'
  )


def test_parse_overrides():
  assert parse_overrides(['--config.a.b=1', '--config.c={"d": 1}']) == {'a.b': '1', 'c': '{"d": 1}'}
  assert message(parse_overrides, ['--a.b=1']) == '--a.b=1: wanted --config.KEY=VALUE'


def own_flags() -> flags.FlagValues:
  values = flags.FlagValues()
  flags.DEFINE_string('workdir', None, 'Run directory.', flag_values=values)
  flags.DEFINE_integer('limit', 1, 'A number.', flag_values=values)
  return values


def test_flags_of_the_script_are_parsed_and_their_errors_are_one_line():
  values = own_flags()
  parse_flags(['train.py', '--workdir=x', '--limit=3'], values)
  assert (values.workdir, values.limit) == ('x', 3)
  line = '--wrkdir: unknown flag; did you mean --workdir?'
  assert message(parse_flags, ['t', '--wrkdir=x'], own_flags()) == line
  line = '--confg.seed: unknown flag; did you mean --config?'
  assert message(parse_flags, ['t', '--confg.seed=1'], own_flags()) == line
  assert (
    message(parse_flags, ['t', '--zzzzzz'], own_flags()) == '--zzzzzz: unknown flag; see --help'
  )
  line = 'x.py: unexpected argument; every value has a flag (--name=value), see --help'
  assert message(parse_flags, ['t', 'x.py'], own_flags()) == line
  assert parse_flags(['t', 'x.py', '--limit=3'], own_flags(), operands=('FILE',)) == ['x.py']
  missing = message(functools.partial(parse_flags, operands=('FILE',)), ['t'], own_flags())
  assert missing == 'FILE: missing, see --help'
  assert message(parse_flags, ['t', '--limit=ten'], own_flags()).startswith('flag --limit=ten: ')


def test_help_prints_the_flags_and_leaves_with_0(capsys):
  with pytest.raises(SystemExit) as caught:
    parse_flags(['train.py', '--help'], own_flags())
  assert caught.value.code == 0
  printed = capsys.readouterr().out
  assert '--workdir: Run directory.' in printed
  assert '--config: FILE.py[:VARIANT]' in printed


FILE = """
import dataclasses
from tests_config_types import Root, Stage

def get_config(variant: str = '') -> Root:
  if variant not in ('', 'long'):
    raise ValueError(f'unknown variant {variant!r}')
  return Root(name='file', stages=(Stage(name='sft', steps=100 if variant else 10),))
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
  """Writes a configuration file; in it, `tests_config_types` is this module."""
  monkeypatch.setitem(sys.modules, 'tests_config_types', sys.modules[__name__])
  # The working directory is not on it.
  monkeypatch.setattr(sys, 'path', [place for place in sys.path if place])
  monkeypatch.chdir(tmp_path)

  def write(text: str, name: str = 'x.py') -> str:
    (tmp_path / name).write_text(textwrap.dedent(text))
    return name

  return write


def test_a_whole_command_line(write):
  write(FILE)
  values = own_flags()
  argv = [
    'train.py',
    '--config=x.py:long',
    '--workdir=w',
    '--config.clip.high=1',
    '--config.stages.sft.optimizer.peak_lr=1',
  ]
  config = load_config(argv, Root, flag_values=values)
  wanted = Stage(name='sft', steps=100, optimizer=Optimizer(peak_lr=1.0))
  assert config == Root(name='file', clip=Clip(high=1.0), stages=(wanted,))
  assert values.workdir == 'w'
  assert load_file('x.py', Root).stages[0].steps == 10


def test_what_lies_beside_a_configuration_can_be_imported_and_hides_nothing(
  write, tmp_path, monkeypatch
):
  """Also from a working directory elsewhere; a neighbour called like something installed stays out
  of its way.
  """
  monkeypatch.delitem(sys.modules, 'colorsys', raising=False)
  write('CLIP = 0.75', 'beside_this_one.py')
  write('raise AssertionError', 'colorsys.py')
  write(
    'import colorsys\nfrom beside_this_one import CLIP\nfrom tests_config_types import *\n'
    'def get_config(): return Root(clip=Clip(low=colorsys.ONE_THIRD, high=CLIP))'
  )
  (tmp_path / 'elsewhere').mkdir()
  monkeypatch.chdir(tmp_path / 'elsewhere')
  for _ in range(2):
    assert load_file(str(tmp_path / 'x.py'), Root).clip == Clip(low=1 / 3, high=0.75)
    assert sys.path.count(str(tmp_path)) == 1
  del sys.modules['beside_this_one']


def test_ints_in_float_fields_come_back_as_floats(write):
  write('from tests_config_types import *\ndef get_config(): return Root(clip=Clip(low=0, high=1))')
  high = load_config(['t', '--config=x.py'], Root, flag_values=own_flags()).clip.high
  assert (high, type(high)) == (1.0, float)


def test_a_configuration_file_may_define_its_own_dataclasses(write):
  write("""
    from __future__ import annotations
    import dataclasses
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own:
      a: int | None = None
    def get_config(): return dataclasses.asdict(Own())
  """)
  assert message(load_file, 'x.py', Root) == 'x.py: get_config returned a dict, wanted a Root'


@pytest.mark.parametrize(
  ('text', 'spec', 'line'),
  [
    (FILE, 'x.py:lang', "x.py:7: ValueError: unknown variant 'lang'"),
    (FILE, 'y.py', "y.py: no such configuration file; did you mean 'x.py'?"),
    (FILE, 'none/y.py', 'none/y.py: no such configuration file; none is available'),
    (
      FILE,
      'x.txt',
      '--config=x.txt: wanted FILE.py[:VARIANT], or the name of a shipped configuration',
    ),
    (
      FILE,
      'quickstrat',
      "--config=quickstrat: no such shipped configuration; did you mean 'quickstart'?",
    ),
    (
      'a = 1',
      'x.py',
      "x.py: defines no function get_config(variant: str = ''), which returns the configuration",
    ),
    ('\nimport nowhere', 'x.py', "x.py:2: ModuleNotFoundError: No module named 'nowhere'"),
    ('def f(:\n  pass', 'x.py', 'x.py:1: SyntaxError: invalid syntax'),
    (
      'def get_config(): return 1',
      'x.py:v',
      'x.py:v: get_config() of this file takes no variant; wanted --config=x.py',
    ),
    ('def get_config():\n  return 1', 'x.py', 'x.py: get_config returned a int, wanted a Root'),
    (
      'from tests_config_types import *\ndef get_config():\n\n  return Root(sed=1)',
      'x.py',
      "x.py:4: TypeError: Root.__init__() got an unexpected keyword argument 'sed'. Did you mean "
      "'seed'?",
    ),
    (
      'from tests_config_types import *\ndef get_config(): return root(limit="3")',
      'x.py',
      "x.py: config.limit: got '3' (str), wanted a number",
    ),
  ],
)
def test_each_bad_file_is_one_line(write, text, spec, line):
  write(text)
  got = message(load_file, spec, Root)
  assert got == line or got == line.removesuffix(" Did you mean 'seed'?").removesuffix('.')


def test_no_configuration_given():
  assert message(lambda: load_config(['t'], Root, flag_values=own_flags())) == (
    'no configuration given; wanted --config=configs/NAME.py, or --config=configs/NAME.py:VARIANT'
  )


@pytest.mark.parametrize(
  ('fields', 'line'),
  [
    ({'name': 1}, 'config.name: got 1 (int), wanted text'),
    ({'name': Mode.FAST}, "config.name: got <Mode.FAST: 'fast'> (Mode), wanted text"),
    ({'seed': True}, 'config.seed: got True (bool), wanted an integer or text'),
    ({'shuffle': 1}, 'config.shuffle: got 1 (int), wanted true or false'),
    ({'limit': math.nan}, 'config.limit: got nan; wanted a number'),
    ({'limit': False}, 'config.limit: got False (bool), wanted a number'),
    ({'mode': 'fast'}, "config.mode: got 'fast' (str), wanted one of fast, exact"),
    ({'level': 3}, 'config.level: got 3 (int), wanted one of 1, 2'),
    ({'level': True}, 'config.level: got True (bool), wanted one of 1, 2'),
    ({'words': ['a']}, "config.words: got ['a'] (list), wanted a tuple of (text, ...)"),
    ({'words': ('a', 1)}, 'config.words.1: got 1 (int), wanted text'),
    ({'clip': None}, 'config.clip: got None (NoneType), wanted a Clip'),
    (
      {'tasksets': (Source(name='a', weights={'b': 'c'}),)},
      "config.tasksets.0.weights.b: got 'c' (str), wanted a number",
    ),
    (
      {'stages': (Stage(name='a', steps=1.0),)},
      'config.stages.0.steps: got 1.0 (float), wanted an integer',
    ),
    (
      {'stages': (Stage(name='a', steps=1, optimizer=Optimizer(peak_lr=1e-3, betas=(0.9,))),)},
      'config.stages.0.optimizer.betas: got 1 elements, wanted 2: a tuple of (a number, a number)',
    ),
    (
      {'tasksets': (Source(name='a', options={'b': [(1, 2)]}),)},
      'config.tasksets.0.options.b.0: got (1, 2) (tuple), wanted a JSON value (none, true or '
      'false, a finite number, text, a list or a dict)',
    ),
    ({'free': {1: 2}}, 'config.free (key): got 1 (int), wanted text'),
  ],
)
def test_values_of_the_wrong_type_are_named(fields, line):
  assert message(check_types, Root(**fields)) == line


def test_right_types_pass():
  check_types(
    root(limit=3, mode=Mode.EXACT, level=2, remat='none', words=('a',), free=[None, {'a': 1.5}])
  )


def test_an_annotation_that_is_not_understood_is_the_authors_mistake():
  @dataclasses.dataclass
  class Bad:
    items: list[int]

  with pytest.raises(TypeError, match='cannot be annotated with list'):
    check_types(Bad(items=[1]))


def test_json_in_full():
  stage = Stage(name='sft', steps=5, engine=Clip())
  config = Root(
    tasksets=(Source(name='t', options={'low': 3}, weights={'a': 1}),),
    stages=(stage,),
    words=('a',),
  )
  wanted = {
    'name': 'run', 'seed': 0, 'shuffle': True, 'limit': 'inf', 'mode': 'fast', 'level': 1,
    'path': None, 'remat': None, 'clip': {'low': 0.2, 'high': 0.2}, 'words': ['a'], 'free': None,
    'tasksets': [{'name': 't', 'options': {'low': 3}, 'weights': {'a': 1.0}}],
    'stages': [{'name': 'sft', 'steps': 5, 'optimizer': None,
                'engine': {'@type': 'Clip', 'low': 0.2, 'high': 0.2}}],
  }  # fmt: skip
  assert to_json(config) == wanted
  assert from_json(json.loads(json.dumps(wanted, allow_nan=False)), Root) == config


def test_json_that_does_not_fit_is_named():
  tree = to_json(root())
  tree['stages'][1]['steps'] = 'many'
  assert (
    message(from_json, tree, Root) == "config.stages.1.steps: got 'many' (str), wanted an integer"
  )
  del tree['stages'][1]['steps']
  assert message(from_json, tree, Root) == 'config.stages.1: Stage needs a value for steps'


def test_an_integer_beyond_the_range_of_floats_is_no_number():
  tree = to_json(root())
  tree['limit'] = 10**400
  assert message(from_json, tree, Root) == f'config.limit: got {10**400} (int), wanted a number'
  tree['limit'] = 10**300
  assert from_json(tree, Root).limit == 1e300


JSON = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=8,
)
FLOATS = st.floats(allow_nan=False)
OPTIMIZERS = st.builds(
  Optimizer, peak_lr=FLOATS, betas=st.tuples(FLOATS, FLOATS), clip=st.none() | FLOATS
)
STAGES = st.builds(
  Stage,
  name=st.text(),
  steps=st.integers(),
  optimizer=st.none() | OPTIMIZERS,
  engine=st.builds(Clip) | st.builds(Schedule, warmup=st.integers()),
)
ROOTS = st.builds(
  Root,
  name=st.text(),
  seed=st.integers() | st.text(),
  limit=FLOATS,
  mode=st.sampled_from(Mode),
  path=st.none() | st.text(),
  words=st.lists(st.text()).map(tuple),
  free=JSON,
  tasksets=st.lists(
    st.builds(
      Source,
      name=st.text(),
      options=st.dictionaries(st.text(), JSON),
      weights=st.dictionaries(st.text(), FLOATS),
    )
  ).map(tuple),
  stages=st.lists(STAGES).map(tuple),
)


@settings(max_examples=25, deadline=None)
@given(ROOTS)
def test_json_round_trip_is_exact(config):
  check_types(config)
  restored = from_json(json.loads(json.dumps(to_json(config), allow_nan=False)), Root)
  assert restored == config
  assert repr(restored) == repr(config)
  assert difference(config, restored) == []


def test_difference_names_every_changed_key():
  old, new = (
    root(),
    override(
      stages__grpo__optimizer__peak_lr='2e-3', clip__high='0.3', tasksets__train__options__x='1'
    ),
  )
  assert difference(old, new) == [
    ('clip.high', 0.2, 0.3),
    ('tasksets.train.options.x', ABSENT, 1),
    ('stages.grpo.optimizer.peak_lr', 0.001, 0.002),
  ]


def test_difference_against_the_json_of_an_older_program():
  old = to_json(root())
  old['gone'] = 1
  del old['seed']
  assert sorted(difference(old, root())) == [('gone', 1, ABSENT), ('seed', ABSENT, 0)]


def test_difference_sees_order_length_and_bool_against_int():
  old = root()
  assert difference(old, dataclasses.replace(old, stages=old.stages[::-1])) == [
    ('stages', ['sft', 'grpo'], ['grpo', 'sft'])
  ]
  shorter = difference(old, dataclasses.replace(old, stages=old.stages[:1]))
  assert [(key, new) for key, _, new in shorter] == [('stages.grpo', ABSENT)]
  assert difference(dataclasses.replace(old, free=1), dataclasses.replace(old, free=True)) == [
    ('free', 1, True)
  ]
  assert difference(dataclasses.replace(old, words=('a',)), old) == [('words', ['a'], [])]
