"""The contract of engines, against the embedded one and against a fleet of fake servers (the real ones: vllm_test)."""

import asyncio

import engine_contract
import pytest
import serving
from fake_vllm import FakeServer, Sampled

from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine

MODEL = serving.model_of('qwen2', tied=True)
CONFIG = EmbeddedConfig(slots=8, prefill_rows=2, prefill_buckets=(16, 400), decode_steps=8, filters=False)


def test_embedded_engine():
  async def main():
    thread = DeviceThread()
    engine = EmbeddedEngine(MODEL, CONFIG, max_length=serving.LENGTH, seed=3, run=thread.run)
    await engine.start()
    await engine_contract.hold(engine, MODEL, atol=1e-4)
    await engine_contract.hold_closed(engine)

  asyncio.run(main())


@pytest.mark.full
def test_fleet_of_fake_servers(tmp_path):
  async def main():
    shape = dict(max_model_len=serving.LENGTH, vocab_size=serving.VOCAB)
    servers = [FakeServer(Sampled(MODEL.spec, config=CONFIG), **shape) for _ in range(2)]
    addresses = [await server.start(uds=str(tmp_path / f'{i}.sock')) for i, server in enumerate(servers)]
    async with serving.attached(MODEL, addresses, tmp_path) as fleet:
      await engine_contract.hold(fleet, MODEL, atol=1e-4)
      await engine_contract.hold_closed(fleet)
    for server in servers:
      await server.close()

  asyncio.run(main())
