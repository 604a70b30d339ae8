"""Optuna's rules decide from the ledger alone, so the same after a restart."""

import pytest
from sweeping import RATE, sweep_file

from jaxrl_llm.app.sweeps import search
from jaxrl_llm.app.sweeps.ledger import TrialState
from jaxrl_llm.app.sweeps.plan import load_plan, open_ledger
from jaxrl_llm.app.sweeps.trials import with_seeds
from jaxrl_llm.core.errors import UserError

RATES = f"axes={{'{RATE}': (1e-4, 2e-4, 3e-4, 4e-4)}}"


@pytest.fixture
def opened(tmp_path):
  pytest.importorskip('optuna')

  def open_with(fields):
    plan = load_plan(str(sweep_file(tmp_path, fields)), {})
    return plan.sweep, open_ledger(plan, tmp_path)

  return open_with


def stops(sweep, ledger, number):
  return search.should_stop(sweep, ledger.entries(), ledger.reports(), number)


def test_the_median_rule_stops_what_is_worse_than_the_median_at_the_same_step(opened):
  sweep, ledger = opened(f'{RATES}, early_stopping=MedianRule(after_trials=2)')
  for number, value in ((0, 0.2), (1, 0.6)):
    ledger.report(number, 2, [(2, value)])
    assert not stops(sweep, ledger, number)
    ledger.end(number, TrialState.FINISHED, exit_code=0)
  ledger.report(2, 2, [(2, 0.3)])  # The median is 0.4.
  assert stops(sweep, ledger, 2)
  ledger.report(3, 2, [(2, 0.5)])
  assert not stops(sweep, ledger, 3)


def test_the_median_rule_respects_the_direction_and_its_start(opened):
  fields = f"{RATES}, direction='minimize', early_stopping=MedianRule(after_trials=1, after_step=4)"
  sweep, ledger = opened(fields)
  ledger.report(0, 4, [(2, 0.2), (4, 0.2)])
  ledger.end(0, TrialState.FINISHED, exit_code=0)
  ledger.report(1, 2, [(2, 0.9)])
  assert not stops(sweep, ledger, 1)
  ledger.report(1, 4, [(4, 0.9)])
  assert stops(sweep, ledger, 1)


def test_successive_halving_keeps_the_best_of_a_rung_and_its_decisions_hold(opened):
  sweep, ledger = opened(f'{RATES}, early_stopping=SuccessiveHalving(first_step=2, factor=2)')
  for number, value in ((0, 0.4), (1, 0.8), (2, 0.1), (3, 0.9)):
    ledger.report(number, 2, [(2, value)])
  assert [stops(sweep, ledger, number) for number in range(4)] == [False, False, True, False]
  # A sweep that was killed before it told the run: the run went on, the decision holds.
  ledger.report(2, 3, [(3, 0.99)])
  assert stops(sweep, ledger, 2)


def test_guided_search_draws_new_points_from_what_it_knows(opened):
  axes = f"search='tpe', count=4, axes={{'{RATE}': Uniform(low=1e-5, high=1e-2, log=True)}}"
  sweep, ledger = opened(f'{axes}, seeds=(1, 2)')
  assert ledger.entries() == []
  drawn = []
  while point := search.next_point(sweep, ledger.entries(), ledger.reports()):
    again = search.next_point(sweep, ledger.entries(), ledger.reports())
    assert point == again, 'a restarted sweep draws the same point'
    drawn.append(point[RATE])
    for entry in ledger.add(with_seeds(sweep, point)):
      ledger.report(entry.number, 2, [(2, 1 - point[RATE])])
      ledger.end(entry.number, TrialState.FINISHED, exit_code=0)
  assert len(set(drawn)) == 4 and all(1e-5 <= rate <= 1e-2 for rate in drawn)
  assert len(ledger.entries()) == 8


def test_without_optuna_only_what_needs_it_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(search, 'optuna', None)
  load_plan(str(sweep_file(tmp_path, RATES)), {})
  for fields in (f'{RATES}, early_stopping=MedianRule()', f"{RATES}, search='random', count=2"):
    with pytest.raises(UserError, match=r"needs Optuna.*pip install 'jaxrl_llm\[sweep\]'"):
      load_plan(str(sweep_file(tmp_path, fields)), {})
