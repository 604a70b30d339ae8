"""Scheduler of the embedded engine: assigns samples to decode slots. It runs on the host and uses
neither a device nor a clock.

Invariants: requests start in order of arrival, except that a later request may share the prefill of
an earlier request with the same bucket (padded prompt length). Requests that need different decode
programs (with and without top-k and top-p) are never decoded together. A turn leaves a slot free
only if no sample waits, or if the next waiting request needs the other program.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import CUT, Completion, Request
from jaxrl_llm.rollout.embedded.programs import Admission, Decoded, Prefilled, admissions_matrix
from jaxrl_llm.rollout.embedded.sampling import row_key


class QueuedRequest:
  """A request in the queue, with the number of its samples that have started and a queue for its
  results.
  """

  def __init__(self, request: Request, bucket: int):
    self.request, self.bucket = request, bucket
    self.admitted = 0
    """Number of samples that have been assigned a slot so far, including finished samples."""
    self.left = False
    """Whether the caller has stopped consuming results."""
    self.results: asyncio.Queue[tuple[int, Completion] | Exception] = asyncio.Queue()

  @property
  def next_index(self) -> int:
    """Index of the sample that is assigned a slot next."""
    return self.request.first + self.admitted

  @property
  def pending(self) -> int:
    """Number of samples waiting for a slot."""
    return 0 if self.left else self.request.samples - self.admitted


@dataclasses.dataclass(eq=False)
class Prefill:
  """Sequences that are prefilled together: prompts, or running samples after a weight update. Once
  the engine has executed the scheduler's turn with this prefill, `result` contains their keys and
  values.
  """

  sequences: tuple[Sequence[int], ...]
  """Tokens whose keys and values are computed: each sequence without its newest token."""
  bucket: int
  """Length to which the sequences are padded."""
  requests: tuple[QueuedRequest, ...] = ()
  """Requests of the prompts; empty for running samples."""
  result: Prefilled | None = None

  @property
  def pending(self) -> int:
    return sum(queued.pending for queued in self.requests)


@dataclasses.dataclass(eq=False)
class Occupant:
  """The sample that a slot decodes."""

  queued: QueuedRequest
  index: int
  segments: list[tuple[int, Version]]
  """(index of the first token, version) of each segment, oldest first."""
  length: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
  """One unit of device work: prefills, assignments of samples to slots, and one decode call. New
  requests are considered only between turns.
  """

  prefills: list[Prefill]
  admissions: list[tuple[Prefill, Int32[np.ndarray, 'slots columns']]]
  control: Int32[np.ndarray, 'controls']
  filtered: bool


class Scheduler:
  """Manages the queue, the prefilled prompts and the slots. In a loop, the engine calls `plan`,
  executes the returned turn on the device, and calls `harvest` with the result.
  """

  def __init__(
    self,
    *,
    name: str,
    seed: int,
    slots: int,
    max_length: int,
    prefill_rows: int,
    max_stop_ids: int,
    recomputed: tuple[int, ...] = (),
  ):
    """
    Args:
      recomputed: lengths (buckets), ascending, to which running samples are padded when they are
        prefilled again after a weight update. If empty, running samples are not prefilled again and
        keep their keys and values.
    """
    self._recomputed = recomputed
    self._stale: set[int] = set()
    """Slots whose keys and values must be computed again before the next decode call."""
    self._name, self._seed, self._prefill_rows, self._max_stop_ids = (
      name,
      seed,
      prefill_rows,
      max_stop_ids,
    )
    self._waiting: list[QueuedRequest] = []
    self._ready: list[Prefill] = []
    self._slots: list[Occupant | None] = [None] * slots
    self._tokens = np.zeros((slots, max_length), np.int32)
    self._logprobs = np.zeros((slots, max_length), np.float32)
    self._filtered = False
    self.discarded = 0
    """Number of sampled tokens that no completion contains."""

  @property
  def open_tokens(self) -> int:
    """Number of sampled tokens of unfinished completions."""
    return sum(slot.length for slot in self._slots if slot is not None)

  @property
  def free_slots(self) -> int:
    return self._slots.count(None)

  def add(self, queued: QueuedRequest) -> None:
    self._waiting.append(queued)

  def requests(self) -> set[QueuedRequest]:
    """Returns all unfinished requests."""
    running = {slot.queued for slot in self._slots if slot is not None}
    return (
      running
      | set(self._waiting)
      | {queued for prefill in self._ready for queued in prefill.requests}
    )

  def reweigh(self, version: Version) -> None:
    """Adapts to new weights. Running samples start a new segment. Prompts that were prefilled for
    pending samples are queued to be prefilled again. If the scheduler was built with `recomputed`
    lengths, the running samples are prefilled again, too.
    """
    if self._recomputed:
      self._stale = {i for i, occupant in enumerate(self._slots) if occupant is not None}
    for occupant in self._slots:
      if occupant is not None:
        drawn = [segment for segment in occupant.segments if segment[0] < occupant.length]
        occupant.segments = [*drawn, (occupant.length, version)]
    self._waiting = self._unprefilled() + self._waiting
    self._ready = []

  def _unprefilled(self) -> list[QueuedRequest]:
    """Returns the requests whose prompt is prefilled and that still have pending samples. Callers
    queue them, so that the prompts are prefilled again.
    """
    return [queued for prefill in self._ready for queued in prefill.requests if queued.pending]

  def vacate(self) -> None:
    """Empties the slots before their keys and values are lost. Prompts that were prefilled for
    pending samples are queued to be prefilled again.

    Raises:
      RuntimeError: a completion is in progress and its caller still waits for it.
    """
    running = [slot for slot in self._slots if slot is not None and not slot.queued.left]
    if running:
      raise RuntimeError(
        f'engine {self._name}: released with {len(running)} completions in progress, the first of '
        f'request {running[0].queued.request.uid}'
      )
    self.discarded += sum(slot.length for slot in self._slots if slot is not None)
    self._slots = [None] * len(self._slots)
    self._waiting = self._unprefilled() + self._waiting
    self._ready = []

  def relabel(self, version: Version) -> None:
    """Sets the version of each running sample's newest segment. This is called if the weights stay
    the same but belong to a new version.
    """
    for occupant in self._slots:
      if occupant is not None:
        occupant.segments[-1] = (occupant.segments[-1][0], version)

  def plan(self, version: Version | None) -> Turn | None:
    """Drops requests whose caller has stopped consuming results, fills free slots, and returns the
    next turn, or None if there is no work.
    """
    self.discarded += sum(s.length for s in self._slots if s is not None and s.queued.left)
    self._slots = [None if slot is None or slot.queued.left else slot for slot in self._slots]
    self._waiting = [queued for queued in self._waiting if not queued.left]
    self._ready = [prefill for prefill in self._ready if prefill.pending]
    if self.free_slots == len(self._slots) and not self._ready and self._waiting:
      self._filtered = self._waiting[0].request.sampling.filtered
    again = self._recompute()
    prefills = [prefill for prefill, _ in again] + self._take_prompts()
    admissions = again + self._fill_slots(version)
    occupied = [slot is not None for slot in self._slots]
    active = sum(occupied)
    if not active:
      return None
    # While samples wait, the decode call ends as soon as enough slots have finished: an eighth of
    # all slots, or one per waiting sample if that is fewer.
    pending = sum(part.pending for part in (*self._ready, *self._same_kind()))
    until = max(0, active - min(pending, max(1, len(self._slots) // 8))) if pending else 0
    control = np.array([until, *occupied], np.int32)
    return Turn(prefills=prefills, admissions=admissions, control=control, filtered=self._filtered)

  def _same_kind(self) -> Iterable[QueuedRequest]:
    """Yields the waiting requests that come before the first one that needs the other decode
    program (with or without top-k and top-p). Later requests are not considered, so that no request
    is overtaken forever.
    """
    for queued in self._waiting:
      if queued.request.sampling.filtered != self._filtered:
        return
      yield queued

  def _take_prompts(self) -> list[Prefill]:
    """Forms prefills, in order of arrival, for the free slots that already prefilled prompts cannot
    fill. A prefill's spare rows are filled with later prompts of the same bucket.
    """
    taken = []
    short = self.free_slots - sum(prefill.pending for prefill in self._ready)
    candidates = list(self._same_kind())
    while short > 0 and candidates:
      bucket = candidates[0].bucket
      requests = [queued for queued in candidates if queued.bucket == bucket][: self._prefill_rows]
      chosen = set(requests)
      candidates = [queued for queued in candidates if queued not in chosen]
      self._waiting = [queued for queued in self._waiting if queued not in chosen]
      prompts = tuple(queued.request.prompt[:-1] for queued in requests)
      taken.append(Prefill(prompts, bucket, tuple(requests)))
      short -= taken[-1].pending
    self._ready += taken
    return taken

  def _recompute(self) -> list[tuple[Prefill, Int32[np.ndarray, 'slots columns']]]:
    """Forms prefills of the running samples whose keys and values come from earlier weights.
    Returns each prefill with the admission matrix that puts the samples back into their slots.
    """
    by_bucket: dict[int, list[tuple[int, list[int]]]] = {}
    for slot in sorted(self._stale):
      if (occupant := self._slots[slot]) is not None:
        prompt = occupant.queued.request.prompt
        tokens = [*prompt, *self._tokens[slot, : occupant.length].tolist()]
        bucket = min(bucket for bucket in self._recomputed if bucket >= len(tokens) - 1)
        by_bucket.setdefault(bucket, []).append((slot, tokens))
    self._stale = set()
    again = []
    for bucket, running in sorted(by_bucket.items()):
      for i in range(0, len(running), self._prefill_rows):
        part = running[i : i + self._prefill_rows]
        matrix = admissions_matrix(len(self._slots), self._max_stop_ids)
        for row, (slot, tokens) in enumerate(part):
          occupant = self._slots[slot]
          request = occupant.queued.request
          self._admission(request, occupant.index, row)._replace(
            token=tokens[-1],
            position=len(tokens) - 1,
            remaining=request.max_tokens - occupant.length,
          ).write(matrix[slot])
        again.append((Prefill(tuple(tokens[:-1] for _, tokens in part), bucket), matrix))
    return again

  def _fill_slots(
    self, version: Version | None
  ) -> list[tuple[Prefill, Int32[np.ndarray, 'slots columns']]]:
    """Assigns pending samples to free slots. Returns, for each prefill that supplies samples, the
    prefill and its admission matrix, which has one row per slot.
    """
    free = [i for i, slot in enumerate(self._slots) if slot is None]
    samples = [
      (prefill, row, queued)
      for prefill in self._ready
      for row, queued in enumerate(prefill.requests)
      for _ in range(queued.pending)
    ]
    matrices: dict[Prefill, np.ndarray] = {}
    for slot, (prefill, row, queued) in zip(free, samples):
      if prefill not in matrices:
        matrices[prefill] = admissions_matrix(len(self._slots), self._max_stop_ids)
      self._admission(queued.request, queued.next_index, row).write(matrices[prefill][slot])
      self._slots[slot] = Occupant(queued, queued.next_index, [(0, version)])
      queued.admitted += 1
    self._ready = [prefill for prefill in self._ready if prefill.pending]
    return list(matrices.items())

  def _admission(self, request: Request, index: int, row: int) -> Admission:
    return Admission(
      source=row,
      token=request.prompt[-1],
      position=len(request.prompt) - 1,
      remaining=request.max_tokens,
      top_k=request.sampling.top_k,
      temperature=request.sampling.temperature,
      top_p=request.sampling.top_p,
      key=row_key(seed=self._seed, words=request.key, sample_index=index),
      stop_ids=request.stop_ids,
    )

  def harvest(self, decoded: Decoded) -> list[tuple[QueuedRequest, int]]:
    """Stores the sampled tokens and delivers the finished completions. Returns the request and the
    number of tokens of each finished completion.
    """
    steps, slots = np.nonzero(np.arange(len(decoded.tokens))[:, None] < decoded.produced)
    lengths = np.array([0 if slot is None else slot.length for slot in self._slots])
    self._tokens[slots, lengths[slots] + steps] = decoded.tokens[steps, slots]
    self._logprobs[slots, lengths[slots] + steps] = decoded.logprobs[steps, slots]
    ended: list[tuple[QueuedRequest, int]] = []
    for i, occupant in enumerate(self._slots):
      if occupant is None:
        continue
      before, occupant.length = occupant.length, occupant.length + int(decoded.produced[i])
      tokens, request = self._tokens[i, : occupant.length], occupant.queued.request
      finish = _finish(tokens, request) if decoded.remaining[i] == 0 else None
      end = request.repetition_end(tokens, start=before)
      if end is not None and (finish is None or end < occupant.length):
        # Tokens that the decode call sampled after the repetition are discarded.
        self.discarded += occupant.length - end
        finish, occupant.length = Finish.REPETITION, end
      if finish is not None:
        self._slots[i] = None
        occupant.queued.results.put_nowait((occupant.index, self._completion(i, occupant, finish)))
        ended.append((occupant.queued, occupant.length))
    return ended

  def _completion(self, slot: int, occupant: Occupant, finish: Finish) -> Completion:
    tokens = self._tokens[slot, : occupant.length].copy()
    ends = [start for start, _ in occupant.segments[1:]] + [occupant.length]
    finishes = [CUT] * (len(ends) - 1) + [str(finish)]
    return Completion(
      tokens=tokens,
      logprobs=self._logprobs[slot, : occupant.length].copy(),
      finish=finish,
      segments=tuple(
        Segment(start=start, end=end, version=version, engine=self._name, finish=reason)
        for (start, version), end, reason in zip(occupant.segments, ends, finishes, strict=True)
      ),
    )


def _finish(tokens: Int32[np.ndarray, 'time'], request: Request) -> Finish:
  """Returns the reason why the decode program ended a completion: a stop token or the length limit.
  The decode program does not detect repetition.
  """
  return Finish.STOP if tokens[-1] in request.stop_ids else Finish.LENGTH
