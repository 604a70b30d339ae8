"""The page for people who judge: keyboard, pairs, the saved file, and hostile answers."""

import dataclasses
import json

import pytest
from browsing import open_page
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from stored import issues, make_sample

from jaxrl_llm.app.offline import feedback
from jaxrl_llm.replay.awaited import Awaited
from jaxrl_llm.replay.inbox import given
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.runtime import report

HOSTILE = (
  '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
  '<a href="javascript:window.hacked=3">x</a>{{data}}<!-- \u202egood\u202c \u200b\x07\u3164 &lt;'
)


@pytest.fixture
def run(tmp_path):
  """A run in which two groups of two samples wait; one answer is hostile."""
  store = open_store(tmp_path / 'run' / 'replay')
  awaited = Awaited(scorers={'human': 1}, since=0.0, until=4e9, newest_version=0)
  for group in 'gh':
    uids = [f'{group}/{i}' for i in range(2)]
    store.at(0).issue(issues(uids))
    store.at(0).append([make_sample(uid) for uid in uids])
    texts = {uid: HOSTILE if uid == 'g/0' else f'answer {uid}\n  indented' for uid in uids}
    store.at(0).wait_for_rewards(texts, awaited)
  store.close()
  return tmp_path / 'run'


@pytest.fixture
def page(run, browser, tmp_path):
  """The page in the browser, whose downloads are in `tmp_path`."""
  file = tmp_path / 'page.html'
  assert feedback.export_groups(run / 'replay', None, file) == 2
  browser.execute_cdp_cmd(
    'Browser.setDownloadBehavior', {'behavior': 'allow', 'downloadPath': str(tmp_path / 'saved')}
  )
  browser.get_log('browser')
  open_page(browser, file)
  return browser


def press(browser, *keys):
  browser.find_element(By.TAG_NAME, 'h1').click()
  browser.execute_script('document.activeElement.blur()')
  for key in keys:
    ActionChains(browser).send_keys(key).perform()


def progress(browser):
  return browser.find_element(By.ID, 'progress').text


def saved(browser, folder, name):
  file = folder / 'saved' / name
  WebDriverWait(browser, 30).until(lambda _: file.exists() and file.read_text().endswith('\n'))
  return file


def test_samples_are_judged_with_keys_and_the_saved_file_is_imported(page, run, tmp_path):
  assert progress(page) == '1 of 4, 0 judged'
  press(page, '1')
  assert progress(page) == '1 of 4, 0 judged'  # A verdict needs a name.
  assert page.switch_to.active_element.get_attribute('id') == 'who'
  page.find_element(By.ID, 'who').send_keys('ann 10')
  assert progress(page) == '1 of 4, 0 judged'  # Digits in the name judge nothing.
  press(page, '1', '0', Keys.BACKSPACE, '5', 'n', '1')
  assert progress(page) == '4 of 4, 3 judged'
  press(page, 's')
  file = saved(page, tmp_path, 'run-single-ann-10.jsonl')
  assert [json.loads(line) for line in file.read_text().splitlines()] == [
    {'uid': uid, 'value': value, 'who': 'ann 10', 'attempt': 1, 'scorer': 'human'}
    for uid, value in (('g/0', 1), ('g/1', 0.5), ('h/1', 1))
  ]
  result = feedback.import_file(run / 'replay', file)
  assert (result.attached, result.refused) == (3, [])
  assert {v.uid: v.value for v in given(run / 'replay')} == {'g/0': 1, 'g/1': 0.5, 'h/1': 1}


def test_pairs_are_shown_side_by_side_and_become_verdicts(page, run, tmp_path):
  page.find_element(By.CSS_SELECTOR, '[data-value=pairs]').click()
  page.find_element(By.ID, 'who').send_keys('bob')
  assert progress(page) == '1 of 2, 0 judged'
  left, right = page.find_elements(By.CLASS_NAME, 'answer')
  assert left.rect['y'] == right.rect['y'] and left.rect['x'] < right.rect['x']
  press(page, Keys.ARROW_RIGHT)
  page.find_element(By.CSS_SELECTOR, '[data-key="0"]').click()
  press(page, 's')
  file = saved(page, tmp_path, 'run-pairs-bob.jsonl')
  assert feedback.import_file(run / 'replay', file).refused == []
  assert {v.uid: v.value for v in given(run / 'replay')} == {
    'g/0': 0.0, 'g/1': 1.0, 'h/0': 0.5, 'h/1': 0.5
  }  # fmt: skip


def test_each_judgement_has_the_name_of_its_time_and_each_mode_warns_until_it_is_saved(
  page, run, tmp_path
):
  def warns():
    return page.execute_script(
      "const leaving = new Event('beforeunload', { cancelable: true });"
      'window.dispatchEvent(leaving); return leaving.defaultPrevented'
    )

  who = page.find_element(By.ID, 'who')
  who.send_keys('ann\u3000b\u00a0 c')
  press(page, '1')
  page.find_element(By.CSS_SELECTOR, '[data-value=pairs]').click()
  press(page, '1', 's')
  saved(page, tmp_path, 'run-pairs-ann-b-c.jsonl')
  assert warns()
  page.find_element(By.CSS_SELECTOR, '[data-value=single]').click()
  who.clear()
  who.send_keys('bob')
  press(page, '0', 's')
  file = saved(page, tmp_path, 'run-single-bob.jsonl')
  assert not warns()
  assert feedback.import_file(run / 'replay', file).refused == []
  assert {(v.uid, v.who) for v in given(run / 'replay')} == {('g/0', 'ann b c'), ('g/1', 'bob')}


def test_a_hostile_answer_is_shown_as_text_and_runs_nothing(page, tmp_path):
  shown = page.find_element(By.CSS_SELECTOR, '[data-uid="g/0"] pre').text
  for text in (
    '</script><script>',
    '<img src=x',
    '{{data}}',
    '&lt;',
    '⟨U+202E⟩good',
    '⟨U+0007⟩⟨U+3164⟩',
  ):
    assert text in shown
  assert '\u202e' not in shown and '\u200b' not in shown
  assert not page.find_elements(By.CSS_SELECTOR, 'img, a, iframe')
  assert page.execute_script('return window.hacked === undefined')
  assert not [row for row in page.get_log('browser') if row['level'] == 'SEVERE']
  text = (tmp_path / 'page.html').read_text()
  assert "default-src 'none'" in text and HOSTILE not in text


def test_an_episode_of_several_turns_is_shown_as_a_whole(run, browser, tmp_path):
  (first, *_), file = feedback.waiting_groups(run / 'replay'), tmp_path / 'page.html'
  said = ({'role': 'tool', 'content': HOSTILE}, {'role': 'assistant', 'content': 'the last turn'})
  group = dataclasses.replace(first, turns={'g/1': said})
  data = {'name': 'run', 'kind': 'feedback', 'groups': [group.to_json()]}
  report.write(file, report.render(data, feedback._SCRIPTS))
  browser.get_log('browser')
  open_page(browser, file)
  browser.find_element(By.ID, 'who').send_keys('ann')
  press(browser, '1')
  shown = browser.find_elements(By.CSS_SELECTOR, '[data-uid="g/1"] .said')
  assert [node.text.split('\n')[0] for node in shown] == ['tool', 'assistant']
  assert shown[1].text.endswith('the last turn') and '⟨U+202E⟩good' in shown[0].text
  assert browser.execute_script('return window.hacked === undefined')


def test_many_long_answers_stay_usable(run, browser, tmp_path):
  """2,000 groups, and an answer of a megabyte: the page draws one item at a time."""
  store = open_store(run / 'replay')
  store.recover(1)
  uids = [f'm{group}/{i}' for group in range(2000) for i in range(2)]
  store.at(1).issue(issues(uids))
  store.at(1).append([make_sample(uid) for uid in uids])
  awaited = Awaited(scorers={'human': 1}, since=0.0, until=4e9, newest_version=0)
  store.at(1).wait_for_rewards(dict.fromkeys(uids, 'x') | {'m0/0': 'word ' * 200_000}, awaited)
  store.close()
  file = tmp_path / 'page.html'
  assert feedback.export_groups(run / 'replay', None, file) == 2002
  open_page(browser, file)
  browser.find_element(By.ID, 'who').send_keys('ann')
  press(browser, *'1111', '0')
  assert progress(browser) == '6 of 4004, 5 judged'
  assert len(browser.find_elements(By.CLASS_NAME, 'answer')) == 1
