"""Compares the completion's one answer with the reference answer: as text, as a number, or as mathematics.

Value 1.0 or 0.0; None only where the truth is missing or unreadable. A completion scores 0 when it has no answer, when
it gives two different ones (in two boxes, or as a list where the truth is none), and for what it echoes of the prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.api import Attempt, OverrunIsZero, Scorer, Verdict, read_options
from jaxrl_llm.rewards.extraction import Method, candidates, collapse, extract


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerOptions:
  mode: Literal['exact', 'numeric', 'latex'] = 'exact'
  extraction: Method = 'whole'
  """Where in the completion the answer stands. The truth's own form is recognised (`…#### 42`, `\\boxed{42}`, `42`)."""
  tag: str = 'answer'
  ignore_case: bool = False
  """Mode `exact` only."""
  units: bool = False
  """Mode `numeric` only: words after the number are ignored."""
  absolute_tolerance: float = 0.0
  relative_tolerance: float = 0.0
  """Mode `numeric`: accepted within max(absolute, relative · |truth|); both 0: equal as rationals."""
  on_timeout: Literal['zero', 'none'] = 'zero'
  """What a missed deadline is worth: by default it is the completion's doing (`OverrunIsZero`)."""


class Number(NamedTuple):
  value: Fraction
  """As written: 42 for `42%`."""
  percent: bool


_DECIMAL = re.compile(
  r'(?P<whole>\d{1,3}(?:,\d{3})+|\d*)(?:\.(?P<part>\d*))?(?:[eE](?P<exponent>[-+]?\d{1,3}))?', re.ASCII
)
_FRACTION = re.compile(
  r'(?P<whole>\d+(?=\s|\\))?\s*'
  r'(?:(?P<a>\d+)\s*/\s*(?P<b>\d+)|\\[dt]?frac\s*\{\s*(?P<c>-?\d+)\s*\}\s*\{\s*(?P<d>\d+)\s*\})',
  re.ASCII,
)
_LATEX_NOISE = (('\u2212', '-'), ('{,}', ','), (r'\!', ''), (r'\,', ''), (r'\;', ''), (r'\%', '%'), (r'\$', '$'))
_UNITS = re.compile(r'\s*(?:\\(?:text|mathrm)\{[^{}\d]*\}|[^\W\d_]+\.?)(?:\s+[^\W\d_]+\.?)*\s*$')
_MAX_DIGITS = 200


def parse_number(text: str, *, units: bool = False) -> Number | None:
  """The one number that the whole text is, exactly; None if it is anything else (two numbers, a word, a NaN).

  Reads signs, thousands separators in groups of three, decimals, exponents of up to three digits, fractions and mixed
  numbers (plain or LaTeX), percent signs, a currency sign; math delimiters, bold marks and a final stop are ignored.
  """
  for old, new in _LATEX_NOISE:
    text = text.replace(old, new)
  text = text.strip().strip('*').strip('$').rstrip('.').strip()
  if units:
    text = _UNITS.sub('', text)
  sign = -1 if text.startswith('-') else 1
  text = text.removeprefix('-') if sign < 0 else text.removeprefix('+')
  text = text.strip().strip('$€£¥').strip()
  percent = text.endswith('%')
  text = text.removesuffix('%').strip()
  if len(text) > _MAX_DIGITS:
    return None
  if match := _FRACTION.fullmatch(text):
    numerator, denominator = match['a'] or match['c'], match['b'] or match['d']
    if int(denominator) == 0:
      return None
    return Number(sign * (int(match['whole'] or 0) + Fraction(int(numerator), int(denominator))), percent)
  match = _DECIMAL.fullmatch(text)
  if not match or not (match['whole'] or match['part']):
    return None
  digits = match['whole'].replace(',', '') + (match['part'] or '')
  scale = int(match['exponent'] or 0) - len(match['part'] or '')
  return Number(sign * int(digits) * Fraction(10) ** scale, percent)


def numbers_agree(truth: Number, answer: Number, *, absolute: float = 0.0, relative: float = 0.0) -> bool:
  """Whether the numbers are equal within the tolerance.

  p% is p/100. Where only one of the two carries the sign, the numbers as written may agree as well: references to
  questions like "what percentage …" often leave it out.
  """

  def close(t: Fraction, a: Fraction) -> bool:
    return abs(t - a) <= max(Fraction(absolute), Fraction(relative) * abs(t))

  if truth.percent == answer.percent:
    return close(truth.value, answer.value)
  scaled = [number.value / 100 if number.percent else number.value for number in (truth, answer)]
  return close(truth.value, answer.value) or close(*scaled)


@functools.cache
def _math_verify() -> Callable[[str], list[Any]]:
  # Imported here: sympy takes a third of a second, which every launch script would pay. The workers preload it.
  import math_verify

  # It warns in each process that its own timeouts are off. They must be (they use SIGALRM); the pool's deadline kills.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  targets = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
  return functools.partial(math_verify.parse, extraction_config=targets, parsing_timeout=None)


@functools.lru_cache(maxsize=64)
def _parse_latex(text: str) -> tuple[Any, ...]:
  return tuple(_math_verify()(rf'\boxed{{{text}}}'))


def _latex_equal(truth: str, answer: str) -> bool:
  import math_verify

  return math_verify.verify(list(_parse_latex(truth)), list(_parse_latex(answer)), timeout_seconds=None)


_SEPARATORS = re.compile(
  r'\\(?:vee|wedge|lor|land|cup|cap|pm|mp|to|implies|iff|equiv|[a-zA-Z]*arrow|\\)|\b(?:or|and)\b|\.\s|[;\n|]'
)
_COMMANDS = re.compile(r'\\[a-zA-Z]+')


def latex_agree(truth: str, answer: str) -> bool:
  """Whether two pieces of LaTeX mean the same, by math-verify, behind guards against hedged answers.

  math-verify takes the last side of `41 = 42` and of `41 \\vee 42`. Here a separator that the truth has not is a second
  answer, and each side of an equation that holds no variable has to agree.
  """
  truth, answer = _unboxed(truth).strip().strip('$').strip(), _unboxed(answer).strip().strip('$').strip()
  if collapse(truth) == collapse(answer):
    return True
  numbers = parse_number(truth), parse_number(answer)
  if numbers[0] is not None and numbers[1] is not None:
    return numbers_agree(*numbers) or _latex_equal(truth, answer)
  if '$' in answer or r'\boxed' in answer or set(_SEPARATORS.findall(answer)) - set(_SEPARATORS.findall(truth)):
    return False
  if '=' in answer and '=' not in truth:
    sides = [side for side in answer.split('=') if not re.search('[a-zA-Z]', _COMMANDS.sub('', side))]
    if not all(side.strip() and _latex_equal(truth, side) for side in sides):
      return False
  return _latex_equal(truth, answer)


def reference(truth: str) -> str:
  """The reference answer inside a dataset's truth: after the last `####`, else the last `\\boxed{}`, else all of it."""
  found = candidates(truth, 'hashes') or candidates(truth, 'boxed') or [truth.strip()]
  return found[-1]


def _unboxed(answer: str) -> str:
  """`42` for `$\\boxed{42}$`; other text as it is."""
  inner = answer.strip().strip('$').strip()
  found = candidates(inner, 'boxed')
  return found[0] if len(found) == 1 and inner.startswith(r'\boxed') and inner.endswith('}') else answer


def _agree(truth: str, answer: str, options: AnswerOptions) -> bool | None:
  """Whether the answer is the truth; None if the truth cannot be read in this mode."""
  if options.mode == 'exact':
    truth, answer = collapse(truth), collapse(answer)
    return truth.casefold() == answer.casefold() if options.ignore_case else truth == answer
  if options.mode == 'latex':
    return latex_agree(truth, answer) if truth and _parse_latex(truth.strip().strip('$').strip()) else None
  wanted, got = (parse_number(_unboxed(text), units=options.units) for text in (truth, answer))
  if wanted is None or got is None:
    return None if wanted is None else False
  return numbers_agree(wanted, got, absolute=options.absolute_tolerance, relative=options.relative_tolerance)


def _key(options: AnswerOptions) -> Callable[[str], Hashable]:
  """What makes two answers of one completion the same answer."""

  def key(text: str) -> Hashable:
    number = None if options.mode == 'exact' else parse_number(_unboxed(text), units=options.units)
    return collapse(text) if number is None else number

  return key


def score_answer(attempt: Attempt, *, options: AnswerOptions) -> Verdict:
  """1.0 if the completion's one answer agrees with the task's truth, else 0.0; None without a readable truth."""
  if attempt.task.truth is None or not attempt.task.truth.strip():
    return Verdict(value=None, evidence={'reason': 'the task has no truth'})
  truth = reference(attempt.task.truth)
  found = extract(
    attempt.completion,
    method=options.extraction,
    tag=options.tag,
    prompts=[message['content'] for message in attempt.task.prompt],
    key=_key(options),
  )
  evidence = {'truth': truth[:200]}
  # The truth is read even where there is no answer: whether a task can be scored must not depend on the completion.
  agree = _agree(truth, found.answer or '', options)
  if agree is None:
    return Verdict(value=None, evidence={**evidence, 'reason': f'the truth is not {options.mode}'})
  if found.answer is None:
    return Verdict(value=0.0, evidence={**evidence, 'reason': found.reason})
  return Verdict(value=float(agree), evidence={**evidence, 'answer': found.answer[:200]})


def answer_scorer(**options: Any) -> Scorer:
  """Whether the answer equals the truth: exact, numeric or LaTeX (math-verify); options: `AnswerOptions`."""
  read = read_options(AnswerOptions, options, 'answer')
  for name in ('absolute_tolerance', 'relative_tolerance'):
    tolerance = options.get(name, 0.0)
    if not 0 <= tolerance < float('inf'):
      raise UserError(f"scorer 'answer': option {name} is {tolerance}, wanted a finite number that is not negative")
  scorer = functools.partial(score_answer, options=read)
  return OverrunIsZero(scorer) if read.on_timeout == 'zero' else scorer
