"""Brackets of a JSON text, checked against a scan of one character after the other."""

import random

import pytest

from jaxrl_llm.core import files


def is_one_object(text: str) -> bool:
  """Returns whether the brackets of a text without backslashes are those of one object."""
  depth, is_quoted, is_over = 0, False, False
  for character in text:
    if is_over:
      return False
    if character == '"':
      is_quoted = not is_quoted
    elif not is_quoted and character in '[{':
      depth += 1
    elif not is_quoted and character in ']}':
      depth -= 1
      is_over = depth == 0
    if depth > files.MAX_DEPTH:
      return False
  return is_over and not is_quoted


@pytest.mark.parametrize('part', [1, 3, 1 << 17])
def test_the_verdict_is_that_of_a_scan(monkeypatch, part):
  monkeypatch.setattr(files, '_PART', part)
  draws, accepted = random.Random(0), 0
  for _ in range(4000):
    text = '{' + ''.join(draws.choices('{}[]"a', k=draws.randrange(9))) + '}'
    try:
      files.check_object(text.encode())
    except ValueError:
      assert not is_one_object(text), text
    else:
      accepted += 1
      assert is_one_object(text), text
  assert 100 < accepted < 3900


@pytest.mark.parametrize('extra', [0, 1])
def test_nesting_is_limited(extra):
  inner = files.MAX_DEPTH - 1 + extra
  text = b'{"a":' + b'[' * inner + b'"]"' + b']' * inner + b'}'
  if extra:
    with pytest.raises(ValueError):
      files.check_object(text)
  else:
    files.check_object(text)
