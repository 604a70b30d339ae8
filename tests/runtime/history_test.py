"""The history of a run's configurations, as kept and as the report shows it."""

import pytest
from browsing import open_page, start_browser

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import history, report
from jaxrl_llm.runtime.history import Change, Entry, Parent

HOSTILE = '</script><script>window.hacked = 1</script>'
ENTRIES = (
  Entry(
    step=1,
    attempt=0,
    time=1.5,
    config={'seed': 0},
    parent=Parent(run=f'/runs/{HOSTILE}', step=7, reset=('optimizer', 'store')),
  ),
  Entry(step=8, attempt=1, time=2.0, config={'seed': 1}, changes=(Change('seed', 0, 1),)),
  Entry(step=8, attempt=2, time=3.0, config={'seed': 0}, changes=(Change(HOSTILE, 1, None),)),
)


@pytest.fixture
def run(tmp_path):
  (tmp_path / 'metrics.jsonl').touch()
  history.write(tmp_path, ENTRIES)
  return tmp_path


def test_a_history_is_read_as_it_was_written(run):
  assert history.read(run) == ENTRIES
  assert history.read(run / 'elsewhere') == ()


def test_the_last_entry_up_to_a_step_is_in_force(run):
  assert [history.in_force(ENTRIES, step) for step in (0, 1, 7)] == [None, *ENTRIES[:1] * 2]
  assert history.in_force(ENTRIES, 8) is history.in_force(ENTRIES, 99) is ENTRIES[2]
  assert history.until(ENTRIES, 6) == ENTRIES[:1] and history.until(ENTRIES, 7) == ENTRIES


@pytest.mark.parametrize(
  ('field', 'value'),
  [('step', 0), ('step', True), ('time', 1e300), ('time', float('nan')), ('config', 3)],
)
def test_an_invalid_entry_is_one_line_and_the_report_omits_it(run, field, value):
  lines = [{**entry.to_json(), field: value} for entry in ENTRIES[1:]]
  (run / history.FILE).write_text(
    '\n'.join(str(line).replace('None', 'null').replace("'", '"') for line in lines)
    .replace('True', 'true')
    .replace('nan', 'NaN')
  )
  with pytest.raises(UserError, match=r'^[^\n]*history\.jsonl: line 1 is not an entry[^\n]*$'):
    history.read(run)
  shown = report.payload(run)
  assert shown['history'] == []
  assert any('history.jsonl: line 1' in warning for warning in shown['warnings'])


@pytest.mark.full
def test_the_report_shows_where_a_run_comes_from_and_each_change_with_its_first_step(run, tmp_path):
  browser = start_browser(tmp_path / 'profile')
  try:
    open_page(browser, report.build(run))
    cells = browser.execute_script(
      'return [...document.querySelectorAll("#changes tbody tr")].map('
      '(row) => [...row.cells].map((cell) => cell.textContent))'
    )
    hacked = browser.execute_script('return window.hacked')
  finally:
    browser.quit()
  assert cells == [
    [
      '1',
      '1970-01-01 00:00',
      f'branched from /runs/{HOSTILE} at step 7, without its optimizer, store',
    ],
    ['8', '1970-01-01 00:00', 'seed', '0', '1'],
    ['8', '1970-01-01 00:00', HOSTILE, '1', 'null'],
  ]
  assert hacked is None
