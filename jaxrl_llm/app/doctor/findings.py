"""Findings of the doctor (`jaxrl train --doctor`). Each finding is printed as one line, with a
remedy if one is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxrl_llm.core.errors import UserError, first_cause, one_line
from jaxrl_llm.core.types import Json


class FindingStatus(enum.StrEnum):
  OK = 'ok'
  WARNING = 'warning'
  FAILURE = 'failure'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """Result of one check."""

  check: str
  """Name of the check. If the check concerns one part of the run, such as a stage, the name is
  `<check> <part>`.
  """
  status: FindingStatus
  result: str
  """Description of the result in words."""
  remedy: str = ''
  """Advice to the user; empty if nothing needs to be done."""
  detail: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  """Values on which `result` is based, keyed by name. Names of quantities end in their unit."""

  @property
  def line(self) -> str:
    then = f'; {self.remedy}' if self.remedy else ''
    return f'{self.status:8} {one_line(f"{self.check}: {self.result}{then}", 2000)}'

  def to_json(self) -> dict[str, Json]:
    """Returns the finding as a JSON mapping: its texts, followed by its details."""
    order = ('check', 'status', 'remedy', 'result')
    return {**{name: str(getattr(self, name)) for name in order}, **self.detail}


def ok(check: str, result: str, **detail: Any) -> Finding:
  return Finding(check=check, status=FindingStatus.OK, result=result, detail=detail)


def warning(check: str, result: str, remedy: str, **detail: Any) -> Finding:
  return Finding(
    check=check, status=FindingStatus.WARNING, result=result, remedy=remedy, detail=detail
  )


def failure(check: str, result: str, remedy: str, **detail: Any) -> Finding:
  return Finding(
    check=check, status=FindingStatus.FAILURE, result=result, remedy=remedy, detail=detail
  )


class Findings:
  """All findings of an examination. `tell` is called with each finding when it is added."""

  def __init__(self, tell: Callable[[Finding], None]):
    self._all: list[Finding] = []
    self._tell = tell

  def __iter__(self) -> Iterator[Finding]:
    return iter(self._all)

  def add(self, *findings: Finding) -> None:
    for finding in findings:
      self._all.append(finding)
      self._tell(finding)

  def failed(self, *checks: str) -> bool:
    """Returns whether any of the named checks has failed. Without names, considers all checks."""
    return any(
      finding.status == FindingStatus.FAILURE
      and (not checks or finding.check.partition(' ')[0] in checks)
      for finding in self._all
    )

  @contextlib.contextmanager
  def guarding(
    self, check: str, errors: Iterable[type[Exception]] = (UserError,)
  ) -> Iterator[None]:
    """Converts an exception raised within the block to a failure of `check`.

    Args:
      errors: types of exceptions to convert. Others are raised again.
    """
    try:
      yield
    except Exception as error:
      cause = first_cause(error)
      if not isinstance(cause, tuple(errors)):
        raise
      result, _, remedy = str(cause).rpartition('; ')
      self.add(failure(check, result or remedy, remedy if result else 'see the message'))
