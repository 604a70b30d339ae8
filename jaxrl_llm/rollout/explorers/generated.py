"""Completions that the engine generated for one lease (the loan of a group to an explorer), and the
check that a sample consists of them.

Invariants: the engine generated the sampled tokens of an accepted sample for the lease's holder,
with the same logprobs, temperature and versions. An explorer can choose prompts and discard
completions, but cannot invent tokens. Tokens that are trained on were drawn from the distribution
that the group is to be sampled from: an explorer cannot narrow it with top-p or top-k.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Completion, Sampling


class _Source(NamedTuple):
  """Origin of tokens: the policy version and engine that generated them, and the temperature."""

  version: Version
  engine: str
  temperature: float


class Generated:
  """Record of the tokens and logprobs that the engine generated for one lease.

  Samples are checked one after the other. Meanwhile, completions can be added in another thread.
  """

  def __init__(self, sampling: Sampling | None = None):
    """
    Args:
      sampling: sampling parameters of the group; None for the default ones.
    """
    self._sampling = sampling or Sampling()
    self._added: collections.deque[tuple[Completion, Sampling]] = collections.deque()
    """Completions that are not in the other fields yet. The next check adds them there, because it
    is made in a thread, and encoding a long completion would block the event loop.
    """
    self._parts: dict[_Source, list[bytes]] = {}
    """Generated tokens of each source, as entries."""
    self._untrainable: dict[_Source, list[bytes]] = {}
    """Those that were drawn with another top-p or top-k than the group's."""

  def add(self, completion: Completion, sampling: Sampling) -> None:
    """Records a completion that was sampled with these parameters."""
    self._added.append((completion, sampling))

  def _encode(self, completion: Completion, sampling: Sampling) -> None:
    tokens = _entries(completion.tokens, completion.logprobs)
    parts = self._parts if self._is_trainable(sampling) else self._untrainable
    for part in completion.segments:
      source = _Source(part.version, part.engine, sampling.temperature)
      parts.setdefault(source, []).append(
        tokens[part.start * _ENTRY_BYTES : part.end * _ENTRY_BYTES]
      )

  def _is_trainable(self, sampling: Sampling) -> bool:
    wanted = self._sampling
    return not sampling.filtered or (
      (sampling.top_p, sampling.top_k) == (wanted.top_p, wanted.top_k)
    )

  def check(self, sample: Sample) -> None:
    """Raises ValueError unless the engine generated the tokens that the sample marks as sampled or
    as trained on, under the versions that its segments name, and drew those that are trained on
    from the group's distribution.

    The segments must be in order and must not overlap.
    """
    while self._added:
      self._encode(*self._added.popleft())
    tokens = _entries(sample.tokens, sample.behaviour_logprobs)
    generated: dict[_Source, _Joined] = {}
    for segment in sample.segments:
      source = _Source(segment.version, segment.engine, sample.temperature)
      if source not in generated:
        generated[source] = self._joined(source)
      known, place = generated[source], slice(segment.start, segment.end)
      for start, end in _runs(sample.sampled[place], segment.start):
        part = tokens[start * _ENTRY_BYTES : end * _ENTRY_BYTES]
        if _contains(known.trainable, part):
          continue
        if not _contains(known.untrainable, part):
          raise ValueError(
            f'tokens [{start}, {end}) or their logprobs are not what engine {segment.engine!r} '
            f'generated as version {segment.version} for this lease'
          )
        if sample.loss_mask[start:end].any():
          raise ValueError(
            f'tokens [{start}, {end}) are in loss_mask, but were drawn with another top_p or top_k '
            "than the group's; leave them out of loss_mask, or request them with the group's "
            'sampling'
          )
    if (trained := sample.loss_mask & ~sample.sampled).any():
      raise ValueError(f'token {np.argmax(trained)} is in loss_mask, but was not sampled')

  def _joined(self, source: _Source) -> _Joined:
    """Returns the tokens of a source. Raises ValueError if it has generated none."""
    sources = self._parts.keys() | self._untrainable.keys()
    engines = {(part.version, part.engine) for part in sources}
    if (source.version, source.engine) not in engines:
      raise ValueError(
        f'version {source.version} of engine {source.engine!r} generated nothing for this lease, '
        f'wanted one of {sorted((str(version), engine) for version, engine in engines)}'
      )
    if source not in sources:
      wanted = sorted({part.temperature for part in sources})
      raise ValueError(
        f'temperature is {source.temperature}, wanted one at which tokens were requested: {wanted}'
      )
    return _Joined(
      *(_SEPARATOR.join(parts.get(source, ())) for parts in (self._parts, self._untrainable))
    )


class _Joined(NamedTuple):
  """Generated tokens of one source, as entries. Completions are separated by `_SEPARATOR`."""

  trainable: bytes
  untrainable: bytes


_ENTRY_BYTES = 8
"""Size in bytes of one entry, which is a token id followed by its logprob (see `_entries`)."""
_SEPARATOR = b'\xff' * _ENTRY_BYTES
"""Entry that separates completions. It cannot occur in a sample, because its logprob is NaN."""


def _entries(tokens: Int32[np.ndarray, 'time'], logprobs: Float32[np.ndarray, 'time']) -> bytes:
  """Encodes each token and its logprob as one entry of 8 bytes."""
  bits = np.ascontiguousarray(logprobs, '<f4').view('<i4')
  return np.stack([tokens.astype('<i4'), bits], axis=1).tobytes()


def _contains(known: bytes, part: bytes) -> bool:
  """Returns whether `part` is a run of consecutive entries in `known`."""
  # A comparison of whole entries finds the first entry of `part` ten times as fast as a search for
  # its bytes. With the slower search, a sample of many short slices would block the event loop for
  # seconds.
  if len(known) < len(part):
    return False
  matches = np.frombuffer(known, '<i8') == np.frombuffer(part, '<i8', count=1)
  first = int(matches.argmax())
  if not matches[first]:
    return False
  place = first * _ENTRY_BYTES
  if known.startswith(part, place):  # Faster than the search, and usually true.
    return True
  place = known.find(part, place + 1)
  while place % _ENTRY_BYTES and place >= 0:
    place = known.find(part, place + 1)
  return place >= 0


def _runs(marks: Bool[np.ndarray, 'time'], start: int) -> list[tuple[int, int]]:
  """Returns (start, end) of each run of True in `marks`. The first mark has the index `start`."""
  edges = np.flatnonzero(np.diff(np.r_[False, marks, False])) + start
  return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
