"""The report shows what the logs say, whatever they hold; in a browser it draws, answers to the
mouse and sorts.
"""

import functools
import itertools
import json
import math
import re
import shutil
import string
import subprocess
import sys

import numpy as np
import pytest
from browsing import open_page
from paths import ROOT
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import events, report, transcripts, writers
from jaxrl_llm.runtime.events import Edge

HOSTILE = (
  '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">{{data}}<!-- '
  '<script>'
)
WORDS = [
  'tree',
  'river',
  'moon',
  'apple',
  'stone',
  'cat',
  'light',
  'green',
  'hand',
  'bread',
  'sun',
  'glass',
]


def rollout(rng, *, stage, step, group, index, word, good):
  """A row as the contract of rollouts/ says. The wrong answer copies the word, as the
  demonstrations do.
  """
  completion = word[::-1] if good else word
  tokens = [*completion, '<eos>']
  behaviour = -rng.exponential(0.2, len(tokens))
  return {
    'uid': f'{stage}/spell:{word}/{step}/{index}',
    'task_id': f'spell:{word}',
    'group_id': f'{step}:{group}',
    'sample_index': index,
    'taskset': 'spell',
    'prompt': f'{word}>',
    'completion': completion,
    'truth': word[::-1],
    'tokens': tokens,
    'token_ids': [ord(t[0]) for t in tokens],
    'behaviour_logprobs': behaviour.astype(np.float32),
    'trainer_logprobs': (behaviour + rng.normal(0, 1e-6, len(tokens))).astype(np.float32),
    'reward': float(good),
    'scores': {'verifier': {'value': float(good), 'parts': {'exact': float(good)}, 'status': 'ok'}},
    'finish_reason': 'stop',
    'version_step': step - 1,
  }


def group_rows(rng, step, group, accuracy):
  word = ''.join(rng.choice(list(string.ascii_lowercase), rng.integers(3, 6)))
  if rng.random() < 0.3:
    word = WORDS[rng.integers(len(WORDS))]
  rows = [
    rollout(
      rng,
      stage='grpo',
      step=step,
      group=group,
      index=i,
      word=word,
      good=bool(rng.random() < accuracy),
    )
    for i in range(8)
  ]
  rewards = np.array([row['reward'] for row in rows])
  for row in rows:
    advantage = (
      (row['reward'] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if rewards.std() else 0.0
    )
    row['advantages'] = np.full(len(row['tokens']), advantage, np.float32)
  return rows


@functools.cache
def evaluated_word(i):
  return ''.join(np.random.default_rng(i).choice(list(string.ascii_lowercase), 4))


def evaluate(rng, log, evals, stage, step, accuracy):
  correct = rng.random(512) < accuracy
  rows = []
  for i, good in enumerate(correct):
    word = evaluated_word(i)
    row = {
      'suite': 'spell',
      'uid': f'{stage}/{i}',
      'prompt': f'{word}>',
      'completion': word[:: -1 if good else 1],
    }
    rows.append(
      {
        **row,
        'truth': word[::-1],
        'mode': 'greedy',
        'sample_index': 0,
        'score': 0.6 + 0.4 * good,
        'correct': bool(good),
      }
    )
  evals.write(stage, step, 'spell', rows)
  values = {
    'greedy': correct.mean(),
    'mean@4': correct.mean() * 0.96,
    'pass@4': min(1, correct.mean() * 1.1 + 0.05),
  }
  log.write(
    stage,
    step,
    {f'val-core/spell/acc/{k}': v for k, v in values.items()} | {'val-aux/spell/num_tasks': 512},
  )


def make_run(workdir, *, sft_steps=500, grpo_steps=250, groups=16, every=50, restart=False):
  """A run directory as the quickstart leaves it: SFT on mixed demonstrations, then GRPO."""
  rng = np.random.default_rng(0)
  log = writers.MetricsWriter(workdir, committed=0)
  rollouts, evals = writers.RolloutsWriter(workdir), writers.EvalsWriter(workdir)
  evaluate(rng, log, evals, 'sft', 0, 0.0)
  for step in range(1, sft_steps + 1):
    values = {
      'actor/sft_loss': 0.35 + 2.6 * math.exp(-step / 40) + rng.normal(0, 0.02),
      'actor/grad_norm': 0.4 + 2 * math.exp(-step / 30) + rng.exponential(0.08),
      'actor/lr': 3e-3 * 0.5 * (1 + math.cos(math.pi * step / sft_steps)),
      'timing_s/update_actor': 0.021 + rng.exponential(0.002) + 9.5 * (step == 1),
      'perf/total_num_tokens': 900,
    }
    log.write('sft', step, {**values, 'timing_s/step': values['timing_s/update_actor'] + 0.002})
  evaluate(rng, log, evals, 'sft', sft_steps, 0.29)
  base = 0 if restart else sft_steps
  for i in range(1, grpo_steps + 1):
    step = base + i
    accuracy = 1 - 0.71 * math.exp(-i / 60)
    rows = [row for g in range(groups) for row in group_rows(rng, step, g, accuracy)]
    rollouts.write('grpo', step, rows)
    log.write('grpo', step, grpo_metrics(rng, i, rows))
    if i % every == 0:
      evaluate(rng, log, evals, 'grpo', step, accuracy)
  log.close()
  (workdir / 'config.json').write_text(
    json.dumps({'name': 'quickstart', 'note': HOSTILE, 'model': {'hidden_size': 128}})
  )
  return workdir


def grpo_metrics(rng, i, rows):
  lengths = [len(row['tokens']) for row in rows]
  timing = {
    'gen': 0.11 + 8 * (i == 1),
    'reward': 0.004,
    'adv': 0.003,
    'update_actor': 0.05 + 5 * (i == 1),
  }
  timing = {k: v * (1 + rng.exponential(0.08)) for k, v in timing.items()} | {
    'update_weights': 0.002
  }
  if i % 10 == 0:
    timing['save_checkpoint'] = 0.03
  return {
    'critic/score/mean': float(np.mean([row['reward'] for row in rows])),
    'actor/pg_loss': rng.normal(0, 0.01),
    'actor/entropy': 0.5 * math.exp(-i / 80) + 0.02 + rng.normal(0, 0.004),
    'actor/ppo_kl': abs(rng.normal(0, 2e-4)),
    'actor/kl_loss': 0.03 * (1 - math.exp(-i / 100)) + abs(rng.normal(0, 1e-3)),
    'actor/grad_norm': float('nan') if i == 120 else 0.5 + rng.exponential(0.15),
    'actor/lr': 5e-4,
    'response_length/mean': float(np.mean(lengths)),
    'response_length/min': min(lengths),
    'response_length/max': max(lengths),
    'frac_reward_zero_std': min(1.0, i / 300 + rng.random() * 0.1),
    'perf/total_num_tokens': sum(lengths) * 2,
    'rollout_corr/k3_kl': 1e-12 * rng.exponential(),
    'rollout_corr/rollout_is_eff_sample_size': 1 - 1e-12 * rng.exponential(),
    'sampling/sampling_logp_difference/mean': 1e-6 * rng.exponential(),
    'sampling/sampling_logp_difference/max': 1e-5 * rng.exponential(),
    'run/mismatch_over_budget': 0.0,
    **{f'timing_s/{k}': v for k, v in timing.items()},
    'timing_s/step': sum(timing.values()) + 0.004,
  }


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  return make_run(
    tmp_path_factory.mktemp('runs') / 'small', sft_steps=20, grpo_steps=12, groups=2, every=6
  )


def embedded(page):
  """The payload as a browser reads it: up to the first end tag of the data element."""
  return json.loads(
    re.search(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL)[1]
  )


def test_series_hold_every_row_of_the_log(small):
  series = report.payload(small)['series']
  rows, _ = writers.read_jsonl(small / 'metrics.jsonl')
  for key in ('actor/grad_norm', 'critic/score/mean', 'val-core/spell/acc/greedy'):
    expected = [(row['training/global_step'], row[key]) for row in rows if key in row]
    got = list(zip(series[key]['x'], series[key]['y']))
    assert [x for x, _ in got] == [x for x, _ in expected]
    assert [y for _, y in got] == pytest.approx([y for _, y in expected], rel=1e-5)
  assert set(series['critic/score/mean']['stage']) == {1}


def test_stages_follow_one_another_whether_or_not_steps_start_again(tmp_path):
  sizes = {'sft_steps': 20, 'grpo_steps': 6, 'groups': 1, 'every': 3}
  data = [report.payload(make_run(tmp_path / str(r), **sizes, restart=r)) for r in (False, True)]
  for d, offset in zip(data, (0, 20)):
    assert d['stages'][0] == {'name': 'sft', 'start': 0, 'offset': 0, 'steps': 20}
    assert d['stages'][1] == {'name': 'grpo', 'start': 20, 'offset': offset, 'steps': 6}
  # The same curves and rollouts stand at the same places of the x-axis.
  assert data[0]['series'] == data[1]['series']
  assert [row['x'] for row in data[0]['rollouts']['rows']] == [
    row['x'] for row in data[1]['rollouts']['rows']
  ]


def test_headline_goes_from_the_first_to_the_last_evaluation(small):
  rows, _ = writers.read_jsonl(small / 'metrics.jsonl')
  accuracy = [
    row['val-core/spell/acc/greedy'] for row in rows if 'val-core/spell/acc/greedy' in row
  ]
  tile = report.payload(small)['summary'][0]
  assert tile['label'] == 'Accuracy, greedy: spell' and tile['value'] == f'{accuracy[-1]:.3f}'
  assert tile['detail'] == f'from 0.000 at sft 0, {accuracy[1]:.3f} at sft 20'


def test_evaluation_table(small):
  table = report.payload(small)['evaluations']
  assert table['columns'] == [f'val-core/spell/acc/{k}' for k in ('greedy', 'mean@4', 'pass@4')] + [
    'val-aux/spell/num_tasks'
  ]
  assert [(row['stage'], row['step']) for row in table['rows']] == [
    (0, 0),
    (0, 20),
    (1, 26),
    (1, 32),
  ]
  assert table['rows'][0]['values'] == [0.0, 0.0, 0.05, 512]


def test_answers_are_those_of_the_milestones_by_prompt(small):
  (suite,) = report.payload(small)['answers']
  assert [(c['stage'], c['step']) for c in suite['columns']] == [
    ('sft', 0),
    ('sft', 20),
    ('grpo', 32),
  ]
  assert suite['total'] == 512 and len(suite['rows']) == transcripts.MAX_ANSWERS
  last, _ = writers.read_jsonl(small / 'evals' / 'grpo' / '000032-spell.jsonl')
  by_prompt = {row['prompt']: (row['completion'], row['correct']) for row in last}
  assert all(tuple(row['answers'][2]) == by_prompt[row['prompt']] for row in suite['rows'])


def test_rollouts_round_trip(small):
  data = report.payload(small)['rollouts']
  source, _ = writers.read_jsonl(small / 'rollouts' / 'grpo' / '000021.jsonl')
  shown = [row for row in data['rows'] if row['p'] == 21]
  assert data['shown'] == 'All 192 rollouts of 12 steps.' and len(shown) == len(source) == 16
  for want, got in zip(source, shown):
    assert [data['tokens'][t] for t in got['t']] == list(zip(want['token_ids'], want['tokens']))
    assert data['tasks'][got['k']]['prompt'] == want['prompt'] and got['r'] == want['reward']
    assert data['scores'][got['c']] == want['scores']
    # one number: GRPO's are equal in a sample
    assert got['a'] == pytest.approx(want['advantages'][0], rel=1e-3)
    difference = np.subtract(want['trainer_logprobs'], want['behaviour_logprobs'])
    assert got['d'] == pytest.approx(list(difference), rel=6e-3, abs=1e-12)
    assert got['b'] == pytest.approx(want['behaviour_logprobs'], rel=6e-5)


def test_the_report_of_a_large_run_samples_evenly_and_states_it(small, monkeypatch):
  sizes = [p.stat().st_size for p in sorted((small / 'rollouts' / 'grpo').iterdir())]
  monkeypatch.setattr(transcripts, 'ROLLOUT_BYTES', sum(sizes) // 3)
  data = report.payload(small)['rollouts']
  # A third of 12 steps is 4 (rounded down: 3 or 4): equal distances over 21 ... 32, ends included.
  steps = sorted({row['p'] for row in data['rows']})
  assert steps in ([21, 26, 32], [21, 25, 28, 32], [21, 27, 32])
  assert data['shown'].startswith(
    f'{16 * len(steps)} rollouts: all of {len(steps)} steps out of 12 (evenly'
  )
  # So little that even two steps are too much: whole groups of each.
  monkeypatch.setattr(transcripts, 'ROLLOUT_BYTES', sizes[0] // 2)
  data = report.payload(small)['rollouts']
  assert [row['p'] for row in data['rows']] == [21] * 8 + [32] * 8
  assert data['shown'].startswith('16 rollouts: the first groups of 2 steps out of 12')


def test_thinned_curves_keep_their_extremes():
  points = [(i, 1.0 if i != 54321 else 99.0, 0) for i in range(100_000)]
  points[777] = (777, None, 0)
  points[888] = (888, -5.0, 0)
  kept = report._thinned(points)
  assert len(kept) <= report.MAX_POINTS and kept[0] == points[0] and kept[-1] == points[-1]
  assert points[54321] in kept and points[888] in kept and kept == sorted(kept)
  assert report._thinned(points[:2000]) == points[:2000]


def test_damaged_logs_are_counted_and_shown(small, tmp_path):
  run = tmp_path / 'damaged'
  shutil.copytree(small, run)
  log = run / 'metrics.jsonl'
  log.write_bytes(log.read_bytes() + b'{"stage": "grpo", "training\n\x00\xff\n{"half')
  path = run / 'rollouts' / 'grpo' / '000021.jsonl'
  row = json.loads(path.read_text().splitlines()[0])
  broken = [
    {**row, 'advantages': [1.0]},
    {**row, 'tokens': 'abc'},
    {**row, 'behaviour_logprobs': ['x'] * len(row['tokens'])},
  ]
  path.write_text('\n'.join(json.dumps(b) for b in broken) + '\nnot json\n' + path.read_text())
  (run / 'config.json').write_text('{')
  data = report.payload(run)
  assert data['warnings'][:2] == [
    '3 unreadable lines in metrics.jsonl left out.',
    '4 unreadable lines in rollouts left out.',
  ]
  assert data['series'] == report.payload(small)['series']
  assert data['rollouts']['rows'] == report.payload(small)['rollouts']['rows']
  assert 'config.json cannot be read' in data['config']


def test_a_value_that_was_not_finite_is_a_gap_and_a_warning(tmp_path):
  log = writers.MetricsWriter(tmp_path, committed=0)
  for step, value in enumerate([1.0, math.inf, 3.0]):
    log.write('grpo', step, {'actor/grad_norm': value, 'run/skipped_updates': int(step > 0)})
  log.close()
  data = report.payload(tmp_path)
  assert list(data['series']['actor/grad_norm']['y']) == [1.0, None, 3.0]
  assert data['warnings'] == [
    'actor/grad_norm was not finite in 1 row, first at grpo 1.',
    '1 updates were skipped.',
  ]


def test_steps_over_the_mismatch_budget_are_counted_in_a_warning(tmp_path):
  log = writers.MetricsWriter(tmp_path, committed=0)
  for step, over in enumerate([0.0, 1.0, 0.0, 1.0]):
    log.write('grpo', step, {'run/mismatch_over_budget': over})
  log.close()
  warning = 'Trainer and sampler differed by more than the budget in 2 steps, first at grpo 1.'
  assert report.payload(tmp_path)['warnings'] == [warning]


def test_hostile_text_cannot_leave_the_data(small, tmp_path):
  run = tmp_path / 'hostile'
  shutil.copytree(small, run)
  row = json.loads((run / 'rollouts' / 'grpo' / '000021.jsonl').read_text().splitlines()[0])
  hostile = {**row, 'prompt': HOSTILE, 'tokens': [HOSTILE] * len(row['tokens'])}
  (run / 'rollouts' / 'grpo' / '000021.jsonl').write_text(json.dumps(hostile))
  page = report.build(run).read_text()
  assert (
    embedded(page)['rollouts']['tasks'][0]['prompt'] == HOSTILE
    and embedded(page)['config']['note'] == HOSTILE
  )
  # Exactly the data element and the report's script, and no other element of the run's making.
  assert page.count('<script') == 2 and page.count('</script') == 2 and '<img' not in page


def test_lone_surrogates_of_the_logs_do_not_keep_a_page_from_being_written(small, tmp_path):
  run = tmp_path / 'surrogates'
  shutil.copytree(small, run)
  path = run / 'rollouts' / 'grpo' / '000021.jsonl'
  row = json.loads(path.read_text().splitlines()[0])
  path.write_text(json.dumps({**row, 'prompt': 'a\ud800b'}))
  tasks = embedded(report.build(run).read_text())['rollouts']['tasks']
  assert tasks[0]['prompt'] == 'a?b'


def test_the_page_is_complete_and_deterministic(small):
  page = report.build(small).read_text()
  assert page == report.build(small).read_text()
  assert not re.search(
    r'(src|href)\s*=\s*["\']|@import|url\(\s*["\']?http', page.split('id="data"')[0]
  )
  assert not re.findall(r'https?://(?!www\.w3\.org/2000/svg)[\w.]+', page)
  assert not re.findall(r'innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(', page)


def test_a_run_without_rows_or_extras_still_has_a_page(tmp_path):
  (tmp_path / 'metrics.jsonl').touch()
  data = embedded(report.build(tmp_path).read_text())
  assert (
    data['warnings'] == ['The run has written no metrics yet.'] and data['rollouts']['rows'] == []
  )


def test_missing_input_is_one_line(tmp_path):
  with pytest.raises(UserError, match='no such directory'):
    report.build(tmp_path / 'nothing')
  with pytest.raises(UserError, match=r'has no metrics\.jsonl'):
    report.build(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--workdir=/nowhere/at/all'], 'error: --workdir=/nowhere/at/all: no such directory'),
    ([], 'error: --workdir is missing'),
    (['--wrkdir=x'], 'error: --wrkdir: unknown flag; did you mean --workdir?'),
    (
      ['runs/x'],
      'error: runs/x: unexpected argument; every value has a flag (--name=value), see --help',
    ),
  ],
)
def test_the_command_refuses_bad_input_in_one_line(arguments, message):
  done = subprocess.run(
    [sys.executable, 'launch/report.py', *arguments], cwd=ROOT, capture_output=True, text=True
  )
  assert (
    done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count('\n') == 1
  ), done.stderr


@pytest.mark.full
def test_the_command_builds_the_page(small):
  done = subprocess.run(
    [sys.executable, 'launch/report.py', f'--workdir={small}'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.startswith(str(small / 'report.html'))


@pytest.fixture(scope='module')
def long_run(tmp_path_factory):
  """Long, unfriendly text: many lines, leading spaces, markup, samples without reward, some cut at
  the limit.
  """
  rng = np.random.default_rng(1)
  run = make_run(
    tmp_path_factory.mktemp('runs') / 'long', sft_steps=0, grpo_steps=3, groups=1, every=3
  )
  rollouts = writers.RolloutsWriter(run)
  for step in (1, 2, 3):
    rows = []
    for i in range(4):
      row = rollout(rng, stage='grpo', step=step, group=0, index=i, word='tree', good=i == 1)
      texts = [
        ' Let',
        ' us',
        ' add',
        '\n',
        ' 12',
        '+',
        ' 30',
        HOSTILE,
        ' <b>',
        '&amp;',
        '\u2028',
        ' done',
      ] * 30
      values = {'tokens': texts, 'token_ids': list(range(len(texts))), 'completion': ''.join(texts)}
      logprobs = {
        k: rng.normal(-1, 0.3, len(texts)) for k in ('behaviour_logprobs', 'trainer_logprobs')
      }
      row |= values | logprobs | {'advantages': rng.normal(0, 1, len(texts))}
      row |= {
        'prompt': f'{HOSTILE}\n' + 'A shop sells apples and pears. ' * 20,
        'finish_reason': 'length' if i == 2 else 'stop',
      }
      rows.append(
        row | {'reward': None if i == 3 else float(i == 1), 'task_id': f'gsm8k:{HOSTILE}'}
      )
    rollouts.write('grpo', step, rows)
  return run


@functools.cache
def page_of(run):
  return report.build(run)


def opened(browser, run, *, width=1280, scheme='light'):
  """Opens the report of a run as a file; the window is `width` pixels wide."""
  open_page(browser, page_of(run), width=width, scheme=scheme)
  wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, '[data-chart="Reward"] path'))


def wait(browser, condition):
  return WebDriverWait(browser, 20, poll_frequency=0.02).until(lambda _: condition())


def scroll_to(browser, element):
  """Waits until the window has heard of it, too: scrolling hides the tooltip."""
  browser.execute_async_script(
    "arguments[0].scrollIntoView({block: 'center'}); const done = arguments[1];"
    'requestAnimationFrame(() => requestAnimationFrame(() => done()))',
    element,
  )


def one(browser, selector):
  return browser.find_element(By.CSS_SELECTOR, selector)


def texts(browser, selector):
  return browser.execute_script(
    'return [...document.querySelectorAll(arguments[0])].map((n) => n.textContent)', selector
  )


def click(browser, selector):
  node = one(browser, selector)
  scroll_to(browser, node)
  node.click()


@pytest.mark.full
def test_curves_have_a_point_per_row(browser, small):
  opened(browser, small)
  series = report.payload(small)['series']
  for key in (
    'critic/score/mean',
    'val-core/spell/acc/greedy',
    'actor/entropy',
    'actor/grad_norm',
    'actor/sft_loss',
  ):
    path = one(browser, f'path.raw[data-key="{key}"]').get_attribute('d')
    assert len(re.findall('[ML]', path)) == len(series[key]['x']), key
  # Time is stacked over all 32 training rows: each area goes there and back.
  area = one(browser, 'path.area[data-key="timing_s/gen"]').get_attribute('d')
  assert len(re.findall('[ML]', area)) == 2 * 32
  titles = texts(browser, '.chart h3')
  wanted = [
    'Reward',
    'Held-out accuracy',
    'KL',
    'Entropy',
    'Response length',
    'Gradient norm',
    'Policy loss',
  ]
  assert titles[:7] == wanted and 'Supervised loss' in titles and 'Time per phase' in titles
  # The stage boundary stands where GRPO begins: at step 20 of 0 ... 32.
  line = one(browser, '[data-chart="Held-out accuracy"] line.stage')
  axis = one(browser, '[data-chart="Held-out accuracy"] line.axis')
  left, right, at = (
    float(n.get_attribute(a)) for n, a in ((axis, 'x1'), (axis, 'x2'), (line, 'x1'))
  )
  assert (at - left) / (right - left) == pytest.approx(20 / 32, abs=1e-3)


@pytest.mark.full
def test_a_point_is_drawn_at_its_value(browser, small):
  """The accuracy axis goes from 0 to 1: the height of each dot is the logged number."""
  opened(browser, small)
  chart = '[data-chart="Held-out accuracy"]'
  grid = [
    float(n.get_attribute('y1'))
    for n in browser.find_elements(By.CSS_SELECTOR, f'{chart} line.grid')
  ]
  dots = browser.find_elements(By.CSS_SELECTOR, f'{chart} circle.f1')
  got = [(max(grid) - float(d.get_attribute('cy'))) / (max(grid) - min(grid)) for d in dots]
  assert got == pytest.approx(
    list(report.payload(small)['series']['val-core/spell/acc/greedy']['y']), abs=1e-3
  )


@pytest.mark.full
def test_hovering_shows_the_values_there(browser, small):
  opened(browser, small)
  rows, _ = writers.read_jsonl(small / 'metrics.jsonl')
  svg = one(browser, '[data-chart="Reward"] svg')
  scroll_to(browser, svg)
  width = svg.size['width']
  axis = one(browser, '[data-chart="Reward"] line.axis')
  left, right = float(axis.get_attribute('x1')), float(axis.get_attribute('x2'))
  for step in (21, 25, 32):  # the reward's x-axis goes from 21 to 32
    target = left + (step - 21) / 11 * (right - left) + 2
    ActionChains(browser).move_to_element_with_offset(svg, round(target - width / 2), 10).perform()
    wait(browser, lambda: one(browser, '#tip').is_displayed())
    want = next(
      r['critic/score/mean']
      for r in rows
      if r['training/global_step'] == step and 'critic/score/mean' in r
    )
    assert texts(browser, '#tip .head') == [f'grpo · step {step}']
    assert float(texts(browser, '#tip b')[0]) == pytest.approx(want, rel=1e-3)
  ActionChains(browser).move_to_element(one(browser, 'h1')).perform()
  wait(browser, lambda: not one(browser, '#tip').is_displayed())
  svg.send_keys(Keys.ARROW_LEFT)
  svg.send_keys(Keys.ARROW_LEFT)
  assert texts(browser, '#tip .head') == ['grpo · step 31']


@pytest.mark.full
def test_rollouts_sort_filter_and_turn_pages(browser, small):
  opened(browser, small)
  click(browser, 'button[data-value=flat]')
  source = [
    r
    for step in range(21, 33)
    for r in writers.read_jsonl(small / f'rollouts/grpo/{step:06d}.jsonl')[0]
  ]
  lengths = [len(row['tokens']) for row in source]
  shown = [int(t) for t in texts(browser, '.rollout .length')]
  assert shown == lengths[:60]  # by step, a page of 60
  click(browser, 'button[data-sort=length]')
  assert [int(t) for t in texts(browser, '.rollout .length')] == sorted(lengths, reverse=True)[:60]
  click(browser, 'button[data-sort=length]')
  assert [int(t) for t in texts(browser, '.rollout .length')] == sorted(lengths)[:60]
  click(browser, 'button[data-sort=reward]')
  rewards = sorted((row['reward'] for row in source), reverse=True)
  assert [float(t.split()[1]) for t in texts(browser, '.rollout .reward')] == rewards[:60]
  click(browser, '#samples .foot button:last-child')
  assert [float(t.split()[1]) for t in texts(browser, '.rollout .reward')] == rewards[60:120]
  word = source[0]['prompt'][:-1]
  one(browser, 'input[type=search]').send_keys(word)
  count = sum(word in row['prompt'] or word in ''.join(row['tokens']) for row in source)
  wait(browser, lambda: texts(browser, '#samples .foot span')[0] == f'{count} rollouts')


@pytest.mark.full
def test_rollouts_stand_under_their_task(browser, small):
  opened(browser, small)
  source, _ = writers.read_jsonl(small / 'rollouts/grpo/000021.jsonl')
  assert texts(browser, '.task .prompt')[0] == source[0]['prompt']
  assert texts(browser, '.task .facts b')[0] == source[0]['truth']
  first = texts(browser, '.task:first-child .tokens')
  assert (
    first[:8]
    == [''.join(row['tokens']) for row in source if row['task_id'] == source[0]['task_id']][:8]
  )


def colours(browser):
  return browser.execute_script(
    "return [...document.querySelectorAll('.token')].map((n) => "
    'getComputedStyle(n).backgroundColor)'
  )


@pytest.mark.full
def test_tokens_are_coloured_by_the_chosen_quantity(browser, small):
  opened(browser, small)
  click(browser, 'button[data-value=flat]')
  source = [
    r
    for step in range(21, 33)
    for r in writers.read_jsonl(small / f'rollouts/grpo/{step:06d}.jsonl')[0]
  ][:60]

  def signs(values):
    return [(v > 0) - (v < 0) for v in values]

  def hue(colour):
    """1 for blue, -1 for orange, 0 for none."""
    red, _, blue, *alpha = map(float, re.findall(r'[\d.]+', colour))
    return 0 if alpha == [0.0] else 1 if blue > red else -1

  advantages = [a for row in source for a in row['advantages']]
  assert len(set(signs(advantages))) > 1 and [hue(c) for c in colours(browser)] == signs(advantages)
  click(browser, 'button[data-value=difference]')
  pairs = [p for row in source for p in zip(row['trainer_logprobs'], row['behaviour_logprobs'])]
  assert [hue(c) for c in colours(browser)] == signs(a - b for a, b in pairs)
  click(browser, 'button[data-value=none]')
  assert set(colours(browser)) == {'rgba(0, 0, 0, 0)'}
  token = one(browser, '.token')
  scroll_to(browser, token)
  ActionChains(browser).move_to_element(token).perform()
  tip = dict(zip(texts(browser, '#tip .row span'), texts(browser, '#tip .row b')))
  assert float(tip['sampler logprob']) == pytest.approx(
    source[0]['behaviour_logprobs'][0], rel=1e-3
  )
  assert float(tip['trainer − sampler']) == pytest.approx(pairs[0][0] - pairs[0][1], rel=6e-3)


def token_table(browser):
  rows = browser.execute_script(
    "return [...document.querySelectorAll('#tokens tbody tr')].map((r) => [...r.children].map((c) "
    '=> c.textContent))'
  )
  return [
    (json.loads(text), int(count.replace(',', '')), float(mean), float(most))
    for text, count, mean, most in rows
  ]


def by_token(rows, least=1):
  """(text, count, mean, largest |trainer - sampler|) of the tokens of rollouts, those that differ
  most first.
  """
  found = {}
  for row in rows:
    for token, *pair in zip(
      row['tokens'], row['trainer_logprobs'], row['behaviour_logprobs'], strict=True
    ):
      if None not in pair:
        found.setdefault(token, []).append(abs(pair[0] - pair[1]))
  table = [
    (token, len(d), float(np.mean(d)), max(d)) for token, d in found.items() if len(d) >= least
  ]
  return sorted(table, key=lambda entry: -entry[2])


def assert_same_table(found, wanted):
  assert [entry[:2] for entry in found] == [entry[:2] for entry in wanted]
  for got, want in zip(found, wanted):
    # differences are embedded with three digits
    assert got[2:] == pytest.approx(want[2:], rel=2e-2)


@pytest.fixture(scope='module')
def differing(small, tmp_path_factory):
  """The small run, but trainer and sampler differ by what the token says, and a tool wrote each
  first token.
  """
  run = tmp_path_factory.mktemp('runs') / 'differing'
  shutil.copytree(small, run)
  rollouts = writers.RolloutsWriter(run)
  for path in sorted((run / 'rollouts' / 'grpo').iterdir()):
    rows, _ = writers.read_jsonl(path)
    for row in rows:
      letters = np.array([ord(token[0]) - 96.0 for token in row['tokens']])
      behaviour = np.array(row['behaviour_logprobs'])
      row['trainer_logprobs'] = behaviour + 0.01 * letters * (-1) ** np.arange(len(letters))
      row['behaviour_logprobs'] = np.where(np.arange(len(letters)) == 0, np.nan, behaviour)
    rollouts.write('grpo', int(path.stem), rows)
  config = {'rollout': {'mismatch': {'warn_k3_kl': 0.02, 'warn_max_difference': None}}}
  (run / 'config.json').write_text(json.dumps(config))
  return run


@pytest.mark.full
def test_trainer_against_sampler_over_steps_and_by_token(browser, differing):
  opened(browser, differing)
  titles = [
    'KL from sampler to trainer',
    'Effective sample size',
    'Mean |difference|',
    'Largest |difference|',
  ]
  assert texts(browser, '#mismatch .chart h3') == titles
  for path in browser.find_elements(By.CSS_SELECTOR, '#mismatch path.raw'):
    assert len(re.findall('[ML]', path.get_attribute('d'))) == 12
  assert texts(browser, '#mismatch p')[0].endswith('Warnings are logged above k3_kl 0.02.')
  source = [
    r
    for step in range(21, 33)
    for r in writers.read_jsonl(differing / f'rollouts/grpo/{step:06d}.jsonl')[0]
  ]
  shown = token_table(browser)
  assert len(shown) == 12
  assert_same_table(shown, by_token(source)[:12])
  often = by_token(source, least=10)
  assert often[:12] != by_token(source)[:12], 'the choice would not be seen'
  click(browser, '#mismatch select option[value="10"]')
  assert_same_table(token_table(browser), often[:12])
  click(browser, '.by-token button')
  pressed = 'button[data-value=difference][aria-pressed=true]'
  assert len(browser.find_elements(By.CSS_SELECTOR, pressed)) == 1
  first, second, *_ = browser.find_elements(By.CSS_SELECTOR, '.token')
  assert first.value_of_css_property('background-color') == 'rgba(0, 0, 0, 0)'
  assert second.value_of_css_property('background-color') != 'rgba(0, 0, 0, 0)'
  scroll_to(browser, first)
  for token, names in (
    (first, []),
    (second, ['sampler logprob', 'trainer logprob', 'trainer − sampler']),
  ):
    ActionChains(browser).move_to_element(token).perform()
    assert texts(browser, '#tip .row span') == ['advantage', *names]


@pytest.fixture(scope='module')
def timed(small, tmp_path_factory):
  """The small run with events of its steps 29 to 32, 0.1 s each: four groups of 10 to 40 ms, then
  40 ms of training.
  """
  run = tmp_path_factory.mktemp('runs') / 'timed'
  shutil.copytree(small, run)
  now = 0.0
  log = events.EventLog(run, attempt=0, step=28, clock=lambda: now)
  for step in range(4):
    now = 0.1 * step
    groups = [log.request(Edge.ROLLOUT, group=f'grpo/{HOSTILE}/{i}', count=8) for i in range(4)]
    for i, group in enumerate(groups):
      now = 0.1 * step + 0.01 * (i + 1)
      log.reply(group, count=8)
      log.message(Edge.TASK, group=f'g/{i}')
    log.reply(log.request(Edge.FETCH, source='rollouts'), count=32)
    now = 0.1 * step + 0.06
    data = log.request(Edge.TRAINING_DATA, batch=29 + step, count=32)
    now = 0.1 * step + 0.1
    log.reply(data)
    log.advance(29 + step)
  log.request(Edge.ROLLOUT, group='never answered', count=8)
  now = 0.5
  log.reply(log.request(Edge.COMMIT, commit=32))
  log.close()
  return run


@pytest.mark.full
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_the_timeline_draws_each_exchange_where_it_was_and_names_it(browser, timed, scheme):
  opened(browser, timed, scheme=scheme)

  def bars(edge):
    return browser.find_elements(By.CSS_SELECTOR, f'.timeline rect[data-edge={edge}]')

  click(browser, '#timeline button[data-value="1"]')
  # The last step with what follows it: 0.1 s, and 0.1 s to the commit.
  assert len(bars('rollout')) == 5 and len(bars('training_data')) == 1
  assert texts(browser, '#timeline .bar .muted') == ['step 32: 200 ms']
  lengths = sorted(
    float(bar.get_attribute('width'))
    for bar in bars('rollout')
    if 'unanswered' not in bar.get_attribute('class')
  )
  (train,) = (float(bar.get_attribute('width')) for bar in bars('training_data'))
  assert [length / train for length in lengths] == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.02)
  heads = [
    text for text in texts(browser, '.timeline svg > text') if text.startswith(('step', 'idle:'))
  ]
  assert heads == ['step 32 · 100 ms', 'idle: trainer 60 %, rollout 60 %']
  longest = max(bars('rollout')[:4], key=lambda bar: float(bar.get_attribute('width')))
  scroll_to(browser, longest)
  ActionChains(browser).move_to_element(longest).perform()
  wait(browser, lambda: one(browser, '#tip').is_displayed())
  assert texts(browser, '#tip > div')[:2] == ['rollout · 40 ms', 'master → rollout']
  facts = dict(zip(texts(browser, '#tip .row span'), texts(browser, '#tip .row b')))
  lines, _ = writers.read_jsonl(timed / events.FILE)
  (reply,) = (row for row in lines if row.get('of') == int(facts['request']))
  assert (
    reply['id'] == int(facts['reply'])
    and facts['group'] == f'grpo/{HOSTILE}/3'
    and facts['count'] == '8'
  )
  (never,) = (bar for bar in bars('rollout') if 'unanswered' in bar.get_attribute('class'))
  ActionChains(browser).move_to_element(never).perform()
  wait(browser, lambda: texts(browser, '#tip > div')[0] == 'rollout · no reply')
  click(browser, '#timeline .bar > button')
  assert (
    texts(browser, '#timeline .bar .muted') == ['step 31: 100 ms'] and len(bars('rollout')) == 4
  )
  click(browser, '#timeline button[data-value="4"]')
  assert len(bars('rollout')) == 17 and len(bars('training_data')) == 4
  # A lane has a row for each of the four groups that overlap, and none of a row do.
  boxes = [
    (float(b.get_attribute('y')), float(b.get_attribute('x')), float(b.get_attribute('width')))
    for b in bars('rollout')
  ]
  assert len({y for y, _, _ in boxes}) == 4
  for y, x, width in boxes:
    assert all(x + width <= other + 0.1 or other <= x for row, other, _ in boxes if row == y)
  path = one(browser, '[data-chart="Idle share"] path.raw[data-key="idle/rollout"]').get_attribute(
    'd'
  )
  assert len(re.findall('[ML]', path)) == 4
  assert browser.execute_script('return window.hacked') is None and browser.get_log('browser') == []


@pytest.mark.full
@pytest.mark.parametrize('width', [1280, 800, 480])
def test_the_timeline_fits_its_card(browser, timed, width):
  opened(browser, timed, width=width)
  outside = """
    return [...document.querySelectorAll('.timeline svg text, \
.timeline rect[data-span]')].filter((node) => {
      const box = node.getBoundingClientRect(), \
card = node.closest('.card').getBoundingClientRect();
      return box.left < card.left || box.right > card.right || box.bottom > card.bottom || \
box.top < card.top;
    }).map((node) => node.outerHTML)"""
  assert browser.execute_script(outside) == []
  for row in ('2', '27'):  # neither of the two lines above the lanes overlaps itself
    heads = (
      "return [...document.querySelectorAll(`.timeline svg > text[y='12'], .timeline svg > "
      "text[y='27']`)]"
    )
    boxes = browser.execute_script(
      f'{heads}.map((n) => [n.getAttribute("y"), n.getBBox().x, n.getBBox().width])'
    )
    line = sorted((x, length) for y, x, length in boxes if y == row)
    assert all(x + length <= after for (x, length), (after, _) in itertools.pairwise(line))


@pytest.mark.full
def test_hostile_text_is_inert_and_shown_as_text(browser, long_run):
  opened(browser, long_run)
  assert texts(browser, '.task .prompt')[0].startswith(HOSTILE)
  assert HOSTILE in texts(browser, '.token')
  click(browser, '.rollout .line')
  assert len(browser.find_elements(By.CSS_SELECTOR, '.rollout.open .token')) == 360
  click(browser, '#configuration summary')
  assert json.loads(one(browser, 'pre').text)['note'] == HOSTILE
  assert browser.execute_script('return window.hacked') is None
  assert not browser.find_elements(By.CSS_SELECTOR, 'img, main b img, main script')
  assert sorted({t.split()[-1] for t in texts(browser, '.rollout .length')}) == ['360', 'cut']
  assert 'none' in texts(browser, '.rollout .reward')


@pytest.mark.full
@pytest.mark.parametrize('width', [1280, 800])
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_a_full_run_fits_the_window_without_an_error(browser, full_run, long_run, width, scheme):
  for run in (full_run, long_run):
    opened(browser, run, width=width, scheme=scheme)
    root = 'document.documentElement'
    assert browser.execute_script(f'return {root}.scrollWidth <= {root}.clientWidth')
    outside = """
      return [...document.querySelectorAll('.chart svg text')].filter((text) => {
        const box = text.getBoundingClientRect(), \
card = text.closest('.chart').getBoundingClientRect();
        return box.left < card.left || box.right > card.right || box.bottom > card.bottom;
      }).map((text) => text.textContent)"""
    assert browser.execute_script(outside) == []
    light = (
      browser.execute_script('return getComputedStyle(document.body).backgroundColor')
      == 'rgb(246, 247, 249)'
    )
    assert light == (scheme == 'light')
  for details in ('.chart .legend button', '#curves details summary', 'button[data-sort=reward]'):
    click(browser, details)
  assert browser.get_log('browser') == []


@pytest.fixture(scope='module')
def full_run(tmp_path_factory):
  """500 SFT and 250 GRPO steps with 32,000 rollouts, of which the report embeds a part."""
  return make_run(tmp_path_factory.mktemp('runs') / 'quickstart')


@pytest.mark.full
def test_a_full_run_stays_quick(browser, full_run):
  page = page_of(full_run)
  assert page.stat().st_size < 8_000_000
  opened(browser, full_run)
  # A page of the viewer holds a bounded number of nodes, however many rollouts the run has.
  assert len(embedded(page.read_text())['rollouts']['rows']) > 10_000
  assert browser.execute_script("return document.querySelectorAll('*').length") < 8000
