"""The ledger keeps what it was told, refuses another sweep, and admits one sweep at a time."""

import math

import pytest
from sweeping import RATE, sweep_file

from jaxrl_llm.app.sweeps.ledger import FILE, Ledger, TrialState, in_use, locked, values
from jaxrl_llm.app.sweeps.plan import load_plan, open_ledger, preview
from jaxrl_llm.app.sweeps.ranking import measured, ranked
from jaxrl_llm.core.errors import UserError

GRID = f"axes={{'{RATE}': (1e-4, 1e-3)}}, seeds=(1, 2)"


def opened(tmp_path, fields, overrides=None):
  return open_ledger(load_plan(str(sweep_file(tmp_path, fields)), overrides or {}), tmp_path)


def test_trials_keep_number_id_and_state_when_the_file_is_reordered_and_extended(tmp_path):
  ledger = opened(tmp_path, GRID)
  ids = [entry.id for entry in ledger.entries()]
  assert ids[0] == '000-peak_lr-0.0001-seed-1' and len(ids) == 4
  ledger.start(2)
  ledger.end(2, TrialState.FINISHED, exit_code=0)
  ledger.close()
  extended = f"axes={{'{RATE}': (1e-3, 1e-5, 1e-4)}}, seeds=(2, 1, 3)"
  ledger = opened(tmp_path, extended)
  entries = ledger.entries()
  assert [entry.id for entry in entries[:4]] == ids and len(entries) == 9
  assert entries[2].state == TrialState.FINISHED and entries[2].attempts == 1
  assert [entry.number for entry in entries] == list(range(9))


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (f"axes={{'{RATE}': (1e-4,)}}, seeds=(1, 2)", '2 of its trials are no longer in .*first 002-'),
    (f"{GRID}, overrides={{'stages.sft.steps': 7}}", r'config\.stages\.sft\.steps: 500 .* 7 now'),
    (f'{GRID}, early_stopping=MedianRule()', 'early_stopping: None in the ledger'),
  ],
)  # fmt: skip
def test_another_sweep_is_one_line_and_changes_nothing(tmp_path, fields, message):
  opened(tmp_path, GRID).close()
  before = (tmp_path / FILE).read_bytes()
  with pytest.raises(UserError, match=message):
    opened(tmp_path, fields)
  assert (tmp_path / FILE).read_bytes() == before


def test_the_objective_may_change_unless_it_decides_which_steps_run(tmp_path):
  ledger = opened(tmp_path, GRID)
  ledger.report(0, 4, [(4, 0.5)])
  ledger.close()
  minimized = sweep_file(tmp_path, f"{GRID}, direction='minimize'")
  assert open_ledger(load_plan(str(minimized), {}), tmp_path).reports()
  text = minimized.read_text().replace('val-core/eval/acc/greedy', 'critic/score/mean')
  minimized.write_text(text)
  assert open_ledger(load_plan(str(minimized), {}), tmp_path).reports() == []
  with pytest.raises(UserError, match='the sweep has changed'):
    opened(tmp_path, f'{GRID}, early_stopping=SuccessiveHalving(first_step=2)')


def test_a_killed_sweep_leaves_trials_that_wait_or_are_stopped(tmp_path):
  ledger = opened(tmp_path, GRID)
  for number in (0, 1, 2):
    ledger.start(number)
  ledger.stopping(1)
  ledger.end(2, TrialState.FINISHED, exit_code=0)
  ledger.close()
  ledger = Ledger(tmp_path)
  ledger.recover()
  assert [entry.state for entry in ledger.entries()] == [
    'waiting',
    'stopped',
    'finished',
    'waiting',
  ]


def test_measurements_count_once_and_give_values(tmp_path):
  ledger = opened(tmp_path, GRID)
  assert ledger.report(0, 6, [(2, 0.2), (4, 0.9), (6, 0.4)]) == 3
  assert ledger.report(0, 4, [(4, 0.1)]) == 0  # Executed again after a kill.
  assert ledger.report(1, 2, [(2, math.nan)]) == 1
  assert ledger.report(2, 2, [(2, 0.6)]) == 1
  entries, reports = ledger.entries(), ledger.reports()
  assert entries[0].step == 6 and math.isnan(reports[3].value)
  found = values(entries, reports, {'direction': 'maximize', 'at': 'last'})
  assert found == {0: 0.4, 2: 0.6}
  best = values(entries, reports, {'direction': 'maximize', 'at': 'best'})
  assert best == {0: 0.9, 2: 0.6}


def test_points_are_ranked_by_mean_with_standard_error_over_seeds(tmp_path):
  ledger = opened(tmp_path, GRID)
  groups = ranked(ledger.entries(), {0: 0.2, 1: 0.4, 2: 0.9}, 'maximize')
  assert [group.label for group in groups] == ['peak_lr 0.001', 'peak_lr 0.0001']
  assert groups[1].mean == pytest.approx(0.3) and groups[1].stderr == pytest.approx(0.1)
  assert groups[0].stderr is None
  assert measured(groups[1].mean, groups[1].stderr) == '0.3 ± 0.1'
  lowest = ranked(ledger.entries(), {0: 0.2, 1: 0.4, 2: 0.9}, 'minimize')
  assert [group.label for group in lowest] == ['peak_lr 0.0001', 'peak_lr 0.001']


def test_one_sweep_at_a_time_but_tasks_together(tmp_path):
  with locked(tmp_path, shared=False):
    _assert_refused(tmp_path, shared=True)
  with locked(tmp_path, shared=True), locked(tmp_path, shared=True):
    _assert_refused(tmp_path, shared=False)
  with locked(tmp_path, shared=False):
    _assert_refused(tmp_path, shared=False)
  assert not in_use(tmp_path / 'nothing')


def _assert_refused(folder, *, shared):
  with pytest.raises(UserError, match='in use by another sweep'), locked(folder, shared=shared):
    pass


def test_a_file_that_is_no_ledger_is_one_line(tmp_path):
  with pytest.raises(UserError, match=r'has no ledger\.sqlite'):
    Ledger(tmp_path)
  (tmp_path / FILE).write_text('no database')
  with pytest.raises(UserError, match='not the ledger of a sweep'):
    Ledger(tmp_path)


def test_a_preview_writes_nothing(tmp_path):
  plan = load_plan(str(sweep_file(tmp_path, GRID)), {})
  assert [entry.number for entry in preview(plan, tmp_path / 'new')] == [0, 1, 2, 3]
  assert not (tmp_path / 'new').exists()
