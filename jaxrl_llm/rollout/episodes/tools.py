"""Tools: Python functions that the policy may call."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.sandbox.sandbox import Ending, Limits, Sandboxes
from jaxrl_llm.rollout.episodes.calls import CallFailed, call_within

_TYPES: Mapping[str, type | tuple[type, ...]] = {
  'array': list,
  'boolean': bool,
  'integer': int,
  'number': (int, float),
  'object': dict,
  'string': str,
}


class ToolFailed(Exception):
  """Raised when a tool call failed. The policy reads the exception's message as the result of the
  call.
  """


class Tool:
  """A typed Python function that the policy may call.

  Attributes:
    name: name of the function.
    schema: JSON schema for chat templates, from the function's annotations and docstring.
  """

  def __init__(
    self, function: Callable[..., Any], *, deadline_s: float = 30.0, max_characters: int = 8192
  ):
    """
    Args:
      function: function, or coroutine function, with annotations and a docstring that describes
        each parameter under `Args:`. A plain function runs in a thread. Python cannot end a thread,
        so a function that may hang should do its work in a separate process and end that process
        itself.
      deadline_s: maximum seconds for a call. The wait until fewer than `MAX_THREADS` calls run in
        threads does not count.
      max_characters: maximum length of a result. The rest is cut off.

    Raises:
      UserError: the function is not annotated or not documented.
    """
    # Imported here, because the import takes seconds.
    from transformers.utils import get_json_schema

    self.name, self._function = function.__name__, function
    self._deadline_s, self._max_characters = deadline_s, max_characters
    try:
      self.schema: dict[str, Json] = get_json_schema(function)
    except Exception as error:
      raise UserError(
        one_line(f'tool {self.name}: no JSON schema can be made of its signature: {error}')
      ) from None

  async def __call__(self, arguments: Mapping[str, Json]) -> str:
    """Calls the function and returns its result as text. Raises ToolFailed if the arguments do not
    fit the function, or if the function raises an exception or exceeds its deadline.
    """
    self._check(arguments)
    try:
      result = await call_within(self._deadline_s, functools.partial(self._function, **arguments))
      return str(result)[: self._max_characters]
    except CallFailed as failed:
      raise ToolFailed(f'{self.name}: {failed}') from None
    except Exception as error:  # Raised by the result's own `__str__`.
      raise ToolFailed(one_line(f'{self.name}: {type(error).__name__}: {error}')) from None

  def _check(self, arguments: Mapping[str, Json]) -> None:
    parameters = self.schema['function']['parameters']
    known = parameters.get('properties', {})
    if unknown := sorted(set(arguments) - set(known)):
      raise ToolFailed(
        one_line(f'{self.name}: no argument {unknown[0]!r}; there are {", ".join(known)}', 200)
      )
    if missing := [name for name in parameters.get('required', []) if name not in arguments]:
      raise ToolFailed(f'{self.name}: argument {missing[0]!r} is missing')
    for name, value in arguments.items():
      kind = known[name].get('type')
      wanted = _TYPES.get(kind) if isinstance(kind, str) else None
      is_bool = isinstance(value, bool) and kind != 'boolean'
      if wanted is not None and (is_bool or not isinstance(value, wanted)):
        raise ToolFailed(
          one_line(f'{self.name}: argument {name!r} is {value!r}, wanted {kind}', 200)
        )


@functools.cache
def _sandboxes(limits: Limits) -> Sandboxes:
  """Returns the sandboxes of this process for programs with these limits."""
  sandboxes = Sandboxes(limits)
  atexit.register(sandboxes.close)
  return sandboxes


def python_tool(limits: Limits | None = None) -> Tool:
  """Returns a tool that runs a Python program in the sandbox and returns what it prints. In a
  process, all tools that this function returns for the same limits share sandboxes, which end with
  the process.

  Raises UserError if this machine cannot isolate programs.
  """
  allowed = Limits() if limits is None else limits
  sandboxes = _sandboxes(allowed)

  def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
      code: the program.
    """
    outcome, output = sandboxes.output(code, '')
    if outcome.ended == Ending.PASSED:
      return output
    return f'{output}\n{outcome.detail or f"stopped at a limit: {outcome.ended}"}'.strip()

  return Tool(python, deadline_s=allowed.wall_s + 30.0)
