"""Parses the flags `--options='{"a": 1}'`, a JSON object, and `--options.KEY=VALUE`, where VALUE is
JSON or text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.files import parse_json

_OPTION = re.compile(r'--?options\.(?P<key>[^=]+)(?:=(?P<text>.*))?', re.DOTALL)


def split_options(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
  """Splits `argv` into the arguments for absl and the --options.KEY=TEXT overrides."""
  rest, overrides = [], {}
  for argument in argv:
    match = _OPTION.fullmatch(argument)
    if match is None:
      rest.append(argument)
    elif match['text'] is None:
      raise UserError(f'{argument}: no value given; write {argument}=VALUE')
    else:
      overrides[match['key']] = match['text']
  return rest, overrides


def read_options(text: str, overrides: dict[str, str]) -> dict[str, Any]:
  """Returns the options in a JSON text, with `overrides` applied. Raises UserError if an option is
  malformed.
  """
  try:
    options = parse_json(text)
  except ValueError as error:
    raise UserError(f'--options={one_line(text)}: not JSON: {error}') from None
  if not isinstance(options, dict):
    raise UserError(f'--options={text}: wanted a JSON object')
  for key, value in overrides.items():
    *parents, last = key.split('.')
    place = options
    for parent in parents:
      place = place.setdefault(parent, {})
      if not isinstance(place, dict):
        raise UserError(f'--options.{key}: {parent} is {json.dumps(place)}, which has no {last!r}')
    place[last] = _value(value)
  return options


def _value(text: str) -> Any:
  """Parses a text as JSON. Returns the text itself if it is not JSON."""
  try:
    return parse_json(text)
  except ValueError:
    return text
