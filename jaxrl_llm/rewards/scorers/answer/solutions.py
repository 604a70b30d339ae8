"""Compares mathematical answers of any form with the truth. The form of the truth decides how they
are compared.

Invariants: if an answer has another form than the truth, it is accepted only if both mean the same,
as do `x > 3` and `(3, ∞)`, or `x = 3, y = -2` and `(3, -2)`. An answer with several values is never
accepted if the truth is a single value.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from jaxrl_llm.rewards.scorers.answer.choice import parse_choice
from jaxrl_llm.rewards.scorers.answer.effort import explodes
from jaxrl_llm.rewards.scorers.answer.equality import formulas_equal, inequalities_equal
from jaxrl_llm.rewards.scorers.answer.expressions import is_name, latex_agree, tight, unboxed
from jaxrl_llm.rewards.scorers.answer.formula import read_formula
from jaxrl_llm.rewards.scorers.answer.intervals import intervals_agree
from jaxrl_llm.rewards.scorers.answer.latex import canonical
from jaxrl_llm.rewards.scorers.answer.lists import (
  inside,
  mathematical,
  named,
  names,
  sets_agree,
  split,
  tuples_agree,
)
from jaxrl_llm.rewards.scorers.answer.numbers import parse_number, plain
from jaxrl_llm.rewards.scorers.answer.short_text import normalise
from jaxrl_llm.rewards.scorers.answer.units import parse_quantity

_LABEL = re.compile(
  r'(?:\\text\s*\{\s*\(?(?P<a>[A-J])\s*\)?[.:]?\s*\}|\((?P<b>[A-J])\)|(?P<c>[A-J])[).:](?=\s|$))'
  r'\s*(?P<rest>.*)',
  re.DOTALL,
)
_LETTER = re.compile(r'[A-J]')
_MATRIX = re.compile(
  r'[(\[]?\s*\\begin\s*\{(?P<kind>[pbB]?matrix|smallmatrix|array)\}\s*(?:\{[^{}]*\})?'
  r'(?P<rows>.*)\\end\s*\{(?P=kind)\}\s*[)\]]?',
  re.DOTALL,
)
_TEXT = re.compile(r'(?:\\text\s*\{[^{}]*\}\s*)+')
_WORDS = re.compile(
  r'(?<!\\)(?<![a-zA-Z])(?!(?:arc)?(?:sin|cos|tan|sinh|cosh|tanh|sqrt)(?![a-z]))[a-zA-Z]{4,}'
  r'|[ap]\.?\s?m\b',
  re.IGNORECASE,
)
_CLOCK = re.compile(r'[\d\s:.]+')
_NOTHING = frozenset(
  {'no solution', 'no real solution', 'none', 'empty set', 'emptyset', 'no such number'}
)
_REAL = re.compile(r'[<>≤≥≠∪∞ℝ∈∖]')
_RELATION = re.compile(r'\s*(<|>|≤|≥|≠)\s*')
_FLIPPED = str.maketrans('<>≤≥', '><≥≤')
_RATIO = re.compile(r'[^:]+(?::[^:]+)+')


def solutions_agree(truth: str, answer: str) -> bool | None:
  """Returns whether the answer agrees with the truth. Returns None if the truth is empty. The truth
  may be a choice letter, words, a matrix, a ratio, a set of real numbers, a list, a value or an
  equation.
  """
  truth, answer = (canonical(unboxed(text)).strip('$ ') for text in (truth, answer))
  return _agree(truth, answer) if truth else None


def _agree(truth: str, answer: str) -> bool:
  if tight(truth) == tight(answer):
    return True
  if not answer or explodes(answer):
    return False
  for compare in (_choices, _matrices, _texts, _ratios, _real_sets, _lists):
    verdict = compare(truth, answer)
    if verdict is not None:
      return verdict
  return latex_agree(truth, answer)


def _label(text: str) -> tuple[str, str] | None:
  r"""Splits a text such as `\text{(B)} 12` into the letter of a choice and the value. Returns None
  if the text does not begin with a marked letter.
  """
  match = _LABEL.fullmatch(text)
  return (match['a'] or match['b'] or match['c'], match['rest'].strip()) if match else None


def unlabelled(text: str) -> str:
  r"""Returns the text without a leading choice letter: `12` for `\text{(B)} 12`. A text that does
  not begin with such a letter is returned unchanged.
  """
  label = _label(text)
  return label[1] if label and label[1] and _LABEL.match(text)['c'] is None else text


def answer_key(text: str) -> Hashable:
  """Returns a key that all spellings of an answer share: a choice letter, a number, or else the
  text without insignificant spaces.
  """
  text = canonical(unboxed(text))
  label = _label(text)
  if label or _LETTER.fullmatch(text):
    return frozenset({label[0] if label else text})
  number = parse_number(text)
  return tight(text) if number is None else number


# Each function that `_agree` tries handles some forms of truth. It returns whether the answer
# agrees, or None if the function does not apply.


def _choices(truth: str, answer: str) -> bool | None:
  wanted = _label(truth)
  if wanted is None and _LETTER.fullmatch(truth):
    chosen = parse_choice(answer, None)
    return None if chosen is None else chosen == {truth}
  if wanted is None:
    # The answer may have a choice letter before the value.
    value = unlabelled(answer)
    if value == answer:
      return None
    # Another letter before the value would be a second answer.
    return unlabelled(value) == value and _agree(truth, value)
  given = _label(answer)
  if wanted[1] and given and given[1]:
    return (
      given[0] == wanted[0]
      and not (_label(wanted[1]) or _label(given[1]))
      and _agree(wanted[1], given[1])
    )
  chosen = parse_choice(answer, None)
  if chosen is not None or not wanted[1]:
    return chosen == {wanted[0]}
  return _label(wanted[1]) is None and _agree(wanted[1], answer)


def _rows(text: str) -> list[list[str]] | None:
  match = _MATRIX.fullmatch(text)
  if not match or r'\begin' in match['rows']:
    return None
  rows = [
    row.strip() for row in re.split(r'\\\\|\\cr(?![a-z])', match['rows'].replace(r'\hline', ''))
  ]
  return [[cell.strip() for cell in row.split('&')] for row in rows if row] or None


def _matrices(truth: str, answer: str) -> bool | None:
  wanted, got = _rows(named(truth)[1]), _rows(named(answer)[1])
  if wanted is None and got is None:
    return None
  for rows, other in ((wanted, answer), (got, truth)):
    if rows is not None and 1 in (len(rows), len(rows[0])) and (wanted is None or got is None):
      vector = [cell for row in rows for cell in row]
      entries = f'({",".join(vector)})'
      return (
        bool(tuples_agree(entries, other)) if rows is wanted else bool(tuples_agree(other, entries))
      )
  if wanted is None or got is None:
    return None
  return [len(row) for row in wanted] == [len(row) for row in got] and all(
    _agree(w, g) for rows in zip(wanted, got) for w, g in zip(*rows)
  )


def _ratios(truth: str, answer: str) -> bool | None:
  if (
    not _RATIO.fullmatch(truth)
    or not re.search(r'\d\s*:\s*\d|[a-z]\s*:\s*[a-z\d]', truth)
    or '=' in answer.rpartition(':')[2]
  ):
    return None
  wanted, got = (
    [part.strip() for part in text.rpartition('=')[2].split(':')]
    for text in (truth, re.sub(r'\s+to\s+|\\text\s*\{\s*to\s*\}', ':', answer))
  )
  if len(wanted) == len(got):
    return all(
      part == other or (not re.match(r'0\d', part + other) and latex_agree(part, other))
      for part, other in zip(wanted, got)
    )
  if len(wanted) != 2:
    return False
  quotient = read_formula('/'.join(f'({part})' for part in wanted))
  written = read_formula(got[0]) if len(got) == 1 and re.search(r'\\frac|/', got[0]) else None
  return bool(quotient and written and formulas_equal(quotient, written, seed=truth + answer))


def _words(answer: str) -> str:
  """Returns the form in which answers in words are compared: normalised and in the singular. The
  form of answers such as "no solution" is 'none'.
  """
  words = [
    word[:-1] if len(word) > 3 and word.endswith('s') else word
    for word in normalise(answer).split()
  ]
  text = ' '.join(words)
  return 'none' if text in _NOTHING or tight(answer) == r'\{\}' else text


def _texts(truth: str, answer: str) -> bool | None:
  bare = plain(truth)
  formula = re.sub(r'\\text\s*\{[^{}]*\}', '', truth)
  if not (_TEXT.fullmatch(truth) or _WORDS.search(formula)):
    if truth == r'\emptyset':
      return _words(answer) == 'none' or None
    clock = r'\text' in truth and _CLOCK.fullmatch(formula) and _words(truth) == _words(answer)
    return True if clock else None
  if _words(truth) and _words(truth) == _words(answer):
    return True
  # None leaves the decision to the other functions, because a truth with digits may be a quantity,
  # and a list may be several answers.
  return None if re.search(r'[\d=,;\\]|\b(?:and|or)\b', bare) else False


def _members(text: str) -> str:
  """Returns the set itself, `{1, 2}`, for a text such as `x ∈ {1, 2}`. Other text is returned
  unchanged.
  """
  value = named(text)[1] if '∈' in text else text
  return value if value.startswith(r'\{') and not re.search('[|:]', value) else text


def _is_real_set(text: str) -> bool:
  """Returns whether the text is recognisable as a set of real numbers or a relation, by a sign such
  as `∪`, `∞` or `<`, or by unequal brackets, as in `[1, 2)`.
  """
  ends = text[:1] + text[-1:]
  return bool(_REAL.search(text)) or (
    ends[:1] in '([]' and ends[-1:] in ')][' and ends not in ('', '()', '[]')
  )


def _real_sets(truth: str, answer: str) -> bool | None:
  wanted, got = (_members(mathematical(text)) for text in (truth, answer))
  if tight(wanted).lstrip('+') in ('∞', '-∞'):
    return tight(got).lstrip('+') == tight(wanted).lstrip('+')
  if not _is_real_set(wanted) and not _is_real_set(got):
    return None
  agree = intervals_agree(wanted, got)
  if agree or _relations(wanted, got):
    return True
  return None if agree is None and not _RELATION.search(wanted) else False


def _relations(truth: str, answer: str) -> bool:
  """Returns whether two inequalities are equivalent. They may differ by a factor and in the order
  of their sides.
  """
  wanted, got = _RELATION.split(truth), _RELATION.split(answer)
  if (
    len(wanted) != len(got)
    or len(wanted) < 3
    or any(re.search(r'\b(?:and|or)\b', text) for text in (truth, answer))
  ):
    return False
  for sides in (got, [part.translate(_FLIPPED) for part in got[::-1]]):
    if wanted[1::2] == sides[1::2] and all(
      latex_agree(w, s) for w, s in zip(wanted[::2], sides[::2])
    ):
      return True
  formulas = [read_formula(side.strip()) for side in (*wanted[::2], *got[::2])]
  if len(wanted) > 3 or None in formulas:
    return False
  sign = inequalities_equal(
    (formulas[0], formulas[1]), (formulas[2], formulas[3]), seed=truth + answer
  )
  return bool(sign) and got[1] == (wanted[1] if sign > 0 else wanted[1].translate(_FLIPPED))


def _single(text: str) -> bool:
  """Returns whether the text is a single value, so that any commas in it belong to a number."""
  return (
    parse_number(text) is not None
    or parse_quantity(text) is not None
    or read_formula(text) is not None
  )


def _entries(text: str) -> list[str]:
  """Returns the values of a list without brackets. If the text is a single value, returns the whole
  text.
  """
  return [text] if _single(text) else split(text, words=True)


def _records(text: str) -> list[str] | None:
  """Returns the tuples that a text such as `p = 5, q = 2; p = 7, q = 2` lists, here `(5,2)` and
  `(7,2)`. Returns None for other text.
  """
  groups = [split(group) for group in text.split(';')]
  if len(groups) < 2 or any(
    len(group) < 2 or not all(named(part)[0] for part in group) for group in groups
  ):
    return None
  return [f'({",".join(named(part)[1] for part in group)})' for group in groups]


def _bracketed(text: str) -> bool:
  """Returns whether the text consists of several entries in one pair of brackets."""
  inner = inside(text, ('(', '[', '⟨'), (')', ']', '⟩'))
  return inner is not None and len(split(inner)) > 1


def _decimal(text: str) -> str:
  """Returns the text with its comma replaced by a decimal point. Returns an empty string if the
  comma cannot be a decimal comma.
  """
  match = re.fullmatch(r'([-+]?\d+),(\d+)', text)
  return f'{match[1]}.{match[2]}' if match else ''


def _lists(truth: str, answer: str) -> bool | None:
  wanted, got = mathematical(truth), mathematical(answer)
  wanted, got = (_members(', '.join(_records(text) or [text])) for text in (wanted, got))
  value = named(wanted)[1]
  braced = inside(value, ('{',), ('}',))
  if value.startswith(r'\{') or (braced is not None and len(split(braced)) > 1):
    return sets_agree(wanted, got)
  if _bracketed(value) and not _single(value):
    other = named(got)[1]
    if got.startswith(r'\{') or (
      len(split(value[1:-1])) == 2 and {value[0], other[:1]} == {'(', '['}
    ):
      return False  # The answer is a set, or an interval with different ends.
    return tuples_agree(wanted, got)
  several, given = _entries(wanted), _entries(got)
  if len(several) == 1 and '±' not in wanted and r'\pm' not in wanted:
    if len(given) == 1:
      listed = inside(named(got)[1], ('(', '[', '⟨', r'\{'), (')', ']', '⟩', r'\}'))
      many = listed is not None and len(split(listed)) > 1 and not _single(got)
      return False if many or '±' in got or r'\pm' in got else None
    return _decimal(got) == wanted
  called = names(wanted)
  if len(set(called)) == len(called) > 1 and all(map(is_name, called)):
    return _named_agree(wanted, called, got)
  repeated = len(set(map(tight, several))) < len(several)
  return sets_agree(wanted, got, each=repeated and not got.startswith(r'\{'))


def _named_agree(truth: str, called: list[str], answer: str) -> bool:
  """Returns whether an answer gives each of several unknowns its right value.

  Args:
    truth: right values, as in `x = 3, y = -2`.
    called: names of the unknowns in `truth`, in order.
    answer: the answer, which may also be a tuple without names, as in `(3, -2)`.
  """
  wanted = [named(part)[1] for part in split(truth, words=True)]
  given = names(answer)
  if named(answer)[0].startswith('('):
    return tuples_agree(f'({", ".join(called)}) = ({", ".join(wanted)})', answer) or False
  if given:
    got = dict(zip(map(tight, given), (named(part)[1] for part in split(answer, words=True))))
    if set(got) == set(map(tight, called)):
      return all(latex_agree(value, got[tight(name)]) for name, value in zip(called, wanted))
    return False
  if tuples_agree(f'({",".join(wanted)})', answer):
    return True
  letters = {name.partition('_')[0] for name in called}
  return len(letters) == 1 and bool(sets_agree(', '.join(wanted), answer))
