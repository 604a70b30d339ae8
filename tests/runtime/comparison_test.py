"""The comparison page shows what the runs' logs say, whatever they hold."""

import json
import re
import subprocess
import sys

import pytest
from browsing import open_page, wait_for_count
from paths import ROOT
from selenium.webdriver.common.by import By

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import comparison, writers
from jaxrl_llm.runtime.comparison import ComparedRun, Objective, mean_and_error

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
KEY = 'val-core/eval/acc/greedy'
OBJECTIVE = Objective(key=KEY)


def make_run(folder, *, rate, seed, accuracy, steps=12, text='cba', extra=None):
  """A run of `steps` GRPO steps that evaluates every fourth one."""
  log = writers.MetricsWriter(folder, committed=0)
  for step in range(1, steps + 1):
    row = {'critic/score/mean': accuracy * step / steps, 'actor/pg_loss': -0.1 * seed}
    if step % 4 == 0:
      row[KEY] = accuracy * step / steps
      evaluated = [
        {
          'suite': 'held_out',
          'uid': f'u{i}',
          'prompt': f'{i}>',
          'truth': 'cba',
          'completion': text if i % 2 else 'abc',
          'correct': bool(i % 2 and accuracy > 0.5),
          'mode': 'greedy',
        }
        for i in range(4)
      ]
      writers.EvalsWriter(folder).write('grpo', step, 'held_out', evaluated)
    log.write('grpo', step, row)
    rollout = {
      'task_id': f'task{step % 3}',
      'prompt': f'{step % 3}>',
      'truth': 'cba',
      'completion': text,
      'tokens': [text],
      'token_ids': [1],
      'reward': accuracy,
    }
    writers.RolloutsWriter(folder).write('grpo', step, [rollout])
  log.close()
  stage = {'name': 'grpo', 'steps': steps, 'optimizer': {'peak_lr': rate}}
  config = {'name': 'x', 'seed': seed, 'stages': [stage], **(extra or {})}
  (folder / 'config.json').write_text(json.dumps(config))
  return folder


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Two learning rates with two seeds each; the second rate is better."""
  folder = tmp_path_factory.mktemp('runs')
  settings = {
    'a1': (1e-4, 1, 0.2),
    'a2': (1e-4, 2, 0.4),
    'b1': (1e-3, 1, 0.8),
    'b2': (1e-3, 2, 0.6),
  }
  paths = {
    name: make_run(folder / name, rate=rate, seed=seed, accuracy=accuracy)
    for name, (rate, seed, accuracy) in settings.items()
  }
  groups = comparison.groups_of(paths)
  return [
    ComparedRun(
      name=name,
      workdir=path,
      group=groups[name],
      value=OBJECTIVE.value(writers.read_jsonl(path / 'metrics.jsonl')[0]),
    )
    for name, path in paths.items()
  ]


def payload_of(runs, tmp_path, **settings):
  settings = {'title': 'sweep', 'objective': OBJECTIVE, **settings}
  return comparison.payload(runs, tmp_path / 'compare.html', **settings)


def test_runs_equal_up_to_the_seed_are_one_group_named_by_what_differs(runs):
  assert [run.group for run in runs] == ['peak_lr 0.0001'] * 2 + ['peak_lr 0.001'] * 2


def test_groups_are_ranked_with_mean_and_standard_error(runs, tmp_path):
  data = payload_of(runs, tmp_path)
  assert [group['label'] for group in data['groups']] == ['peak_lr 0.001', 'peak_lr 0.0001']
  assert data['groups'][0]['mean'] == pytest.approx(0.7)
  assert data['groups'][0]['stderr'] == pytest.approx(0.1)
  lowest = payload_of(runs, tmp_path, objective=Objective(key=KEY, direction='minimize'))
  assert lowest['groups'][0]['label'] == 'peak_lr 0.0001'
  assert mean_and_error([]) == (None, None) and mean_and_error([3.0]) == (3.0, None)


def test_only_differences_are_listed_by_name(runs, tmp_path):
  differences = payload_of(runs, tmp_path)['differences']
  assert {row['key']: row['values'] for row in differences} == {
    'seed': ['1', '2', '1', '2'],
    'stages.grpo.optimizer.peak_lr': ['0.0001', '0.0001', '0.001', '0.001'],
  }


def test_a_part_that_a_run_lacks_is_one_difference(tmp_path):
  rewards = {'rewards': {'scorers': [{'name': 'code', 'weight': 1.0}]}}
  paths = [
    make_run(tmp_path / 'a', rate=1, seed=1, accuracy=1, extra=rewards),
    make_run(tmp_path / 'b', rate=1, seed=1, accuracy=1),
  ]
  compared = [ComparedRun(name=path.name, workdir=path, group=path.name) for path in paths]
  (row,) = payload_of(compared, tmp_path)['differences']
  assert row['key'] == 'rewards' and row['values'][1] == '(absent)' and 'code' in row['values'][0]


def test_curves_answers_and_rollouts_are_those_of_the_logs(runs, tmp_path):
  data = payload_of(runs, tmp_path)
  series = data['runs'][2]['series']
  assert series[KEY]['x'] == [4, 8, 12] and series[KEY]['y'][-1] == pytest.approx(0.8)
  assert len(series['critic/score/mean']['x']) == 12
  (suite,) = data['answers']
  assert len(suite['rows']) == 4 and suite['rows'][1]['answers'][2] == ['cba', True]
  assert len(data['rollouts']) == 3
  assert [rollout['x'] for rollout in data['rollouts'][0]['runs'][0]] == [1, 4, 7, 10]


def test_long_runs_are_thinned_at_the_same_steps(runs, tmp_path, monkeypatch):
  monkeypatch.setattr(comparison, 'MAX_POINTS', 5)
  data = payload_of(runs, tmp_path)
  for run in data['runs']:
    assert run['series']['critic/score/mean']['x'] == [3, 6, 9, 12]
    assert run['series'][KEY]['x'] == [4, 8, 12], 'evaluations are all kept'
  assert any('one of every 3 steps' in note for note in data['warnings'])


def test_damaged_runs_are_counted_and_missing_ones_are_one_line(tmp_path):
  run = make_run(tmp_path / 'a', rate=1, seed=1, accuracy=1)
  with (run / 'metrics.jsonl').open('a') as file:
    file.write('{"half')
  (run / 'config.json').write_text('no json')
  compared = [ComparedRun(name='a', workdir=run, group='a')]
  notes = payload_of(compared, tmp_path)['warnings']
  assert any('1 unreadable' in note for note in notes) and any('config.json' in n for n in notes)
  with pytest.raises(UserError, match=r'has no metrics\.jsonl'):
    payload_of([ComparedRun(name='b', workdir=tmp_path / 'b', group='b')], tmp_path)


@pytest.fixture(scope='module')
def hostile(tmp_path_factory):
  """A page whose every text tries to become markup."""
  folder = tmp_path_factory.mktemp('hostile')
  extra = {'note': HOSTILE, HOSTILE: 1}
  paths = [
    make_run(folder / 'a', rate=1, seed=1, accuracy=0.9, text=HOSTILE, extra=extra),
    make_run(folder / 'b', rate=2, seed=1, accuracy=0.1, text=HOSTILE),
  ]
  (paths[0] / 'report.html').touch()
  runs = [
    ComparedRun(name=f'{HOSTILE}{i}', workdir=path, group=f'{HOSTILE}{i}', state=HOSTILE, value=0.5)
    for i, path in enumerate(paths)
  ]
  target = folder / 'compare.html'
  return comparison.build(runs, target, title=HOSTILE, objective=OBJECTIVE)


def test_hostile_text_cannot_leave_the_data(hostile):
  page = hostile.read_text()
  assert page.count('<script') == 2 and '<img' not in page
  assert not re.findall(r'https?://(?!www\.w3\.org/2000/svg)[\w.]+', page)
  assert not re.findall(r'innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(', page)


def texts(browser, selector):
  return browser.execute_script(
    'return [...document.querySelectorAll(arguments[0])].map((n) => n.textContent)', selector
  )


@pytest.mark.full
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_the_page_fits_and_shows_means_runs_and_tasks(browser, runs, tmp_path, scheme):
  page = comparison.build(runs, tmp_path / 'c.html', title='sweep', objective=OBJECTIVE)
  open_page(browser, page, scheme=scheme)
  chart = '[data-chart="Objective"]'
  assert texts(browser, '#ranking tbody tr.best td.long') == ['peak_lr 0.001']
  assert len(browser.find_elements(By.CSS_SELECTOR, f'{chart} path.raw')) == 2
  assert len(browser.find_elements(By.CSS_SELECTOR, f'{chart} path.band')) == 2
  browser.find_element(By.CSS_SELECTOR, '[data-value="runs"]').click()
  wait_for_count(browser, f'{chart} path.raw', 4)
  assert texts(browser, '#differences td.key') == ['seed', 'stages.grpo.optimizer.peak_lr']
  assert texts(browser, '.answers th.run') == ['b1', 'a1'], 'the best runs of the two best points'
  browser.find_element(By.CSS_SELECTOR, '.answers [data-value="differ"]').click()
  assert len(browser.find_elements(By.CSS_SELECTOR, '.answers tbody tr')) == 2
  assert len(browser.find_elements(By.CSS_SELECTOR, '.columns2')) == 3
  root = 'document.documentElement'
  assert browser.execute_script(f'return {root}.scrollWidth <= {root}.clientWidth')
  assert browser.get_log('browser') == []


@pytest.mark.full
def test_hostile_text_is_inert_and_shown_as_text(browser, hostile):
  open_page(browser, hostile)
  assert texts(browser, 'h1') == [HOSTILE]
  assert texts(browser, '#ranking td.long') == [f'{HOSTILE}0', f'{HOSTILE}1']
  assert HOSTILE in texts(browser, '.columns2 .tokens') and f'✓ {HOSTILE}' in texts(
    browser, 'td.text'
  )
  assert browser.execute_script('return window.hacked') is None
  assert not browser.find_elements(By.CSS_SELECTOR, 'main img, main script')
  links = browser.execute_script(
    "return [...document.querySelectorAll('main table a')].map((a) => a.href)"
  )
  assert len(links) == 1 and links[0].startswith('file://') and links[0].endswith('/a/report.html')


@pytest.mark.full
def test_the_command_compares_two_runs_and_refuses_bad_input_in_one_line(runs, tmp_path):
  def compare(*arguments):
    command = [sys.executable, 'launch/compare.py', *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

  both = f'--workdirs={runs[0].workdir},{runs[2].workdir}'
  done = compare(both, f'--target={tmp_path / "c.html"}')
  assert done.returncode == 0 and (tmp_path / 'c.html').stat().st_size > 10_000, done.stderr
  for arguments, message in (
    (
      [both, '--objective=val-core/eval/acc/gredy'],
      "no run has this metric; did you mean 'val-core/eval/acc",
    ),
    ([f'--workdirs={runs[0].workdir}'], 'wanted at least two runs'),
  ):
    done = compare(*arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count('\n') == 1
