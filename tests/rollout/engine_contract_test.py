"""The contract of engines, against those of the catalogue and one of a user's own, as a
configuration names them.

vLLM's servers are fake here (the real ones: vllm_test).
"""

import asyncio
import dataclasses
import pathlib

import engine_contract
import pytest
import serving
from fake_vllm import FakeServer, Sampled

from jaxrl_llm.app.schema import RolloutConfig
from jaxrl_llm.config.values import to_json
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.api import Engine
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
from jaxrl_llm.rollout.embedded.speculation import SpeculationConfig
from jaxrl_llm.rollout.vllm.config import VllmConfig

MODEL = serving.model_of('qwen2', tied=True)
CONFIG = EmbeddedConfig(
  slots=8, prefill_rows=2, prefill_buckets=(16, 400), decode_steps=8, filters=False
)
SPECULATIVE = dataclasses.replace(CONFIG, speculation=SpeculationConfig(ngram_min=1))
OWN = {'engine': 'fixtures.own_engine:ENGINE', 'engine_options': {'embedded': to_json(CONFIG)}}


def built(folder: pathlib.Path, **rollout) -> Engine:
  config = RolloutConfig(max_prompt_length=300, max_response_length=serving.LENGTH - 300, **rollout)
  setting = serving.setting_of(MODEL.spec, folder, dtype='float32')
  return config.engine_spec().build(setting, DeviceThread().run)


@pytest.mark.parametrize(
  'rollout',
  [{'embedded': CONFIG}, {'embedded': SPECULATIVE}, OWN],
  ids=['embedded', 'speculative', 'own'],
)
def test_engine_in_the_process(rollout, tmp_path):
  async def main():
    engine = built(tmp_path, **rollout)
    await engine.start()
    await engine_contract.hold(engine, MODEL, atol=1e-4)
    await engine_contract.hold_closed(engine)

  asyncio.run(main())


@pytest.mark.full
def test_fleet_of_fake_servers(tmp_path):
  async def main():
    shape = dict(max_model_len=serving.LENGTH, vocab_size=serving.VOCAB)
    servers = [FakeServer(Sampled(MODEL.spec, config=CONFIG), **shape) for _ in range(2)]
    addresses = [
      await server.start(uds=str(tmp_path / f'{i}.sock')) for i, server in enumerate(servers)
    ]
    vllm = VllmConfig(addresses=tuple(addresses), publish_dir=str(tmp_path / 'published'))
    fleet = built(tmp_path, engine='vllm', vllm=vllm)
    await fleet.start()
    await engine_contract.hold(fleet, MODEL, atol=1e-4)
    await engine_contract.hold_closed(fleet)
    for server in servers:
      await server.close()

  asyncio.run(main())
