"""Model FLOPs utilisation (MFU) of a step: the share of the devices' peak throughput that the
model's arithmetic reached in each phase.

Source: Chowdhery et al. (arXiv:2204.02311), appendix B, with the operations that
`models.flops.model_flops` counts. Metric keys are those of verl.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from jaxrl_llm.batching.packing import Packing
from jaxrl_llm.models.flops import causal_pairs, model_flops
from jaxrl_llm.models.spec import ModelSpec


class Work(NamedTuple):
  """Arithmetic of one phase of a step."""

  phase: str
  """Part of the step that the stopwatch times, such as `update_actor`."""
  role: Literal['actor', 'critic', 'actor_infer', 'ref', 'critic_infer']
  """Last part of the metric's key. Forward passes before the update have separate roles."""
  flops: int
  """Number of floating-point operations in the phase, on all devices together."""


def packed_flops(
  spec: ModelSpec, packings: Iterable[Packing], *, backward: bool, frozen: bool = False
) -> int:
  """Returns the number of floating-point operations of one pass over packed rows, without padding.
  Tokens of a shared prefix count once.

  Args:
    backward: whether the pass computes gradients.
    frozen: whether the weights are frozen, so that the backward pass computes no gradients for
      them.
  """
  tokens = pairs = 0
  for packing in packings:
    first, length = packing.first.tolist(), packing.length.tolist()
    tokens += packing.tokens
    ends = [start + stored for start, stored in zip(first, length, strict=True)]
    pairs += causal_pairs(ends) - causal_pairs(first)
  return model_flops(spec, tokens, pairs=pairs, backward=backward, frozen=frozen)


def utilisation(
  work: Iterable[Work], seconds: Mapping[str, float], *, peak_flops: float
) -> dict[str, float]:
  """Returns the metrics `perf/mfu/<role>`, each in [0, 1] if `peak_flops` is correct.

  Args:
    seconds: durations of the step's phases, keyed by phase.
    peak_flops: peak floating-point operations per second of all devices together.
  """
  return {
    f'perf/mfu/{part.role}': part.flops / (seconds[part.phase] * peak_flops)
    for part in work
    if part.flops and seconds.get(part.phase)
  }
