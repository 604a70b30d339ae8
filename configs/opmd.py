"""Kimi k1.5's online policy mirror descent on the quickstart's task.

Paper:     Kimi k1.5 (arXiv:2501.12599), section 2.3.2: the loss is over whole sequences, the
           reference is the policy before the batch, and the optimizer's moments are reset before
           each batch. Here, each batch gets several updates.
Command:   python launch/train.py --config=configs/opmd.py
Hardware:  a laptop's CPU.
Time and result: docs/develop/acceptance.md.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import AlgorithmConfig, Config, OptimizerConfig


def get_config(task: str = '') -> Config:
  config = quickstart.get_config(task)
  sft, grpo = config.stages
  opmd = dataclasses.replace(
    grpo,
    name='opmd',
    algorithm=AlgorithmConfig(name='opmd', options={'tau': 0.1}),
    minibatches=4,
    # The learning rate is small, because the first steps of a newly initialised Adam have the size
    # of the rate in every coordinate.
    optimizer=OptimizerConfig(peak_lr=1e-4, b2=0.99),
  )
  return dataclasses.replace(config, name='opmd', stages=(sft, opmd))
