"""Communication volume of a compiled program, parsed from its text.

A collective in the body of a loop counts once per iteration if the compiler knows the number of
iterations, as for scanned layers. In other loops it counts only once. Examples are the loops over
micro-batches and over chunks of the head, whose iterations are known only at run time.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Traffic(NamedTuple):
  count: int
  bytes: int
  """Number of bytes per device. A reduce-scatter counts the size of its operands, and any other
  collective counts the size of its results.
  """
  largest: str
  """Largest array counted in `bytes`, such as 'bf16[4096,1024]'."""
  overlapped: int = 0
  """Part of `bytes` whose transfer can overlap with a matrix product: the transfer is asynchronous,
  and the compiler has scheduled a product between its start and its end. The product may take less
  time than the transfer.
  """


KINDS = ('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'collective-permute')
_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) (?:\([^\n]*\) -> [^\n]*)?\{$')
_OPERATION = re.compile(rf'^(?:ROOT )?%?[\w.\-]+ = (.+?) ({"|".join(KINDS)})(-start)?\(')
_BETWEEN = re.compile(r'^(?:ROOT )?%?[\w.\-]+ = (.+?) send\(.*_xla_megascale_transfer_type="(\w+)"')
"""Matches a transfer between TPU slices, which the compiler turns into pairs of sends and
receives.
"""
_CALLED = re.compile(
  r'\b(body|calls|to_apply|called_computations|branch_computations)=\{?([^,}]+(?:, ?%[^,}]+)*)'
)
_TRIPS = re.compile(r'known_trip_count"?:\s?\{"?n"?:"?(\d+)')
_ARRAY = re.compile(r'\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]')
_FUSED_SCATTER = 'all-reduce-scatter'
"""In TPU programs, the first part of the name of a fusion that performs an all-reduce and keeps
only the device's shard of the result.
"""
_DEFINED = re.compile(r'^(?:ROOT )?(%[\w.\-]+) = (\([^()]*\)|\S+) ')
_STARTED = re.compile(rf'^(?:ROOT )?(%[\w.\-]+) = .+? (?:{"|".join(KINDS)})-start\(')
_ENDED = re.compile(rf'^(?:ROOT )?%[\w.\-]+ = .+? (?:{"|".join(KINDS)})-done\([^%]*(%[\w.\-]+)')
_PRODUCT = re.compile(
  r' (?:dot|convolution)\(| custom-call\(.*custom_call_target="[^"]*(?:gemm|matmul)'
)
_CHANNEL = re.compile(r'channel_id=(\d+)')
_CONSTANT = re.compile(r'^(%[\w.\-]+) = s32\[\]\S* constant\((\d+)\)')
_BELOW = re.compile(r'^ROOT .* compare\(\S+, (%[\w.\-]+)\), direction=LT')
_CONDITION = re.compile(r'condition=%?([\w.\-]+)')


class _Array(NamedTuple):
  bytes: int
  text: str


@dataclasses.dataclass
class _Collective:
  kind: str
  bytes: int
  largest: _Array
  channel: str | None
  overlapped: bool = False


class _Computation:
  """Collectives and calls of one computation of the program."""

  def __init__(self) -> None:
    self.collectives: list[_Collective] = []
    self.fused: list[str] = []
    """Names of the fusions that this computation calls. The collectives of these fusions count as
    part of this computation.
    """
    self.calls: list[tuple[str, int | None, str | None]] = []
    """Called computations. Each entry is the name, the number of calls (None if not stated), and
    the name of the loop condition (None if the computation is not the body of a loop).
    """
    self.types: dict[str, str] = {}
    """Result type of each operation, keyed by the operation's name."""
    self.constants: dict[str, int] = {}
    self.products = 0
    """Number of operations parsed so far that compute matrix products, themselves or in a called
    computation. A compiled program lists its operations in the order of their execution.
    """
    self.started: dict[str, tuple[_Collective, int]] = {}
    """Asynchronous collectives, keyed by the name of the operation that starts them, with the value
    of `products` at that point.
    """
    self.bound: int | None = None
    """Exclusive upper bound of the loop counter, if this computation is a loop condition. The
    counter starts at 0 and increases by one per iteration.
    """


def traffic(text: str) -> Mapping[str, Traffic]:
  """Returns the traffic of each kind of collective in `text`, the result of `compiled.as_text()`.
  Kinds that do not occur are omitted.
  """
  program, entry = _parse(text)
  counts: collections.Counter[str] = collections.Counter()
  sizes: collections.Counter[str] = collections.Counter()
  overlapped: collections.Counter[str] = collections.Counter()
  largest: dict[str, _Array] = {}

  def visit(name: str, times: int) -> None:
    computation = program[name]
    for sent in (*computation.collectives, *_fused(program, computation)):
      counts[sent.kind] += times
      sizes[sent.kind] += times * sent.bytes
      overlapped[sent.kind] += times * sent.bytes * sent.overlapped
      largest[sent.kind] = max(largest.get(sent.kind, sent.largest), sent.largest)
    for called, trips, condition in computation.calls:
      if trips is None:
        trips = (program[condition].bound if condition else None) or 1
      visit(called, times * trips)

  visit(entry, 1)
  kinds = (*KINDS, *sorted(set(counts) - set(KINDS)))
  return {
    kind: Traffic(counts[kind], sizes[kind], largest[kind].text, overlapped[kind])
    for kind in kinds
    if counts[kind]
  }


def overlapped_share(sent: Mapping[str, Traffic]) -> float:
  """Returns the share of all bytes that `Traffic.overlapped` counts; 1 if nothing is sent."""
  total = sum(traffic.bytes for traffic in sent.values())
  return sum(traffic.overlapped for traffic in sent.values()) / total if total else 1.0


def _parse(text: str) -> tuple[Mapping[str, _Computation], str]:
  """Returns the computations, keyed by name, and the name of the entry computation."""
  program: dict[str, _Computation] = collections.defaultdict(_Computation)
  entry = current = ''
  for line in map(str.strip, text.splitlines()):
    if head := _HEAD.match(line):
      current = head[2]
      entry = current if head[1] else entry
    elif line == '}':
      current = ''
    elif current:
      _parse_line(line, current, program[current])
      _parse_schedule(line, program, program[current])
  return program, entry


def _parse_schedule(
  line: str, program: Mapping[str, _Computation], computation: _Computation
) -> None:
  """Records the products and the asynchronous collectives that a line starts or ends. Computations
  are printed before those that call them, so the products of called computations are already known.
  """
  called = [name.strip(' %') for _, names in _CALLED.findall(line) for name in names.split(',')]
  if _PRODUCT.search(line) or any(program[name].products for name in called if name in program):
    computation.products += 1
  if (begun := _STARTED.match(line)) and computation.collectives:
    computation.started[begun[1]] = computation.collectives[-1], computation.products
  elif (ended := _ENDED.match(line)) and ended[1] in computation.started:
    sent, before = computation.started.pop(ended[1])
    sent.overlapped = computation.products > before


def _parse_line(line: str, name: str, computation: _Computation) -> None:
  if defined := _DEFINED.match(line):
    computation.types[defined[1]] = defined[2]
  if operation := _OPERATION.match(line):
    scattered = name.startswith(_FUSED_SCATTER)
    arrays = _whole(
      operation[2],
      started=bool(operation[3]),
      result=operation[1],
      line=line,
      types=computation.types,
    )
    channel = _CHANNEL.search(line)
    computation.collectives.append(
      _Collective(
        'reduce-scatter' if scattered else operation[2],
        sum(array.bytes for array in arrays),
        max(arrays),
        channel[1] if channel else None,
      )
    )
  elif constant := _CONSTANT.match(line):
    computation.constants[constant[1]] = int(constant[2])
  elif below := _BELOW.match(line):
    computation.bound = computation.constants.get(below[1])
  elif (sent := _BETWEEN.match(line)) is not None:
    # The send returns the operand, a context and a token. Only the operand is counted.
    array = _arrays(sent[1])[0]
    kind = f'{sent[2].lower().replace("_", "-")} between slices'
    computation.collectives.append(_Collective(kind, array.bytes, array, None))
  trips, condition = _TRIPS.search(line), _CONDITION.search(line)
  for attribute, names in _CALLED.findall(line):
    called = [name.strip(' %') for name in names.split(',')]
    if attribute == 'calls':
      computation.fused += called
    else:
      times = int(trips[1]) if trips else None
      computation.calls += [
        (callee, times, condition[1] if condition else None) for callee in called
      ]


def _whole(
  kind: str, *, started: bool, result: str, line: str, types: Mapping[str, str]
) -> list[_Array]:
  """Returns those arrays of a collective that `Traffic.bytes` counts."""
  if started and kind != 'all-reduce':
    # An asynchronous start returns a tuple of operands, an equal number of results, and context
    # scalars.
    both = [array for array in _arrays(result) if not array.text.endswith('[]')]
    halves = both[: len(both) // 2], both[len(both) // 2 :]
    return max(halves, key=lambda half: sum(array.bytes for array in half))
  if kind == 'reduce-scatter':
    operands = line.split(f'{kind}(', 1)[1].split(')', 1)[0].split(',')
    arrays = [
      array for operand in operands for array in _arrays(types.get(operand.strip(), operand))
    ]
    return arrays or _arrays(result)
  return _arrays(result)


def _arrays(text: str) -> list[_Array]:
  return [_Array(_bytes(*match), '{}[{}]'.format(*match)) for match in _ARRAY.findall(text)]


def _fused(program: Mapping[str, _Computation], computation: _Computation) -> list[_Collective]:
  """Returns the collectives in the fusions that a computation calls.

  TPU programs split a transfer into several fusions with the same channel: its start, the work that
  overlaps with it, and its end. These count as one collective.
  """
  fused: dict[Any, _Collective] = {}
  for fusion in computation.fused:
    for sent in _within(program, fusion):
      first = fused.setdefault(sent.channel or object(), sent)
      first.overlapped |= program[fusion].products > 0
  return list(fused.values())


def _within(program: Mapping[str, _Computation], fusion: str) -> Iterator[_Collective]:
  yield from program[fusion].collectives
  for inner in program[fusion].fused:
    yield from _within(program, inner)


def _bytes(kind: str, shape: str) -> int:
  return _bits(kind) * math.prod(int(n) for n in shape.split(',') if n) // 8


def _bits(kind: str) -> int:
  return 8 if kind == 'pred' else int(re.search(r'\d+', kind)[0])
