"""The report's own numbers (means of groups, histograms, rewards by task and domain, pass@k) are
those of the logs, whatever is filtered; charts can be saved; and a run of 10,000 steps stays small.
"""

import base64
import csv
import io
import itertools
import json
import math
import statistics

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from jaxrl_llm.runtime import events, metric_descriptions, metric_names, report, timeline, writers
from jaxrl_llm.runtime.events import Edge
from tests.runtime.report_test import (
  click,
  evaluate,
  group_rows,
  grpo_metrics,
  make_run,
  one,
  opened,
  page_of,
  texts,
  wait,
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """24 SFT and 16 GRPO steps of two domains; some samples have no reward, some prompts are formulas
  of a spreadsheet.
  """
  run = make_run(
    tmp_path_factory.mktemp('runs') / 'two', sft_steps=24, grpo_steps=16, groups=3, every=8
  )
  rollouts = writers.RolloutsWriter(run)
  for path in sorted((run / 'rollouts' / 'grpo').iterdir()):
    rows, _ = writers.read_jsonl(path)
    for i, row in enumerate(rows):
      row['domain'] = 'long' if len(row['truth']) > 4 else 'short'
      row['reward'] = None if i % 11 == 5 else row['reward']
      row['prompt'] = f'=SUM(1;{row["prompt"]})' if row['prompt'] < 'n' else row['prompt']
    rollouts.write('grpo', int(path.stem), rows)
  log, _ = writers.read_jsonl(run / 'metrics.jsonl')
  lines = (json.dumps({**row, 'actor/pg_clipfrac': 0.0}) for row in log)
  (run / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
  return run


def rows_of(run):
  files = sorted((run / 'rollouts' / 'grpo').iterdir())
  return [{**row, 'step': int(path.stem)} for path in files for row in writers.read_jsonl(path)[0]]


def by(rows, *keys):
  groups = {}
  for row in rows:
    groups.setdefault(tuple(row[key] for key in keys), []).append(row)
  return groups


def mean_reward(rows):
  rewards = [row['reward'] for row in rows if row['reward'] is not None]
  return statistics.fmean(rewards) if rewards else None


FILTERS = {
  '': lambda row: True,
  'positive': lambda row: (row['reward'] or 0) > 0,
  'zero': lambda row: row['reward'] is not None and row['reward'] <= 0,
  'unscorable': lambda row: row['reward'] is None,
}


def shown_groups(browser):
  """(prompt, facts) of each task or group on the page."""
  return browser.execute_script(
    "return [...document.querySelectorAll('.task.card')].map((n) => "
    "[n.querySelector('.prompt').textContent, n.querySelector('.facts').textContent])"
  )


@pytest.mark.full
def test_a_mean_covers_the_whole_task_or_group_under_every_filter(browser, run):
  opened(browser, run)
  source = rows_of(run)
  for text, outcome in itertools.product(('', 'r'), FILTERS):
    Select(one(browser, 'select[aria-label=Outcome]')).select_by_value(outcome)
    if text:
      box = one(browser, '#samples input[type=search]')
      box.clear()
      box.send_keys(text)
    check_means(browser, source, text, outcome)


def check_means(browser, source, text, outcome):
  """Compares all means on the page, by task and by group, with those of the logs."""

  def passes(row):
    found = text in row['prompt'] or text in ''.join(row['tokens'])
    return FILTERS[outcome](row) and found

  kept = [row for row in source if passes(row)]
  wait(browser, lambda: texts(browser, '#samples .foot span')[0].startswith(f'{len(kept)} rollout'))
  for grouping, keys in (('task', ('task_id',)), ('group', ('group_id',))):
    click(browser, f'#samples button[data-value={grouping}]')
    groups, shown = by(source, *keys), by(kept, *keys)
    assert f'of {len(shown)} {grouping}' in texts(browser, '#samples .foot span')[0]
    for (prompt, facts), (key, some) in zip(shown_groups(browser), shown.items()):
      whole, mean = groups[key], mean_reward(groups[key])
      assert prompt == some[0]['prompt']
      said = facts.partition('mean reward ')[2].partition(' · ')[0]
      assert said == 'none' if mean is None else float(said) == pytest.approx(mean, abs=6e-4)
      count = f'{len(whole)} rollout'
      assert (f'{len(some)} of {count}' if len(some) < len(whole) else f' · {count}') in facts


def table(browser, title):
  cells = browser.execute_script(
    'return [...document.querySelectorAll(`[data-table="${arguments[0]}"] tbody tr`)]'
    '.map((r) => [...r.children].map((c) => c.textContent))',
    title,
  )
  return {name: rest for name, *rest in cells}


def pass_at_k(n, c, k):
  return 1 - math.comb(n - c, k) / math.comb(n, k)


@pytest.mark.full
def test_rewards_by_domain_and_task_with_errors_and_pass_at_k(browser, run):
  opened(browser, run)
  source = rows_of(run)
  for choice, steps in (('all', range(25, 41)), ('first', range(25, 29)), ('last', range(37, 41))):
    click(browser, f'#range button[data-value={choice}]')
    rows = [row for row in source if row['step'] in steps]
    shown = table(browser, 'Reward by domain')
    assert shown.keys() == {f'spell · {domain}' for (domain,) in by(rows, 'domain')}
    for (domain,), some in by(rows, 'domain').items():
      means = [m for task in by(some, 'task_id').values() if (m := mean_reward(task)) is not None]
      mean, error, count, tasks, *passed = shown[f'spell · {domain}']
      assert float(mean) == pytest.approx(statistics.fmean(means), abs=6e-4)
      want = statistics.stdev(means) / math.sqrt(len(means))
      assert float(error.removeprefix('± ')) == pytest.approx(want, abs=6e-4)
      assert (int(count), int(tasks)) == (len(some), len(means))
      scored = [row for row in some if row['reward'] is not None]
      sizes = [
        (len(g), sum(row['reward'] >= 1 for row in g)) for g in by(scored, 'group_id').values()
      ]
      for k, value in zip((1, 2, 4, 8), passed):
        found = [pass_at_k(n, c, k) for n, c in sizes if n >= k]
        if found:
          assert float(value) == pytest.approx(statistics.fmean(found), abs=6e-4)
        else:
          assert value == '–'
  click(browser, '#range button[data-value=all]')
  tasks = by(source, 'prompt')
  best = max(m for rows in tasks.values() if (m := mean_reward(rows)) is not None)
  click(browser, '[data-table="Reward by task"] button[data-by=mean]')
  means = [float(row[0]) for row in table(browser, 'Reward by task').values()]
  assert means == sorted(means, reverse=True) and means[0] == pytest.approx(best, abs=6e-4)


@pytest.mark.full
def test_histograms_count_every_rollout_of_their_steps(browser, run):
  opened(browser, run)
  source = rows_of(run)
  first = [row for row in source if row['step'] < 29]
  last = [row for row in source if row['step'] > 36]
  wanted = {
    'Response lengths': [len(first), len(last)],
    'Rewards': [sum(row['reward'] is not None for row in rows) for rows in (first, last)],
    'Advantages': [len(first), len(last)],
  }
  for title, (early, late) in wanted.items():
    bars = browser.find_elements(By.CSS_SELECTOR, f'[data-chart="{title}"] rect.bar')
    for colour, count in (('f2', early), ('f1', late)):
      counts = [
        int(b.get_attribute('data-count')) for b in bars if colour in b.get_attribute('class')
      ]
      assert sum(counts) == count, title
  lengths = [len(row['tokens']) for row in last]
  bars = browser.find_elements(By.CSS_SELECTOR, '[data-chart="Response lengths"] rect.bar.f1')
  counts = [int(bar.get_attribute('data-count')) for bar in bars]
  assert counts == [lengths.count(n) for n in range(min(len(r['tokens']) for r in first + last), 7)]


def saved(browser, folder, selector):
  """The bytes of the file that a click saves."""
  folder.mkdir(exist_ok=True)
  before = {*folder.iterdir()}
  browser.execute_cdp_cmd(
    'Browser.setDownloadBehavior', {'behavior': 'allow', 'downloadPath': str(folder)}
  )
  click(browser, selector)
  done = wait(
    browser, lambda: [p for p in folder.iterdir() if p not in before and '.crdown' not in p.name]
  )
  wait(browser, lambda: done[0].stat().st_size)
  return done[0].name, done[0].read_bytes()


@pytest.mark.full
def test_charts_are_saved_as_numbers_and_as_pictures(browser, run, tmp_path):
  opened(browser, run)
  name, data = saved(browser, tmp_path, '[data-chart="KL"] [data-export=CSV]')
  head, *rows = csv.reader(io.StringIO(data.decode()))
  assert name == 'two-KL.csv' and head == ['stage', 'step', 'actor/ppo_kl', 'actor/kl_loss']
  log, _ = writers.read_jsonl(run / 'metrics.jsonl')
  wanted = [row for row in log if 'actor/ppo_kl' in row]
  assert [(stage, int(step)) for stage, step, *_ in rows] == [
    ('grpo', row['training/global_step']) for row in wanted
  ]
  for key, column in (('actor/ppo_kl', 2), ('actor/kl_loss', 3)):
    got = [float(row[column]) for row in rows]
    assert got == pytest.approx([row[key] for row in wanted], rel=1e-5)
  for title in ('KL', 'Rewards', 'Time per phase'):
    name, data = saved(browser, tmp_path, f'[data-chart="{title}"] [data-export=PNG]')
    width, height = (int.from_bytes(data[at : at + 4], 'big') for at in (16, 20))
    svg = one(browser, f'[data-chart="{title}"] svg').size
    assert data[:8] == b'\x89PNG\r\n\x1a\n' and name.endswith('.png')
    assert width == pytest.approx(2 * (svg['width'] + 28), abs=3) and height > 2 * svg['height']
    # The picture has more colours than paper and ink: the lines are drawn.
    colours = browser.execute_async_script(
      'const done = arguments[1]; const image = new Image();'
      "image.onload = () => { const c = document.createElement('canvas'); c.width = image.width;"
      "c.height = image.height; const pen = c.getContext('2d'); pen.drawImage(image, 0, 0);"
      'const d = pen.getImageData(0, 0, c.width, c.height).data; const seen = new Set();'
      'for (let i = 0; i < d.length; i += 4) seen.add(`${d[i]},${d[i + 1]},${d[i + 2]}`);'
      'done([...seen]); };'
      'image.src = `data:image/png;base64,${arguments[0]}`',
      base64.b64encode(data).decode(),
    )
    assert '0,104,168' in colours or '31,122,178' in colours or len(colours) > 50, title
  name, data = saved(browser, tmp_path, '[data-table="Reward by domain"] [data-export=CSV]')
  assert data.decode().startswith('Domain,mean reward,')
  check_tables(browser, run, tmp_path)
  assert browser.get_log('browser') == []


def check_tables(browser, run, folder):
  """Compares the saved tables with the logs."""
  _, data = saved(browser, folder, '[data-table="Reward by task"] [data-export=CSV]')
  _, *rows = csv.reader(io.StringIO(data.decode()))
  wanted = {row['prompt'] for row in rows_of(run) if row['step'] > 36}
  formulas = {prompt for prompt in wanted if prompt.startswith('=')}
  assert formulas and {row[0] for row in rows} == {
    f"'{prompt}" if prompt in formulas else prompt for prompt in wanted
  }
  # Some spreadsheets end a cell at a semicolon, unless it is quoted.
  assert all(f'"\'{prompt}"' in data.decode() for prompt in formulas)
  name, data = saved(browser, folder, '#evaluation [data-export=CSV]')
  head, *rows = csv.reader(io.StringIO(data.decode()))
  measured = [row for row in writers.read_jsonl(run / 'metrics.jsonl')[0] if head[2] in row]
  assert name == 'two-Evaluation.csv' and head[:2] == ['stage', 'step']
  assert [(stage, int(step)) for stage, step, *_ in rows] == [
    (row['stage'], row['training/global_step']) for row in measured
  ]
  for column, key in enumerate(head[2:], start=2):
    got = [float(row[column]) for row in rows]
    assert got == pytest.approx([row[key] for row in measured], rel=1e-5)


@pytest.mark.full
def test_rounding_errors_are_not_drawn_as_a_curve(browser, run):
  opened(browser, run)
  chart = '[data-chart="KL from sampler to trainer"]'
  heights = browser.execute_script(
    'const box = document.querySelector(arguments[0]).getBBox(); return box.height;',
    f'{chart} path.raw',
  )
  assert heights < 1
  log, _ = writers.read_jsonl(run / 'metrics.jsonl')
  largest = max(row.get('rollout_corr/k3_kl', 0) for row in log)
  note = texts(browser, f'{chart} .note')[0]
  assert float(note.removeprefix('Rounding error alone: at most ').rstrip('.')) == pytest.approx(
    largest, rel=1e-2
  )
  # No value of a share is below 0, so that neither is the axis of a constant 0.
  click(browser, '#curves details summary')
  Select(one(browser, 'select[aria-label=Metric]')).select_by_value('actor/pg_clipfrac')
  chart = '[data-chart="Clipped tokens"] svg'
  wait(browser, lambda: texts(browser, f'{chart} text'))
  assert not [text for text in texts(browser, f'{chart} text') if text.startswith(('-', '−'))]
  # A learning rate of that size is a curve.
  assert metric_names.label('actor/lr').noise == 0


@pytest.mark.full
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_it_fits_a_phone(browser, run, scheme):
  opened(browser, run, width=390, scheme=scheme)
  root = 'document.documentElement'
  assert browser.execute_script(f'return {root}.scrollWidth <= {root}.clientWidth')
  outside = browser.execute_script(
    "return [...document.querySelectorAll('.chart svg text')].filter((text) => {"
    "const box = text.getBoundingClientRect(), card = text.closest('.chart')"
    '.getBoundingClientRect(); return box.left < card.left || box.right > card.right; })'
    '.map((text) => text.textContent)'
  )
  assert outside == []


def test_every_metric_of_a_chart_has_a_name_and_a_unit():
  for key in ('critic/score/mean', 'timing_s/gen', 'val-core/a/b/acc/pass@4', 'rewards/x/mean'):
    name, unit = metric_names.label(key)
    assert name and unit and name != key
  assert metric_names.label('val-core/a/b/acc/pass@4').name == 'a/b: pass@4'
  assert metric_names.label('something/of_its_own') == ('something: of its own', '')
  assert metric_names.LABELS.keys() <= metric_descriptions.METRICS.keys()


def test_of_a_long_log_of_messages_whole_steps_of_its_end_are_read(tmp_path):
  now = 0.0
  log = events.EventLog(tmp_path, attempt=0, step=0, clock=lambda: now)
  for step in range(1, 101):
    asked = log.request(Edge.TRAINING_DATA, batch=step)
    now += 1.0
    log.reply(asked)
    log.advance(step)
  log.close()
  path = tmp_path / events.FILE
  whole = timeline.load(path)
  for limit in range(2000, 2400, 37):  # at any byte of a line
    part = timeline.load(path, limit)
    count = len(part.steps)
    assert part.cut and part.unreadable == 0 and 5 < count < 20
    assert [s._replace(start=0, end=0) for s in part.steps] == [
      s._replace(start=0, end=0) for s in whole.steps[-count:]
    ]
    assert all(s.end - s.start == pytest.approx(1.0) for s in part.steps)
  assert not whole.cut and timeline.load(path, path.stat().st_size) == whole


@pytest.fixture(scope='module')
def long(tmp_path_factory):
  """10,000 steps; rollouts of every 250th."""
  rng = np.random.default_rng(0)
  run = tmp_path_factory.mktemp('runs') / 'long'
  rollouts, evals = writers.RolloutsWriter(run), writers.EvalsWriter(run)
  for first in range(1, 10_001, 250):
    accuracy = 1 - 0.8 * math.exp(-first / 2e3)
    rows = [row for group in range(4) for row in group_rows(rng, first, group, accuracy)]
    rollouts.write('grpo', first, rows)
    values = {**writers.finite_row(grpo_metrics(rng, 1 + first % 100, rows)), 'stage': 'grpo'}
    with (run / 'metrics.jsonl').open('a') as file:
      for step in range(first, first + 250):
        values |= {'training/global_step': step, 'actor/entropy': rng.random()}
        file.write(json.dumps(values) + '\n')
    log = writers.MetricsWriter(run, committed=None)
    evaluate(rng, log, evals, 'grpo', first + 249, accuracy)
    log.close()
  return run


@pytest.mark.full
def test_a_run_of_10000_steps_is_small_and_can_be_used(browser, long, tmp_path):
  page = page_of(long)
  assert page.stat().st_size < 8_000_000
  opened(browser, long)
  data = json.loads(one(browser, '#data').get_attribute('textContent'))
  assert data['stages'][0]['steps'] == 10_000
  assert all(len(line['x']) <= report.MAX_POINTS for line in data['series'].values())
  assert browser.execute_script("return document.querySelectorAll('*').length") < 8000
  click(browser, 'button[data-value=flat]')
  click(browser, 'button[data-sort=length]')
  lengths = [int(t) for t in texts(browser, '.rollout .length')]
  assert lengths == sorted(lengths, reverse=True)
  Select(one(browser, 'select[aria-label=Outcome]')).select_by_value('zero')
  assert {t.split()[1] for t in texts(browser, '.rollout .reward')} == {'0'}
  _, exported = saved(browser, tmp_path, '[data-chart="Reward"] [data-export=CSV]')
  _, *rows = csv.reader(io.StringIO(exported.decode()))
  steps = [int(step) for _, step, _ in rows]
  assert steps == sorted(steps) and steps[0] == 1 and steps[-1] == 10_000
  assert len(browser.find_elements(By.CSS_SELECTOR, '#evaluations tbody tr')) == 31
  click(browser, '#evaluation .more button')
  assert len(browser.find_elements(By.CSS_SELECTOR, '#evaluations tbody tr')) == 41
  assert browser.get_log('browser') == []
