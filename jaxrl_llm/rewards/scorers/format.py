"""Checks that a whole completion has the form of a template.

A template is literal text with named fields, such as
`<think>{think}</think><answer>{answer}</answer>`. Each literal piece (a tag, or text between tags)
must occur exactly as often and in the same order as in the template, and no field may be blank.
White space at both ends and around literal pieces is ignored, both in the template and in the
completion.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import string
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.api import Attempt, Scorer, Verdict, read_options

_PIECES = re.compile(r'<[^<>]*>|[^<>]+|[<>]')


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatOptions:
  template: str = '<think>{think}</think><answer>{answer}</answer>'
  """Template of the completion. Literal braces are doubled, as in str.format."""


@dataclasses.dataclass(frozen=True)
class Piece:
  text: str
  """Literal text, or the name of a field."""
  field: bool


def read_template(template: str, scorer: str = 'format') -> tuple[Piece, ...]:
  """Splits a template into its pieces. Raises UserError if it is malformed or ambiguous."""

  def wrong(problem: str) -> UserError:
    example = '<answer>{answer}</answer>'
    return UserError(
      f'scorer {scorer!r}: template {template!r} {problem}; wanted text with named fields, as in '
      f'{example!r}'
    )

  try:
    parsed = list(string.Formatter().parse(template))
  except ValueError as error:
    raise wrong(f'does not parse ({error})') from None
  pieces: list[Piece] = []
  for literal, name, spec, conversion in parsed:
    pieces += [Piece(text.strip(), False) for text in _PIECES.findall(literal) if text.strip()]
    if name is None:
      continue
    if not name.isidentifier() or spec or conversion:
      raise wrong(f'has the field {name!r}, which is not a plain name')
    if pieces and pieces[-1].field:
      raise wrong(f'has nothing between the fields {pieces[-1].text!r} and {name!r}')
    if Piece(name, True) in pieces:
      raise wrong(f'has the field {name!r} twice')
    pieces.append(Piece(name, True))
  if not any(piece.field for piece in pieces) or all(piece.field for piece in pieces):
    raise wrong('needs at least one field and one literal')
  literals = {piece.text for piece in pieces if not piece.field}
  for inner in literals:
    if any(inner in outer for outer in literals - {inner}):
      raise wrong(f'has the literal {inner!r} inside another one')
  return tuple(pieces)


def read_fields(completion: str, pieces: tuple[Piece, ...]) -> tuple[dict[str, str], str]:
  """Returns the contents of the template's fields, keyed by field, and an empty reason.

  If the completion does not have the template's form, returns an empty dict and the reason.
  """
  literals = [piece.text for piece in pieces if not piece.field]
  for literal in literals:
    wanted, got = sum(other.count(literal) for other in literals), completion.count(literal)
    if got != wanted:
      return {}, f'{literal!r} occurs {got} times, wanted {wanted}'
  fields: dict[str, str] = {}
  position, field = 0, ''
  for piece in (*pieces, None):
    if piece and piece.field:
      field = piece.text
      continue
    start = completion.find(piece.text, position) if piece else len(completion)
    if start < 0:
      return {}, f'{piece.text!r} is out of order'
    between, field, name = completion[position:start], '', field
    if name and not between.strip():
      return {}, f'field {name!r} is blank'
    if not name and between.strip():
      return {}, f'{between.strip()[:40]!r} stands outside the template'
    if name:
      fields[name] = between
    position = start + (len(piece.text) if piece else 0)
  return fields, ''


def score_format(attempt: Attempt, *, pieces: tuple[Piece, ...]) -> Verdict:
  """Scores 1.0 if the completion has the template's form, else 0.0."""
  _, wrong = read_fields(attempt.completion, pieces)
  return Verdict(value=0.0 if wrong else 1.0, evidence={'reason': wrong} if wrong else {})


def format_scorer(**options: Any) -> Scorer:
  """Returns a scorer that checks whether the completion has the form of a template. The options are
  `FormatOptions`.
  """
  read = read_options(FormatOptions, options, 'format')
  return functools.partial(score_format, pieces=read_template(read.template))
