"""Sweep over three learning rates of the quickstart's GRPO stage, with two seeds each and a short
SFT stage.

Command:   jaxrl sweep --sweep=quickstart_lr --parallel=2
Hardware:  a laptop's CPU.
Time and result: docs/develop/acceptance.md.
"""

from jaxrl_llm.api import Sweep


def get_sweep() -> Sweep:
  return Sweep(
    base='quickstart',
    axes={'stages.grpo.optimizer.peak_lr': (2e-4, 5e-4, 1e-3)},
    seeds=(1, 2),
    objective='val-core/eval/acc/greedy',
    overrides={'stages.sft.steps': 200, 'stages.grpo.steps': 60, 'stages.grpo.evaluate_every': 20},
  )
