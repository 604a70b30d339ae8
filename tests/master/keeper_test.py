"""What a row of metrics says the seconds of trainer and servers were spent on."""

from jaxrl_llm.master.keeper import _goodput

TIMES = {'timing_s/gen': 4.0, 'timing_s/train': 3.0, 'perf/rollout_idle_s': 0.0}


def ledger(row, process, **how):
  found = _goodput(row, 10.0, **{'explores': True, 'is_repeated': False} | how)
  prefix = f'goodput/seconds/{process}/'
  seconds = {key.removeprefix(prefix): s for key, s in found.items() if key.startswith(prefix)}
  return {name: spent for name, spent in seconds.items() if spent}


def test_servers_of_a_stage_without_rollouts_are_idle():
  row = TIMES | {'run/engines_serving': 2.0, 'perf/publish_pause_s': 1.0}
  assert ledger(row, 'servers') == {'generate': 18.0, 'publish': 2.0}
  assert ledger(row, 'servers', explores=False) == {'idle': 18.0, 'publish': 2.0}


def test_a_trainer_whose_servers_are_all_lost_waits_and_only_an_embedded_engine_generates():
  embedded, lost = TIMES, TIMES | {'run/engines_serving': 0.0}
  assert ledger(embedded, 'trainer') == {'generate': 4.0, 'train': 3.0, 'other': 3.0}
  assert ledger(lost, 'trainer') == {'wait': 4.0, 'train': 3.0, 'other': 3.0}
  assert ledger(embedded, 'servers') == ledger(lost, 'servers') == {}
