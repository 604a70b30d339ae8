"""Adapters for unchanged user reward functions: verl's `compute_score`, TRL's `reward_func`, and
plain Python functions.

Invariants: a function gets the arguments that its own framework would pass, under the same names
(docs/guides/rewards.md lists arguments that are not available). Its result becomes the Verdict. An
exception, or a result of an unexpected form, counts as a failure of the scorer and never as a
value.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import pathlib
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from types import ModuleType
from typing import Any, Literal, SupportsFloat

from jaxrl_llm.config.own import own_part
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Attempt, PerGroup, Scorer, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerlOptions:
  function: str
  """The function, as `module:attribute` or `path/to/file.py:attribute`. The file and the attribute
  are verl's `custom_reward_function.path` and `name`.
  """
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Additional keyword arguments of the function (verl's
  `custom_reward_function.reward_kwargs`).
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrlOptions:
  function: str
  """The function, as `module:attribute` or `path/to/file.py:attribute`."""
  form: Literal['row', 'plain', 'conversational'] = 'row'
  """Form in which the function gets prompts and completions. plain: text; conversational: lists of
  messages; row: the form of the prompt in the task's dataset row.
  """
  truth_column: str = 'ground_truth'
  """Name of the argument in which the function gets the truth (the reference answer). If the row
  has a field of this name, the function gets that field instead.
  """
  per_group: bool = False
  """Whether to call the function once per group instead of once per attempt. Functions that compare
  completions need this.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonOptions:
  function: str
  """The function `f(prompt, completion, truth)`, as `module:attribute` or
  `path/to/file.py:attribute`.
  """
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Additional keyword arguments of the function."""


class UserFunction:
  """A user's function, which is pickled by name. A worker therefore loads the function when the
  worker starts, before the deadline of the first call begins.
  """

  def __init__(self, name: str, scorer: str):
    """Loads the function. Raises UserError if it does not exist."""
    place, _, attribute = name.rpartition(':')
    if not place or not attribute:
      wanted = "'module:attribute' or 'path/to/file.py:attribute'"
      raise UserError(f'scorer {scorer!r}: function is {name!r}, wanted {wanted}')
    if place.endswith('.py'):
      path = pathlib.Path(place).absolute()
      self.name = f'{path}:{attribute}'
      module = _file_module(path, f'scorer {scorer!r}: function {name!r}')
      if attribute not in vars(module):
        raise UserError(f'scorer {scorer!r}: function {name!r}: the file defines no {attribute!r}')
      self.call = vars(module)[attribute]
    else:
      self.name = name
      self.call = own_part(name, f'scorer {scorer!r}: function')
    self._scorer = scorer
    if not callable(self.call):
      raise UserError(
        f'scorer {scorer!r}: function {name!r} is a {type(self.call).__name__}, wanted a function'
      )

  def __reduce__(self):
    return UserFunction, (self.name, self._scorer)

  def __call__(self, *arguments: Any, **named: Any) -> Any:
    """Calls the function and returns its result. An asynchronous function is run to completion."""
    result = self.call(*arguments, **named)
    return asyncio.run(_result(result)) if inspect.isawaitable(result) else result


async def _result(awaitable: Awaitable[Any]) -> Any:
  # Wait 'score': bounded by the call's deadline, at which this process is killed.
  return await awaitable


def _file_module(path: pathlib.Path, where: str) -> ModuleType:
  """Imports the file as a module, once per process. Like a script, the file can import modules from
  its own directory.
  """
  if not path.is_file():
    raise UserError(f'{where}: {path}: no such file')
  name = (
    f'jaxrl_llm_own_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}'
  )
  if name in sys.modules:
    return sys.modules[name]
  if str(path.parent) not in sys.path:
    sys.path.append(str(path.parent))
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # Dataclasses in the file look up annotations there.
  try:
    spec.loader.exec_module(module)
  except (Exception, SystemExit) as error:
    del sys.modules[name]
    lines = [
      frame.lineno
      for frame in traceback.extract_tb(error.__traceback__)
      if frame.filename == str(path)
    ]
    line = (
      error.lineno
      if isinstance(error, SyntaxError) and error.filename == str(path)
      else (lines or [0])[-1]
    )
    message = ' '.join(str(error).split())
    raise UserError(f'{where}: {path}:{line}: {type(error).__name__}: {message}') from error
  return module


def ground_truth(task: Task) -> Json:
  """Returns the task's truth with the type that it has in the dataset row.

  If the taskset has derived the truth instead of copying it from the row, the truth is text.
  """
  reward_model = task.fields.get('reward_model')
  values = [
    reward_model.get('ground_truth') if isinstance(reward_model, Mapping) else None,
    task.fields.get('answer'),
  ]
  for value in values:
    if (
      value is not None
      and not isinstance(value, str)
      and json.dumps(value, ensure_ascii=False) == task.truth
    ):
      return value
  return task.truth


def data_source(task: Task) -> str:
  """Returns the row's field `data_source` if it is text, else the name of the taskset."""
  named = task.fields.get('data_source')
  return named if isinstance(named, str) else task.taskset


def prompt_text(task: Task) -> str:
  """Returns the prompt as text. This is the row's prompt if that is text, or else the contents of
  the task's messages, joined by blank lines.
  """
  prompt = task.fields.get('prompt')
  return (
    prompt
    if isinstance(prompt, str)
    else '\n\n'.join(message['content'] for message in task.prompt)
  )


def _number(value: Any, where: str) -> float:
  if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
    raise TypeError(f'{where} is {value!r}, wanted a number')
  return float(value)


def _json(value: Any) -> Json:
  try:
    return json.loads(json.dumps(value, default=repr), parse_constant=str)
  # The value has a key that JSON does not allow, or contains itself.
  except (TypeError, ValueError, RecursionError):
    return repr(value)


def _is_part(value: Any) -> bool:
  if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
    return False
  try:
    return math.isfinite(float(value))
  # The value is an array of several numbers, or an integer too large for a float.
  except (TypeError, ValueError, OverflowError):
    return False


def _verdict(result: Any, keys: Sequence[str]) -> Verdict:
  """Converts the result of a function to a Verdict.

  The result is a number, or a dict that has the value under one of `keys`. Other finite numbers in
  the dict become parts, and all other entries become evidence.
  """
  if not isinstance(result, Mapping):
    return Verdict(value=_number(result, 'what the function returned'))
  key = next((key for key in keys if key in result), None)
  if key is None:
    raise KeyError(
      f'the function returned a dict with {sorted(map(str, result))}, wanted {" or ".join(keys)} '
      'in it'
    )
  other_entries = {str(name): value for name, value in result.items() if name != key}
  parts = {name: float(value) for name, value in other_entries.items() if _is_part(value)}
  return Verdict(
    value=None
    if result[key] is None
    else _number(result[key], f'{key!r} of what the function returned'),
    parts=parts,
    evidence={name: _json(value) for name, value in other_entries.items() if name not in parts},
  )


def _none_said() -> Verdict:
  return Verdict(value=None, evidence={'reason': 'the function returned None'})


def score_verl(
  attempt: Attempt, *, function: UserFunction, arguments: Mapping[str, Any]
) -> Verdict:
  """Scores an attempt with a reward function for verl, which gets the arguments that verl's reward
  manager passes.

  The function returns a number, or a dict with the key `score`.
  """
  task = attempt.task
  result = function(
    data_source=data_source(task),
    solution_str=attempt.completion,
    ground_truth=ground_truth(task),
    extra_info=task.fields.get('extra_info') or {},
    **arguments,
  )
  return _verdict(result, ('score',))


def verl_scorer(**options: Any) -> Scorer:
  """Returns a scorer that calls an unchanged reward function for verl: compute_score(data_source,
  solution_str, ground_truth, extra_info). The options are `VerlOptions`.
  """
  read = from_json(dict(options), VerlOptions, "options of scorer 'verl'")
  return functools.partial(
    score_verl, function=UserFunction(read.function, 'verl'), arguments=read.arguments
  )


def score_python(
  attempt: Attempt, *, function: UserFunction, arguments: Mapping[str, Any]
) -> Verdict:
  """Scores an attempt with a plain Python function.

  The function returns a number, a bool, a dict with the key `score` or `value`, or None if it
  cannot score the attempt.
  """
  result = function(
    prompt_text(attempt.task), attempt.completion, ground_truth(attempt.task), **arguments
  )
  return _none_said() if result is None else _verdict(result, ('score', 'value'))


def python_scorer(**options: Any) -> Scorer:
  """Returns a scorer that calls a plain Python function f(prompt, completion, truth). The function
  returns a number, a bool or a dict. The options are `PythonOptions`.
  """
  read = from_json(dict(options), PythonOptions, "options of scorer 'python'")
  return functools.partial(
    score_python, function=UserFunction(read.function, 'python'), arguments=read.arguments
  )


class UnknownTokens(Sequence):
  """Placeholder for a completion's token ids, because scorers know only the number of tokens."""

  def __init__(self, count: int):
    self._count = count

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, index: Any) -> Any:
    raise TypeError('scorers receive the number of tokens, not their ids: len(completion_ids[i])')


def _columns(attempts: Sequence[Attempt], truth_column: str) -> dict[str, list[Json]]:
  """Returns the columns that TRL passes to a reward function, keyed by name: the fields of the
  dataset rows, and the truths. Each column is a list with one element per attempt.
  """
  names = dict.fromkeys(name for attempt in attempts for name in attempt.task.fields)
  kept = [name for name in names if name not in ('prompt', 'completion', 'completion_ids')]
  columns = {name: [attempt.task.fields.get(name) for attempt in attempts] for name in kept}
  truths = [ground_truth(attempt.task) for attempt in attempts]
  if truth_column not in columns and any(truth is not None for truth in truths):
    columns[truth_column] = truths
  return columns


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the arguments in `given` for which the function has parameters."""
  parameters = inspect.signature(function).parameters
  if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
    return dict(given)
  return {name: value for name, value in given.items() if name in parameters}


def trl_verdicts(
  attempts: Sequence[Attempt], function: UserFunction, options: TrlOptions
) -> tuple[Verdict, ...]:
  """Calls the function once, with the arguments that TRL's `GRPOTrainer` would pass. Returns one
  verdict per attempt.
  """
  extras: dict[str, list[Any]] = {}
  metrics: dict[str, float] = {}
  row_prompts = [attempt.task.fields.get('prompt') for attempt in attempts]
  talks = [
    options.form == 'conversational' or (options.form == 'row' and isinstance(p, list))
    for p in row_prompts
  ]

  def message(text):
    return [{'role': 'assistant', 'content': text}]

  given = {
    **_columns(attempts, options.truth_column),
    'prompts': [
      [dict(m) for m in a.task.prompt] if talk else prompt_text(a.task)
      for a, talk in zip(attempts, talks)
    ],
    'completions': [
      message(a.completion) if talk else a.completion for a, talk in zip(attempts, talks)
    ],
    'completion_ids': [UnknownTokens(attempt.response_len) for attempt in attempts],
    'trainer_state': None,
    'log_extra': lambda column, values: extras.update({column: list(values)}),
    'log_metric': lambda name, value: metrics.update({name: float(value)}),
  }
  rewards = function(**_taken(function.call, given))
  if (
    isinstance(rewards, str | Mapping)
    or not isinstance(rewards, Sized)
    or len(rewards) != len(attempts)
  ):
    raise ValueError(
      f'the function returned {rewards!r:.200}, wanted a list of {len(attempts)}: a reward for each'
    )
  verdicts = []
  for index, reward in enumerate(rewards):
    evidence = {
      name: _json(values[index]) for name, values in extras.items() if index < len(values)
    }
    value = (
      None if reward is None else _number(reward, f'reward {index} of what the function returned')
    )
    if value is None or math.isnan(value):  # In TRL, both None and NaN mean "no reward".
      verdicts.append(Verdict(value=None, evidence={**_none_said().evidence, **evidence}))
    else:
      verdicts.append(Verdict(value=value, parts=metrics, evidence=evidence))
  return tuple(verdicts)


def score_trl(attempt: Attempt, *, function: UserFunction, options: TrlOptions) -> Verdict:
  """Scores one completion by calling the function on a batch that contains only this completion."""
  (verdict,) = trl_verdicts((attempt,), function, options)
  return verdict


def score_trl_group(
  attempts: tuple[Attempt, ...],
  scores: tuple[tuple[Score, ...], ...],
  *,
  function: UserFunction,
  options: TrlOptions,
) -> tuple[Verdict, ...]:
  """Scores a group by calling the function once on all of its completions."""
  return trl_verdicts(attempts, function, options)


def trl_scorer(**options: Any) -> Scorer | PerGroup:
  """Returns a scorer that calls an unchanged reward function for TRL: reward_func(prompts,
  completions, **columns), which returns a list. The options are `TrlOptions`.
  """
  read = from_json(dict(options), TrlOptions, "options of scorer 'trl'")
  function = UserFunction(read.function, 'trl')
  if read.per_group:
    return PerGroup(functools.partial(score_trl_group, function=function, options=read))
  return functools.partial(score_trl, function=function, options=read)
