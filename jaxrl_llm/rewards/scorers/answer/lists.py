"""Compares sets (in any order) and tuples (in order) of expressions, which may be nested."""

from __future__ import annotations

import re

from jaxrl_llm.rewards.scorers.answer.expressions import latex_agree, unboxed
from jaxrl_llm.rewards.scorers.answer.latex import canonical
from jaxrl_llm.rewards.scorers.answer.numbers import plain

MAX_ELEMENTS = 64
"""Maximum number of elements in a set or tuple. The time to compare two sets is quadratic in their
numbers of elements.
"""

_SIGNS = (
  (r'\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle|limits)(?![a-zA-Z])', ''),
  (r'\\lbrace(?![a-zA-Z])', r'\\{'), (r'\\rbrace(?![a-zA-Z])', r'\\}'),
  (r'\\langle(?![a-zA-Z])', '⟨'), (r'\\rangle(?![a-zA-Z])', '⟩'),
  (r'\\cup(?![a-zA-Z])', '∪'), (r'\\setminus(?![a-zA-Z])', '∖'), (r'\\pm(?![a-zA-Z])', '±'),
  (r'\\mp(?![a-zA-Z])', '∓'), (r'\\infty(?![a-zA-Z])', '∞'), (r'\\in(?![a-zA-Z])', '∈'),
  (r'\\(?:le|leq|leqslant)(?![a-zA-Z])|<=', '≤'), (r'\\(?:ge|geq|geqslant)(?![a-zA-Z])|>=', '≥'),
  (r'\\(?:ne|neq)(?![a-zA-Z])|!=', '≠'), (r'\\lt(?![a-zA-Z])', '<'), (r'\\gt(?![a-zA-Z])', '>'),
  (r'\\(?:emptyset|varnothing)(?![a-zA-Z])', '∅'),
  (r'\\(?:mathbb|mathbf|Bbb)\s*\{?R\}?|\\R(?![a-zA-Z])', 'ℝ'), (r'\\mid(?![a-zA-Z])', '|'),
  (r'\\(?:vee|lor)(?![a-zA-Z])', ' or '), (r'\\q?quad(?![a-zA-Z])', ' '),
)  # fmt: skip
_SIGNS = tuple((re.compile(pattern), sign) for pattern, sign in _SIGNS)
_NAME = re.compile(
  r"\s*(?P<name>\\?[a-zA-Z]+'*(?:_\{?\w+\}?)?(?:\^\{?-1\}?)?(?:\s*\([\w\s,]*\))?|"
  r'\([a-zA-Z]\s*(?:,\s*[a-zA-Z]\s*)+\)|\|[A-Za-z]+\||'
  r'\\(?:overline|angle|vec|hat|text)\s*\{?\s*[A-Za-z]+\s*\}?)\s*[=∈]\s*(?![=])'
)
_BOTH = str.maketrans('±∓', '+-'), str.maketrans('±∓', '-+')
_OPEN, _CLOSE = '([{⟨', ')]}⟩'


def mathematical(text: str) -> str:
  """Replaces LaTeX commands for brackets, relations and signs with the characters themselves."""
  text = plain(canonical(unboxed(text)))
  for pattern, sign in _SIGNS:
    text = pattern.sub(sign, text)
  return text.strip()


def named(text: str) -> tuple[str, str]:
  """Splits a text such as `x = 3` into name and value. The name is empty if the text has none."""
  match = _NAME.match(text)
  return (match['name'], text[match.end() :].strip()) if match else ('', text.strip())


def split(text: str, *, words: bool = False) -> list[str]:
  """Splits a text at commas and semicolons outside all brackets. With `words`, it is also split at
  `or` and `and`.

  If any comma or semicolon is followed by white space, a comma between a digit and a group of three
  digits belongs to a number, as in `1,000, 2`.
  """
  loose = re.search(r'[,;]\s', text) is not None
  parts, start, depth = [], 0, 0
  pattern = r'\\[{}]|[(\[{⟨)\]}⟩]|[,;]' + (r'|\b(?:or|and)\b' if words else '')
  for match in re.finditer(pattern, text):
    token = match.group().removeprefix('\\')
    if token in _OPEN:
      depth += 1
    elif token in _CLOSE:
      depth -= 1
    elif depth == 0:
      at = match.start()
      if (
        token == ','
        and loose
        and re.match(r'\d{3}(?!\d)', text[at + 1 :])
        and re.search(r'\d$', text[:at])
      ):
        continue
      parts.append(text[start:at])
      start = match.end()
  return [part.strip() for part in [*parts, text[start:]]]


def inside(text: str, left: tuple[str, ...], right: tuple[str, ...]) -> str | None:
  """Returns the content of the pair of brackets that encloses the whole text; None if there is no
  such pair.

  Args:
    left: opening brackets.
    right: closing brackets, in the same order.
  """
  pairs = [(opening, closing) for opening, closing in zip(left, right) if text.startswith(opening)]
  if not pairs or not text.endswith(pairs[0][1]) or len(text) < len(''.join(pairs[0])):
    return None
  opening, closing = pairs[0]
  depth = 0
  for match in re.finditer(r'\\[{}]|[(\[{⟨)\]}⟩]', text):
    depth += 1 if match.group()[-1] in _OPEN else -1
    if depth == 0 and match.end() < len(text):
      return None
  return text[len(opening) : len(text) - len(closing)].strip() if depth == 0 else None


def parse_set(text: str) -> list[str] | None:
  """Returns the elements of a set, as they are written in the text. Returns None if the text is not
  a set.

  Braces around the set are optional, and elements may have names, as in `x = 1 or x = 2`.
  """
  text = mathematical(text)
  if named(text)[0] and (len(split(text, words=True)) == 1 or named(text)[0].startswith('(')):
    text = named(text)[1]
  inner = inside(text, (r'\{', '{'), (r'\}', '}'))
  text = text if inner is None else inner
  if text in ('', '∅'):
    return [] if text or inner is not None else None
  parts = split(text, words=True)
  if len(parts) > 1 and '' in parts:
    # In `1, 2, and 3`, there is an empty part between the last comma and `and`.
    parts = [part for i, part in enumerate(parts) if part or i != len(parts) - 2]
  pairs = [named(part) for part in parts]
  names = {name for name, _ in pairs}
  letters = {re.sub(r'_(?:\{\w+\}|\w)$', '', name) for name in names}
  if '' in [value for _, value in pairs] or len(letters - {''}) > 1 or len(parts) > MAX_ELEMENTS:
    return None
  elements = []
  for _, value in pairs:
    elements += (
      [value.translate(signs) for signs in _BOTH] if '±' in value or '∓' in value else [value]
    )
  return elements


def parse_tuple(text: str) -> list[str] | None:
  """Returns the entries of a tuple, as they are written in the text. Returns None if the text is
  not a tuple. The brackets may be round, square, angle or missing.
  """
  text = mathematical(text)
  name, value = named(text)
  text = (
    value
    if name
    and (inside(value, ('(', '[', '⟨'), (')', ']', '⟩')) is not None or name.startswith('('))
    else text
  )
  inner = inside(text, ('(', '[', '⟨'), (')', ']', '⟩'))
  parts = split(text, words=bool(name)) if inner is None else split(inner)
  return (
    None
    if '' in parts or len(parts) > MAX_ELEMENTS or (inner is None and len(parts) == 1)
    else parts
  )


def names(text: str) -> list[str]:
  """Returns the names of the entries of a tuple, as in `(x, y) = …` or `x = …, y = …`. The list is
  empty unless every entry has a name.
  """
  text = mathematical(text)
  name, _ = named(text)
  if name.startswith('('):
    return [letter.strip() for letter in name[1:-1].split(',')]
  entry_names = [
    named(part)[0]
    for part in split(inside(text, ('(', '[', '⟨'), (')', ']', '⟩')) or text, words=True)
  ]
  return entry_names if all(entry_names) and len(entry_names) > 1 else []


def _elements_agree(truth: str, answer: str) -> bool:
  sets = [_is_set(text) for text in (truth, answer)]
  if any(sets):
    return all(sets) and bool(sets_agree(truth, answer))
  if inside(truth, ('(',), (')',)) is not None and len(split(truth[1:-1])) > 1:
    return inside(answer, ('(',), (')',)) is not None and bool(tuples_agree(truth, answer))
  return latex_agree(truth, answer)


def _is_set(text: str) -> bool:
  r"""Returns whether the text is a set: anything in escaped braces, as in `\{1\}`, or a list in
  plain braces, as in `{1, 2}`. In LaTeX, plain braces only group text, so `{1}` is not a set.
  """
  grouped = inside(text, ('{',), ('}',))
  return inside(text, (r'\{',), (r'\}',)) is not None or (
    grouped is not None and len(split(grouped)) > 1
  )


def sets_agree(truth: str, answer: str, *, each: bool = False) -> bool | None:
  """Returns whether the sets have the same elements, in any order. Returns None if the truth is not
  a set.

  Args:
    each: whether repeated elements count, as in `3, 3, 5` (multisets).
  """
  wanted, got = parse_set(truth), parse_set(answer)
  if wanted is None or got is None:
    return None if wanted is None else False
  if each:
    return len(wanted) == len(got) and all(
      sum(_elements_agree(w, g) for g in got)
      == sum(_elements_agree(w, other) for other in wanted)
      > 0
      for w in wanted
    )
  return all(any(_elements_agree(w, g) for g in got) for w in wanted) and all(
    any(_elements_agree(w, g) for w in wanted) for g in got
  )


def tuples_agree(truth: str, answer: str) -> bool | None:
  """Returns whether the tuples have the same entries in the same order. Returns None if the truth
  is not a tuple.
  """
  wanted, got = parse_tuple(truth), parse_tuple(answer)
  if wanted is None or got is None:
    return None if wanted is None else False
  order = names(answer)
  # If the answer names its entries, they must be in the order of the truth's names or, if the truth
  # has no names, in alphabetical order: `y = 1, x = 2` does not agree with (1, 2).
  if order and order != (names(truth) or sorted(order)):
    return False
  return len(wanted) == len(got) and all(_elements_agree(w, g) for w, g in zip(wanted, got))
