"""Servers that register: which of them serve the policy's model."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxrl_llm.core.net.registry import Lease, Watch
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.vllm.replica import Replica

_UNCOMPARED = ('max_position_embeddings', 'initializer_range', 'head')
"""Fields of a spec that may differ between a policy and its server: lengths are checked at
admission, and servers only sample.
"""


def fingerprint(spec: ModelSpec, tokenizer: bytes | None) -> dict[str, str]:
  """Returns digests by which a policy and a server recognise each other.

  Args:
    spec: spec of the model.
    tokenizer: content of tokenizer.json; None: the server has none.
  """
  fields = dataclasses.asdict(spec)
  for name in _UNCOMPARED:
    del fields[name]
  digests = {'model': _digest(fields)}
  if tokenizer is not None:
    said = json.loads(tokenizer)
    # The rest (truncation, padding) may change when a library saves the same tokenizer again.
    digests['tokenizer'] = _digest([said.get('model'), said.get('added_tokens')])
  return digests


def _digest(value: object) -> str:
  text = json.dumps(value, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()[:16]


class Discovery:
  """Finds a fleet's servers in a registry.

  Attributes:
    wanted: number of servers without which a run does not start.
  """

  def __init__(
    self,
    watch: Watch,
    *,
    wanted: int,
    fingerprint: Mapping[str, str],
    build: Callable[[str, str, int], Replica],
    tell: Callable[[str, str], None],
  ):
    """
    Args:
      watch: the servers in the registry.
      wanted: see the attribute.
      fingerprint: the policy's digests.
      build: returns the replica of a server, given its name, address and number.
      tell: called with the name of a server and what became of it.
    """
    self.wanted, self.tell = wanted, tell
    self._watch, self._fingerprint, self._build = watch, fingerprint, build
    self._numbers = itertools.count()

  @property
  def directory(self) -> pathlib.Path:
    return self._watch.registry.directory

  @property
  def expired(self) -> frozenset[str]:
    """Addresses of servers whose leases have expired."""
    return self._watch.expired

  async def look(self) -> Sequence[Lease]:
    """Returns the leases in force."""
    return await self._watch.look_async()

  def mismatch(self, lease: Lease) -> str | None:
    """Returns why a server cannot serve the policy, by the digests that both have, or None."""
    for name in sorted(self._fingerprint.keys() & lease.fingerprint.keys()):
      if lease.fingerprint[name] != (wanted := self._fingerprint[name]):
        return (
          f'{lease.name} ({lease.address}) serves another {name} than the policy: its digest is '
          f'{lease.fingerprint[name]:.16}, wanted {wanted}'
        )
    return None

  def replica(self, lease: Lease, taken: Collection[str]) -> Replica:
    """Builds the replica of a server, under its name or, if that is `taken`, one like it."""
    names = itertools.chain([lease.name], (f'{lease.name}-{i}' for i in itertools.count(2)))
    name = next(name for name in names if name not in taken)
    return self._build(name, lease.address, next(self._numbers))
