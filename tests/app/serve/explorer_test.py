"""An explorer that follows a registry works for the run that is there, and for the next one."""

import asyncio
import contextlib

import pytest
from crews import Setting
from exploring import make_tasks

from jaxrl_llm.app.serve import explorer
from jaxrl_llm.app.serve.explorer import FLAGS
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import Kind, Lease, Registry, Watch, registered
from jaxrl_llm.core.net.token_server import FrontConfig


@pytest.fixture(autouse=True)
def often(monkeypatch):
  monkeypatch.setattr(explorer, 'LOOK_S', 0.02)
  monkeypatch.setattr(explorer, '_AGAIN_S', 0.02)


@pytest.fixture
def registry(tmp_path):
  FLAGS(['explorer', '--name=helper'])
  return Registry(tmp_path / 'registry', '--registry')


def setting(folder, registry):
  folder.mkdir()

  def announce(address):
    return registered(registry, Lease(kind=Kind.MASTER, name=folder.name, address=address))

  listen = FrontConfig(token_file=str(registry.key_file))
  return Setting(folder, announce=announce, listen=listen)


def names(registry, kind):
  return [lease.name for lease in Watch(registry, kind).look(0.0)]


@contextlib.asynccontextmanager
async def exploring(registry):
  task = asyncio.create_task(explorer._explore_for(registry, registry.key))
  try:
    async with asyncio.timeout(60):
      yield task
  finally:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_an_explorer_waits_for_a_run_and_goes_over_to_the_one_that_takes_its_place(
  tmp_path, registry
):
  (task,) = make_tasks(1)

  async def main():
    async with exploring(registry) as explored:
      while names(registry, Kind.EXPLORER) != ['helper']:
        await asyncio.sleep(0.01)
      for name in ('first', 'second'):
        made = setting(tmp_path / name, registry)
        async with made.running():
          assert names(registry, Kind.MASTER) == [name]
          assert len(await made.samples(made.crew, task)) == 3
        assert names(registry, Kind.MASTER) == [] and not explored.done()
    assert names(registry, Kind.EXPLORER) == [], 'it has said that it leaves'

  asyncio.run(main())


def test_of_two_runs_the_newer_is_explored_for(tmp_path, registry):
  """The older one was killed: its lease is there, and nobody behind it."""
  (task,) = make_tasks(1)

  async def main():
    registry.put(Lease(kind=Kind.MASTER, name='killed', address=f'unix:{tmp_path}/none'))
    async with exploring(registry):
      made = setting(tmp_path / 'next', registry)
      async with made.running():
        assert len(await made.samples(made.crew, task)) == 3

  asyncio.run(main())


def test_a_key_that_the_run_refuses_ends_the_explorer_with_one_line(tmp_path, registry):
  async def main():
    made = setting(tmp_path / 'run', registry)
    starting = asyncio.create_task(made.crew.start())
    try:
      with pytest.raises(UserError, match='refuses the token') as raised:
        await asyncio.wait_for(explorer._explore_for(registry, 'another-key-0123456789'), 60)
      assert raised.value.exit_code == 2 and names(registry, Kind.EXPLORER) == []
    finally:
      starting.cancel()
      await asyncio.gather(starting, return_exceptions=True)
      await made.crew.close()

  asyncio.run(main())


@pytest.mark.parametrize(
  ('flags', 'line'),
  [
    ([], '--master and --registry: wanted one of them'),
    (['--master=unix:/a', '--registry=/tmp/b'], '--master and --registry: wanted one of them'),
    (['--registry=DIR/file/registry'], 'cannot be used as a registry'),
    (['--registry=DIR', '--name=a/b'], '--name=a/b: wanted at most 100 letters'),
    (['--registry=DIR/open'], 'others can enter it; chmod 700 it'),
  ],
)
def test_flags_that_name_no_run_are_one_line(tmp_path, capsys, flags, line):
  (tmp_path / 'file').touch()
  (tmp_path / 'open').mkdir(mode=0o755)
  FLAGS.unparse_flags()
  for name in ('master', 'registry', 'name'):
    FLAGS[name].unparse()
  flags = [flag.replace('DIR', str(tmp_path)) for flag in flags]
  assert explorer.run(['serve', *flags]) == 2
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and line in said
