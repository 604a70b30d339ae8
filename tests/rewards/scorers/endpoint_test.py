"""Scores come from real HTTP servers whole or not at all, and faults that pass are tried again."""

import asyncio
import contextlib
import dataclasses
import itertools
import ssl

import pytest
from clocks import simulated
from fixtures.rewards_scorers import attempt
from services import CUT, HANG, Service, one_after_another

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import RemoteError
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.rewards.api import Addressed, RewardsConfig, ScorerConfig, Verdict
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rewards.scorers.http import http_scorer

SOON = {'first_wait_s': 0.01}


def scored(service, *attempts, **options):
  """What the scorer says of each attempt, all of them at once."""

  async def main():
    async with (
      service.running(),
      http_scorer(addresses=[service.address], **{**SOON, **options}).open() as score,
    ):
      return await asyncio.gather(*map(score, attempts or (attempt('x'),)), return_exceptions=True)

  return simulated(main())


def test_the_attempt_is_posted_and_the_answer_is_the_verdict():
  service = Service(
    lambda body: {'value': 0.5, 'parts': {'form': 1}, 'evidence': {'why': ['so']}, 'version': 3}
  )
  fields = {'data_source': 'sums', 'extra_info': {'level': 3}, 'reward_model': {'ground_truth': 5}}
  (said,) = scored(service, attempt('five', uid='u7', truth='5', fields=fields))
  assert said == Verdict(value=0.5, parts={'form': 1.0}, evidence={'why': ['so']})
  prompt = [{'role': 'user', 'content': 'What is it?'}]
  wanted = {'uid': 'u7', 'prompt': prompt, 'completion': 'five', 'ground_truth': 5}
  assert service.seen == [{**wanted, 'data_source': 'sums', 'extra_info': {'level': 3}}]
  assert 'Authorization' not in service.headers[0]


def test_what_the_row_does_not_say_is_posted_as_the_tasksets_name_and_an_empty_object():
  service = Service(lambda body: {'value': 1})
  scored(service, attempt('x'))
  assert (service.seen[0]['data_source'], service.seen[0]['extra_info']) == ('t', {})


def test_score_is_another_word_for_value_and_null_says_unscorable():
  assert scored(Service(lambda body: {'score': 2})) == [Verdict(value=2.0)]
  assert scored(Service(lambda body: {'value': None})) == [Verdict(value=None)]


@pytest.mark.parametrize(
  ('answer', 'told'),
  [
    ({}, 'one of value and score'),
    ({'value': 1, 'score': 1}, 'one of value and score'),
    ({'value': '1'}, 'finite number or null'),
    ({'value': True}, 'finite number or null'),
    ('{"value": NaN}', 'finite number or null'),
    ('{"value": 1' + '0' * 400 + '}', 'finite number or null'),
    ({'value': 1, 'parts': {'a': 'b'}}, 'object of finite numbers'),
    ({'value': 1, 'parts': [1]}, 'object of finite numbers'),
    ({'value': 1, 'evidence': 'because'}, 'wanted an object'),
    ([1], 'wanted an object'),
    ('1.0 points', 'wanted JSON'),
    ('[' * 100_000, 'wanted JSON'),
    ('"' + 'x' * (5 << 20) + '"', 'more than'),
    (404, 'HTTP 404: status 404'),
    (302, 'HTTP 302'),
    (401, 'check key_file'),
  ],
)
def test_an_answer_that_is_no_verdict_is_an_error_at_once(answer, told):
  service = Service(lambda body: answer)
  (raised,) = scored(service)
  assert isinstance(raised, RemoteError) and told in str(raised) and '\n' not in str(raised)
  assert len(service.seen) == 1


STEPS = {'value': 0.9, 'step_values': [0.5, 1, 0.25]}


@pytest.mark.parametrize(
  ('steps', 'value'),
  [
    (None, 0.9),
    ('last', 0.25),
    ('mean', 1.75 / 3),
    ('min', 0.25),
    ('product', 0.125),
    ('sum', 1.75),
  ],
)
def test_values_of_steps_are_combined_by_hand(steps, value):
  (said,) = scored(Service(lambda body: STEPS), steps=steps)
  assert said == Verdict(value=value, evidence={'step_values': [0.5, 1.0, 0.25]})


@pytest.mark.parametrize(
  ('steps', 'rewards'), [('turns', (0.5, 1.0, 0.25)), ('turn_differences', (0.5, 0.5, -0.75))]
)
def test_values_of_steps_are_the_rewards_of_turns(steps, rewards):
  service = Service(lambda body: STEPS)
  talk = [('user', 'What is it?'), ('assistant', 'a'), ('tool', 'b'), ('assistant', 'c')]
  talk += [('tool', 'd'), ('assistant', 'e')]
  transcript = tuple({'role': role, 'content': content} for role, content in talk)
  several = dataclasses.replace(attempt('e'), transcript=transcript)
  (said,) = scored(service, several, steps=steps)
  assert (said.value, said.turn_values) == (0.0, rewards)
  assert service.seen[0]['transcript'] == [dict(message) for message in transcript]
  (raised,) = scored(service, dataclasses.replace(several, transcript=transcript[:2]), steps=steps)
  assert '3 step_values for 1 turns' in str(raised)


@pytest.mark.parametrize('values', [None, [], 0.5, ['a'], [True], [float('inf')], [0.5] * 5000])
def test_values_of_steps_that_are_none_are_an_error(values):
  answer = {'value': 1} if values is None else {'value': 1, 'step_values': values}
  (raised,) = scored(Service(lambda body: answer), steps='min')
  assert isinstance(raised, RemoteError)
  assert 'step_values' in str(raised) or 'wanted JSON' in str(raised)


def test_an_attempt_that_cannot_be_judged_has_no_value_whatever_its_steps():
  (said,) = scored(Service(lambda body: STEPS | {'value': None}), steps='min')
  assert said.value is None


@pytest.mark.parametrize('fault', [429, 500, 503, CUT, HANG])
def test_a_fault_that_passes_is_tried_again(fault):
  service = Service(one_after_another(fault, {'value': 1}))
  assert scored(service, request_deadline_s=2.0 if fault is HANG else 60.0) == [Verdict(value=1.0)]
  assert len(service.seen) == 2 and service.seen[0] == service.seen[1]


def test_one_that_stays_is_an_error_that_says_how_often_and_what():
  service = Service(lambda body: 503)
  (raised,) = scored(service, retries=2)
  assert str(raised) == f'3 tries: {service.address}: HTTP 503: status 503'
  assert len(service.seen) == 3
  (raised,) = scored(Service(lambda body: 503), retries=0)
  assert 'tries' not in str(raised)


def test_a_service_that_asks_for_time_gets_it():
  times = []

  def answer(body):
    times.append(asyncio.get_running_loop().time())
    return {'value': 1} if len(times) > 1 else (429, {}, {'Retry-After': '1'})

  assert scored(Service(answer)) == [Verdict(value=1.0)]
  assert times[1] - times[0] == pytest.approx(1.0)


def test_each_wait_is_twice_the_one_before():
  times = []

  def answer(body):
    times.append(asyncio.get_running_loop().time())
    return {'value': 1} if len(times) > 3 else 503

  assert scored(Service(answer), first_wait_s=0.1) == [Verdict(value=1.0)]
  waits = [late - early for early, late in itertools.pairwise(times)]
  assert waits == pytest.approx([0.1, 0.2, 0.4])


def test_no_service_makes_it_wait_for_ever():
  """The hour that it asks for is more than `simulated` waits."""
  service = Service(one_after_another((429, {}, {'Retry-After': '3600'}), {'value': 1}))
  assert scored(service) == [Verdict(value=1.0)]


def test_an_address_that_is_held_up_gets_no_more_while_another_is_free():
  release = asyncio.Event()

  async def held_up(body):
    await release.wait()
    return {'value': 0}

  async def main():
    slow, quick = Service(held_up), Service(lambda body: {'value': 1})
    async with contextlib.AsyncExitStack() as stack:
      for service in (slow, quick):
        await stack.enter_async_context(service.running())
      score = await stack.enter_async_context(
        http_scorer(addresses=[slow.address, quick.address]).open()
      )
      first = asyncio.create_task(score(attempt('x')))
      while not slow.seen:
        await asyncio.sleep(0.01)
      async with asyncio.timeout(30):
        values = [(await score(attempt('x'))).value for _ in range(4)]
      release.set()
      return values, (await first).value

  assert simulated(main()) == ([1.0] * 4, 0.0)


def test_where_nobody_listens_it_says_so():
  async def main():
    async with http_scorer(addresses=['http://127.0.0.1:9'], retries=1, **SOON).open() as score:
      await score(attempt('x'))

  with pytest.raises(RemoteError, match=r'2 tries: http://127\.0\.0\.1:9: ClientConnectorError'):
    simulated(main())


def test_another_address_takes_over_and_work_is_shared():
  async def main():
    bad, good, other = (
      Service(lambda body, v=value: v) for value in (500, {'value': 1}, {'value': 1})
    )
    async with bad.running(), good.running(), other.running():
      async with http_scorer(addresses=[bad.address, good.address], **SOON).open() as score:
        assert [await score(attempt('x')) for _ in range(4)] == [Verdict(value=1.0)] * 4
        assert len(good.seen) == 4 and len(bad.seen) <= 4
      shared = len(good.seen)
      async with http_scorer(addresses=[good.address, other.address], **SOON).open() as score:
        await asyncio.gather(*(score(attempt('x')) for _ in range(10)))
      assert (len(good.seen) - shared, len(other.seen)) == (5, 5)

  simulated(main())


def test_after_a_fault_an_address_comes_last():
  async def main():
    good, bad = Service(lambda body: {'value': 1}), Service(lambda body: 500)
    async with contextlib.AsyncExitStack() as stack:
      for service in (good, bad):
        await stack.enter_async_context(service.running())
      scorer = http_scorer(addresses=[good.address], retries=1, **SOON)
      score = await stack.enter_async_context(scorer.open())
      for _ in range(3):
        await score(attempt('x'))
      # The second has served less, so it is asked first.
      score.set_addresses([good.address, bad.address])
      assert [(await score(attempt('x'))).value for _ in range(3)] == [1.0] * 3
    return len(good.seen), len(bad.seen)

  served, faults = simulated(main())
  assert served == 6 and faults >= 1


def test_addresses_change_while_it_is_in_use():
  async def main():
    old, new = Service(lambda body: {'value': 0}), Service(lambda body: {'value': 1})
    async with old.running(), new.running(), http_scorer(addresses=[old.address]).open() as score:
      assert isinstance(score, Addressed)
      before = await score(attempt('x'))
      score.set_addresses([new.address])
      with pytest.raises(UserError, match="address 'here'"):
        score.set_addresses(['here'])
      return before.value, (await score(attempt('x'))).value, len(old.seen)

  assert simulated(main()) == (0, 1, 1)


def test_no_more_requests_are_under_way_than_allowed():
  async def answer(body):
    await asyncio.sleep(0.02)
    return {'value': 1}

  service = Service(answer)
  assert len(scored(service, *[attempt('x')] * 12, concurrency=3)) == 12
  assert service.most == 3


def test_the_key_of_its_file_is_shown_to_the_service_and_to_nobody_it_sends_on_to(tmp_path):
  key = tmp_path / 'key'
  key.write_text('secret-of-this-test\n')
  service = Service(lambda body: {'value': 1})
  scored(service, key_file=str(key))
  assert service.headers[0]['Authorization'] == 'Bearer secret-of-this-test'

  async def main():
    elsewhere = Service(lambda body: {'value': 1})
    async with elsewhere.running():
      moved = Service(lambda body: (307, {}, {'Location': elsewhere.address}))
      async with (
        moved.running(),
        http_scorer(addresses=[moved.address], key_file=str(key)).open() as score,
      ):
        with pytest.raises(RemoteError, match='HTTP 307') as raised:
          await score(attempt('x'))
    return elsewhere.seen, str(raised.value)

  seen, told = simulated(main())
  assert not seen and 'secret' not in told


def test_a_unix_socket_will_do(tmp_path):
  service = Service(lambda body: {'value': 1})

  async def main():
    socket = tmp_path / 's'
    async with service.running(socket), http_scorer(addresses=[f'unix:{socket}']).open() as score:
      return await score(attempt('x'))

  assert simulated(main()) == Verdict(value=1.0)


def test_an_https_service_is_believed_by_the_certificate_that_is_named(certificate):
  cert, key, _ = certificate
  service, tls = (
    Service(lambda body: {'value': 1}),
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
  )
  tls.load_cert_chain(cert, key)

  async def main():
    async with service.running(tls=tls):
      options = {'addresses': [service.address], 'retries': 0}
      async with http_scorer(**options, ca_file=cert).open() as score:
        believed = await score(attempt('x'))
      async with http_scorer(**options).open() as score:
        with pytest.raises(
          RemoteError, match=f'{service.address}: ClientConnectorCertificateError'
        ):
          await score(attempt('y'))
      return believed

  assert simulated(main()) == Verdict(value=1.0)
  assert len(service.seen) == 1


@pytest.mark.parametrize(
  ('options', 'told'),
  [
    ({}, 'addresses is empty, wanted at least one, or discover'),
    ({'addresses': []}, 'addresses is empty'),
    ({'addresses': ['localhost:80']}, "address 'localhost:80', wanted http://HOST:PORT"),
    ({'addresses': ['http://h'], 'key_file': '/no/such'}, 'key_file: /no/such: cannot be read'),
    (
      {'addresses': ['http://h'], 'ca_file': '/no/such'},
      'ca_file /no/such: the certificates cannot',
    ),
    ({'addresses': ['http://h'], 'retries': -1}, 'retries is -1'),
    ({'addresses': ['http://h'], 'request_deadline_s': 0}, 'wanted both above 0'),
    ({'addresses': ['http://h'], 'adresses': []}, "did you mean 'addresses'"),
  ],
)
def test_what_could_never_work_is_one_line(options, told):
  with pytest.raises(UserError) as raised:
    http_scorer(**options)
  assert told in str(raised.value) and '\n' not in str(raised.value)


def test_the_pool_awaits_it_and_its_faults_are_scores():
  service = Service(one_after_another({'value': 0.25}, {'wrong': 1}, HANG))

  async def main():
    async with service.running():
      config = RewardsConfig(scorers=(ScorerConfig(name='http', deadline_s=3.0),))
      pool = ScorerPool({'http': http_scorer(addresses=[service.address])}, config)
      await pool.start()
      try:
        return [(await pool.score(attempt('x')))[0] for _ in range(3)]
      finally:
        await pool.close()

  good, wrong, late = simulated(main())
  assert (good.status, good.value) == (Status.OK, 0.25)
  assert (wrong.status, wrong.value) == (Status.ERROR, None) and 'Malformed' in wrong.evidence[
    'error'
  ]
  assert (late.status, late.value) == (Status.TIMEOUT, None)
