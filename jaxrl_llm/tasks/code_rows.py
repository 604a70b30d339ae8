"""Converts rows of public data sets of programming problems to rows that the scorer `code` reads.

Invariants: this module executes nothing that a row contains. In particular, it never loads a
pickle: it only reads the opcodes, and accepts only a pickle of a single text. Compressed data are
expanded only up to a limit.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import keyword
import math
import pickletools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.types import Json

Form = Literal['apps', 'code_contests', 'livecodebench']

MAX_TESTS_BYTES = 64 << 20
"""Maximum size in bytes of compressed tests after decompression."""
_READS_INPUT = (
  'Write a Python program that reads its input from standard input and prints its output to '
  'standard output.'
)
_STARTS = 'Write it in Python, and begin with this code:\n```python\n{}\n```'
_FUNCTION = 'Write a Python function `{}` that does this.'
_APPS_TOLERANCE = {'absolute': 1e-8, 'relative': 1e-5}
"""Tolerance for numbers in outputs, as in the APPS evaluator (the defaults of `numpy.allclose`)."""
_TEXT_OPCODES = ('SHORT_BINUNICODE', 'BINUNICODE', 'BINUNICODE8')
_IGNORED_OPCODES = ('PROTO', 'FRAME', 'MEMOIZE', 'BINPUT', 'LONG_BINPUT')
_MAX_OPCODES = 16


def convert(fields: Mapping[str, Json], form: Form) -> dict[str, Json]:
  """Converts a row of a public data set to one with `prompt`, `ability` and `tests`.

  Programs in the row, such as solutions, are dropped.

  Raises ValueError if the row does not have the given form, or has no tests.
  """
  converted = _CONVERTERS[form](fields)
  if not converted['tests']:
    raise ValueError('has no tests')
  return {**converted, 'ability': 'code', 'data_source': form}


def _apps(fields: Mapping[str, Json]) -> dict[str, Json]:
  """Converts a row of APPS (Hendrycks et al., arXiv:2105.09938)."""
  question, starter = _text(fields, 'question'), _optional_text(fields, 'starter_code')
  tests = _object(fields, 'input_output')
  inputs, outputs = _list(tests, 'inputs'), _list(tests, 'outputs')
  if len(inputs) != len(outputs):
    raise ValueError(f'input_output has {len(inputs)} inputs and {len(outputs)} outputs')
  name = tests.get('fn_name')
  kept = _kept(fields, ('problem_id', 'difficulty', 'url'))
  if name is None:
    cases = [
      {'stdin': _lines(given), 'stdout': _lines(wanted)}
      for given, wanted in zip(inputs, outputs, strict=True)
    ]
    asked = _asked(question, starter, _READS_INPUT)
    return {**kept, 'prompt': asked, 'tests': cases, 'tolerance': dict(_APPS_TOLERANCE)}
  if not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)):
    raise ValueError(f'fn_name is {name!r:.80}, wanted the name of a function')
  called = f'Solution().{name}' if starter and 'class Solution' in starter else name
  statements = []
  for given, wanted in zip(inputs, outputs, strict=True):
    if not isinstance(given, list):
      raise ValueError(f'an input of fn_name is {given!r:.80}, wanted the list of arguments')
    # The APPS evaluator also accepts a bare result where a list with that single result is
    # expected.
    results = [wanted, *wanted] if isinstance(wanted, list) and len(wanted) == 1 else [wanted]
    statements.append(_statement(called, given, results))
  asked = _asked(question, starter, _FUNCTION.format(name))
  return {**kept, 'prompt': asked, 'tests': statements, 'entry_point': called}


def _code_contests(fields: Mapping[str, Json]) -> dict[str, Json]:
  """Converts a row of CodeContests (Li et al., arXiv:2203.07814)."""
  for name in ('input_file', 'output_file'):
    if _optional_text(fields, name):
      raise ValueError(f'{name} is {fields[name]!r:.80}, but programs have only standard streams')
  cases = []
  for kind in ('public_tests', 'private_tests', 'generated_tests'):
    if fields.get(kind) is None:
      continue
    tests = _object(fields, kind)
    inputs, outputs = _list(tests, 'input'), _list(tests, 'output')
    if len(inputs) != len(outputs):
      raise ValueError(f'{kind} has {len(inputs)} inputs and {len(outputs)} outputs')
    cases += [
      {'stdin': _lines(given), 'stdout': _lines(wanted)}
      for given, wanted in zip(inputs, outputs, strict=True)
    ]
  limits: dict[str, Json] = {}
  if fields.get('time_limit') is not None:
    limit = _object(fields, 'time_limit')
    seconds = _whole(limit, 'seconds') + 1e-9 * _whole(limit, 'nanos')
    if seconds:
      limits['cpu_s'] = seconds
  if memory := _whole(fields, 'memory_limit_bytes'):
    limits['memory_mib'] = max(1, memory >> 20)
  return {
    **_kept(fields, ('name', 'source', 'difficulty', 'cf_rating')),
    'prompt': _asked(_text(fields, 'description'), None, _READS_INPUT),
    'tests': cases,
    **({'limits': limits} if limits else {}),
  }


def _livecodebench(fields: Mapping[str, Json]) -> dict[str, Json]:
  """Converts a row of LiveCodeBench's code generation task (Jain et al., arXiv:2403.07974)."""
  tests = [
    *_tests_of(_value(fields, 'public_test_cases'), 'public_test_cases'),
    *_tests_of(_private_tests(fields), 'private_test_cases'),
  ]
  kinds = {test.get('testtype') for test in tests if isinstance(test.get('testtype'), str)}
  if tests and (len(kinds) != 1 or not kinds <= {'stdin', 'functional'}):
    raise ValueError(f'its tests have the types {sorted(kinds)}, wanted stdin or functional')
  question, starter = _text(fields, 'question_content'), _optional_text(fields, 'starter_code')
  kept = _kept(fields, ('question_id', 'question_title', 'platform', 'contest_date', 'difficulty'))
  if kinds != {'functional'}:
    cases = [{'stdin': _text(test, 'input'), 'stdout': _text(test, 'output')} for test in tests]
    return {**kept, 'prompt': _asked(question, starter, _READS_INPUT), 'tests': cases}
  name = _object(fields, 'metadata').get('func_name')
  if not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)):
    raise ValueError(f'metadata.func_name is {name!r:.80}, wanted the name of a method')
  called = f'Solution().{name}' if starter and 'class Solution' in starter else name
  statements = [
    _statement(
      called,
      [_parsed(line, 'an input') for line in _text(test, 'input').splitlines() if line.strip()],
      [_parsed(_text(test, 'output'), 'an output')],
    )
    for test in tests
  ]
  asked = _asked(question, starter, _FUNCTION.format(name))
  return {**kept, 'prompt': asked, 'tests': statements, 'entry_point': called}


_CONVERTERS: Mapping[str, Callable[[Mapping[str, Json]], dict[str, Any]]] = {
  'apps': _apps,
  'code_contests': _code_contests,
  'livecodebench': _livecodebench,
}


def _private_tests(fields: Mapping[str, Json]) -> Json:
  """Returns the private tests of a row of LiveCodeBench, as JSON or JSON text. If the row has a
  pickle of the JSON text, compressed with zlib and encoded as base64, the text is extracted.
  """
  value = _value(fields, 'private_test_cases')
  if not isinstance(value, str) or value.lstrip()[:1] in ('[', ''):
    return value
  try:
    packed = base64.b64decode(value, validate=True)
    expanded = _expanded(packed)
  except (binascii.Error, zlib.error) as error:
    raise ValueError(f'private_test_cases is neither JSON nor base64 of zlib: {error}') from None
  return unpickled_text(expanded)


def _expanded(packed: bytes) -> bytes:
  stream = zlib.decompressobj()
  expanded = stream.decompress(packed, MAX_TESTS_BYTES + 1)
  if len(expanded) > MAX_TESTS_BYTES:
    raise ValueError(f'private_test_cases expands to more than {MAX_TESTS_BYTES:,} bytes')
  if not stream.eof:
    raise ValueError('private_test_cases is cut off')
  return expanded


def unpickled_text(pickled: bytes) -> str:
  """Returns the text in a pickle of a single text, without loading the pickle.

  Raises ValueError for every other pickle.
  """
  texts: list[str] = []
  try:
    for number, (opcode, value, _) in enumerate(pickletools.genops(io.BytesIO(pickled))):
      if opcode.name in _TEXT_OPCODES and not texts:
        texts.append(value)
      elif opcode.name == 'STOP' and texts:
        return texts[0]
      elif opcode.name not in _IGNORED_OPCODES or number >= _MAX_OPCODES:
        raise ValueError(f'its pickle has the opcode {opcode.name}, wanted a text and nothing else')
  except (ValueError, UnicodeDecodeError) as error:
    raise ValueError(f'private_test_cases: {error}') from None
  raise ValueError('private_test_cases: its pickle has no text')


def _tests_of(value: Json, name: str) -> list[Mapping[str, Json]]:
  tests = _parsed(value, name) if isinstance(value, str) else value
  if not isinstance(tests, list) or not all(isinstance(test, Mapping) for test in tests):
    raise ValueError(f'{name} is {tests!r:.80}, wanted a list of objects')
  return tests


def _statement(called: str, arguments: Sequence[Json], results: Sequence[Json]) -> str:
  """Returns a test that passes if a call returns one of the results. Because JSON has no tuples, a
  tuple is accepted in place of a list, and a list of tuples in place of a list of lists.
  """
  accepted: list[Any] = []
  for result in results:
    accepted.append(result)
    if isinstance(result, list):
      accepted.append(tuple(result))
      if result and all(isinstance(item, list) for item in result):
        accepted.append([tuple(item) for item in result])
  shown = ', '.join(map(repr, arguments))
  if len(accepted) == 1:
    return f'assert {called}({shown}) == {accepted[0]!r}'
  return f'assert {called}({shown}) in {accepted!r}'


def _asked(question: str, starter: str | None, instruction: str) -> str:
  ending = _STARTS.format(starter.rstrip()) if starter and starter.strip() else instruction
  return f'{question.strip()}\n\n{ending}'


def _kept(fields: Mapping[str, Json], names: Iterable[str]) -> dict[str, Json]:
  return {name: fields[name] for name in names if fields.get(name) is not None}


def _value(fields: Mapping[str, Json], name: str) -> Json:
  if fields.get(name) is None:
    raise ValueError(f'has no {name}; its fields are {", ".join(sorted(fields)):.200}')
  return fields[name]


def _text(fields: Mapping[str, Json], name: str) -> str:
  value = _value(fields, name)
  if not isinstance(value, str):
    raise ValueError(f'{name} is {value!r:.80}, wanted text')
  return value


def _optional_text(fields: Mapping[str, Json], name: str) -> str | None:
  return None if fields.get(name) is None else _text(fields, name)


def _object(fields: Mapping[str, Json], name: str) -> Mapping[str, Json]:
  """Returns the row's field `name`, which is an object or the JSON text of one."""
  value = _value(fields, name)
  parsed = _parsed(value, name) if isinstance(value, str) else value
  if not isinstance(parsed, Mapping):
    raise ValueError(f'{name} is {parsed!r:.80}, wanted an object')
  return parsed


def _list(fields: Mapping[str, Json], name: str) -> list[Json]:
  value = _value(fields, name)
  if not isinstance(value, list):
    raise ValueError(f'{name} is {value!r:.80}, wanted a list')
  return value


def _whole(fields: Mapping[str, Json], name: str) -> int:
  """Returns the row's field `name`, an integer of at least 0, or 0 if the field is missing."""
  value = fields.get(name)
  if value is None:
    return 0
  if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
    raise ValueError(f'{name} is {value!r:.80}, wanted an integer of at least 0')
  return value


def _lines(value: Json) -> str:
  """Returns the text of an input or output, which may be given as a list of lines."""
  if isinstance(value, str):
    return value
  if isinstance(value, list) and all(isinstance(line, str) for line in value):
    return '\n'.join(value)
  raise ValueError(f'an input or output is {value!r:.80}, wanted text or a list of lines')


def _parsed(text: str, name: str) -> Any:
  try:
    return parse_json(text, parse_constant=_refuse, parse_float=_finite)
  except json.JSONDecodeError as error:
    raise ValueError(f'{name} is not JSON: {error}') from None
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from None


def _refuse(name: str) -> None:
  raise ValueError(f'{name} is not JSON')


def _finite(text: str) -> float:
  if not math.isfinite(number := float(text)):
    raise ValueError(f'{text:.40} is beyond the range of a float')
  return number
