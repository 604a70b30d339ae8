"""Expert rows that are added to a run while it is active (`replay.experts`), as rows of batches."""

from __future__ import annotations

from jaxrl_llm.batching.plan import Row, with_prefixes
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.replay import experts
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import SEALED
from jaxrl_llm.rollout.untrusted import Bounds


class AddedExperts:
  """Draws added expert rows for the batches of a stage, in the order of their arrival."""

  def __init__(self, store: ReplayStore, *, max_uses: int, bounds: Bounds):
    """
    Args:
      max_uses: maximum number of batches that may train on a row.
      bounds: limits of the run. A row that exceeds them is left out when it arrives. A row that is
        too long is not drawn even if an earlier start of the run, with a larger limit, has accepted
        it.
    """
    self._store, self._max_uses, self._bounds = store, max_uses, bounds

  def draw(self, step: int, count: int) -> tuple[list[Row], dict[str, int]]:
    """Takes newly arrived rows into the store, and draws at most `count` of the store's expert rows
    for the batch of a step. Call it once per step.

    Returns the drawn rows, and the counters `experts/…` of the batch.
    """
    arrived = experts.take(self._store, step, self._check)
    longest = self._bounds.max_length
    ready = self._store.added(step, max_uses=self._max_uses, longest=longest)
    uids = ready[:count]
    places = self._store.at(step).seal(uids) if uids else {}
    samples = self._store.read(uids)
    rows = [
      Row(
        uid=sample.uid,
        source=f'{SEALED}/{places[sample.uid][0]}',
        index=places[sample.uid][1],
        length=len(sample.tokens),
        prompt_len=sample.prompt_len,
        group=sample.group_id,
        reward=None,
        is_expert=True,
        truncated=False,
        version_step=None,
      )
      for sample in samples
    ]
    counts = {'arrived': arrived, 'added': len(rows), 'waiting': len(ready) - len(rows)}
    return with_prefixes(rows, samples), {f'experts/{name}': n for name, n in counts.items()}

  def _check(self, sample: Sample) -> None:
    """Raises ValueError if the sample exceeds the limits of the run."""
    self._bounds.check_tokens(sample.tokens, 'tokens')
    if len(sample.tokens) > self._bounds.max_length:
      raise ValueError(f'{len(sample.tokens)} tokens, wanted at most {self._bounds.max_length}')
