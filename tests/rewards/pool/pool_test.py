"""The pool answers every call exactly once, whatever scorers do to their processes."""

import asyncio
import concurrent.futures
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from fixtures import rewards_scorers
from fixtures.rewards_scorers import attempt
from paths import FIXTURES, ROOT, SUPPORT
from pools import score_then_length, with_pool

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.rewards.api import (
  Attempt,
  OverrunIsZero,
  PerGroup,
  RewardsConfig,
  ScorerConfig,
  Verdict,
  combine,
)
from jaxrl_llm.rewards.pool import worker
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer

OWNER = FIXTURES / 'rewards_owner.py'


SECRETS = """
import sys
import pools
from fixtures import rewards_scorers
if __name__ == '__main__':
  names = sys.argv[1:]
  scorers = {'named': rewards_scorers.named_variables}
  score = pools.score_then_length(scorers, 'named', ' '.join(names), \
environment=('OPENAI_API_KEY',))
  print(*(name for name in names if score.evidence[name] == 'false'))
"""


def test_workers_get_no_secret_of_the_environment_but_those_that_are_named(tmp_path):
  """In a process of its own: a fork server keeps the environment in which it was started."""
  script = tmp_path / 'script.py'
  script.write_text(SECRETS)
  kept = ['OPENAI_API_KEY', 'TOKENIZERS_PARALLELISM', 'MONKEY']
  names = ['HF_TOKEN', 'aws_secret_access_key', 'PGPASSWORD', *kept]
  env = {**os.environ, **dict.fromkeys(names, 'false')}
  env['PYTHONPATH'] = os.pathsep.join(map(str, (FIXTURES, ROOT, SUPPORT)))
  done = subprocess.run(
    [sys.executable, script, *names], env=env, capture_output=True, text=True, timeout=300
  )
  assert done.stdout.split() == kept, done.stderr


def test_200_concurrent_calls_are_each_answered_once(tmp_path):
  log = tmp_path / 'log'

  async def use(pool):
    calls = (
      attempt(f'c{i}', uid=f'u{i}', domain='log', fields={'log': str(log)}) for i in range(200)
    )
    scores = await asyncio.gather(*(pool.score(a) for a in calls))
    return [score for (score,) in scores], pool.counts

  scores, counts = with_pool({'log': rewards_scorers.log_uid}, use, workers=2)
  assert [s.evidence for s in scores] == [
    {'uid': f'u{i}', 'completion': f'c{i}'} for i in range(200)
  ]
  assert [s.uid for s in scores] == [f'u{i}' for i in range(200)]
  assert Counter(log.read_text().split()) == Counter({f'u{i}': 1 for i in range(200)})
  assert counts['ok'] == counts['log/ok'] == 200


def test_an_attempt_is_judged_by_the_scorers_of_its_domain_in_their_order():
  configs = (
    ScorerConfig(name='b', domains=('math', 'code'), weight=2.0),
    ScorerConfig(name='a', weight=0.5),
    ScorerConfig(name='c', domains=('code',)),
  )
  scorers = dict.fromkeys('abc', rewards_scorers.length)

  async def main():
    pool = ScorerPool(scorers, RewardsConfig(scorers=configs))
    await pool.start()
    result = [
      await pool.score(attempt('1234', domain=domain)) for domain in ('math', 'code', 'other')
    ]
    await pool.close()
    return result

  math, code, other = asyncio.run(main())
  assert [[s.scorer for s in scores] for scores in (math, code, other)] == [
    ['b', 'a'],
    ['b', 'a', 'c'],
    ['a'],
  ]
  reward = combine(math, RewardsConfig(scorers=configs))
  assert reward.value == 2.0 * 4 + 0.5 * 4
  assert reward.parts == {'b': 4.0, 'b/half': 2.0, 'a': 4.0, 'a/half': 2.0}


def per_turn(a: Attempt) -> Verdict:
  return Verdict(value=1.0, turn_values=(0, 0.5))


def unbounded_turn(a: Attempt) -> Verdict:
  return Verdict(value=1.0, turn_values=(0.0, float('inf')))


def test_turn_values_come_through_as_numbers_or_are_an_error():
  async def use(pool):
    return [(await pool.score(attempt('x', domain=name)))[0] for name in ('turns', 'unbounded')]

  turns, unbounded = with_pool({'turns': per_turn, 'unbounded': unbounded_turn}, use)
  assert (turns.value, turns.turn_values) == (1.0, (0.0, 0.5))
  assert [type(value) for value in turns.turn_values] == [float, float]
  assert (unbounded.status, unbounded.value) == (
    Status.ERROR,
    None,
  ) and 'inf' in unbounded.evidence['error']


@pytest.mark.parametrize('spin', [rewards_scorers.spin_in_python, rewards_scorers.spin_in_c])
def test_a_scorer_that_never_ends_is_killed_at_its_deadline(spin):
  score = score_then_length({'spin': spin}, 'spin', deadline_s=0.2)
  assert (score.status, score.value, score.time) == (Status.TIMEOUT, None, 0.2)
  assert score.evidence['caused_by'] == 'scorer'


def test_an_overrun_that_the_completion_caused_is_zero():
  bomb = r'\boxed{\max(1, 9^{9 \cdot 9^{9}})}'  # What only math-verify reads.
  latex = answer_scorer(mode='latex', extraction='boxed')
  score = score_then_length({'latex': latex}, 'latex', bomb, deadline_s=1.0)
  assert (score.status, score.value, score.evidence['caused_by']) == (
    Status.TIMEOUT,
    0.0,
    'completion',
  )
  lenient = answer_scorer(mode='latex', extraction='boxed', on_timeout='none')
  assert score_then_length({'latex': lenient}, 'latex', bomb, deadline_s=1.0).value is None


def test_the_deadline_kills_also_where_the_owner_is_not_the_main_thread():
  """math-verify's own timeouts are signals, which only a main thread gets; what hangs here is
  killed as a process.
  """
  latex = answer_scorer(mode='latex', extraction='boxed')
  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    bomb = r'\boxed{\max(1, \binom{9999999}{4999999})}'
    score = threads.submit(
      score_then_length, {'latex': latex}, 'latex', bomb, deadline_s=1.0
    ).result()
  assert (score.status, score.value, score.evidence['caused_by']) == (
    Status.TIMEOUT,
    0.0,
    'completion',
  )


@pytest.mark.parametrize(
  ('crash', 'exit_code'), [(rewards_scorers.dies, 3), (rewards_scorers.is_killed, -9)]
)
@pytest.mark.parametrize('blame', [lambda scorer: scorer, OverrunIsZero])
def test_a_crash_is_reported_and_the_pool_lives_on(crash, exit_code, blame):
  score = score_then_length({'crash': blame(crash)}, 'crash')
  assert (score.status, score.value) == (Status.CRASHED, None)
  assert score.evidence['error'] == 'the worker process died'
  # 255: the fork server had already reaped it.
  assert score.evidence['exit_code'] in (exit_code, 255)


def test_what_a_scorer_raises_or_returns_wrongly_is_an_error_with_its_text():
  texts = {
    'raises': "KeyError: 'x'",
    'exits': 'SystemExit: 0',
    'raises_timeout': 'TimeoutError: of its own',
    'raises_mutely': 'Mute, which cannot be printed (AttributeError)',
    'allocates': 'MemoryError: ',
    'not_a_number': 'ValueError: scorer returned value nan',
    'not_a_verdict': 'TypeError: scorer returned float, wanted Verdict',
    'not_json': 'TypeError: Object of type set is not JSON serializable',
  }

  async def use(pool):
    return {name: (await pool.score(attempt('x', domain=name)))[0] for name in texts}

  scores = with_pool({name: getattr(rewards_scorers, name) for name in texts}, use)
  for name, text in texts.items():
    assert (scores[name].status, scores[name].value) == (Status.ERROR, None)
    assert scores[name].evidence['error'].startswith(text)
  assert 'rewards_scorers.py' in scores['raises'].evidence['where']


async def broken(pool):
  """Waits until the pool has noticed that its idle worker is gone: with no call out, that breaks
  the whole pool.
  """
  async with asyncio.timeout(60):
    while pool._workers._pool.active:
      await asyncio.sleep(0.01)


def test_an_idle_worker_that_is_killed_is_replaced():
  async def use(pool):
    pids = []
    for _ in range(3):
      (score,) = await pool.score(attempt('x', domain='length'))
      assert score.status == Status.OK
      pids.append(score.evidence['pid'])
      os.kill(pids[-1], signal.SIGKILL)
      await broken(pool)
    return pids

  assert len(set(with_pool({}, use))) == 3


def test_breaks_with_scores_in_between_do_not_add_up(monkeypatch):
  monkeypatch.setattr('jaxrl_llm.rewards.pool.processes.MAX_BREAKS', 1)

  async def use(pool):
    for _ in range(3):
      (score,) = await pool.score(attempt('x', domain='length'))
      os.kill(score.evidence['pid'], signal.SIGKILL)
      await broken(pool)
    scores = await asyncio.gather(*(pool.score(attempt('x', domain='length')) for _ in range(4)))
    return [score.status for (score,) in scores], pool.counts['breaks']

  assert with_pool({}, use, workers=1) == ([Status.OK] * 4, 3), (
    'once for each break, however many calls meet it'
  )


def test_workers_that_cannot_be_replaced_end_the_run_and_not_the_patience(tmp_path):
  file = tmp_path / 'stop'

  async def use(pool):
    (score,) = await pool.score(attempt('x', domain='bad'))
    file.touch()
    os.kill(score.evidence['pid'], signal.SIGKILL)
    await asyncio.wait_for(pool.score(attempt('x', domain='bad')), 30)

  with pytest.raises(RunError, match='broke 6 times without a score in between'):
    with_pool({'bad': rewards_scorers.StartsUnless(str(file))}, use)


def test_workers_that_import_much_are_told_of(caplog):
  async def use(pool):
    return [
      record.getMessage()
      for record in caplog.records
      if 'Scorer workers import' in record.getMessage()
    ]

  assert with_pool({}, use) == []
  (told,) = with_pool({'heavy': rewards_scorers.Heavy()}, use)
  assert told.startswith('Scorer workers import torch: ')


def test_a_worker_ignores_ctrl_c_and_dies_of_a_termination_at_once():
  evidence = score_then_length({'signals': rewards_scorers.signals}, 'signals').evidence
  assert evidence == {'SIGINT': signal.SIG_IGN, 'SIGTERM': signal.SIG_DFL}


def test_crashes_among_other_calls_cost_only_their_own_scores():
  async def use(pool):
    kinds = ['crash' if i % 10 == 3 else 'length' for i in range(60)]
    scores = await asyncio.gather(
      *(pool.score(attempt('x' * i, domain=kind)) for i, kind in enumerate(kinds))
    )
    return kinds, [score for (score,) in scores]

  kinds, scores = with_pool({'crash': rewards_scorers.dies}, use, workers=2)
  for i, (kind, score) in enumerate(zip(kinds, scores)):
    assert (score.status, score.value) == (
      (Status.CRASHED, None) if kind == 'crash' else (Status.OK, float(i))
    )


def test_workers_hold_no_accelerator_library():
  score = score_then_length({'imports': rewards_scorers.imports}, 'imports')
  assert score.evidence == {'modules': []}


def test_cancelling_a_call_frees_its_worker(tmp_path):
  log = tmp_path / 'log'

  async def use(pool):
    call = asyncio.create_task(
      pool.score(attempt('1000', domain='sleep', fields={'log': str(log)}))
    )
    while not log.exists():
      await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
      await call
    return await pool.score(attempt('123', domain='length'))

  (score,) = with_pool({'sleep': rewards_scorers.log_and_sleep}, use)
  assert score.value == 3.0


@pytest.mark.parametrize(
  'scorer',
  [
    lambda a: Verdict(value=1.0),
    functools.partial(rewards_scorers.length, threading.Lock()),
    PerGroup(lambda attempts, scores: ()),
  ],
)
def test_a_scorer_that_no_process_could_get_is_one_line(scorer):
  with pytest.raises(
    UserError, match="scorer 'bad': cannot be pickled for its worker process"
  ) as raised:
    with_pool({'bad': scorer}, None)
  assert '\n' not in str(raised.value)


def test_misuse_is_one_clear_line():
  config = RewardsConfig(scorers=(ScorerConfig(name='length'),))
  with pytest.raises(UserError, match=r"no scorer was built for \['length'\]; built: \['len'\]"):
    ScorerPool({'len': rewards_scorers.length}, config)
  pool = ScorerPool({'length': rewards_scorers.length}, config)
  with pytest.raises(RunError, match='before start'):
    asyncio.run(pool.score(attempt()))


def owner(what):
  """A process with a pool, in a session of its own, once it says that it is ready."""
  process = subprocess.Popen(
    [sys.executable, OWNER, what], stdout=subprocess.PIPE, text=True, start_new_session=True
  )
  assert process.stdout.readline() == 'ready\n'
  return process


def session_members(session):
  """Living processes of a session (from /proc: fields after the command's name are state, parent,
  group, session).
  """
  members = []
  for stat in Path('/proc').glob('[0-9]*/stat'):
    try:
      state, _, _, own_session = stat.read_text().rpartition(')')[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
      continue
    if int(own_session) == session and state not in 'ZX':
      members.append(int(stat.parent.name))
  return members


@pytest.mark.full
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_no_process_outlives_an_owner_that_is_killed():
  process = owner('hang')
  # The owner, the fork server and three workers, two of them busy.
  assert len(session_members(process.pid)) >= 5
  process.kill()
  process.wait()
  for _ in range(300):
    if not session_members(process.pid):
      break
    time.sleep(0.1)
  left = session_members(process.pid)
  for pid in left:
    os.kill(pid, signal.SIGKILL)
  assert not left


@pytest.mark.full
def test_an_interrupt_of_the_process_group_leaves_the_workers_to_their_owner():
  process = owner('interrupt')
  os.killpg(process.pid, signal.SIGINT)
  out, _ = process.communicate(timeout=120)
  assert (process.returncode, out) == (0, 'ok 1.0 crashed ok 1.0\n')


ASKS = """
import sys

from jaxrl_llm.rewards.api import Verdict


def loaded(a):
  libraries = {'aiohttp', 'jax', 'math_verify', 'reasoning_gym', 'sympy', 'torch'}
  return Verdict(value=1.0, evidence={'libraries': sorted(libraries & set(sys.modules))})
"""
"""Module `asks`: a scorer that names the libraries its worker has imported."""

CALLS_OURS = f'{ASKS}\nfrom jaxrl_llm.rewards.scorers.answer.expressions import latex_agree\n'
"""Module `calls_ours`: the same scorer, in a module that imports one of the package."""

SLOW_LIBRARY = """
import time

time.sleep(4.0)


def get_score_answer_fn(name):
  return lambda answer, entry: float(answer == entry['answer'])
"""
"""A module in place of reasoning_gym that takes 4 s to import."""

LOADED = """
import asyncio

import asks
import calls_ours
from fixtures.rewards_scorers import attempt

from jaxrl_llm.rewards.api import RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.scorers.format import format_scorer
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rewards.scorers.verifier.scorer import verifier_scorer


async def first_scores(*, deadline_s=60.0, **scorers):
  # The scorers share a pool and are called one after another.
  configs = tuple(ScorerConfig(name=name, domains=(name,), deadline_s=deadline_s) \
for name in scorers)
  pool = ScorerPool(scorers, RewardsConfig(scorers=configs))
  await pool.start()
  fields = {'reasoning_gym': 'spell_backward', 'entry': {'answer': 'cba'}}
  scores = [(await pool.score(attempt('cba', domain=name, fields=fields)))[0] for name in scorers]
  await pool.close()
  return scores


def tell(**scorers):
  asked, *scores = asyncio.run(first_scores(**scorers))
  print(asked.evidence['libraries'], *(f'{score.status} {score.value}' for score in scores))
"""


def told(folder, calls, **files):
  """The lines that `calls` print in a new process, for a process has only one fork server."""
  for name, text in {'asks': ASKS, 'calls_ours': CALLS_OURS, **files}.items():
    (folder / f'{name}.py').write_text(text)
  env = {**os.environ, 'PYTHONPATH': os.pathsep.join(map(str, (folder, ROOT, SUPPORT)))}
  command = [sys.executable, '-c', LOADED + calls]
  done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()


def test_workers_have_the_libraries_of_their_scorers_before_the_first_call_and_no_others(tmp_path):
  calls = """
tell(asks=asks.loaded, format=format_scorer())
tell(ours=calls_ours.loaded)
"""
  assert told(tmp_path, calls) == ['[] ok 0.0', "['math_verify', 'sympy']"]


@pytest.mark.full
def test_the_deadline_of_a_first_call_is_not_charged_with_an_import(tmp_path):
  """Neither where the fork server has the library nor where it was started without it."""
  calls = 'tell(asks=asks.loaded, verifier=verifier_scorer(), deadline_s=2.0)\n'
  wanted = "['reasoning_gym'] ok 1.0"
  assert told(tmp_path, calls, reasoning_gym=SLOW_LIBRARY) == [wanted]
  assert told(tmp_path, f'tell(asks=asks.loaded)\n{calls}', reasoning_gym=SLOW_LIBRARY) == [
    '[]',
    wanted,
  ]


@pytest.mark.parametrize(
  ('kind', 'options', 'library'),
  [
    *(('answer', {'mode': mode}, set()) for mode in ('exact', 'numeric', 'choice', 'text')),
    *(
      ('answer', {'mode': mode}, {'math_verify'}) for mode in ('latex', 'interval', 'set', 'tuple')
    ),
    ('answer', {'mode': 'latex', 'on_timeout': 'none'}, {'math_verify'}),
    ('k12', {'mode': 'exact'}, {'math_verify'}),  # A row may name another kind.
    ('verifier', {}, {'reasoning_gym'}),
    ('length', {}, set()),
  ],
)
def test_a_scorer_of_ours_has_the_library_that_it_needs(kind, options, library):
  # Here, as this module is imported by workers too.
  from jaxrl_llm.app.composition.scorers import build_scorer

  modules = set(worker.preload([build_scorer(ScorerConfig(name=kind, options=options))]))
  assert modules & {'math_verify', 'reasoning_gym', 'sympy'} == library
  assert any(name.startswith('jaxrl_llm.rewards.') for name in modules - {worker.__name__}), (
    'its own module too'
  )


def test_answers_without_expressions_load_no_library(tmp_path):
  calls = """
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer

for mode in ('exact', 'numeric', 'choice', 'text'):
  for text in (r'\\frac{1}{2}', '(1, 2]', '{1, 2}', 'B', '5 km', 'two words'):
    answer_scorer(mode=mode, extraction='whole')(attempt(text, truth='42'))
    answer_scorer(mode=mode, extraction='whole')(attempt(text, truth=text))
print(asks.loaded(None).evidence['libraries'])
"""
  assert told(tmp_path, calls) == ['[]']
