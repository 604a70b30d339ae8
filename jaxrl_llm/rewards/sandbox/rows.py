"""Reads the tests of a task's row.

`tests` is a list of statements, a text that defines `check`, or a list of `{stdin, stdout}`. Each
statement may be an object `{test, weight}`. Tests with `stdin` may have a `weight`, a `tolerance`,
and the limits `cpu_s` and `memory_mib`. The row's `tolerance` and `limits` are the defaults for its
tests. The row's `checker` is a program that judges the outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.sandbox.comparison import Tolerance
from jaxrl_llm.rewards.sandbox.sandbox import MAX_WEIGHT, Case, Work

_ENTRY_POINT = re.compile(r'[^\W\d]\w*(?:\(\))?(?:\.[^\W\d]\w*)*')
_LIMITS = {'cpu_s': float, 'memory_mib': int}


def read_tests(fields: Mapping[str, Json]) -> Work | None:
  """Reads the tests of a task into a `Work` with an empty program. Returns None if the task has no
  tests.

  Raises ValueError if the tests are malformed.
  """
  tests, entry_point = fields.get('tests'), fields.get('entry_point')
  if not tests:
    return None
  if entry_point is not None and not (
    isinstance(entry_point, str) and _ENTRY_POINT.fullmatch(entry_point)
  ):
    raise ValueError(
      f'entry_point is {entry_point!r}, wanted the name of a function, or Class().method'
    )
  if isinstance(tests, Sequence) and all(
    isinstance(test, Mapping) and {'stdin', 'stdout'} <= test.keys() for test in tests
  ):
    return _cases(tests, fields)
  for name in ('checker', 'tolerance', 'limits'):
    if fields.get(name) is not None:
      raise ValueError(f'the task has a {name}, but its tests have no stdin and stdout')
  name = None if entry_point is None else re.split(r'[.(]', entry_point)[0]
  if isinstance(tests, str):
    if entry_point is None:
      raise ValueError(
        'tests are a string, but entry_point is missing; wanted the name that check(candidate) '
        'receives'
      )
    return Work(program='', tests=(f'{tests}\n\ncheck({entry_point})\n',), entry_point=name)
  if isinstance(tests, Sequence):
    statements, weights = zip(*map(_statement, tests), strict=True)
    equal = len(set(weights)) == 1
    return Work(
      program='',
      tests=statements,
      entry_point=name,
      weights=() if equal else _weighing(weights),
    )
  raise ValueError(_FORMS)


_FORMS = (
  'tests are neither statements, nor a string that defines check, nor objects with stdin and stdout'
)


def _statement(test: Json) -> tuple[str, float]:
  """Returns a statement and its weight."""
  if isinstance(test, str):
    return test, 1.0
  if isinstance(test, Mapping) and isinstance(test.get('test'), str):
    return test['test'], _number(test, 'weight', 1.0)
  raise ValueError(_FORMS)


def _cases(tests: Sequence[Mapping[str, Json]], fields: Mapping[str, Json]) -> Work:
  limits = _limits(fields.get('limits'))
  tolerance = _tolerance(fields.get('tolerance'))
  checker = fields.get('checker')
  if checker is not None and not (isinstance(checker, str) and checker.strip()):
    raise ValueError('checker is not a program, wanted its source text')
  if checker is not None and tolerance is not None:
    raise ValueError('the task has a checker and a tolerance; wanted one of them')
  cases = []
  for number, test in enumerate(tests):
    own = _limits({name: test[name] for name in _LIMITS if test.get(name) is not None})
    at = _tolerance(test['tolerance']) if test.get('tolerance') is not None else tolerance
    if checker is not None and at is not None:
      raise ValueError(f'test {number} has a tolerance, but the task has a checker')
    try:
      case = Case(
        stdin=str(test['stdin']),
        stdout=str(test['stdout']),
        weight=_number(test, 'weight', 1.0),
        tolerance=at,
        **{**limits, **own},
      )
    except UserError as error:
      raise ValueError(f'test {number}: {error}') from None
    cases.append(case)
  _weighing([case.weight for case in cases])
  return Work(program='', cases=tuple(cases), checker=checker)


def _weighing(weights: Sequence[float]) -> tuple[float, ...]:
  if not all(0 <= weight <= MAX_WEIGHT for weight in weights) or not any(weights):
    raise ValueError(
      f'the tests have weights {list(weights)!r:.80}, wanted numbers from 0 to {MAX_WEIGHT:g}, not '
      'all 0'
    )
  return tuple(weights)


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
  value = values.get(name)
  if value is None:
    return default
  if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
    raise ValueError(f'{name} of a test is {value!r:.80}, wanted a finite number')
  return float(value)


def _limits(values: Json) -> dict[str, Any]:
  """Returns the resource limits in a row as keyword arguments for `Case`."""
  if values is None:
    return {}
  if not isinstance(values, Mapping) or not values.keys() <= _LIMITS.keys():
    raise ValueError(f'limits are {values!r:.80}, wanted an object with {sorted(_LIMITS)}')
  limits = {}
  for name, kind in _LIMITS.items():
    if values.get(name) is not None:
      value = _number(values, name, 0.0)
      if not 0 < value < 1 << 40 or value != kind(value):
        raise ValueError(f'{name} of a test is {value!r:.80}, wanted a positive {kind.__name__}')
      limits[name] = kind(value)
  return limits


def _tolerance(value: Json) -> Tolerance | None:
  """Reads a tolerance: either `{absolute, relative}`, or one number for both."""
  if value is None:
    return None
  if isinstance(value, Mapping) and value.keys() <= {'absolute', 'relative'} and value:
    parts = {name: _number(value, name, 0.0) for name in value}
  elif isinstance(value, int | float) and not isinstance(value, bool):
    number = _number({'tolerance': value}, 'tolerance', 0.0)
    parts = {'absolute': number, 'relative': number}
  else:
    raise ValueError(
      f'tolerance is {value!r:.80}, wanted a number or an object with absolute and relative'
    )
  try:
    return Tolerance(**parts)
  except UserError as error:
    raise ValueError(str(error)) from None
