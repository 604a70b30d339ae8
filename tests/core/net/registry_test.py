"""The directory of leases: who counts, for how long, and what of a hostile directory does not."""

import asyncio
import concurrent.futures
import dataclasses
import json
import logging
import os
import platform
import stat
import subprocess
import sys

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net import registry as registry_module
from jaxrl_llm.core.net.registry import (
  KEY,
  Kind,
  Lease,
  Registry,
  Watch,
  create_key,
  public_address,
  registered,
  service_name,
)

LEASE_S = 10.0


@pytest.fixture
def registry(tmp_path):
  return Registry(tmp_path / 'registry', '--registry', lease_s=LEASE_S)


@pytest.fixture
def said(caplog):
  caplog.set_level(logging.WARNING, logger='absl')
  return caplog


def lease(name='one', **fields):
  return Lease(**{'kind': Kind.VLLM, 'name': name, 'address': 'unix:/tmp/one.sock', **fields})


def watch(registry):
  return Watch(registry, Kind.VLLM)


def names(leases):
  return [lease.name for lease in leases]


def written(registry, of):
  return registry.directory / of.file


def forge(registry, of, **changes):
  """Changes a lease's file without its key."""
  file = written(registry, of)
  row = json.loads(file.read_text())
  row['lease'] |= changes
  file.write_text(json.dumps(row))


def signed(registry, of, **changes):
  """A file that a service with the key could write, and none of ours would."""
  body = {**dataclasses.asdict(of), **changes}
  row = {'schema': 1, 'lease': body, 'signature': registry._sign(body)}
  file = written(registry, of)
  file.write_text(json.dumps(row))
  file.chmod(0o600)


# The key and the directory.


def test_directory_and_key_belong_to_this_user_alone_and_stay(tmp_path):
  path = tmp_path / 'a' / 'registry'
  first, second = Registry(path, 'x'), Registry(path, 'x')
  assert first.key == second.key and len(first.key) >= 32
  assert stat.S_IMODE(path.stat().st_mode) == 0o700
  assert stat.S_IMODE((path / KEY).stat().st_mode) == 0o600
  assert [file.name for file in path.iterdir()] == [KEY]


def test_of_many_that_create_the_key_at_once_all_get_the_same(tmp_path):
  path = tmp_path / 'registry'
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    keys = set(pool.map(lambda _: Registry(path, 'x').key, range(64)))
  assert len(keys) == 1 and [file.name for file in path.iterdir()] == [KEY]


def loosen(path):
  path.chmod(0o755)


def link(path):
  path.rename(path.with_name('elsewhere'))
  path.symlink_to(path.with_name('elsewhere'))


def loosen_key(path):
  (path / KEY).chmod(0o640)


def writable_key(path):
  (path / KEY).chmod(0o602)


def link_key(path):
  (path / KEY).rename(path / 'other')
  (path / KEY).symlink_to(path / 'other')


def short_key(path):
  (path / KEY).write_text('secret\n')


def large_key(path):
  (path / KEY).write_text('k' * 5000)


def pipe_key(path):
  (path / KEY).unlink()
  os.mkfifo(path / KEY, 0o600)


def file_for_directory(path):
  (path / KEY).unlink()
  path.rmdir()
  path.write_text('')


@pytest.mark.parametrize(
  ('spoil', 'message'),
  [
    (loosen, r'has mode 755, and others can enter it; chmod 700 it'),
    (link, 'wanted a directory of mode 700, not a link'),
    (loosen_key, r'has mode 640, and others can use it; chmod 600 it'),
    (writable_key, r'has mode 602, and others can use it; chmod 600 it'),
    (link_key, 'is a link'),
    (short_key, '6 characters, wanted 16 to 4096'),
    (large_key, '5,000 bytes, wanted at most 4,096'),
    (pipe_key, 'is not a regular file'),
    (file_for_directory, 'wanted a directory of mode 700'),
  ],
)
def test_what_others_could_use_is_refused_with_one_line(registry, spoil, message):
  spoil(registry.directory)
  with pytest.raises(UserError, match=message) as raised:
    Registry(registry.directory, '--registry')
  assert str(raised.value).startswith(f'--registry: {registry.directory}')
  assert '\n' not in str(raised.value) and registry.key not in str(raised.value)


def test_a_directory_or_key_of_another_user_is_refused(registry, monkeypatch):
  monkeypatch.setattr(os, 'getuid', lambda: 12345)
  with pytest.raises(UserError, match=r'belongs to user \d+, not to this user \(12345\)'):
    Registry(registry.directory, '--registry')


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot be used as a registry'):
    create_key(tmp_path / 'file' / 'registry')


# Leases.


def test_a_reader_sees_those_of_its_kind_with_all_their_fields(registry):
  ours = lease(fingerprint={'model': 'abc'})
  registry.put(ours)
  registry.put(lease('two', kind=Kind.SANDBOX))
  (seen,) = watch(registry).look(0.0)
  assert dataclasses.replace(seen, renewed=0.0) == ours and seen.renewed > 0
  assert stat.S_IMODE(written(registry, ours).stat().st_mode) == 0o600
  registry.remove(ours)
  registry.remove(ours)
  assert watch(registry).look(0.0) == ()


def test_a_lease_expires_by_its_readers_clock_and_comes_back_with_a_renewal(registry):
  ours, reader = lease(), watch(registry)
  registry.put(ours)
  for now in range(100, 111):
    assert names(reader.look(float(now))) == ['one'] and not reader.expired
  assert reader.look(111.0) == () and reader.expired == {ours.address}
  registry.put(ours)
  assert names(reader.look(112.0)) == ['one'] and not reader.expired
  registry.remove(ours)
  assert reader.look(113.0) == () and not reader.expired, 'it has left'


def test_the_clock_of_the_services_host_does_not_matter(registry):
  reader = watch(registry)
  for number, renewed in enumerate((1e9, 5.0, 3e9, -1.0)):
    signed(registry, ours := lease(id='0' * 32), renewed=renewed)
    assert names(reader.look(number * 9.0)) == [ours.name]


def test_a_reader_that_was_suspended_gives_services_time_to_renew(registry):
  ours, reader = lease(), watch(registry)
  registry.put(ours)
  reader.look(0.0)
  assert names(reader.look(1e6)) == ['one'], 'it may be the reader that was away'
  assert [len(reader.look(1e6 + i)) for i in range(1, 10)][-1] == 0


def test_a_file_that_is_only_touched_is_no_renewal(registry):
  ours, reader = lease(), watch(registry)
  registry.put(ours)
  for now in range(12):
    os.utime(written(registry, ours), (now, now))
    seen = reader.look(float(now))
  assert seen == ()


def test_of_two_leases_for_an_address_the_newer_counts(registry):
  reader = watch(registry)
  registry.put(lease('killed'))
  reader.look(0.0)
  registry.put(lease('again'))
  assert names(reader.look(1.0)) == ['again'] and not reader.expired


def test_while_the_directory_cannot_be_read_the_last_answer_holds(registry, said):
  ours, reader = lease(), watch(registry)
  registry.put(ours)
  reader.look(0.0)
  hidden = registry.directory.with_name('hidden')
  registry.directory.rename(hidden)
  assert [names(reader.look(now)) for now in (5.0, 50.0, 500.0)] == [['one']] * 3
  assert len(said.messages) == 2, 'the first and the second time, then the fourth'
  hidden.rename(registry.directory)
  registry.put(ours)
  assert names(reader.look(501.0)) == ['one']


def test_leases_are_renewed_in_their_block_and_removed_at_its_end(registry, monkeypatch):
  monkeypatch.setattr(registry_module, 'RENEW_S', 0.01)

  async def main():
    ours, reader = lease(), watch(registry)
    async with registered(registry, ours, lease('two', address='unix:/tmp/two.sock')):
      (first, _) = await reader.look_async()
      async with asyncio.timeout(30):
        while (await reader.look_async())[0].renewed == first.renewed:
          await asyncio.sleep(0.005)
      assert len(await reader.look_async()) == 2
    assert await reader.look_async() == ()
    assert [file.name for file in registry.directory.iterdir()] == [KEY]

  asyncio.run(main())


def test_a_renewal_that_fails_is_logged_and_tried_again(registry, monkeypatch, said):
  monkeypatch.setattr(registry_module, 'RENEW_S', 0.005)

  async def main():
    async with registered(registry, lease()):
      registry.directory.chmod(0o755)
      async with asyncio.timeout(30):
        while not said.messages:
          await asyncio.sleep(0.005)
      registry.directory.chmod(0o700)
      file = written(registry, watch(registry).look(0.0)[0])
      before = file.read_text()
      async with asyncio.timeout(30):
        while file.read_text() == before:
          await asyncio.sleep(0.005)

  asyncio.run(main())
  assert 'was not renewed (1 times so far)' in said.messages[0]


def test_the_lease_of_a_killed_process_goes_when_its_service_registers_again(registry):
  child = subprocess.Popen([sys.executable, '-c', ''])
  child.wait()
  registry.put(lease(pid=child.pid))
  registry.put(lease('another', pid=child.pid, address='unix:/tmp/2.sock'))

  async def main():
    async with registered(registry, ours := lease(address='unix:/tmp/3.sock')):
      found = watch(registry).look(0.0)
      assert sorted(names(found)) == ['another', 'one'] and ours.id in {of.id for of in found}

  asyncio.run(main())


# Hostile content.


@pytest.mark.parametrize(
  'change',
  [
    {'address': 'https://evil.example:1'},
    {'name': 'other'},
    {'kind': 'sandbox'},
    {'fingerprint': {'model': 'mine'}},
    {'renewed': 1e11},
    {'more': 1},
  ],
)
def test_a_lease_that_was_changed_without_the_key_does_not_count(registry, said, change):
  registry.put(ours := lease())
  reader = watch(registry)
  assert names(reader.look(0.0)) == ['one']
  forge(registry, ours, **change)
  assert reader.look(1.0) == () == reader.look(2.0)
  (line,) = said.messages
  assert "not signed with the job's key" in line and ours.file in line


def test_a_lease_under_another_name_or_of_another_job_does_not_count(registry, tmp_path):
  registry.put(ours := lease())
  copy = lease()
  written(registry, ours).rename(written(registry, copy))
  other = Registry(tmp_path / 'other', 'x')
  other.put(stranger := lease())
  written(other, stranger).rename(written(registry, stranger))
  assert watch(registry).look(0.0) == ()


@pytest.mark.parametrize(
  'change',
  [
    {'name': '../../etc/passwd'},
    {'name': ''},
    {'name': 'a\nb'},
    {'address': 'ftp://host:1'},
    {'address': ''},
    {'address': 'http://user@127.0.0.1:80'},
    {'address': 'http://127.0.0.1:80?x'},
    {'address': 'http://127.0.0.1:port'},
    {'address': 'http://127.0.0.1'},
    {'address': 'unix:/a b'},
    {'address': 'unix:/' + 'a' * 600},
    {'pid': 'one'},
    {'pid': 0},
    {'started': float('nan')},
    {'started': None},
    {'fingerprint': ['model']},
    {'fingerprint': {'model': 1}},
    {'fingerprint': {str(i): '' for i in range(100)}},
    {'host': None},
    {'kind': 'trainer'},
    {'id': 3},
  ],
)
def test_malformed_fields_do_not_count_even_signed(registry, said, change):
  signed(registry, lease(), **change)
  assert watch(registry).look(0.0) == ()
  assert len(said.messages) == 1 and '\n' not in said.messages[0]


def loose(file):
  file.chmod(0o644)


def oversize(file):
  file.write_text(file.read_text() + ' ' * (1 << 20))


def linked(file):
  file.rename(file.with_name('other'))
  file.symlink_to('other')


def pipe(file):
  file.unlink()
  os.mkfifo(file, 0o600)


def directory(file):
  file.unlink()
  file.mkdir()


def binary(file):
  file.write_bytes(b'\xff\xfe\x00')


def deep(file):
  file.write_text('[' * 10_000)


def empty(file):
  file.write_text('')


def newer(file):
  file.write_text(json.dumps({'schema': 2}))


def number(file):
  file.write_text('9' * 6000)


@pytest.mark.parametrize(
  'spoil', [loose, oversize, linked, pipe, directory, binary, deep, empty, newer, number]
)
def test_a_file_that_is_no_lease_is_skipped_with_one_line_and_the_others_count(
  registry, said, spoil
):
  registry.put(ours := lease())
  registry.put(lease('good', address='unix:/tmp/good.sock'))
  spoil(written(registry, ours))
  reader = watch(registry)
  assert [names(reader.look(now)) for now in (0.0, 1.0, 2.0)] == [['good']] * 3
  (line,) = said.messages
  assert line.startswith(f'registry {registry.directory}: skipped {ours.file}: ')


def test_thousands_of_files_are_one_line_and_a_bounded_look(registry, said):
  registry.put(lease('good'))
  for i in range(5000):
    (registry.directory / f'vllm.{i:032x}.lease').touch(0o600)
  for i in range(1000):
    (registry.directory / f'junk-{i}').touch()
  reader = watch(registry)
  reader.look(0.0)
  assert len(said.messages) == 1 and 'other files' in said.messages[0]
  assert len(reader._seen) <= registry_module._MAX_FILES


@pytest.mark.parametrize(
  ('address', 'host', 'plain', 'reason'),
  [
    ('unix:/tmp/a', None, False, None),
    ('http://127.0.0.1:80', None, False, None),
    ('http://[::1]:80', None, False, None),
    ('http://localhost:80/', None, False, None),
    ('https://far.example:80', 'far', False, None),
    ('http://far.example:80', 'far', True, None),
    ('http://far.example:80', 'far', False, 'would get the key in plain text'),
    ('http://10.0.0.5:80', None, False, 'would get the key in plain text'),
    ('http://127.0.0.1.evil.example:80', None, False, 'would get the key in plain text'),
    ('unix:/tmp/a', 'far', True, 'can be reached only from far'),
    ('https://127.0.0.1:80', 'far', True, 'can be reached only from far'),
  ],
)
def test_the_key_goes_only_where_the_network_cannot_read_it(
  registry, said, address, host, plain, reason
):
  registry.put(lease(address=address, host=host or platform.node()))
  registry.allow_plaintext = plain
  found = watch(registry).look(0.0)
  assert bool(found) == (reason is None)
  assert reason is None or reason in said.messages[0]


def test_names_and_addresses_are_made_for_other_hosts():
  assert Lease(kind=Kind.EXPLORER, name=service_name('ex/plorer 1')).address == ''
  assert public_address('https://0.0.0.0:84') == f'https://{platform.node()}:84'
  assert public_address('http://127.0.0.1:84') == 'http://127.0.0.1:84'
  assert public_address('unix:/tmp/a') == 'unix:/tmp/a'
  with pytest.raises(UserError, match='wanted a name'):
    lease('a/b')
