"""Delayed rewards over HTTP: what is attached, and the answer to everything else."""

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys

import aiohttp
import fronts
import pytest
from paths import ROOT
from stored import issues, make_sample

from jaxrl_llm.app.serve.feedback import FEEDBACK_PATH, MAX_BODY, ROUTES, application
from jaxrl_llm.core.net.listener import listening
from jaxrl_llm.replay.awaited import Awaited
from jaxrl_llm.replay.inbox import INBOX, given
from jaxrl_llm.replay.index import open_store

A, B = 'g/0', 'g/1'


@pytest.fixture
def directory(tmp_path):
  """The store of a run: A and B wait for verdicts."""
  store = open_store(tmp_path / 'replay')
  store.at(0).issue(issues([A, B]))
  store.at(0).append([make_sample(uid) for uid in (A, B)])
  awaited = Awaited(scorers={'human': 1}, since=0.0, until=4e9, newest_version=0)
  store.at(0).wait_for_rewards({A: 'a', B: 'b'}, awaited)
  store.close()
  return tmp_path / 'replay'


def served(directory, tmp_path, client):
  """Runs `client(post)` beside a service behind a front. `post` returns status and answer."""

  async def main():
    front = fronts.config(tmp_path)
    app = application(directory)
    async with (
      listening(app, name='feedback', front=front, routes=ROUTES) as (_, public),
      aiohttp.ClientSession(public) as session,
    ):

      async def post(body, token=fronts.TOKEN, path=FEEDBACK_PATH):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {'Authorization': f'Bearer {token}'} if token else {}
        async with session.post(path, data=data, headers=headers) as response:
          return response.status, await response.text()

      await client(post)

  asyncio.run(asyncio.wait_for(main(), 60))


def test_verdicts_are_attached_and_all_else_has_a_status_and_one_line(directory, tmp_path):
  async def client(post):
    verdict = {'uid': A, 'value': 1, 'who': 'ann'}
    status, text = await post(verdict)
    assert status == 200 and json.loads(text) == {
      'result': 'feedback on g/0: human 1 of ann attached'
    }
    assert (await post(verdict))[0] == 200
    for body, wanted in (
      ({**verdict, 'value': 0}, 409),
      ({**verdict, 'uid': 'nobody/0'}, 404),
      ({**verdict, 'attempt': 9}, 404),
      ({**verdict, 'value': 'high'}, 400),
      (b'{"uid": "g/0", "value": Infinity, "who": "bob"}', 400),
      (b'{"uid": "g/0", "value": 1e999, "who": "bob"}', 400),
      ({**verdict, 'extra': 1}, 400),
      ({'uid': A}, 400),
      ([], 400),
      (b'', 400),
      (b'\xff\xfe', 400),
      (b'[' * 60_000, 400),
    ):
      status, text = await post(body)
      assert status == wanted, (body[:40] if isinstance(body, bytes) else body, text)
      assert '\n' not in json.loads(text)['error']
    assert (await post(b'"' + b'x' * MAX_BODY + b'"'))[0] == 413
    assert (await post(verdict, token='wrong-token-0123456789'))[0] == 401
    assert (await post(verdict, token=None))[0] == 401
    assert (await post(verdict, path='/other'))[0] == 403

  served(directory, tmp_path, client)
  assert [(v.uid, v.value, v.who) for v in given(directory)] == [(A, 1.0, 'ann')]


def test_many_clients_at_once_lose_nothing(directory, tmp_path):
  async def client(post):
    bodies = [{'uid': uid, 'value': n, 'who': f'p{n}'} for n in range(16) for uid in (A, B)]
    answers = await asyncio.gather(*(post(body) for body in bodies for _ in range(2)))
    assert {status for status, _ in answers} == {200}

  served(directory, tmp_path, client)
  assert sorted((v.uid, v.value) for v in given(directory)) == sorted(
    (uid, float(n)) for n in range(16) for uid in (A, B)
  )


def test_an_inbox_that_cannot_be_written_is_a_503_and_the_service_goes_on(directory, tmp_path):
  async def client(post):
    verdict = {'uid': A, 'value': 1, 'who': 'ann'}
    (directory / INBOX).write_bytes(b'no database' * 500)
    status, text = await post(verdict)
    assert status == 503 and 'it is damaged' in text
    (directory / INBOX).unlink()
    assert (await post(verdict))[0] == 200

  served(directory, tmp_path, client)


def test_the_service_runs_as_a_command_and_its_verdicts_survive_its_kill(directory, tmp_path):
  addresses = tmp_path / 'addresses.json'
  flags = [
    f'--workdir={directory.parent}',
    '--host=127.0.0.1',
    f'--token_file={fronts.token_file(tmp_path)}',
    f'--addresses_file={addresses}',
  ]
  process = subprocess.Popen(
    [sys.executable, '-m', 'jaxrl_llm', 'serve', '--role=feedback', *flags],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
      line = reader.submit(process.stdout.readline).result(timeout=120)
    assert 'is accepted at http://127.0.0.1:' in line
    while not addresses.exists():
      pass
    (address,) = json.loads(addresses.read_text())

    async def main():
      headers = {'Authorization': f'Bearer {fronts.TOKEN}'}
      async with aiohttp.ClientSession(address, headers=headers) as session:
        body = {'uid': A, 'value': 1, 'who': 'ann'}
        async with session.post(FEEDBACK_PATH, json=body) as response:
          assert response.status == 200, await response.text()

    asyncio.run(asyncio.wait_for(main(), 60))
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
  assert [(v.uid, v.value) for v in given(directory)] == [(A, 1.0)]
