"""Episodes of a report as conversations: what the page embeds, and what a browser shows of it.

One page with 10,000 rollouts is opened once; each test finds its own episodes in it.
"""

import json

import numpy as np
import pytest
from browsing import open_page
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from jaxrl_llm.runtime import report, transcripts, writers

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
HIDDEN = 'safe\u202eevil\u202c\u200b\x07'
CONTEXT = (
  '<|im_start|>system\nYou may call a calculator.<|im_end|>\n'
  '<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n'
)
CALL = [
  '<tool_call>',
  '{"name": "add", ',
  '"arguments": {"left": 12}}',
  '</tool_call>',
  '<|im_end|>',
]
RESULT = [
  '\n<|im_start|>',
  'tool\n',
  '46 ',
  '\ufffd',
  '\ufffd',
  '<|im_end|>',
  '\n<|im_start|>',
  'assistant\n',
]
ANSWER = ['It', ' is', ' 46', HOSTILE, HIDDEN, '<|im_end|>']
ROLLOUTS = 10_000
STAGES = [{'name': 'grpo', 'start': 0, 'offset': 0, 'steps': 60}]


def row(step, group, index, texts, **fields):
  """A row of a rollouts file, as the master writes it."""
  ids = np.arange(len(texts), dtype=np.int32)
  uid = f'grpo/sums:{group}/0/{index}'
  return {
    'uid': uid,
    'task_id': f'sums:{group}',
    'group_id': f'grpo/sums:{group}/0',
    'sample_index': index,
    'trajectory_id': uid,
    'step_index': 0,
    'steps': 1,
    'taskset': 'sums',
    'prompt': f'question {group}',
    'completion': ''.join(texts),
    'truth': None,
    'tokens': texts,
    'token_ids': ids,
    'behaviour_logprobs': np.full(len(texts), -0.5),
    'trainer_logprobs': np.full(len(texts), -0.4),
    'advantages': np.full(len(texts), 1.0 if index % 2 else -1.0),
    'reward': float(index % 2),
    'scores': {'environment': {'value': float(index % 2), 'parts': {'calls': 1.0}, 'status': 'ok'}},
    'finish_reason': 'stop',
    'version_step': step - 1,
    **fields,
  }


def episode(index):
  """Of step 60: a tool call, its result, and an answer that two versions sampled."""
  texts = [*CALL, *RESULT, *ANSWER]
  read = np.arange(len(texts))
  read = (read >= len(CALL)) & (read < len(CALL) + len(RESULT))
  context = {'context': CONTEXT} if index == 0 else {'context_of': 'grpo/sums:tool/0/0'}
  call, result, end = len(CALL), len(CALL) + len(RESULT), len(texts)
  return row(
    60,
    'tool',
    index,
    texts,
    behaviour_logprobs=np.where(read, np.nan, -0.5),
    trainer_logprobs=np.where(read, np.nan, -0.4),
    advantages=np.where(read, 0.0, 1.0 - index),
    reward=float(index),
    turns=[
      ['policy', 0, call],
      ['observation', call, result, ''.join(RESULT).replace('\ufffd\ufffd', 'é')],
      ['policy', result, end],
    ],
    turn_rewards=[0.25, index - 0.25],
    versions=[[0, call, 55], [result, result + 2, 57], [result + 2, end, 59]],
    version_step=55,
    **context,
  )


def restarted(step_index):
  """Of step 60: a trajectory of two steps, the second with a new prompt."""
  uid = 'grpo/sums:restarted/0/0'
  return row(
    60,
    'restarted',
    0,
    ['first', ' try'] if step_index == 0 else ['second', ' try'],
    uid=uid if step_index == 0 else f'{uid}/1',
    trajectory_id=uid,
    step_index=step_index,
    steps=2,
    reward=None if step_index == 0 else 0.75,
    scores={},
    context=f'prompt {step_index} of the trajectory',
  )


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  """The report of a run of 60 steps, of which the last one has the episodes of the tests."""
  workdir = tmp_path_factory.mktemp('runs') / 'episodes'
  log, rollouts = writers.MetricsWriter(workdir, committed=0), writers.RolloutsWriter(workdir)
  per_step = ROLLOUTS // 60 + 1
  short = row(1, 'GROUP', 0, ['a', 'b'], version_step='STEP')
  short = json.dumps({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in short.items()})
  for step in range(1, 61):
    rows = []
    if step == 60:
      rows = [*map(episode, range(6)), restarted(0), restarted(1)]
      rows.append(row(60, 'long', 0, ['word '] * 5000, context='x' * 50_000))
      calls, messages = ['<tool_call>{</tool_call>'] * 3000, ['<|im_start|>a\n'] * 3000
      turns = [['policy', 0, 3000], ['observation', 3000, 6000]]
      rows.append(row(60, 'many', 0, [*calls, *messages], turns=turns))
    path = rollouts.write('grpo', step, rows)
    with path.open('a') as lines:
      for i in range(per_step):
        group = f'{step}-{i // 8}'
        lines.write(short.replace('"STEP"', str(step - 1)).replace('GROUP', group) + '\n')
    log.write('grpo', step, {'critic/score/mean': 0.5})
  log.close()
  return report.build(workdir)


def compact(tmp_path, *rows):
  path = tmp_path / 'rollouts' / 'grpo' / '000060.jsonl'
  writers.write_rows(path, rows)
  return transcripts.rollouts(tmp_path, STAGES)


def test_turns_rewards_and_versions_of_an_episode_are_embedded(tmp_path):
  data, corrupt = compact(tmp_path, episode(0), episode(1))
  first, second = data['rows']
  assert corrupt == 0 and data['contexts'] == [CONTEXT]
  assert first['o'] == second['o'] == 0 and first['e'] != second['e'] and first['g'] == second['g']
  assert first['w'] == [[0, 5], [1, 13, ''.join(RESULT).replace('\ufffd\ufffd', 'é')], [0, 19]]
  assert first['h'] == [0.25, -0.25] and first['l'] == [[0, 5, 55], [13, 15, 57], [15, 19, 59]]


def test_steps_of_a_trajectory_are_one_episode(tmp_path):
  data, _ = compact(tmp_path, restarted(0), restarted(1))
  assert [r['e'] for r in data['rows']] == [0, 0] and [r['o'] for r in data['rows']] == [0, 1]
  assert [r['i'] for r in data['rows']] == ['1 of 2', '2 of 2']


@pytest.mark.parametrize(
  'fields',
  [
    {'turns': 3},
    {'turns': [['policy', 0, 2]]},
    {'turns': [['policy', 0, 9]]},
    {'turns': [['policy', 0, 0], ['policy', 0, 3]]},
    {'turns': [['policy', 1, 3]]},
    {'turns': [['god', 0, 3]]},
    {'turns': [['observation', 0, 3, 5]]},
    {'turn_rewards': ['x']},
    {'turn_rewards': 1.0},
    {'versions': [[0, 4, 1]]},
    {'versions': [[2, 1, 1]]},
    {'versions': [[0, 1, 'x']]},
    {'versions': [[0, 1]]},
  ],
)
def test_an_invalid_turn_costs_its_row_alone(tmp_path, fields):
  data, corrupt = compact(
    tmp_path, row(60, 'g', 0, ['a', 'b', 'c'], **fields), row(60, 'g', 1, ['a', 'b', 'c'])
  )
  assert corrupt == 1 and [r['u'] for r in data['rows']] == ['grpo/sums:g/0/1']


def test_a_row_whose_context_is_lost_is_shown_without_one(tmp_path):
  data, corrupt = compact(tmp_path, episode(1), {**episode(2), 'context_of': [7]})
  assert corrupt == 0 and all('o' not in r for r in data['rows']) and data['contexts'] == []


def wait(browser, condition):
  return WebDriverWait(browser, 20, poll_frequency=0.02).until(lambda _: condition())


def texts(browser, selector):
  return browser.execute_script(
    'return [...document.querySelectorAll(arguments[0])].map((n) => n.innerText)', selector
  )


def click(browser, selector):
  browser.execute_script('document.querySelector(arguments[0]).click()', selector)


def press(browser, *keys):
  browser.switch_to.active_element.send_keys(*keys)


def type_into(browser, label, value):
  browser.execute_script(
    """const node = document.querySelector(`[aria-label="${arguments[0]}"]`);
    if (node.value === arguments[1]) return; // The list is drawn again some time after an event.
    node.value = arguments[1];
    node.dispatchEvent(new Event('input'));""",
    label,
    value,
  )


def wait_for_count(browser, count):
  start = f'{count} rollout{"" if count == 1 else "s"} of '
  wait(browser, lambda: texts(browser, '#samples .foot span')[0].startswith(start))


def find(browser, text):
  """Filters to the only rollout with this text."""
  type_into(browser, 'Filter rollouts', 'no rollout has this text')
  wait_for_count(browser, 0)  # Earlier tests, too, leave one rollout.
  type_into(browser, 'Filter rollouts', text)
  wait_for_count(browser, 1)


def shown(browser):
  """uids in the first column of the dialog, one of each episode."""
  return texts(browser, '#episode .uid')


@pytest.fixture(scope='module')
def page(browser, file):
  open_page(browser, file)
  return browser


@pytest.fixture
def dialog(page, request):
  """The dialog with the tool-call episode 0, alone."""
  page.execute_script("document.getElementById('episode')?.close()")
  type_into(page, 'Filter rollouts', 'sums:tool/')
  wait_for_count(page, 6)
  page.execute_script("document.querySelector('.rollout .line').focus()")
  press(page, 'v')
  if texts(page, '#episode [data-value=true][aria-pressed=true]'):
    press(page, 'g')
  return page


@pytest.mark.full
def test_ten_thousand_rollouts_are_a_bounded_page_that_opens_in_three_seconds(page):
  assert texts(page, '#samples p')[0].startswith('All 10,0')
  assert page.execute_script("return document.querySelectorAll('*').length") < 8000
  loaded = 'const t = performance.getEntriesByType("navigation")[0]; return t.loadEventEnd'
  print('opened in ms:', page.execute_script(loaded))
  assert page.get_log('browser') == []


@pytest.mark.full
def test_rollouts_are_found_by_text_uid_step_and_reward(page):
  page.execute_script("document.getElementById('episode')?.close()")
  per_step = ROLLOUTS // 60 + 1
  for fields, count in (
    ({'step from': '58', 'step to': '59'}, 2 * per_step),
    ({'step from': '60', 'step to': '60', 'reward from': '0.5', 'reward to': '0.9'}, 2),
    ({'step from': '60', 'reward from': '3'}, 3),
    ({'Filter rollouts': 'sums:tool/0/4'}, 1),  # a uid
    ({'Filter rollouts': 'What is 12 + 34'}, 6),  # the rendered prompt
    ({'Filter rollouts': '46 é'}, 6),  # an observation
    ({'Filter rollouts': 'window.hacked = 1'}, 6),  # the policy
    (
      {'Filter rollouts': 'question restarted', 'reward from': '0.75'},
      2,
    ),  # all steps of an episode
  ):
    for label in ('Filter rollouts', 'step from', 'step to', 'reward from', 'reward to'):
      type_into(page, label, fields.get(label, ''))
    wait_for_count(page, count)
  for label in ('Filter rollouts', 'reward from'):
    type_into(page, label, '')


@pytest.mark.full
def test_an_episode_is_shown_as_a_conversation(dialog):
  assert shown(dialog) == ['grpo/sums:tool/0/0']
  assert texts(dialog, '.said > .turn b:first-child')[:2] == ['system', 'user']
  assert texts(dialog, '.turn.read pre')[:2] == ['You may call a calculator.', 'What is 12 + 34?']
  assert texts(dialog, '.turn.policy .head .muted') == ['turn 1 · 5 tokens', 'turn 2 · 6 tokens']
  assert texts(dialog, '.turn.policy .reward') == ['+0.25', '-0.25']
  assert texts(dialog, '.call') == ['add {"left":12}']
  assert texts(dialog, '.episode > header .muted')[0] == (
    '2 turns · 19 tokens · stop · versions 55 to 59'
  )
  # The observation is folded, with its beginning beside its role; its text is that of all its
  # tokens together.
  tool = '.turn.read:not([open])'
  assert texts(dialog, f'{tool} b') == ['tool'] and texts(dialog, f'{tool} .preview') == ['46 é']
  assert len(texts(dialog, '.turn.read pre')) == 2
  press(dialog, 'o')
  assert texts(dialog, '.turn.read pre')[2] == '46 é' and not texts(dialog, tool)
  press(dialog, 'o')


@pytest.mark.full
def test_text_of_a_policy_is_inert_and_hides_nothing(dialog):
  tokens = texts(dialog, '.turn.policy .token')
  assert HOSTILE in tokens and 'safe⟨U+202E⟩evil⟨U+202C⟩⟨U+200B⟩⟨U+0007⟩' in tokens
  assert dialog.execute_script('return window.hacked') is None
  assert not dialog.find_elements(By.CSS_SELECTOR, 'main img, main script')


@pytest.mark.full
def test_tokens_are_coloured_by_advantage_difference_and_version(dialog):
  def strengths():
    styles = dialog.execute_script(
      "return [...document.querySelectorAll('.turn.policy .token')].map((n) => n.style.background)"
    )
    return [float(style.rpartition('*')[2].rstrip(' )')) if style else 0 for style in styles]

  call, answer = len(CALL), len(ANSWER)
  assert strengths() == [1] * (call + answer)
  press(dialog, 'c')
  assert strengths() == [1] * (call + answer)
  press(dialog, 'c')
  # Versions 4, 2 and 0 batches older than the newest.
  assert strengths() == [1] * call + [0.707] * 2 + [0] * (answer - 2)
  assert [part.split() for part in texts(dialog, '#episode .scale')] == [['newest', '4', 'older']]
  press(dialog, 'c')
  assert strengths() == [0] * (call + answer)
  press(dialog, 'c')
  assert texts(dialog, '#episode .choice [data-value=advantage][aria-pressed=true]')


@pytest.mark.full
def test_a_group_stands_side_by_side_a_few_at_a_time(dialog):
  press(dialog, Keys.ARROW_RIGHT)
  assert shown(dialog) == ['grpo/sums:tool/0/1']
  press(dialog, 'g')
  assert shown(dialog) == [f'grpo/sums:tool/0/{i}' for i in (1, 0, 2, 3)]
  assert texts(dialog, '#episode .episode > header > div .reward') == ['✓ 1', '✗ 0', '✓ 2', '✓ 3']
  click(dialog, '.episodes > .next')
  assert shown(dialog) == [f'grpo/sums:tool/0/{i}' for i in (1, 0, 2, 3, 4, 5)]
  address = dialog.current_url.rpartition('#')[2]
  assert address == 'episode=grpo%2Fsums%3Atool%2F0%2F1'
  press(dialog, 'g')
  press(dialog, Keys.ESCAPE)
  wait(dialog, lambda: not shown(dialog))
  assert '#' not in dialog.current_url


@pytest.mark.full
def test_steps_of_a_trajectory_follow_each_other(page):
  page.execute_script("document.getElementById('episode')?.close()")
  type_into(page, 'Filter rollouts', 'sums:restarted/')
  wait_for_count(page, 2)
  page.execute_script("document.querySelector('.rollout .line').focus()")
  press(page, 'j')
  press(page, 'v')
  assert texts(page, '.said > .turn b:first-child') == [
    'prompt', 'policy', 'prompt of step 2 of 2', 'policy',
  ]  # fmt: skip
  assert texts(page, '.turn.policy .tokens') == ['first try', 'second try']
  assert texts(page, '#episode .bar [role=status]') == ['1 of 1 episode']


@pytest.mark.full
def test_a_long_turn_and_a_long_prompt_are_drawn_in_parts(page):
  page.execute_script("document.getElementById('episode')?.close()")
  find(page, 'sums:long/')
  page.execute_script("document.querySelector('.rollout .line').focus()")
  press(page, 'v')
  assert len(texts(page, '.turn.policy .token')) == 1500
  click(page, '.turn.policy .link')
  assert len(texts(page, '.turn.policy .token')) == 3000
  click(page, '.turn.read summary')
  wait(page, lambda: texts(page, '.turn.read pre'))
  text = texts(page, '.turn.read pre')[0]
  assert text.startswith('x' * 20_000) and text.endswith('30,000 more characters')


@pytest.mark.full
def test_thousands_of_calls_and_messages_are_a_bounded_number_of_nodes(page):
  page.execute_script("document.getElementById('episode')?.close()")
  find(page, 'sums:many/')
  page.execute_script("document.querySelector('.rollout .line').focus()")
  press(page, 'v')
  assert len(texts(page, '.call.no')) == 20 and len(texts(page, '.turn.read')) <= 41
  assert '2,980 more calls' in texts(page, '.turn.policy > .small')


@pytest.mark.full
def test_a_linked_group_fits_a_phone(browser, file):
  open_page(browser, file, width=390, scheme='dark')
  browser.get('about:blank')
  browser.get(f'{file.as_uri()}#episode=grpo%2Fsums%3Atool%2F0%2F2')
  wait(browser, lambda: shown(browser) == ['grpo/sums:tool/0/2'])
  press(browser, 'g')
  outside = """
    const parts = '#episode .top *, #episode .bar *, .episode:first-child *';
    const width = document.documentElement.clientWidth;
    return [...document.querySelectorAll(parts)]
      .filter((n) => n.checkVisibility() && n.getBoundingClientRect().right > width)
      .map((n) => n.outerHTML)"""
  assert browser.execute_script(outside) == []
  root = 'document.documentElement'
  assert browser.execute_script(f'return {root}.scrollWidth <= {root}.clientWidth')
  assert browser.get_log('browser') == []
