"""Scorer `answer`: compares the completion's single answer with the task's reference answer (the
truth).

The value is 1.0 if they agree in the comparison mode of the task, else 0.0. It is None only if the
truth is missing or cannot be read. A completion scores 0 if it gives no answer, or two different
answers (in two boxes, or as a list although the truth is not a list), or only an answer that is
copied from the prompt.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal

from jaxrl_llm.core.extras import check_library
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Attempt, OverrunIsZero, Scorer, Verdict, read_options
from jaxrl_llm.rewards.scorers.answer.choice import choices_agree, parse_choice, read_choices
from jaxrl_llm.rewards.scorers.answer.choosing import ChosenOptions, Mode, choose
from jaxrl_llm.rewards.scorers.answer.expressions import is_name, unboxed
from jaxrl_llm.rewards.scorers.answer.extraction import (
  Extraction,
  Methods,
  collapse,
  extract,
  reference,
)
from jaxrl_llm.rewards.scorers.answer.intervals import intervals_agree
from jaxrl_llm.rewards.scorers.answer.latex import canonical
from jaxrl_llm.rewards.scorers.answer.lists import sets_agree, tuples_agree
from jaxrl_llm.rewards.scorers.answer.numbers import Number, parse_number
from jaxrl_llm.rewards.scorers.answer.short_text import aliases, normalise, texts_agree
from jaxrl_llm.rewards.scorers.answer.solutions import answer_key, solutions_agree, unlabelled
from jaxrl_llm.rewards.scorers.answer.units import (
  Quantity,
  Units,
  parse_quantity,
  quantities_agree,
  quantity_key,
)
from jaxrl_llm.rewards.scorers.answer.values import exact_number, real_value

LIBRARIES = ('math_verify',)
"""Libraries that the functions of this module import at their first call."""

NO_TRUTH = 'the task has no truth'
"""Text of the entry `reason` in a verdict's evidence if the value is None because the task has no
truth (reference answer).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerOptions:
  mode: Mode | None = None
  """Comparison mode. If None, a run and `jaxrl score` choose the mode at their start from the
  truths of all tasks. Elsewhere, the mode is chosen for each task from the task's own truth.
  """
  extraction: Methods | None = None
  """Extraction method, or several methods in order: the first that finds anything decides. If None,
  the methods are chosen from the truths like the mode. The option does not apply to the truth
  itself, whose form is recognised (`…#### 42`, `\\boxed{42}`, `42`).
  """
  tag: str = 'answer'
  ignore_case: bool = False
  """For the mode `exact`: whether to ignore the difference between upper and lower case."""
  units: Units = 'refused'
  """For the mode `numeric`: treatment of units and words after a number. refused: a number followed
  by text cannot be read; ignored: units and words do not count; stated: units must agree if both
  the answer and the truth state a unit; required: like stated, but the answer must have a unit if
  the truth has one.
  """
  absolute_tolerance: float = 0.0
  relative_tolerance: float = 0.0
  """For the mode `numeric`: an answer may differ from the truth by at most
  max(absolute_tolerance, relative_tolerance · |truth|). If both tolerances are 0, the answer must
  equal the truth exactly.
  """
  choices_field: str = 'choices'
  """For the mode `choice`: field of the task's row, or of the row's `extra_info`, that lists the
  choices.
  """
  truth_is_index: bool = False
  """For the mode `choice`: whether the truth is the index of the right choice, counted from 0."""
  aliases_field: str = 'aliases'
  """For the mode `text`: field of the task's row, or of the row's `extra_info`, that lists
  additional accepted answers. The truth itself may also be a JSON list of texts.
  """
  on_timeout: Literal['zero', 'none'] = 'zero'
  """Treatment of a call that runs out of time, memory or stack. zero: the value is 0, because the
  completion is to blame (`OverrunIsZero`); none: the call counts as a failure of the scorer.
  """

  def __post_init__(self):
    for name in ('absolute_tolerance', 'relative_tolerance'):
      tolerance = getattr(self, name)
      if not 0 <= tolerance < float('inf'):
        raise ValueError(
          f'option {name} is {tolerance}, wanted a finite number that is not negative'
        )
    if self.extraction is not None and not self.extraction:
      raise ValueError('option extraction is empty, wanted at least one method')

  @property
  def libraries(self) -> tuple[str, ...]:
    """Libraries that scoring in this mode imports at its first call."""
    return () if self.mode in ('exact', 'numeric', 'choice', 'text') else LIBRARIES


def field_of(task: Task, name: str) -> Json:
  """Returns a field of the task's row or, if the row lacks it, of the row's `extra_info`. Returns
  None if neither has the field.
  """
  extra = task.fields.get('extra_info')
  return task.fields.get(name, extra.get(name) if isinstance(extra, Mapping) else None)


def _quantity(text: str, options: AnswerOptions) -> Quantity | None:
  """Reads a number from a text that states it, assigns it to a name (`x = 3`) or computes it
  correctly (`4 · 3 = 12`). Returns None for other text.
  """
  text = unboxed(text)
  if (plainly := _stated(text, options)) is not None:
    return plainly
  text = canonical(text)
  *sides, value = unlabelled(text).split('=')
  quantity = _stated(value.strip(), options) or _in_one_piece(value.strip())
  for place, side in enumerate(sides):
    if quantity is None or not (
      (place == 0 and is_name(side)) or real_value(side.strip()) == quantity.number.value
    ):
      return None
  return quantity


def _stated(text: str, options: AnswerOptions) -> Quantity | None:
  if options.units != 'refused':
    return parse_quantity(text)
  number = parse_number(text)
  return None if number is None else Quantity(number, None)


def _in_one_piece(text: str) -> Quantity | None:
  exact = exact_number(text)
  return None if exact is None else Quantity(Number(exact, False), None)


def _numeric(truth: str, answer: str, options: AnswerOptions) -> bool | None:
  wanted, got = _quantity(truth, options), _quantity(answer, options)
  if wanted is None or got is None:
    return None if wanted is None else False
  tolerance = dict(absolute=options.absolute_tolerance, relative=options.relative_tolerance)
  return quantities_agree(wanted, got, units=options.units, **tolerance)


def _exact(truth: str, answer: str, options: AnswerOptions) -> bool:
  truth, answer = collapse(truth), collapse(answer)
  return truth.casefold() == answer.casefold() if options.ignore_case else truth == answer


def _text(truth: str, answer: str, task: Task, options: AnswerOptions) -> bool | None:
  more = field_of(task, options.aliases_field)
  listed = [alias for alias in more if isinstance(alias, str)] if isinstance(more, list) else []
  return texts_agree([*aliases(truth), *listed], answer)


def _choice(truth: str, answer: str, task: Task, options: AnswerOptions) -> bool | None:
  choices = read_choices(field_of(task, options.choices_field))
  if options.truth_is_index:
    index = int(truth) if truth.isascii() and truth.isdigit() else -1
    if choices is None or not 0 <= index < len(choices):
      return None
    truth = list(choices)[index]
  return choices_agree(truth, answer, choices)


def _agree(truth: str, answer: str, task: Task, options: AnswerOptions) -> bool | None:
  """Returns whether the answer agrees with the truth. Returns None if the truth cannot be read in
  this mode.
  """
  match options.mode:
    case 'exact':
      return _exact(truth, answer, options)
    case 'numeric':
      return _numeric(truth, answer, options)
    case 'latex':
      return solutions_agree(truth, answer)
    case 'interval':
      return intervals_agree(truth, answer)
    case 'set':
      return sets_agree(truth, answer)
    case 'tuple':
      return tuples_agree(truth, answer)
    case 'choice':
      return _choice(truth, answer, task, options)
    case 'text':
      return _text(truth, answer, task, options)


def _key(text: str, *, options: AnswerOptions, choices: Mapping[str, str] | None) -> Hashable:
  """Returns a key that all spellings of an answer share. If the answer cannot be read as a value,
  the key is text.
  """
  match options.mode:
    case 'exact':
      return collapse(text)
    case 'text':
      return normalise(text)
    case 'choice':
      letters = parse_choice(text, choices)
      return collapse(text) if letters is None else letters
    case 'numeric':
      quantity = _quantity(text, options)
      return collapse(text) if quantity is None else quantity_key(quantity, options.units)
    case 'latex':
      return answer_key(text)
  number = parse_number(unboxed(text))
  return collapse(text) if number is None else number


def found_answer(attempt: Attempt, options: AnswerOptions) -> Extraction:
  """Extracts the completion's single answer, exactly as written."""
  choices = (
    read_choices(field_of(attempt.task, options.choices_field))
    if options.mode == 'choice'
    else None
  )
  return extract(
    attempt.completion,
    method=options.extraction,
    tag=options.tag,
    prompts=[message['content'] for message in attempt.task.prompt],
    key=functools.partial(_key, options=options, choices=choices),
  )


def _left_open(options: AnswerOptions, chosen: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values in `chosen` for the options that the user has not set. If the user has set
  `mode`, `units` is left out too, because its chosen value fits only the chosen mode.
  """
  if options.mode is None:
    return {
      name: value
      for name, value in chosen.items()
      if name != 'extraction' or options.extraction is None
    }
  return {'extraction': chosen['extraction']}


def choose_options(
  given: Mapping[str, Any], truths: Callable[[], Iterable[str | None]]
) -> ChosenOptions | None:
  """Chooses the options that are not set, from the truths of the tasks. Returns None if all options
  are set.
  """
  options = read_options(AnswerOptions, given, 'answer')
  if options.mode is not None and options.extraction is not None:
    return None
  chosen = choose(truths())
  further = {
    name: value
    for name, value in _left_open(options, chosen.options).items()
    if given.get(name) is None
  }
  return chosen._replace(options=further)


def _settled(options: AnswerOptions, truth: str) -> AnswerOptions:
  """Returns the options. Each option that is not set gets a value chosen from this truth alone."""
  if options.mode is not None and options.extraction is not None:
    return options
  return dataclasses.replace(options, **_left_open(options, choose([truth]).options))


def score_answer(attempt: Attempt, *, options: AnswerOptions) -> Verdict:
  """Scores 1.0 if the completion's answer agrees with the task's truth, else 0.0. The value is None
  if the truth is missing or cannot be read.
  """
  if attempt.task.truth is None or not attempt.task.truth.strip():
    return Verdict(value=None, evidence={'reason': NO_TRUTH})
  options = _settled(options, attempt.task.truth)
  truth = reference(attempt.task.truth)
  extraction = found_answer(attempt, options)
  evidence = {'truth': truth[:200]}
  # The truth is read even if there is no answer, because the completion must not affect whether a
  # task can be scored.
  agree = _agree(truth, extraction.answer or '', attempt.task, options)
  if agree is None:
    return Verdict(value=None, evidence={**evidence, 'reason': f'the truth is not {options.mode}'})
  if extraction.answer is None:
    return Verdict(value=0.0, evidence={**evidence, 'reason': extraction.reason})
  return Verdict(value=float(agree), evidence={**evidence, 'answer': extraction.answer[:200]})


def answer_scorer(**options: Any) -> Scorer:
  """Returns a scorer that checks whether the answer equals the truth (number, unit, formula, set,
  choice, words, …). The options are `AnswerOptions`.
  """
  read = read_options(AnswerOptions, options, 'answer')
  # If the mode is not set, a run chooses it from the truths and builds the scorer again.
  if read.mode is not None:
    for library in read.libraries:
      check_library(library, f"scorer 'answer' in mode {read.mode!r}")
  scorer = functools.partial(score_answer, options=read)
  return OverrunIsZero(scorer) if read.on_timeout == 'zero' else scorer
