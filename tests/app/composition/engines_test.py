"""The engine that a configuration names: servers that read text otherwise are refused; where
weights are published.
"""

import asyncio
import pathlib

import pytest
from aiohttp import web

from jaxrl_llm.app.composition.engines import build_engine
from jaxrl_llm.app.composition.prepare import prepare
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.spec import PUBLISHED, publish_directory


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  config = load_file('configs/quickstart.py', Config)
  overrides = {
    'tasksets.train.size': '4000',
    'tasksets.eval.size': '4000',
    'stages.sft.source.count': '400',
  }
  config = apply_overrides(
    config, {**overrides, 'evaluation.held_out.tasks': '24', 'rollout.engine': 'vllm'}
  )
  return config, prepare(config, tmp_path_factory.mktemp('run'))


@pytest.mark.parametrize(
  'answer, refused', [('as the policy', False), ('otherwise', True), ('no tokenizer', False)]
)
def test_a_server_with_another_tokenizer_is_refused(prepared, tmp_path, answer, refused):
  config, made = prepared
  asked = []

  async def tokenize(request):
    asked.append((await request.json())['prompt'])
    tokens = made.tokenizer.encode(asked[-1])
    if answer == 'no tokenizer':
      return web.json_response({'error': {'message': 'none'}}, status=400)
    return web.json_response({'tokens': tokens[::-1] if answer == 'otherwise' else tokens})

  async def main():
    app = web.Application()
    app.add_routes([web.post('/tokenize', tokenize)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / 'vllm.sock')).start()
    addresses = {'rollout.vllm.addresses': f'["unix:{tmp_path}/vllm.sock"]'}
    config_of_run = apply_overrides(config, addresses)
    fleet = build_engine(config_of_run, tmp_path, made, DeviceThread())
    assert not fleet.replicas[0].has_served
    try:
      await fleet._admission._check_tokenizer(fleet.replicas[0])
    finally:
      await fleet.close()
      await runner.cleanup()
      later = build_engine(config_of_run, tmp_path, made, DeviceThread())
      assert later.replicas[0].has_served != refused, 'the next attempt waits for it'
      await later.close()

  if refused:
    with pytest.raises(
      UserError, match=r"vllm-0 .*encodes '.*' as tokens .* serve it with the policy's tokenizer"
    ):
      asyncio.run(main())
  else:
    asyncio.run(main())
  assert asked


def test_each_start_publishes_where_no_other_does_and_removes_what_the_one_before_left(tmp_path):
  config = VllmConfig(publish_dir=str(tmp_path / 'shared'))
  first = publish_directory(config, tmp_path / 'run')
  first.mkdir(parents=True)
  (first / 'weights').touch()
  second = publish_directory(config, tmp_path / 'run')
  assert not first.exists() and second != first
  assert pathlib.Path((tmp_path / 'run' / PUBLISHED).read_text()) == second
  other = publish_directory(config, tmp_path / 'other')
  assert other.parent == second.parent and other != second


@pytest.mark.parametrize('cut', [0, 4, -1])
def test_a_record_that_was_cut_short_removes_nothing(tmp_path, cut):
  config = VllmConfig(publish_dir=str(tmp_path / 'root'))
  first = publish_directory(config, tmp_path / 'run')
  first.mkdir(parents=True)
  record, others = tmp_path / 'run' / PUBLISHED, first.with_name(first.name[:-1])
  others.mkdir()
  record.write_text({0: '', 4: str(first.parent), -1: str(others)}[cut])
  publish_directory(config, tmp_path / 'run')
  assert first.is_dir() and others.is_dir()
