"""Checks values and encoded samples that other processes have written.

Invariant: a sample that passes the checks could have come from a correct process of this run, so it
cannot make the run fail later. This module does not check whether the names in a sample, such as
its uid and its taskset, exist in the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm.core.files import parse_msgpack
from jaxrl_llm.core.records.sample import Role, Sample, decode
from jaxrl_llm.rollout.contract import check_segments

T = TypeVar('T')

MAX_UID = 1024
"""Maximum length of a text field in characters."""
INT32 = 2**31
_SAMPLE_BYTES, _TOKEN_BYTES = 1 << 20, 64
"""Parts of the maximum size of an encoded sample: a constant number of bytes for names, and a
number of bytes per token of the longest sequence.
"""
_ROUNDING = 1e-3
"""Amount by which a logprob may exceed 0 because of rounding."""
_SEGMENT = ('start', 'end', 'attempt', 'step', 'engine', 'finish')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
  """Limits on the samples and requests of a run."""

  vocab_size: int
  """Exclusive upper bound of token ids."""
  max_length: int
  """Maximum number of tokens of a sequence, including its prompt."""

  def check_tokens(self, tokens: Any, name: str) -> None:
    """Raises ValueError if a token id is outside the vocabulary."""
    tokens = np.asarray(tokens, np.int64)
    outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
    if len(outside):
      raise ValueError(f'{name} has token {outside[0]}, wanted 0 … {self.vocab_size - 1}')


def checked_sample(data: bytes, bounds: Bounds) -> Sample:
  """Checks and decodes an encoded sample.

  Raises ValueError if a field is missing or has a wrong type, the sample exceeds the limits, or its
  segments are missing or fail `check_segments`. Damaged data may also raise other exceptions of the
  decoder.
  """
  most = _SAMPLE_BYTES + _TOKEN_BYTES * bounds.max_length
  if len(data) > most:
    raise ValueError(f'{len(data)} bytes, wanted at most {most}')
  _check_types(parse_msgpack(data))
  sample = decode(data)
  _check_arrays(sample, bounds)
  if not sample.segments:
    raise ValueError('segments are missing, wanted the weight versions that sampled the tokens')
  check_segments(sample)
  return sample


def _check_types(row: Any) -> None:
  """Raises ValueError unless the fields of an encoded sample (`core.records.sample.encode`) have
  valid types and ranges.
  """
  check_type(row, 'record', dict)
  for name in (
    'uid',
    'task_id',
    'group_id',
    'trajectory_id',
    'taskset',
    'domain',
    'source',
    'finish_reason',
  ):
    check_text(row, name)
  for name in ('visit', 'sample_index', 'step_index', 'prompt_len'):
    check_integer(row, name, 0, INT32 - 1)
  check_number(row, 'temperature')
  for name in ('tokens', 'role', 'loss_mask', 'sampled', 'behaviour_logprobs'):
    if not field(row, name, bytes):
      raise ValueError(f'{name} is empty')
  field(row, 'preference', type(None))
  for shown in all_of(field(row, 'media', list), 'media', dict):
    all_of(field(shown, 'span', list), 'span', int)
  for segment in all_of(field(row, 'segments', list), 'segments', list):
    fields = dict(zip(_SEGMENT, segment, strict=True))
    for name in ('start', 'end', 'attempt', 'step'):
      check_integer(fields, name, 0, INT32 - 1)
    for name in ('engine', 'finish'):
      check_text(fields, name)


def _check_arrays(sample: Sample, bounds: Bounds) -> None:
  if len(sample.tokens) > bounds.max_length:
    raise ValueError(
      f'{len(sample.tokens)} tokens, wanted at most {bounds.max_length}: rollout.max_prompt_length '
      'and max_response_length together'
    )
  bounds.check_tokens(sample.tokens, 'tokens')
  if sample.role.max() > max(Role):
    raise ValueError(f'role has {sample.role.max()}, wanted at most {int(max(Role))}')
  for name in ('loss_mask', 'sampled'):
    if getattr(sample, name).view(np.uint8).max() > 1:
      raise ValueError(f'{name} has bytes other than 0 and 1')
  if sample.behaviour_logprobs.max() > _ROUNDING:
    raise ValueError(f'behaviour_logprobs has {sample.behaviour_logprobs.max()}, wanted at most 0')


def field(row: Mapping[str, Any], name: str, kind: type[T]) -> T:
  if name not in row:
    raise ValueError(f'{name} is missing')
  return check_type(row[name], name, kind)


def check_type(value: Any, name: str, kind: type[T]) -> T:
  if type(value) is not kind:  # Unlike isinstance, this rejects a bool where an int is expected.
    raise ValueError(f'{name} is {type(value).__name__}, wanted {kind.__name__}')
  return value


def all_of(values: Any, name: str, kind: type[T]) -> list[T]:
  if set(map(type, values)) <= {kind}:
    return values
  return [check_type(value, f'{name}[{i}]', kind) for i, value in enumerate(values)]


def check_text(row: Mapping[str, Any], name: str, most: int = MAX_UID) -> None:
  text = field(row, name, str)
  if len(text) > most or not text.isprintable():
    raise ValueError(f'{name} has {len(text)} characters, wanted at most {most}, all printable')


def check_integer(row: Mapping[str, Any], name: str, least: int, most: int) -> None:
  if not least <= (value := field(row, name, int)) <= most:
    raise ValueError(f'{name} is {value}, wanted {least} … {most}')


def check_number(row: Mapping[str, Any], name: str) -> None:
  value = row.get(name)
  if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
    raise ValueError(f'{name} is {value!r}, wanted a finite number of at least 0')
