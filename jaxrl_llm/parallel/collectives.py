"""What a compiled program sends between devices, read from its text.

A collective in the body of a loop whose length the compiler knows (scanned layers) counts that often; in other loops
(micro-batches, whose number is known only at run time) once.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping
from typing import NamedTuple


class Traffic(NamedTuple):
  count: int
  bytes: int
  """Of the results, on one device."""


KINDS = ('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'collective-permute')
_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) (?:\([^\n]*\) -> [^\n]*)?\{$')
_OPERATION = re.compile(rf'^(?:ROOT )?%?[\w.\-]+ = (.+?) ({"|".join(KINDS)})(-start)?\(')
_CALLED = re.compile(r'\b(?:body|calls|to_apply|called_computations|branch_computations)=\{?([^,}]+(?:, ?%[^,}]+)*)')
_TRIPS = re.compile(r'known_trip_count"?:\s?\{"?n"?:"?(\d+)')
_ARRAY = re.compile(r'\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]')
_FUSED_SCATTER = 'all-reduce-scatter'
"""What TPU programs call a fusion that reduces and keeps one's own part."""


def traffic(text: str) -> Mapping[str, Traffic]:
  """By kind, of `compiled.as_text()`; kinds that do not occur are left out."""
  own: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
  calls: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
  entry = current = ''
  for line in map(str.strip, text.splitlines()):
    if head := _HEAD.match(line):
      current = head[2]
      entry = current if head[1] else entry
    elif line == '}':
      current = ''
    elif current:
      if operation := _OPERATION.match(line):
        kind = 'reduce-scatter' if current.startswith(_FUSED_SCATTER) else operation[2]
        own[current].append((kind, _result_bytes(operation[1], started=bool(operation[3]))))
      trips = _TRIPS.search(line)
      for names in _CALLED.findall(line):
        calls[current] += [(name.strip(' %'), int(trips[1]) if trips else 1) for name in names.split(',')]
  counts: collections.Counter[str] = collections.Counter()
  sizes: collections.Counter[str] = collections.Counter()

  def visit(computation: str, times: int) -> None:
    for kind, size in own[computation]:
      counts[kind] += times
      sizes[kind] += times * size
    for called, trips in calls[computation]:
      visit(called, times * trips)

  visit(entry, 1)
  return {kind: Traffic(counts[kind], sizes[kind]) for kind in KINDS if counts[kind]}


def _result_bytes(result: str, *, started: bool) -> int:
  """Of an asynchronous start, whose tuple holds the operand too, the largest part."""
  sizes = [
    _bits(kind) * math.prod(int(n) for n in shape.split(',') if n) // 8 for kind, shape in _ARRAY.findall(result)
  ]
  return max(sizes, default=0) if started else sum(sizes)


def _bits(kind: str) -> int:
  return 8 if kind == 'pred' else int(re.search(r'\d+', kind)[0])
