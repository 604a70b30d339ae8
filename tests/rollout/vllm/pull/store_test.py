"""Hosts fetch published weights from the trainer and from each other: whole, verified, each piece
once from the trainer, whatever breaks.
"""

import asyncio
import collections
import itertools
import pathlib

import aiohttp
import fronts
import pulling
import pytest
import xxhash
import yarl
from aiohttp import web
from pulling import alone, hosts, published, run, sending, small_atoms

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.token_server import TokenServer
from jaxrl_llm.rollout.vllm.publication import FILE, MANIFEST
from jaxrl_llm.rollout.vllm.pull import ranges
from jaxrl_llm.rollout.vllm.pull import store as store_module
from jaxrl_llm.rollout.vllm.pull.bundle import Atom, Bundle, BundleFile, atom_slices, describe
from jaxrl_llm.rollout.vllm.pull.orders import FetchOrder
from jaxrl_llm.rollout.vllm.pull.ranges import WEIGHTS_PATH
from jaxrl_llm.rollout.vllm.pull.store import Store


@pytest.fixture(autouse=True)
def small(monkeypatch):
  small_atoms(monkeypatch)
  monkeypatch.setattr(store_module, '_PAUSE_S', 0.01)
  monkeypatch.setattr(store_module, '_PATIENCE_S', 0.1)


@pytest.fixture
def publication(tmp_path):
  return published(tmp_path / 'published')[0]


def described(publication) -> Bundle:
  return describe(publication.directory, publication.files, publication.slices, without=MANIFEST)


def test_atoms_cover_the_file_and_have_the_digests_of_its_bytes(publication):
  (file,) = described(publication).files
  data = (publication.directory / FILE).read_bytes()
  assert (file.name, file.size) == (FILE, len(data)) and len(file.atoms) > 20
  ends = [atom.start for atom in file.atoms[1:]] + [len(data)]
  for atom, end in zip(file.atoms, ends, strict=True):
    assert xxhash.xxh3_128_hexdigest(data[atom.start : end]) == atom.digest
  pieces = described(publication).pieces(1)
  assert pieces[0].start == 0 and pieces[-1].stop == len(data)
  assert all(a.stop == b.start and a.last == b.first for a, b in itertools.pairwise(pieces))
  assert all(piece.stop - piece.start <= 1024 or piece.last - piece.first == 1 for piece in pieces)


def test_large_tensors_are_divided_along_their_first_axis():
  assert atom_slices((), 4, 0) == atom_slices((128,), 4, 0) == ()
  assert [tuple(cut) for cut in atom_slices((5, 100), 4, 0)] == [(0, i, 1) for i in range(5)]
  assert [tuple(cut) for cut in atom_slices((7, 40), 4, 0)] == [(0, 0, 3), (0, 3, 3), (0, 6, 1)]


def test_pieces_are_many_enough_for_equal_shares_and_not_too_small(monkeypatch):
  monkeypatch.undo()
  for size, count, wanted in ((64 << 20, 8, 512 << 10), (1 << 20, 8, 256 << 10)):
    atoms = tuple(Atom(start, '0' * 32) for start in range(0, size, 64 << 10))
    pieces = Bundle((BundleFile('a', size, atoms),)).pieces(count)
    assert {piece.stop - piece.start for piece in pieces} == {wanted}
  assert len(atom_slices((4096, 4096), 2, 15 << 30)) == 4  # Of 8 MiB.


def test_a_description_survives_the_way_to_a_host(publication):
  bundle = described(publication)
  again = Bundle.from_json(bundle.to_json())
  assert again == bundle and again.id == bundle.id


@pytest.mark.parametrize('count', [1, 2, 8])
def test_every_host_gets_the_bytes_and_the_trainer_sends_each_once(
  tmp_path, publication, count, monkeypatch
):
  sent = collections.Counter()
  send = store_module.send_range

  async def counting(request, path, asked):
    sent[path.relative_to(tmp_path).parts[0]] += asked.stop - asked.start
    return await send(request, path, asked)

  monkeypatch.setattr(store_module, 'send_range', counting)
  data = (publication.directory / FILE).read_bytes()

  async def main():
    bundle = described(publication)
    async with (
      sending(tmp_path, publication.directory) as (source, asked),
      hosts(tmp_path, count) as made,
    ):
      stores = [host.address for host in made]
      answers = await asyncio.gather(
        *(
          host.order(bundle, sources=[source], stores=stores, place=i)
          for i, host in enumerate(made)
        )
      )
      assert all(h.content(a, FILE) == data for h, a in zip(made, answers, strict=True))
      assert sum(part.stop - part.start for part in asked) == len(data)
      assert sum(sent.values()) == (count - 1) * len(data)
      # No host sends more than its share of the pieces, as often as there are other hosts.
      share = max(
        sum(piece.stop - piece.start for piece in bundle.pieces(count)[i::count])
        for i in range(count)
      )
      assert max(sent.values(), default=0) <= (count - 1) * share

  run(main)


def test_a_second_order_fetches_nothing_again_and_another_releases(tmp_path, publication):
  async def main():
    bundle = described(publication)
    async with (
      sending(tmp_path, publication.directory) as (source, asked),
      hosts(tmp_path, 1) as (host,),
    ):
      order = {'sources': [source], 'stores': [host.address]}
      first = await host.order(bundle, **order)
      fetched = len(asked)
      again = await host.order(bundle, number=2, **order)
      assert again['directories'] == first['directories'] and len(asked) == fetched
      (directory,) = map(pathlib.Path, first['directories'].values())
      # An order that was overtaken releases nothing.
      await host.order(number=1, sources=[source])
      assert directory.exists()
      await host.order(number=3, keep=[bundle.id], sources=[source])
      assert directory.exists()
      # Numbers of another trainer, whose clock may be behind, say nothing.
      await host.order(number=0, trainer='b', sources=[source])
      assert not directory.exists()
    assert not list((tmp_path / 'host-0').iterdir())

  run(main)


def test_orders_that_release_at_the_same_time(tmp_path):
  async def main():
    async with hosts(tmp_path, 1) as (host,):
      for step in (1, 2, 3):
        publication, _ = published(tmp_path / f'published-{step}', step)
        async with sending(tmp_path, publication.directory) as (source, _):
          kept = list(host.store._holdings)
          order = {'sources': [source], 'stores': [host.address], 'keep': kept, 'number': step}
          assert (await host.order(described(publication), **order))['status'] == 200
      answers = await asyncio.gather(*(host.order(number=9 + i) for i in range(8)))
      assert [answer['status'] for answer in answers] == [200] * 8
      assert not list((tmp_path / 'host-0').glob('*/*'))

  run(main)


def test_a_host_that_never_gets_a_piece_is_given_up(tmp_path, publication):
  data = (publication.directory / FILE).read_bytes()

  async def later(request, part):
    return web.Response(status=503)

  async def main():
    async with (
      sending(tmp_path, publication.directory) as (source, _),
      sending(tmp_path, publication.directory, later) as (waiting, _),
      hosts(tmp_path, 1) as (host,),
    ):
      order = {'sources': [source], 'stores': [waiting, host.address], 'place': 1}
      assert host.content(await host.order(described(publication), **order), FILE) == data

  run(main)


def test_a_flipped_byte_is_refused_and_fetched_from_another_host(tmp_path, publication, caplog):
  data = (publication.directory / FILE).read_bytes()

  async def flipping(request, part):
    wrong = bytearray(data[part.start : part.stop])
    wrong[len(wrong) // 2] ^= 1
    return web.Response(status=206, body=bytes(wrong))

  async def main():
    bundle = described(publication)
    async with (
      sending(tmp_path, publication.directory) as (source, asked),
      sending(tmp_path, publication.directory, flipping) as (liar, lies),
      hosts(tmp_path, 2) as made,
    ):
      stores = [liar, *(host.address for host in made)]
      answers = await asyncio.gather(
        *(
          host.order(bundle, sources=[source], stores=stores, place=1 + i)
          for i, host in enumerate(made)
        )
      )
      assert all(h.content(a, FILE) == data for h, a in zip(made, answers, strict=True))
      # The first of the two gets the liar's pieces from the trainer, and the other from the first.
      assert lies and sum(part.stop - part.start for part in asked) == len(data)

  run(main)
  assert 'have digest' in caplog.text and 'another host is asked' in caplog.text


def test_a_dead_host_costs_the_trainer_no_second_copy(tmp_path, publication):
  data = (publication.directory / FILE).read_bytes()

  async def main():
    bundle = described(publication)
    async with (
      sending(tmp_path, publication.directory) as (source, asked),
      hosts(tmp_path, 3) as made,
    ):
      stores = [host.address for host in made]
      stores[1] = 'http://127.0.0.1:1'  # Nobody listens there.
      answers = await asyncio.gather(
        *(made[i].order(bundle, sources=[source], stores=stores, place=i) for i in (0, 2))
      )
      assert all(made[0].content(answer, FILE) == data for answer in answers)
      assert sum(part.stop - part.start for part in asked) == len(data)

  run(main)


def test_a_transfer_continues_after_a_cut_at_the_same_byte(tmp_path, publication):
  data = (publication.directory / FILE).read_bytes()
  cut = []

  async def cutting(request, part):
    if len(cut) >= 3 or part.stop - part.start < 200:
      return None
    cut.append((part, part.start + 100))
    response = web.StreamResponse(status=206)
    response.content_length = part.stop - part.start
    await response.prepare(request)
    await response.write(data[part.start : part.start + 100])
    await asyncio.sleep(0.05)  # The bytes arrive before the end of the connection.
    request.transport.abort()
    return response

  async def main():
    async with alone(tmp_path, publication.directory, cutting) as (host, order, asked):
      answer = await host.order(described(publication), **order)
      assert host.content(answer, FILE) == data
      for part, position in cut:
        assert part._replace(start=position) in asked

  run(main)
  assert len(cut) == 3


def test_an_order_after_a_failure_fetches_only_what_is_missing(tmp_path, publication):
  data = (publication.directory / FILE).read_bytes()
  working = []

  async def failing_in_the_end(request, part):
    if not working and part.stop == len(data):
      return web.Response(status=500)
    return None

  async def main():
    bundle = described(publication)
    async with alone(tmp_path, publication.directory, failing_in_the_end) as (host, order, asked):
      refused = await host.order(bundle, **order)
      assert refused['status'] == 502 and 'HTTP 500' in refused['error']['message']
      fetched = {part for part in asked if part.stop < len(data)}
      del asked[:]
      working.append(True)
      answer = await host.order(bundle, number=2, **order)
      assert host.content(answer, FILE) == data
      assert fetched and not fetched & set(asked)

  run(main)


def test_nothing_is_passed_on_that_was_not_verified(tmp_path, publication, monkeypatch):
  monkeypatch.setattr(store_module, '_WAIT_S', 0.2)
  monkeypatch.setattr(store_module, '_UNKNOWN_S', 0.1)

  async def silent(request, part):
    await asyncio.sleep(30)

  async def main():
    bundle = described(publication)
    async with (
      sending(tmp_path, publication.directory, silent) as (source, asked),
      hosts(tmp_path, 1) as (host,),
      aiohttp.ClientSession(headers=pulling.HEADERS) as session,
    ):

      async def status(name=FILE, bundle_id=bundle.id, first=0, last=99):
        url = f'{host.address}/weights?bundle={bundle_id}&file={name}'
        async with session.get(url, headers={'Range': f'bytes={first}-{last}'}) as response:
          return response.status

      assert await status() == 404  # Not ordered yet.
      waiting = asyncio.create_task(host.order(bundle, sources=[source], stores=[host.address]))
      while not asked:
        await asyncio.sleep(0.01)
      assert await status() == 503
      assert await status('other') == await status('..') == await status(last=10**9) == 404
      assert await status('a/b') == await status(first=9, last=3) == 400
      assert await status(bundle_id='x') == 400
      waiting.cancel()

  run(main)


def test_without_the_token_nothing_is_answered(tmp_path, publication):
  async def main():
    async with (
      sending(tmp_path, publication.directory) as (source, asked),
      hosts(tmp_path, 1) as (host,),
      aiohttp.ClientSession() as session,
    ):
      for method, url in (
        ('GET', f'{source}/weights'),
        ('GET', f'{host.address}/weights'),
        ('GET', f'{host.address}/pull'),
        ('POST', f'{host.address}/pull'),
      ):
        for headers in ({}, {'Authorization': 'Bearer another-token-0123456789'}):
          async with session.request(method, url, headers=headers) as response:
            assert response.status == 401
      assert not asked

  run(main)


def test_a_host_that_does_not_read_is_disconnected(tmp_path, monkeypatch):
  """Otherwise, it would keep files in memory that have been removed."""
  monkeypatch.setattr(ranges, '_READ_S', 0.2)
  size, ended = 1 << 26, asyncio.Event()
  with (tmp_path / FILE).open('wb') as file:
    file.truncate(size)

  async def send(request):
    try:
      return await ranges.send_range(request, tmp_path / FILE, ranges.FileRange('', FILE, 0, size))
    finally:
      ended.set()

  async def main():
    server = TokenServer(fronts.config(tmp_path), routes=[('GET', WEIGHTS_PATH)], handle=send)
    async with server:
      url = yarl.URL(server.address)
      _, writer = await asyncio.open_connection(url.host, url.port)
      writer.write(fronts.request_bytes('GET', WEIGHTS_PATH, fronts.AUTHORISED))
      await ended.wait()
      writer.close()

  run(main)


GOOD = BundleFile('a.safetensors', 10, (Atom(0, '0' * 32), Atom(4, '1' * 32)))


def order_with(**changes):
  order = FetchOrder(
    trainer='a',
    number=1,
    bundles=(Bundle((GOOD,)),),
    sources=(),
    origins={},
    stores=(),
    place=0,
    keep=frozenset(),
  )
  return {**order.to_json(), **changes}


@pytest.mark.parametrize(
  ('change', 'line'),
  [
    ({'other': 1}, 'wanted trainer, number, bundles'),
    ({'bundles': {}}, 'wanted lists'),
    ({'bundles': [7]}, r'wanted a list of \[name, size, atoms\]'),
    ({'bundles': [[['../a', 1, [[0, '0' * 32]]]]]}, "file name '../a'"),
    ({'bundles': [[['.hidden', 1, [[0, '0' * 32]]]]]}, "file name '.hidden'"),
    ({'bundles': [[['a', -1, []]]]}, 'size of a: -1'),
    ({'bundles': [[['a', True, []]]]}, 'size of a: True'),
    ({'bundles': [[['a', 1 << 60, []]]]}, 'size of a'),
    ({'bundles': [[['a', 9, []]]]}, 'do not cover its 9 bytes'),
    ({'bundles': [[['a', 9, [[1, '0' * 32]]]]]}, 'do not cover'),
    ({'bundles': [[['a', 9, [[0, '0' * 32], [9, '0' * 32]]]]]}, 'do not cover'),
    ({'bundles': [[['a', 9, [[0, '0' * 32], [5, '0' * 32], [3, '0' * 32]]]]]}, 'do not cover'),
    ({'bundles': [[['a', 9, [[0, 'G' * 32]]]]]}, '32 hexadecimal digits'),
    ({'bundles': [[['a', 0, []], ['a', 0, []]]]}, 'two files have the same name'),
    ({'sources': ['http://10.0.0.1:80']}, 'would cross the network in plain text'),
    ({'stores': ['http://10.0.0.1:80']}, 'would cross the network in plain text'),
    ({'sources': ['unix:/tmp/x']}, r'wanted http\(s\)'),
    ({'sources': [7]}, r'wanted http\(s\)'),
    ({'sources': ['https://a'] * 5000}, 'at most 4096'),
    ({'origins': {'a': 0}}, 'wanted indices of sources'),
    ({'origins': []}, 'wanted indices of sources'),
    ({'place': 1}, 'place 1, wanted an index'),
    ({'place': True}, 'place True'),
    ({'number': '1'}, "number '1'"),
    ({'keep': [1]}, 'wanted texts in keep'),
  ],
)
def test_malformed_orders_are_refused_in_one_line(tmp_path, change, line):
  async def main():
    async with hosts(tmp_path, 1) as (host,):
      answer = await host.send(order_with(**change))
      assert answer['status'] == 400
      message = answer['error']['message']
      assert message.startswith('order refused: ') and '\n' not in message
      with pytest.raises(AssertionError, match=line):
        raise AssertionError(message)
      assert len(list((tmp_path / 'host-0').rglob('*'))) == 1

  run(main)


def test_weights_that_do_not_fit_are_refused_before_anything_is_fetched(tmp_path):
  huge = BundleFile('a', 1 << 49, (Atom(0, '0' * 32),))

  async def main():
    async with hosts(tmp_path, 1) as (host,):
      answer = await host.order(Bundle((huge,)), stores=[host.address])
      assert answer['status'] == 413
      assert 'the weights need 562,949,953,421,312' in answer['error']['message']

  run(main)


def test_a_trainer_that_cannot_be_reached_is_named(tmp_path):
  async def main():
    async with hosts(tmp_path, 1) as (host,):
      answer = await host.order(sources=['http://127.0.0.1:1'])
      assert answer['status'] == 424
      assert (
        'the trainer cannot be reached from this host: http://127.0.0.1:1'
        in (answer['error']['message'])
      )

  run(main)


def test_a_directory_that_others_can_enter_is_refused(tmp_path):
  (tmp_path / 'open').mkdir(mode=0o755)
  (tmp_path / 'link').symlink_to(tmp_path)
  for name in ('open', 'link'):
    with pytest.raises(UserError, match='is not a directory that only this user can enter'):
      Store(tmp_path / name, key=fronts.TOKEN)
