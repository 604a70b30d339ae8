"""Memory phases through the real program: what moves, what the ledger says, and that it changes no
bit.
"""

import collections
import json

import job
import pytest

from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import events
from jaxrl_llm.runtime.events import Edge

PHASES = {'policy': 'disk', 'optimizer': 'offload', 'critic': 'disk', 'reference': 'offload'}


def configured(*flags):
  spec, *rest = (*job.PPO, *flags)
  pairs = (flag.removeprefix('--config.').split('=', 1) for flag in rest)
  return apply_overrides(load_file(spec.removeprefix('--config='), Config), dict(pairs))


@pytest.fixture(scope='module')
def run():
  """PPO in memory phases, killed in the warm-up of its critic and after a refresh of the
  reference.
  """
  flags = (f'--config.phases={json.dumps(PHASES)}',)
  return job.shared(
    'phases',
    lambda workdir: job.killed_and_resumed(workdir, 16, 21, config=job.PPO, flags=flags),
  )


@pytest.mark.full
def test_a_killed_run_in_memory_phases_equals_a_resident_one_bit_for_bit(run):
  job.assert_equal_runs(run, job.ppo_run())
  assert not [path for path in (run / 'offloaded').rglob('*') if path.is_file()]


@pytest.mark.full
def test_nothing_compiles_after_the_warm_up(run):
  rows = [row for row in job.rows(run) if 'actor/pg_loss' in row and row['stage'] == 'ppo']
  assert rows[-1]['perf/compilations'] == 0, 'the first steps after the last kill compile'


@pytest.mark.full
def test_the_arrows_of_the_figure_are_in_the_log_with_bytes_and_seconds(run):
  seen = collections.Counter()
  asked = {}
  for event in events.read(run / events.FILE):
    if event is None or event.edge not in (
      *(Edge.OFFLOAD, Edge.RELOAD, Edge.RELEASE, Edge.RESTORE),
    ):
      continue
    if event.kind == 'request':
      asked[event.attempt, event.id] = event
    else:
      request = asked[event.attempt, event.of]
      # At the start of an attempt, the engine has no memory to release yet.
      assert event.fields['bytes'] > 0 or event.edge == Edge.RELEASE, request
      seen[event.edge, request.fields.get('role')] += event.fields['bytes'] > 0
  arrows = {
    *((Edge.RESTORE, None), (Edge.OFFLOAD, 'policy'), (Edge.RELEASE, None)),
    *((Edge.RELOAD, 'reference'), (Edge.OFFLOAD, 'reference')),
    *((Edge.RELOAD, 'policy'), (Edge.RELOAD, 'critic'), (Edge.RELOAD, 'optimizer')),
  }
  assert arrows <= seen.keys()
  assert min(seen[arrow] for arrow in arrows) >= 9, 'in each step'


@pytest.mark.full
def test_the_ledger_adds_up_and_is_as_predicted(run):
  # In a process of its own, which has one device as the run does.
  flags = (*job.PPO, f'--config.phases={json.dumps(PHASES)}', '--check', '--json')
  checked = json.loads(job.call('launch/train.py', *flags).stdout)
  predicted = checked['phases']
  ledgers = [
    event.fields for event in events.read(run / events.FILE) if event and event.edge == Edge.LEDGER
  ]
  of_ppo = [ledger for ledger in ledgers if ledger['roles'].get('critic') is not None]
  seen = collections.Counter(ledger['phase'] for ledger in of_ppo)
  assert min(seen[phase] for phase in predicted) >= 9
  for ledger in of_ppo:
    held = {role: size for role, size in ledger['roles'].items() if size}
    assert ledger['other'] >= 0
    assert ledger['total'] == sum(held.values()) + ledger['other']
    if (expected := predicted.get(ledger['phase'])) is not None:
      # Gradients exist only during the update.
      expected = {role: size for role, size in expected.items() if role != 'gradients'}
      assert held == expected, ledger['phase']
    # Everything else: counters, and the rows of the batch while it is trained on.
    assert ledger['other'] < 200_000
  largest = max(ledger['total'] for ledger in of_ppo if ledger['phase'] == 'train')
  assert largest < sum(role['bytes_per_device'] for role in checked['memory'])


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (
      ['--config.phases={}', '--config.stages.1.source.bound=1'],
      'phases: stages.ppo.source.bound is 1, so rollouts are generated while',
    ),
    (
      [
        '--config.phases={}',
        '--config.rollout.engine=vllm',
        '--config.rollout.vllm.addresses=["http://127.0.0.1:1"]',
      ],
      "phases.engine: 'destroy', but the run cannot stop and start",
    ),
    (
      ['--config.phases={"engine":"sleep"}', '--config.rollout.engine=vllm'],
      "phases.engine: 'sleep', but the servers start without sleep mode",
    ),
    (
      [
        '--config.phases={"engine":"sleep"}',
        '--config.rollout.engine=vllm',
        '--config.rollout.vllm.discover=1',
        '--config.registry={}',
      ],
      "phases.engine: 'sleep', but with rollout.vllm.discover servers join and leave",
    ),
  ],
)
def test_contradictions_are_refused_with_one_line(flags, words):
  with pytest.raises(UserError) as error:
    configured(*flags)
  assert words in str(error.value) and '\n' not in str(error.value)
