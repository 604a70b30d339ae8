"""Text templates: Python format strings over the fields of a row, such as 'What is {a} plus {b}?'.

There are two additional format specs. `{numbers:csv}` joins a list with commas and drops '.0' from
whole numbers: ['61.0', 33] gives '61,33'. `{answer:after ####}` is the text after the last '####',
without white space around it.
"""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.core.types import Json

_AFTER = 'after '
_WHOLE = re.compile(r'(-?\d+)\.0+')


def names(fields: Mapping[str, Json]) -> dict[str, Json]:
  """Returns the values that a template may use for a row, keyed by name.

  For a reasoning-gym entry, the names are the keys of its metadata, and `metadata`, `question` and
  `answer`. For any other row, they are the keys of its `extra_info`, the keys of its `reward_model`
  (such as `ground_truth`), and its own keys. If a name occurs twice, the value listed later wins.
  """
  if 'reasoning_gym' in fields:
    entry = fields['entry']
    return {**entry['metadata'], **entry}
  nested: dict[str, Json] = {}
  for key in ('extra_info', 'reward_model'):
    value = fields.get(key)
    if isinstance(value, Mapping):
      nested.update(value)
  return {**nested, **fields}


def render(template: str, fields: Mapping[str, Json]) -> str:
  """Fills a template with the values in `names(fields)`. Raises ValueError for an unknown name or a
  bad format spec.
  """
  values = names(fields)
  try:
    return _FORMATTER.vformat(template, (), values)
  except KeyError as error:
    name = str(error.args[0])
    near = difflib.get_close_matches(name, values, n=1)
    hint = f'did you mean {near[0]!r}?' if near else f'available: {", ".join(sorted(values))}'
    raise ValueError(f'template {template!r} names {name!r}, which the row lacks; {hint}') from None
  except (ArithmeticError, AttributeError, IndexError, MemoryError, TypeError, ValueError) as error:
    raise ValueError(f'template {template!r}: {error}') from None


class _Formatter(string.Formatter):
  def format_field(self, value: Any, format_spec: str) -> str:
    if format_spec == 'csv':
      if not isinstance(value, list):
        raise ValueError(f"'csv' joins a list, got {value!r}")
      return ','.join(_whole(str(item)) for item in value)
    if format_spec.startswith(_AFTER):
      _, marker, rest = str(value).rpartition(format_spec.removeprefix(_AFTER))
      if not marker:
        raise ValueError(f'no {format_spec.removeprefix(_AFTER)!r} in {value!r}')
      return rest.strip()
    return super().format_field(value, format_spec)


def _whole(text: str) -> str:
  match = _WHOLE.fullmatch(text)
  return match[1] if match else text


_FORMATTER = _Formatter()
