"""Algorithms related to GRPO on the quickstart's task. The variant is the name of the algorithm.

Paper:     in the algorithm's own documentation: python launch/train.py --list
Command:   python launch/train.py --config=configs/grpo.py:gspo
Hardware:  a laptop's CPU.
Time and result: docs/develop/acceptance.md.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import AlgorithmConfig, Config

VARIANTS = {
  'grpo': {'clip_ratio_high': 0.28},
  'dr_grpo': {},
  'dapo': {},
  'gspo': {},
  'cispo': {},
  'rloo': {},
  'reinforce_plus_plus': {},
  'reinforce_plus_plus_baseline': {},
}
"""Options of each algorithm, keyed by variant."""


def get_config(name: str = 'grpo') -> Config:
  if name not in VARIANTS:
    raise ValueError(f'variant {name!r}: wanted one of {", ".join(VARIANTS)}')
  config = quickstart.get_config()
  sft, grpo = config.stages
  stage = dataclasses.replace(
    grpo, name=name, algorithm=AlgorithmConfig(name=name, options=VARIANTS[name])
  )
  return dataclasses.replace(config, name=name, stages=(sft, stage))
