"""The quickstart with replay: each GRPO batch consists of 4 new groups and 12 earlier ones. A group
is used at most 4 times.

The run therefore generates a quarter of the rollouts. Earlier groups are drawn by priority =
version - 2 · uses (Trinity-RFT's queue), and are not drawn again in the batch after a use. The
decoupled loss corrects for their age.

Paper:     Trinity-RFT, arXiv:2505.17826.
Command:   python launch/train.py --config=configs/replay.py
Hardware:  a laptop's CPU.
Time and result: docs/guides/staleness.md.
"""

import dataclasses

import quickstart

from jaxrl_llm.api import Config, DrawConfig, PastConfig


def get_config() -> Config:
  config = quickstart.get_config()
  sft, grpo = config.stages
  past = PastConfig(groups=12, max_uses=4, draw=DrawConfig(order='priority', decay=2.0, cooldown=1))
  stage = dataclasses.replace(
    grpo, source=dataclasses.replace(grpo.source, groups_per_batch=4, past=past)
  )
  return dataclasses.replace(config, name='replay', stages=(sft, stage))
