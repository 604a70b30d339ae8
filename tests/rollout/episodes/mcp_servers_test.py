"""Tools of real MCP servers: calls, errors, and servers that hang, die or do not start."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time

import psutil
import pytest
from paths import FIXTURES
from scripted import TASK, Scripted

from jaxrl_llm.app.composition.workflows import build_workflow
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.episodes.mcp_servers import mcp_tools
from jaxrl_llm.rollout.episodes.tool_calls import ToolCall
from jaxrl_llm.rollout.episodes.tools import ToolFailed
from jaxrl_llm.rollout.workflow import WorkflowConfig

SERVER = {'command': sys.executable, 'args': [str(FIXTURES / 'mcp_server.py')]}


@pytest.fixture
def _mcp():
  pytest.importorskip('mcp')


async def result(tool, **arguments):
  try:
    return await tool(arguments)
  except ToolFailed as failed:
    return f'error: {failed}'


async def played(workflow):
  runs = checked_run(workflow, TASK, 0, stage='grpo', samples=1, sampling=Sampling())
  (rollout,) = [each async for each in runs]
  return rollout


async def started(options, deadline_s=60.0):
  return {tool.name: tool for tool in await mcp_tools({'letters': options}, deadline_s)}


def servers():
  """Process ids of the MCP servers that this process has started."""
  running = set()
  for child in psutil.Process().children(recursive=True):
    with contextlib.suppress(psutil.Error):  # It has ended meanwhile.
      if 'mcp_server.py' in ' '.join(child.cmdline()):
        running.add(child.pid)
  return running


@pytest.mark.full
@pytest.mark.usefixtures('_mcp')
def test_a_server_is_started_once_and_again_after_it_has_hung_or_died(tokenizer, monkeypatch):
  """The whole life of one server, because each start takes seconds."""
  monkeypatch.setenv('GIVEN', 'secret')
  options = {**SERVER, 'env': {'SECRET': '$GIVEN'}}

  async def check():
    tools, same = await asyncio.gather(started(options), started(options))
    assert tools['repeat'].schema['function']['description'] == 'Repeats a letter.'
    assert tools['repeat'].schema['function']['parameters']['required'] == ['letter']
    assert await result(tools['repeat'], letter='a', times=3) == 'aaa'
    assert await result(tools['repeat'], letter='\ud800') == '??'
    assert 'error: repeat: Error executing tool' in await result(tools['repeat'], times='x')
    assert (await result(tools['refuse'])).startswith('error: refuse: ')
    pid, secret = (await result(tools['process'])).split()
    assert secret == 'secret' and servers() == {int(pid)}
    assert (await result(same['process'])).split()[0] == pid, 'it was started once'

    sample, text, verdict, *_ = await played(
      built(tokenizer, 'bc$', 'd$', mcp={'letters': options})
    )
    assert tokenizer.decode(sample.tokens[sample.role == Role.TOOL].tolist()) == 'cc'
    assert text == 'd' and verdict.parts == {'tool_calls': 1.0, 'tool_failures': 0.0}
    assert servers() == {int(pid)}

    quick = await started(options, deadline_s=2.0)
    assert await result(quick['wait']) == 'error: wait: no result within 2 s'
    assert (await result(tools['process'])).split()[0] == pid, 'a slow call costs only itself'

    assert await result(quick['hang']) == 'error: hang: no result within 2 s'
    await ended(pid)
    pid, _ = (await result(tools['process'])).split()
    assert 'Connection closed' in await result(tools['die'])
    await ended(pid)
    assert (await result(tools['process'])).split()[0] != pid

  async def ended(pid):
    async with asyncio.timeout(60):
      while int(pid) in servers():
        await asyncio.sleep(0.05)

  asyncio.run(check())
  assert not servers(), 'the last one ended with the event loop'


@pytest.mark.full
@pytest.mark.usefixtures('_mcp')
def test_a_server_over_http_that_goes_and_comes():
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]

  def serve():
    command = [SERVER['command'], *SERVER['args'], str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
      with socket.socket() as probe:
        if not probe.connect_ex(('127.0.0.1', port)):
          return process
      time.sleep(0.1)
    raise AssertionError('the server does not start')

  async def check(process):
    tools = await started({'url': f'http://127.0.0.1:{port}/mcp', 'tools': ['repeat']})
    assert [*tools] == ['repeat'] and await result(tools['repeat'], letter='a') == 'aa'
    process.kill()
    process.wait()
    assert (await result(tools['repeat'], letter='a')).startswith('error: repeat: ')
    process = await asyncio.to_thread(serve)
    try:
      async with asyncio.timeout(60):
        while await result(tools['repeat'], letter='a') != 'aa':
          await asyncio.sleep(0.2)
    finally:
      process.kill()

  process = serve()
  try:
    asyncio.run(check(process))
  finally:
    process.kill()


@pytest.mark.usefixtures('_mcp')
@pytest.mark.parametrize(
  ('options', 'line'),
  [
    (
      {'command': sys.executable, 'args': ['-c', 'import sys; sys.exit("no such key")']},
      'the MCP server does not start: .*no such key; correct its command or url',
    ),
    ({'command': 'no_such_command'}, "does not start: FileNotFoundError: .*'no_such_command'"),
    ({'command': 'sleep', 'args': ['99'], 'start_s': 0.3}, 'no session within 0.3 s'),
    ({'url': 'http://127.0.0.1:9/mcp'}, 'the MCP server does not start: '),
  ],
)
def test_a_server_that_does_not_start_ends_the_run_with_one_line(options, line):
  with pytest.raises(RunError, match=line) as caught:
    asyncio.run(started(options))
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('options', 'line'),
  [
    ({'mcp': {'a': {}}}, "MCP server: got command '' and url '', wanted one of them"),
    ({'mcp': {'a': {'comand': 'x'}}}, r'rollout\.workflow\.options\.mcp\.a.*comand'),
    ({}, r'rollout\.workflow\.options: no tools and no mcp'),
  ],
)
def test_an_impossible_configuration_is_one_line(tokenizer, options, line):
  with pytest.raises(UserError, match=line) as caught:
    built(tokenizer, **options)
  assert '\n' not in str(caught.value)


def test_a_missing_library_is_one_line(tokenizer, monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(UserError, match=r"needs mcp, which .* pip install 'jaxrl_llm\[mcp\]'"):
    built(tokenizer, mcp={'a': {'command': 'x'}})


def built(tokenizer, *texts, **options):
  config = WorkflowConfig(
    kind='tools', options={'parser': 'mcp_servers_test:letters', 'deadline_s': 60.0, **options}
  )
  return build_workflow(config, Scripted(tokenizer, *texts), tokenizer, 40)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
  monkeypatch.setitem(sys.modules, 'mcp_servers_test', sys.modules[__name__])


def letters(text):
  """Parser to which 'b' and a letter call `repeat`."""
  return [ToolCall('repeat', {'letter': text[1:]})] * text.startswith('b')
