"""Loads a configuration: calls a Python file's `get_config(variant)` and applies the overrides of a
command line.

  jaxrl train --config=configs/x.py:variant --config.learner.optimizer.peak_lr=1e-6 --workdir=runs/x

Invariant: every field of a returned configuration matches its annotation, and the configuration
equals `from_json(to_json(config))`. If that is impossible, loading raises a one-line UserError that
names the file, flag or key.

Parts are addressed by dotted keys: fields by name, tuple elements by position or by their `name`
field (`--config.stages.grpo.steps=10`), mapping entries by key. `text.parse_text` defines the
syntax of values. All overrides are applied before any dataclass is constructed, so values that
depend on each other can change together. If a key is overridden several times, the last override
wins.
"""

from __future__ import annotations

import difflib
import inspect
import json
import pathlib
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from jaxrl_llm.config.annotations import (
  describe,
  element_types,
  field_type,
  is_json,
  is_mapping,
  is_tuple,
  members,
  nearest,
)
from jaxrl_llm.config.text import parse_text
from jaxrl_llm.config.values import (
  TAG,
  check_types,
  default_json,
  from_json,
  record_type,
  records,
  to_json,
)
from jaxrl_llm.core.errors import UserError

_CONFIG_FLAG = re.compile(r'--?config(?:\.(?P<key>[^=]*))?(?:=(?P<text>.*))?', re.DOTALL)
_CONFIG_HELP = """  --config: FILE.py[:VARIANT], \
whose get_config(VARIANT) returns the configuration.
  --config.KEY: A value in the configuration, as in --config.learner.optimizer.peak_lr=1e-6."""

SHIPPED = pathlib.Path(__file__).parents[1] / 'configs'
"""Directory of the configurations shipped with the package."""

ABSENT = '(absent)'
"""Placeholder in the result of `difference` for a value that one side lacks."""


def load_config(
  argv: Sequence[str], root_type: type, *, flag_values: flags.FlagValues = flags.FLAGS
) -> Any:
  """Loads the configuration that a command line gives, and parses the command line's other flags.

  Args:
    argv: command line, program name first.
    root_type: type that the configuration must have.
    flag_values: absl flags to which the other flags belong.
  """
  absl_argv, spec, overrides = split_argv(argv)
  parse_flags(absl_argv, flag_values)
  if spec is None:
    raise UserError(
      'no configuration given; wanted --config=configs/NAME.py, or --config=configs/NAME.py:VARIANT'
    )
  return apply_overrides(load_file(spec, root_type), overrides)


def split_argv(argv: Sequence[str]) -> tuple[list[str], str | None, dict[str, str]]:
  """Splits a command line into the arguments for absl, the value of the last --config, and the
  overrides {KEY: TEXT}.

  The value is None if there is no --config. As in absl, a flag's value may follow an equals sign or
  be the next argument. A bare `--` and all arguments after it go to absl unchanged.
  """
  rest, spec, overrides = list(argv[:1]), None, {}
  arguments = list(argv[1:])
  while arguments:
    argument = arguments.pop(0)
    match = _CONFIG_FLAG.fullmatch(argument)
    if argument == '--':
      rest += [argument, *arguments]
      break
    if match is None:
      rest.append(argument)
      continue
    text = match['text']
    if text is None and arguments and not re.match(r'-[-a-zA-Z]', arguments[0]):
      text = arguments.pop(0)
    if not text and (text is None or match['key'] is None):
      raise UserError(f'{argument}: no value given; write {argument.rstrip("=")}=VALUE')
    if match['key'] is None:
      spec = text
    else:
      # A repeated key moves to the end, so that the last value wins.
      overrides.pop(match['key'], None)
      overrides[match['key']] = text
  return rest, spec, overrides


def parse_overrides(arguments: Sequence[str]) -> dict[str, str]:
  """Parses ['--config.a.b=text', ...] to {'a.b': 'text'}. Raises UserError for other arguments."""
  rest, spec, overrides = split_argv(['', *arguments])
  if rest[1:] or spec is not None:
    raise UserError(f'{rest[1] if rest[1:] else "--config=" + spec}: wanted --config.KEY=VALUE')
  return overrides


def parse_flags(
  absl_argv: Sequence[str],
  flag_values: flags.FlagValues = flags.FLAGS,
  document: str | None = None,
  *,
  takes_config: bool = True,
  operands: Sequence[str] = (),
) -> list[str]:
  """Parses a command's flags with absl; returns its operands.

  With --help, prints `document` and the flags, and exits with code 0.

  Args:
    absl_argv: command line, program name first.
    document: description of the command; defaults to the main module's docstring.
    takes_config: whether the command also takes --config, which --help then explains.
    operands: names of the arguments that the command takes besides flags, all of them required.

  Raises:
    UserError: absl rejects a flag, an operand is missing, or there are further arguments.
  """
  if {'--help', '-h', '-help', '--helpshort'} & set(absl_argv[1:]):
    text = document or sys.modules['__main__'].__doc__ or ''
    flag_help = flag_values.main_module_help() or flag_values.get_help()
    config = f'\n{_CONFIG_HELP}\n' if takes_config else ''
    sys.stdout.write(f'{text.strip()}\n\n{flag_help.strip()}\n{config}')
    sys.exit(0)
  try:
    rest = flag_values(list(absl_argv))
  except flags.UnrecognizedFlagError as error:
    close = difflib.get_close_matches(error.flagname.split('.')[0], ['config', *flag_values], n=1)
    hint = f'did you mean --{close[0]}?' if close else 'see --help'
    raise UserError(f'--{error.flagname}: unknown flag; {hint}') from None
  except flags.Error as error:
    raise UserError(_one_line(error)) from None
  if len(rest) <= len(operands):
    raise UserError(f'{operands[len(rest) - 1]}: missing, see --help')
  if rest[1 + len(operands) :]:
    raise UserError(
      f'{rest[1 + len(operands)]}: unexpected argument; every value has a flag (--name=value), see '
      '--help'
    )
  return rest[1:]


def load_file(spec: str, root_type: type) -> Any:
  """Runs a configuration file and returns the result of its `get_config(variant)` after type
  checks.

  Args:
    spec: `PATH.py[:VARIANT]`, or `NAME[:VARIANT]` for a configuration shipped with the package.
    root_type: type that the configuration must have.
  """
  path, config = call_file(
    spec, root_type, function='get_config', what='configuration', flag='--config', shipped=SHIPPED
  )
  check_types(config, f'{path}: config')
  return config


def call_file(
  spec: str, root_type: type, *, function: str, what: str, flag: str, shipped: pathlib.Path
) -> tuple[pathlib.Path, Any]:
  """Runs a Python file; returns the file's path and the result of one of its functions.

  Args:
    spec: `PATH.py[:VARIANT]`, or `NAME[:VARIANT]` for a shipped file. The function is called with
      the variant if there is one, else without arguments.
    root_type: type that the result must have; the types of its fields are not checked.
    function: name of the function, which the file defines.
    what: noun for the result in messages.
    flag: flag that gave `spec`, for messages.
    shipped: directory of the shipped files.
  """
  match = re.fullmatch(r'(?P<path>.*\.py)(?::(?P<variant>.*))?', spec)
  named = re.fullmatch(r'(?P<path>\w+)(?::(?P<variant>.*))?', spec)
  if match is None and named is None:
    raise UserError(f'{flag}={spec}: wanted FILE.py[:VARIANT], or the name of a shipped {what}')
  path = pathlib.Path(match['path']) if match else shipped / f'{named["path"]}.py'
  match = match or named
  if match is named and not path.is_file():
    names = [name.removesuffix('.py') for name in _neighbours(path)]
    raise UserError(f'{flag}={spec}: no such shipped {what}; {nearest(named["path"], names)}')
  if not path.is_file():
    raise UserError(f'{path}: no such {what} file; {nearest(path.name, _neighbours(path))}')
  call = _execute(path).get(function)
  if not callable(call):
    raise UserError(
      f"{path}: defines no function {function}(variant: str = ''), which returns the {what}"
    )
  variant = match['variant'] or ''
  if variant and not inspect.signature(call).parameters:
    raise UserError(
      f'{path}:{variant}: {function}() of this file takes no variant; wanted {flag}={path}'
    )
  result = _guarded(path, lambda: call(variant) if variant else call())
  if type(result) is not root_type:
    raise UserError(
      f'{path}: {function} returned a {type(result).__name__}, wanted a {root_type.__name__}'
    )
  return path, result


def override_text(key: str, value: Any) -> str:
  """Returns the text of an override that sets the given value; `apply_overrides` parses this text.

  A string is returned unchanged. Any other value becomes JSON. Raises UserError if JSON cannot
  represent the value.
  """
  if isinstance(value, str):
    return value
  try:
    return json.dumps(value)
  except TypeError:
    raise UserError(
      f'override {key}: {type(value).__name__}, wanted text, a number, a list or a mapping'
    ) from None


def apply_overrides(config: Any, overrides: Mapping[str, str]) -> Any:
  """Returns the configuration with overrides {'a.b': 'text'} applied.

  If an optional part of the configuration is None, the first override of a field in the part
  creates the part with the default values of its other fields.
  """
  tree = to_json(config)
  for key, text in overrides.items():
    tree = _with(tree, type(config), key.split('.'), text, '--config')
  return from_json(tree, type(config))


def difference(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
  """Lists the differences between two configurations as (dotted key, old value, new value).

  Each argument is a configuration or its JSON. The placeholder '(absent)' stands for a value that
  one side lacks. Tuple elements with distinct names are matched by name.
  """
  old, new = (side if isinstance(side, dict) else to_json(side) for side in (old, new))
  return _differing('', old, new)


def _neighbours(path: pathlib.Path) -> list[str]:
  return sorted(other.name for other in path.parent.glob('*.py')) if path.parent.is_dir() else []


def _one_line(error: BaseException) -> str:
  return ' '.join(str(error).split())


def _execute(path: pathlib.Path) -> dict[str, Any]:
  """Executes a configuration file as a module and returns the module's namespace.

  The module is added to sys.modules, where dataclasses look up the names in their annotations. As
  in a Python script, the file can import modules from its own directory, such as other
  configurations or a user's own algorithm.
  """
  if str(path.parent.absolute()) not in sys.path:
    sys.path.append(str(path.parent.absolute()))
  module = types.ModuleType(f'jaxrl_llm_config_file_{path.stem}')
  module.__file__ = str(path)
  sys.modules[module.__name__] = module
  _guarded(
    path,
    lambda: exec(compile(path.read_bytes(), str(path), 'exec', dont_inherit=True), module.__dict__),
  )
  return module.__dict__


def _guarded(path: pathlib.Path, call: Callable[[], Any]) -> Any:
  """Runs the user's code. Any exception becomes a one-line UserError that gives the line number."""
  try:
    return call()
  except Exception as error:
    if isinstance(error, SyntaxError) and error.filename == str(path):
      line = error.lineno
    else:
      frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
      ]
      line = frames[-1].lineno if frames else 1
    kind = '' if isinstance(error, UserError) else f'{type(error).__name__}: '
    text = error.msg if isinstance(error, SyntaxError) else _one_line(error)
    raise UserError(f'{path}:{line}: {kind}{text}') from error


def _with(value: Any, annotation: Any, names: list[str], text: str, where: str) -> Any:
  """Returns a copy of the JSON `value` in which the parsed `text` is the part at the path
  `names`.
  """
  if not names:
    return parse_text(text, annotation, where)
  name, *rest = names
  inner = f'{where}.{name}'
  kinds = members(annotation)
  free = is_json(annotation)
  if records(annotation) and isinstance(value, dict | None):
    if name == TAG:
      raise UserError(
        f'{inner}: the type alone cannot be changed; give the whole: {where}={{"{TAG}": {text!r}, '
        f'…}}'
      )
    cls = record_type(value or {}, annotation, where)
    kind = field_type(cls, name, where)
    fields = default_json(cls) if value is None else value
    return {**fields, name: _with(fields.get(name), kind, rest, text, inner)}
  if isinstance(value, list) and (free or any(is_tuple(kind) for kind in kinds)):
    index = _index(value, name, where)
    kind = Any if free else element_types(next(filter(is_tuple, kinds)), len(value), where)[index]
    return [*value[:index], _with(value[index], kind, rest, text, inner), *value[index + 1 :]]
  if isinstance(value, dict | None) and (free or any(is_mapping(kind) for kind in kinds)):
    kind = Any if free else typing.get_args(next(filter(is_mapping, kinds)))[1]
    entries = value or {}
    return {**entries, name: _with(entries.get(name), kind, rest, text, inner)}
  raise UserError(f'{inner}: {where} is {describe(annotation)} and has no parts (now {value!r})')


def _names(items: list) -> list[str]:
  """Returns the elements' `name` entries if every element has one, else an empty list."""
  names = [
    item['name'] for item in items if isinstance(item, dict) and isinstance(item.get('name'), str)
  ]
  return names if len(names) == len(items) else []


def _index(items: list, name: str, where: str) -> int:
  names = _names(items)
  if names.count(name) > 1:
    raise UserError(
      f'{where}.{name}: {names.count(name)} elements have this name; address one by position'
    )
  if name in names:
    return names.index(name)
  if name.isdecimal() and len(name) < 10 and int(name) < len(items):
    return int(name)
  positions = f'0 ... {len(items) - 1}' if items else 'none, it is empty'
  known = nearest(name, names) if names else f'wanted a position: {positions}'
  raise UserError(f'{where}.{name}: no such element; {known}')


def _differing(key: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
  if isinstance(old, list) and isinstance(new, list):
    named = [_names(side) for side in (old, new)]
    if all(side and len(set(side)) == len(side) for side in named):
      old, new = (dict(zip(names, side)) for names, side in zip(named, (old, new)))
      moved = (
        [(key, named[0], named[1])]
        if set(named[0]) == set(named[1]) and named[0] != named[1]
        else []
      )
      return moved + _differing(key, old, new)
    if len(old) == len(new) and all(isinstance(item, dict) for item in [*old, *new]):
      old, new = ({str(i): item for i, item in enumerate(side)} for side in (old, new))
  if isinstance(old, dict) and isinstance(new, dict):
    differences = []
    for name in [*old, *(name for name in new if name not in old)]:
      differences += _differing(
        f'{key}.{name}' if key else name, old.get(name, ABSENT), new.get(name, ABSENT)
      )
    return differences
  same = old == new and isinstance(old, bool) == isinstance(new, bool)
  return [] if same else [(key, old, new)]
