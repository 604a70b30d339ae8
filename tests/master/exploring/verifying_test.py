"""A judge behind a real endpoint verifies samples before they are trained on, and is asked about
none of them twice.
"""

import asyncio
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap

import exploring
import pytest
from paths import ROOT
from services import HANG, Service, chat, hangs_after, kill_at_line

from jaxrl_llm.app.composition.stages import build_processors
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.master.exploring.processors import ProcessorConfig
from jaxrl_llm.replay.audit import audit

SCORE = 'verified'


def completion_of(body) -> str:
  """The completion that a request to the judge is about: the last text between its markers."""
  prompt = body['messages'][0]['content']
  key = re.findall(r'between <text-(\w+)> and', prompt)[-1]
  return re.findall(f'<text-{key}>\n(.*?)\n</text-{key}>', prompt, re.DOTALL)[-1]


def verdict(score):
  return chat(json.dumps({'reasoning': 'so', 'score': score}))


def by_first_letter(body):
  """Half of the letters are good."""
  return verdict(1.0 if completion_of(body)[:1] in 'aceg' else 0.25)


def is_good(member) -> bool:
  return member.completion[:1] in 'aceg'


def explored(service, tmp_path, *, batches=2, judge=lambda attempt: 1.0, **options):
  """Batches of an explorer whose samples a judge verifies, the explorer, and an audit's report."""
  tokenizer = exploring.make_tokenizer(tmp_path / 'tokenizer')
  store = exploring.new_store(tmp_path / 'replay')

  async def main():
    async with service.running():
      given = {'addresses': [service.address], 'model': 'j', 'first_wait_s': 0.01, **options}
      config = ProcessorConfig(name=SCORE, kind='judge', options=given)
      exploration = exploring.Exploration(
        tokenizer, store, judge, processors=build_processors([config])
      )
      return await exploration.batches(batches), exploration

  with contextlib.closing(store):
    found, exploration = asyncio.run(main())
    report = audit(store)
    derived = store.derived([m.sample.uid for batch, _ in found for m in batch], SCORE)
  assert report.ok, report
  return found, exploration, report, derived


def test_samples_that_the_judge_rejects_are_dropped_and_its_scores_are_in_the_store(tmp_path):
  service = Service(by_first_letter)
  found, _, report, derived = explored(service, tmp_path)
  members = [member for batch, _ in found for member in batch]
  assert members and all(map(is_good, members))
  assert {uid: row['score'] for uid, row in derived.items()} == {
    member.sample.uid: 1.0 for member in members
  }
  counts = sum((collections.Counter(counts) for _, counts in found), collections.Counter())
  removed = counts[f'processors/{SCORE}/in'] - counts[f'processors/{SCORE}/out']
  assert counts[f'dropped/{SCORE}'] == removed > 0
  assert report.reasons[f'dropped({SCORE})'] == removed


def test_a_verdict_may_mask_a_sample_or_shape_its_reward(tmp_path):
  found, _, _, _ = explored(Service(by_first_letter), tmp_path / 'mask', action='mask')
  members = [member for batch, _ in found for member in batch]
  assert {member.masked for member in members} == {True, False}
  assert all(member.masked is not is_good(member) for member in members)
  found, _, _, derived = explored(
    Service(by_first_letter), tmp_path / 'shape', action='shape', weight=2.0
  )
  members = [member for batch, _ in found for member in batch]
  assert {member.reward.value for member in members} == {1.0 + 2.0, 1.0 + 0.5}
  assert all((member.reward.value == 3.0) is is_good(member) for member in members)
  assert all('reward' in row and 'score' in row for row in derived.values())


def test_the_judge_may_be_asked_about_correct_answers_only(tmp_path):
  service = Service(lambda body: verdict(0.0))
  right = lambda attempt: float(attempt.completion[:1] in 'aceg')  # noqa: E731
  found, _, _, _ = explored(service, tmp_path, judge=right, ask='correct')
  assert service.seen and all(completion_of(body)[:1] in 'aceg' for body in service.seen)
  assert not any(is_good(member) for batch, _ in found for member in batch)


@pytest.mark.parametrize('action', ['drop', 'keep'])
def test_a_sample_without_a_verdict_is_dropped_or_kept_as_configured(tmp_path, action):
  def broken(body):
    return verdict(1.0) if completion_of(body)[:1] in 'aceg' else 400

  found, _, _, derived = explored(Service(broken), tmp_path, on_failure=action)
  members = [member for batch, _ in found for member in batch]
  assert all(map(is_good, members)) is (action == 'drop')
  failed = [row for row in derived.values() if row['score'] is None]
  assert bool(failed) is (action == 'keep') and all('400' in row['reason'] for row in failed)


def test_a_judge_that_never_answers_holds_a_group_up_to_its_deadline(tmp_path):
  def hangs(body):
    return verdict(1.0) if completion_of(body)[:1] in 'aceg' else HANG

  found, _, _, _ = explored(Service(hangs), tmp_path, batches=1, deadline_s=0.2)
  assert all(is_good(member) for batch, _ in found for member in batch)


def test_rubrics_verify_too(tmp_path):
  def scores(body):
    good = completion_of(body)[:1] in 'aceg'
    return chat(json.dumps({'scores': {'right': float(good), 'short': 0.5}}))

  criteria = [{'name': 'right', 'text': 'x', 'weight': 3}, {'name': 'short', 'text': 'y'}]
  found, _, _, _ = explored(Service(scores), tmp_path, mode='rubric', criteria=criteria)
  assert all(is_good(member) for batch, _ in found for member in batch)


def test_another_run_with_the_journal_asks_nothing_twice(tmp_path):
  service = Service(by_first_letter)
  journal = str(tmp_path / 'journal.jsonl')
  first, *_ = explored(service, tmp_path / 'a', cache_file=journal)
  asked = [completion_of(body) for body in service.seen]
  prompts = [body['messages'][0]['content'] for body in service.seen]
  assert asked and len(set(prompts)) == len(prompts)
  again, *_ = explored(service, tmp_path / 'b', cache_file=journal)
  assert len(service.seen) == len(asked)
  uids = [[[m.sample.uid for m in batch] for batch, _ in found] for found in (first, again)]
  assert uids[0] == uids[1]


CHILD = """
import asyncio, pathlib, sys
import exploring
from jaxrl_llm.app.composition.stages import build_processors
from jaxrl_llm.master.exploring.processors import ProcessorConfig

address, directory, store = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
tokenizer = exploring.make_tokenizer(directory / f'tokenizer-{store}')
options = {'addresses': [address], 'model': 'j', 'first_wait_s': 0.01}
options['cache_file'] = str(directory / 'journal.jsonl')
processors = build_processors([ProcessorConfig(name='judge', options=options)])
exploration = exploring.Exploration(
  tokenizer, exploring.new_store(directory / store), lambda attempt: 1.0, processors=processors
)
found = asyncio.run(exploration.batches(2))
print([member.sample.uid for batch, _ in found for member in batch], flush=True)
"""


@pytest.mark.full
def test_a_run_that_is_killed_while_it_asks_does_not_ask_again_what_was_answered(tmp_path):
  reply, answered = hangs_after(3, by_first_letter)
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), f'{ROOT}/tests/support'])}

  def start(store):
    arguments = [service.address, str(tmp_path), store]
    return subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(CHILD), *arguments],
      env=environment,
      stdout=subprocess.PIPE,
      text=True,
    )

  service = Service(reply)
  journal = tmp_path / 'journal.jsonl'
  with service.in_thread():
    child = start('killed')
    kill_at_line(child, journal, 3)
    before = len(service.seen)
    service.answer = by_first_letter
    resumed, _ = start('resumed').communicate(timeout=120)
    whole = len(service.seen)
  later = [body['messages'][0]['content'] for body in service.seen[before:whole]]
  assert later and not set(later) & set(answered) and len(set(later)) == len(later)
  found, *_ = explored(Service(by_first_letter), tmp_path / 'undisturbed')
  assert eval(resumed) == [member.sample.uid for batch, _ in found for member in batch]


@pytest.mark.parametrize(
  ('options', 'reason'),
  [
    ({}, 'addresses is empty'),
    ({'mode': 'pairwise'}, "mode 'pairwise' compares samples"),
    ({'deadline_s': 0}, 'deadline_s is 0'),
    ({'min_score': float('inf')}, 'min_score is inf'),
    ({'discover': '*'}, 'discover'),
    ({'action': 'keep'}, 'action'),
  ],
)
def test_options_that_cannot_be_are_one_line(options, reason):
  given = {'model': 'j', **({'addresses': ['http://127.0.0.1:1']} if options else {}), **options}
  if 'discover' in options:
    del given['addresses']
  with pytest.raises(UserError, match=reason):
    build_processors([ProcessorConfig(name='judge', options=given)])
