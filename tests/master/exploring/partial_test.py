"""Partial rollouts with a deterministic engine and a real store, counted by hand.

A token depends on its request's key, its sample's index and its position alone. How many tokens an
answer has, its stop token among them, is scripted.
"""

import asyncio
import collections
import dataclasses
import json

import exploring
import jax.numpy as jnp
import numpy as np
import pytest
from clocks import LOOP_CLOCK, simulated
from stored import make_sample

from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.sources import PastConfig
from jaxrl_llm.config.load import load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.records.span import Span, joined
from jaxrl_llm.core.types import Version
from jaxrl_llm.master.batches import step_rows
from jaxrl_llm.master.exploring import partial as partials
from jaxrl_llm.master.exploring.endings import NothingToLearn
from jaxrl_llm.master.exploring.limits import TaskLimits
from jaxrl_llm.master.exploring.partial import PartialConfig
from jaxrl_llm.master.exploring.runner import GroupOrder, _Hold
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.master.exploring.waves import WaveSize
from jaxrl_llm.master.records import _partial_metrics
from jaxrl_llm.objectives.correction import importance_weights
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.browse import history, summary
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.rollout.api import BUDGET, Completion, Sampling
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
from jaxrl_llm.rollout.repetition import RepetitionDetection
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.workflow import rollout_sample
from jaxrl_llm.runtime.metrics import resolve

BUDGETED = PartialConfig(budget=3, max_spans=4)
LAST_2, ALL = (
  dataclasses.replace(BUDGETED, loss='last_k', last_k=2),
  dataclasses.replace(BUDGETED, loss='all'),
)
LONGEST = 8


class Scripted(exploring.ContinuingEngine):
  """An engine whose answers have `length(task number, index)` tokens."""

  def __init__(self, tokenizer, length, *, delays=0):
    super().__init__(tokenizer, self.length_of, delays=delays)
    self._prompts = [tuple(tokenizer.render_prompt(t.prompt)) for t in exploring.make_tasks(24)]
    self._by_number = length

  def length_of(self, request, index):
    prompt = request.prompt[: len(request.prompt) - request.begun]
    return self._by_number(self._prompts.index(prompt), index)


def one_long(number, index):
  """Of task 0, the second answer has 7 tokens and the first one; all others have 2."""
  return {(0, 0): 1, (0, 1): 7}.get((number, index), 2)


def various(number, index):
  return 1 + (7 * number + 3 * index * index + number * index) % LONGEST


class Run(exploring.Batches):
  def __init__(self, tokenizer, store, length, *, delays=0, batches=None, **config):
    super().__init__(
      tokenizer,
      store,
      Scripted(tokenizer, length, delays=delays),
      delays=delays,
      max_tokens=LONGEST,
      batches=batches,
      **{'partial': BUDGETED, **config},
    )

  def batches(self, first, end):
    """Members and counts of each batch from `first` to before `end`."""
    return simulated(self.collect(first, end), deadline_s=30)


def names(run, batch):
  """(task number, sample index) of each member of a batch."""
  return [(run.exploration.number(member), member.sample.sample_index) for member in batch]


def spans(sample):
  return [
    (s.start - sample.prompt_len, s.end - sample.prompt_len, s.version.step, s.finish)
    for s in sample.segments
  ]


def content(batches):
  """What is trained on, whoever generated it."""
  return [
    (
      member.sample.uid,
      member.sample.tokens.tolist(),
      member.sample.loss_mask.tolist(),
      [span[:3] for span in spans(member.sample)],
      member.reward.value,
      member.masked,
    )
    for batch, _ in batches
    for member in batch
  ]


def test_an_answer_of_three_iterations_is_scored_and_trained_once_and_its_last_span_is_in_the_loss(
  tokenizer, store
):
  run = Run(tokenizer, store, one_long, batches=3)
  (first, counts), (second, _), (third, last) = run.batches(0, 3)
  # Task 0 spends its budget in both of the first batches, and another group takes its place.
  assert names(run, first) == [(1, 0), (1, 1), (2, 0), (2, 1)]
  assert names(run, second) == [(3, 0), (3, 1), (4, 0), (4, 1)]
  assert names(run, third) == [(0, 0), (0, 1), (5, 0), (5, 1)]
  partial = {f'partial/{name}': n for name, n in (('cut', 1), ('continued', 0), ('open', 1))}
  assert {name: counts[name] for name in partial} == partial
  assert (last['partial/cut'], last['partial/continued'], last['partial/open']) == (0, 1, 0)
  short, long = (member.sample for member in third[:2])
  assert spans(long) == [(0, 3, 0, BUDGET), (3, 6, 1, BUDGET), (6, 7, 2, 'any')]
  assert np.flatnonzero(long.loss_mask).tolist() == [long.prompt_len + 6]
  assert long.behaviour_logprobs[long.prompt_len :].tolist() == [-1, -2, -3, -4, -5, -6, -7]
  assert (long.finish_reason, short.finish_reason) == (Finish.STOP, Finish.STOP)
  # It ended in the first iteration, so that none of its tokens are of the current weights.
  assert not short.loss_mask.any() and [member.masked for member in third[:2]] == [True, False]
  places = store.at(3).seal([short.uid, long.uid])
  rows = [row for member in third[:2] for row in step_rows(member, places)]
  assert [row.version_step for row in rows] == [None, 2], 'staleness counts trained tokens only'
  whole = [member.sample for member in [*first, *second, *third[2:]]]
  assert all(sample.loss_mask[sample.prompt_len :].all() for sample in whole)
  assert set(run.scored.values()) == {1} and len(run.scored) == 12
  asked = [
    (r.first, r.samples, r.begun, r.max_tokens)
    for r in run.engine.requests
    if r.uid == f'grpo/{run.exploration.tasks[0].uid}/0'
  ]
  assert asked == [(0, 2, 0, 3), (1, 1, 3, 3), (1, 1, 6, 2)]
  report = audit(store)
  assert report.ok, report.lines
  assert (report.states['trained'], report.uses, report.live) == (12, {1: 12}, ())


def test_a_group_that_finishes_after_the_batch_is_full_is_generated_again_under_the_next_weights(
  tokenizer, tmp_path
):
  """Two of three groups finished in each of the first batches, so that the third one starts three
  for the two that it needs, and all three finish. A kill after it changes nothing.
  """
  store = exploring.new_store(tmp_path / 'whole')
  run = Run(tokenizer, store, one_long)
  whole = run.batches(0, 4)
  (third, counts), (fourth, last) = whole[2:]
  assert names(run, third) == [(0, 0), (0, 1), (5, 0), (5, 1)]
  assert [counts[f'partial/{name}'] for name in ('cut', 'returned', 'open')] == [0, 1, 1]
  assert names(run, fourth) == [(6, 0), (6, 1), (7, 0), (7, 1)]
  assert {spans(member.sample)[0][2] for member in fourth} == {3}, 'of the weights of its batch'
  assert [last[f'partial/{name}'] for name in ('continued', 'returned', 'open')] == [1, 0, 0]
  uid = f'grpo/{run.exploration.tasks[6].uid}/0'
  assert [r.begun for r in run.engine.requests if r.uid == uid] == [0, 0]
  assert set(run.scored.values()) == {1}, 'it is not scored in vain'
  assert audit(store).ok
  store.close()
  store = exploring.new_store(tmp_path / 'killed')
  killed = Run(tokenizer, store, one_long, delays=2)
  found = killed.batches(0, 3)
  store.close()
  store = open_store(tmp_path / 'killed', synchronous='normal')
  store.recover(3)
  again = Run(tokenizer, store, one_long, attempt=store.attempt)
  again.explorer.restore(json.loads(killed.states[3]))
  assert content([*found, *again.batches(3, 4)]) == content(whole)
  report = audit(store)
  assert report.ok and report.states['void'] == 2, report.lines
  store.close()


def test_waiting_for_a_place_does_not_count_towards_a_groups_time_limit():
  async def main(after_s):
    async def placed():
      await asyncio.sleep(10.0)
      return True

    async with asyncio.timeout(5.0) as limit:
      await asyncio.sleep(2.0)
      assert await _Hold(limit).wait(placed)
      await asyncio.sleep(after_s)

  simulated(main(2.0))
  with pytest.raises(TimeoutError):
    simulated(main(4.0))


def test_waiting_for_a_place_does_not_raise_the_straggler_limit(tokenizer, store, monkeypatch):
  """A group that is generated in one second and waits ten for its place."""
  monkeypatch.setattr('jaxrl_llm.master.exploring.runner.time', LOOP_CLOCK)
  run = Run(tokenizer, store, one_long, groups_per_batch=1, limits=TaskLimits(straggler_factor=2.0))
  runner = run.explorer._runner

  async def main():
    async def placed():
      await asyncio.sleep(10.0)
      return True

    begun = LOOP_CLOCK.monotonic()
    run.engine.hold = lambda request: LOOP_CLOCK.monotonic() < begun + 1.0
    order = GroupOrder('grpo/g/0', run.exploration.tasks[1], 0, Sampling(), [[], []])
    await runner.run(order, placed=placed)

  simulated(main())
  assert runner._limit() == ('straggler', pytest.approx(2.0, abs=0.1))


@pytest.mark.parametrize('groups_per_batch', [1, 2])
def test_which_groups_a_batch_takes_does_not_depend_on_which_of_them_finishes_first(
  tokenizer, tmp_path, groups_per_batch
):
  """Waves of four groups. Tasks 0 and 1 cannot be scored, which becomes known when all of them have
  finished, in any order.
  """

  class Unscorable(Run):
    def judge(self, attempt):
      number = self.exploration.number(attempt)
      return None if number < 2 else super().judge(attempt)

  found = []
  for order in ((0, 1, 2, 3), (1, 2, 3, 0), (2, 1, 3, 0), (3, 1, 2, 0), (3, 2, 1, 0)):
    store = exploring.new_store(tmp_path / ''.join(map(str, order)))
    run = Unscorable(
      tokenizer,
      store,
      lambda number, index: 2,
      groups_per_batch=groups_per_batch,
      partial=PartialConfig(budget=3, groups=4),
    )
    due = {f'grpo/{run.exploration.tasks[n].uid}/0': 0.1 * (i + 1) for i, n in enumerate(order)}
    run.engine.hold = lambda request, due=due: (
      asyncio.get_running_loop().time() < due.get(request.uid, 0.0)
    )
    run.explorer._waves.restore({'groups_per_finished': 4.0 / groups_per_batch})
    batches = run.batches(0, 3)
    assert [number for number, _ in names(run, batches[0][0])][::2] == [2, 3][:groups_per_batch]
    found.append((content(batches), [counts for _, counts in batches], run.states))
    store.close()
  assert all(other == found[0] for other in found)


def test_with_more_groups_than_a_branch_permits_the_waiting_ones_go_first(tokenizer, tmp_path):
  """Four groups are parked, and the branch permits three."""
  partial = PartialConfig(budget=3, max_spans=9, groups=6)

  def length(number, index):
    return 1 if number in (4, 5) else 7

  store = exploring.new_store(tmp_path / 'parent')
  run = Run(tokenizer, store, length, partial=partial)
  run.batches(0, 1)
  store.close()
  store = exploring.new_store(tmp_path / 'branch')
  fewer = dataclasses.replace(partial, groups=3)
  branch = Run(tokenizer, store, length, partial=fewer, batches=4)
  branch.explorer.restore(json.loads(run.states[1]))
  batches = branch.batches(1, 4)
  started = [json.loads(branch.states[step])['explorer']['started'] for step in (2, 3, 4)]
  assert started[0] == json.loads(run.states[1])['explorer']['started'] == 6, 'no new group'
  assert started == sorted(started)
  assert sorted({number for batch, _ in batches[:2] for number, _ in names(branch, batch)}) == [
    *range(4)
  ]
  report = audit(store)
  assert report.ok and report.live == () and set(report.uses) == {1}, report.lines
  store.close()


def test_waves_are_as_large_as_the_last_batch_suggests():
  waves = WaveSize(max_groups=10)
  assert waves.for_finished(4) == 4
  waves.start(6)
  for _ in range(4):
    waves.finish()
  waves.close()
  assert [waves.for_finished(needed) for needed in (1, 4, 8)] == [2, 6, 10]
  again = WaveSize(max_groups=10)
  again.restore(json.loads(json.dumps(waves.state())))
  assert again.for_finished(4) == 6
  waves.start(3)
  waves.close()
  assert waves.for_finished(4) == 10, 'none finished'


def test_an_answer_in_spans_is_the_answer_in_one_go(tokenizer, tmp_path):
  answers = []
  for partial in (BUDGETED, None):
    store = exploring.new_store(tmp_path / f'{partial is None}')
    run = Run(tokenizer, store, various, partial=partial)
    members = [member for batch, _ in run.batches(0, 8) for member in batch]
    answers.append({m.sample.uid: (m.sample.tokens.tolist(), m.completion) for m in members})
    store.close()
  both = answers[0].keys() & answers[1].keys()
  assert len(both) > 20
  assert all(answers[0][name] == answers[1][name] for name in both)


def test_timing_changes_nothing(tokenizer, tmp_path):
  found = []
  for delays in range(5):
    store = exploring.new_store(tmp_path / f'{delays}')
    run = Run(tokenizer, store, various, delays=delays)
    batches = run.batches(0, 5)
    found.append((content(batches), [counts for _, counts in batches], run.states))
    store.close()
  assert all(other == found[0] for other in found)
  assert any(len(span) > 1 for _, _, _, span, _, _ in found[0][0])


@pytest.mark.parametrize('commit', [1, 2, 3, 4])
@pytest.mark.parametrize('further', [0, 1])
def test_a_run_killed_with_open_partials_resumes_exactly(tokenizer, tmp_path, commit, further):
  """`further` batches were completed after the commit, and are done again."""
  store = exploring.new_store(tmp_path / 'whole')
  wanted = content(Run(tokenizer, store, various, batches=6).batches(0, 6))
  store.close()
  store = exploring.new_store(tmp_path / 'killed')
  run = Run(tokenizer, store, various, delays=3, batches=6)
  found = content(run.batches(0, commit + further)[:commit])
  store.close()
  store = open_store(tmp_path / 'killed', synchronous='normal')
  store.recover(commit)
  open_now = store.counts()['partial']
  assert open_now == 2 * sum(
    group['parked'] for group in json.loads(run.states[commit])['explorer']['groups']
  )
  assert open_now or commit in (2, 4), 'the other batches leave groups open'
  again = Run(tokenizer, store, various, delays=1, attempt=store.attempt, batches=6)
  again.explorer.restore(json.loads(run.states[commit]))
  found += content(again.batches(commit, 6))
  assert found == wanted
  report = audit(store)
  assert report.ok, report.lines
  assert report.live == () and report.states['partial'] == 0
  assert set(report.uses) == {1} and report.states['trained'] == 24
  store.close()


@pytest.mark.parametrize('bound', [1, 2])
@pytest.mark.parametrize('loss', [BUDGETED, LAST_2, ALL], ids=lambda partial: partial.loss)
def test_above_bound_0_parked_groups_continue_under_newer_weights_within_the_bound(
  tokenizer, tmp_path, bound, loss
):
  lags, versions = set(), set()
  for delays in range(2):
    store = exploring.new_store(tmp_path / f'{delays}')
    run = Run(tokenizer, store, various, delays=delays, batches=8, bound=bound, partial=loss)
    run.training = 10 * delays
    for step, (batch, _) in enumerate(run.batches(0, 8)):
      for member in batch:
        sample = member.sample
        trained = [s for s in sample.segments if sample.loss_mask[s.start : s.end].any()]
        lags |= {step - s.version.step for s in trained}
        versions.add(len({s.version.step for s in sample.segments}))
    report = audit(store)
    assert report.ok and report.live == (), report.lines
    assert (set(report.uses), report.states['trained']) == ({1}, 32)
    assert set(run.scored.values()) == {1}
    store.close()
  assert max(versions) >= 2
  assert max(lags) <= bound + {'current_only': 0, 'last_k': 1, 'all': LONGEST}[loss.loss]
  assert loss is BUDGETED or max(lags) > bound, 'older spans are trained on'


def test_above_bound_0_a_group_that_a_kill_finds_in_a_later_span_goes_on_from_its_spans(
  tokenizer, tmp_path
):
  store = exploring.new_store(tmp_path)
  run = Run(tokenizer, store, one_long, bound=1, batches=5)
  run.engine.hold = lambda request: request.begun > 0
  run.batches(0, 2)
  state = json.loads(run.states[2])
  assert [(g['number'], g['parked'], g['ended']) for g in state['explorer']['groups']][:1] == [
    (0, False, False)
  ]
  store.close()
  store = open_store(tmp_path, synchronous='normal')
  store.recover(2)
  again = Run(tokenizer, store, one_long, bound=1, batches=5, attempt=store.attempt)
  again.explorer.restore(state)
  members = [member for batch, _ in again.batches(2, 5) for member in batch]
  long = members[names(again, members).index((0, 1))].sample
  assert [span[:2] for span in spans(long)] == [(0, 3), (3, 6), (6, 7)]
  assert spans(long)[0] == (0, 3, 0, BUDGET)
  asked = [r.begun for r in again.engine.requests if r.uid == long.group_id]
  assert asked == [3, 6], 'the first span is not generated again'
  report = audit(store)
  assert report.ok and report.live == () and set(report.uses) == {1}, report.lines
  assert report.states['trained'] == 20
  store.close()


@pytest.mark.parametrize(
  ('config', 'wanted'),
  [
    (BUDGETED, [[0, 0, 0, 0], [0, 0, 1, 1]]),
    (LAST_2, [[0, 0, 1, 1], [0, 0, 1, 1]]),
    (dataclasses.replace(LAST_2, last_k=4), [[1, 1, 1, 1], [0, 1, 1, 1]]),
    (ALL, [[1, 1, 1, 1], [1, 1, 1, 1]]),
  ],
)
def test_which_tokens_enter_the_loss(config, wanted):
  """Of two answers of four tokens. The newest weights are those of step 5."""

  def sample(uid, *steps):
    segments = [
      Segment(start=4 + i, end=5 + i, version=Version(1, step), engine='e', finish=BUDGET)
      for i, step in enumerate(steps)
    ]
    return dataclasses.replace(make_sample(uid, 8), segments=tuple(segments))

  samples = partials.mask_older([sample('g/0', 2, 2, 4, 4), sample('g/1', 1, 3, 5, 5)], config)
  assert [s.loss_mask[4:].astype(int).tolist() for s in samples] == wanted


def test_each_token_is_corrected_by_the_weights_that_sampled_it():
  """The weights that are trained give every token a probability of 1/2. The first span gave each
  1/2, the second 1/8, the third 1: ratios of 1, 4 (truncated to 2) and 1/2.
  """
  spans = [
    Span(
      tokens=np.array([5, 6], np.int32),
      logprobs=np.log(np.full(2, p, np.float32)),
      segments=(Segment(start=0, end=2, version=Version(0, step), engine='e', finish=BUDGET),),
      finish=Finish.STOP if step == 2 else None,
    )
    for step, p in enumerate((0.5, 0.125, 1.0))
  ]
  whole = joined(spans)
  completion = Completion(
    tokens=whole.tokens, logprobs=whole.logprobs, finish=whole.finish, segments=whole.segments
  )
  task = exploring.make_tasks(1)[0]
  sample = rollout_sample(task, 0, 0, [1, 2], completion, group='grpo/t/0', temperature=1.0)
  for partial, counted in ((ALL, [1, 1, 2, 2, 0.5, 0.5]), (LAST_2, [2, 2, 0.5, 0.5])):
    (kept,) = partials.mask_older([sample], partial)
    weights = importance_weights(
      jnp.full((1, 8), jnp.log(0.5)),
      jnp.array(kept.behaviour_logprobs[None]),
      jnp.array((kept.loss_mask & kept.sampled)[None]),
      jnp.ones((1, 8), int),
      segments=1,
      mode='token',
    )
    np.testing.assert_allclose(weights[0, kept.loss_mask], counted, rtol=1e-6)


@pytest.mark.parametrize(
  'fields', [{'loss': 'last_k'}, {'last_k': 2}, {'loss': 'all', 'last_k': 2}]
)
def test_last_k_goes_with_its_number(fields):
  with pytest.raises(UserError, match=r'rollout\.partial\.last_k: got .* with loss '):
    PartialConfig(budget=4, **fields)


def test_in_its_last_span_an_answer_is_generated_to_its_end(tokenizer, store):
  run = Run(tokenizer, store, one_long, partial=PartialConfig(budget=2, max_spans=2))
  (_, _), (second, _) = run.batches(0, 2)
  long = second[1].sample
  assert [span[:3] for span in spans(long)] == [(0, 2, 0), (2, 7, 1)]


def test_an_answer_in_spans_ends_at_the_limit_of_its_stage(tokenizer, store):
  run = Run(tokenizer, store, one_long, response_lengths=((0, LONGEST - 3),))
  (_, _), (second, _) = run.batches(0, 2)
  long = second[1].sample
  assert (long.response_len, long.finish_reason) == (LONGEST - 3, Finish.LENGTH)


def test_a_budget_above_the_longest_answer_changes_nothing(tokenizer, tmp_path):
  found = []
  for partial in (PartialConfig(budget=LONGEST), None):
    store = exploring.new_store(tmp_path / f'{partial is None}')
    found.append(content(Run(tokenizer, store, various, partial=partial).batches(0, 4)))
    store.close()
  assert found[0] == found[1]


def test_open_partials_can_be_looked_at(tokenizer, store):
  async def main():
    run = Run(tokenizer, store, one_long)
    async with run.explorer.running():
      run.engine._version = Version(0, 0)
      run.explorer.advance(0, 0)
      await run.explorer.collect()
      name = f'grpo/{run.exploration.tasks[0].uid}/0/1'
      assert 'partials: 2 spans' in ' '.join(summary(store.directory).lines)
      assert 'attempt 1, step 0: partial' in history(store.directory, name)
      assert (
        'span of step 0: 3 tokens; unfinished; weights 0.0' in history(store.directory, name)[-1]
      )
      report = audit(store)
      assert report.ok and report.states['partial'] == 2 and name in report.live
      assert store.counts()['partial'] == 2
      await asyncio.sleep(0)

  simulated(main(), deadline_s=30)


def test_where_no_answer_fits_the_budget_the_number_of_groups_stays_bounded(tokenizer, tmp_path):
  """Each answer has 7 tokens: three times the budget of 3. The four groups that may be open spend
  it, then the oldest are continued until two have ended.
  """
  found = []
  for delays in range(4):
    store = exploring.new_store(tmp_path / f'{delays}')
    run = Run(tokenizer, store, lambda number, index: 7, delays=delays)
    batches = run.batches(0, 3)
    assert [names(run, batch) for batch, _ in batches] == [
      [(2 * step, 0), (2 * step, 1), (2 * step + 1, 0), (2 * step + 1, 1)] for step in range(3)
    ]
    assert all(counts['partial/open'] <= 2 for _, counts in batches)
    assert audit(store).ok
    found.append(content(batches))
    store.close()
  assert all(other == found[0] for other in found)


def test_in_a_new_store_parked_groups_begin_anew_when_their_turn_comes(tokenizer, tmp_path):
  """As in a branch with --reset_store. Four groups are parked, more than the two that a batch may
  start at once.
  """
  partial = PartialConfig(budget=3, max_spans=9, groups=6)

  def length(number, index):
    return 1 if number in (4, 5) else 7

  store = exploring.new_store(tmp_path / 'parent')
  run = Run(tokenizer, store, length, partial=partial)
  run.batches(0, 1)
  store.close()
  state = json.loads(run.states[1])
  parked = [group['number'] for group in state['explorer']['groups'] if group['parked']]
  assert parked == [0, 1, 2, 3]
  found = []
  for delays in range(3):
    store = exploring.new_store(tmp_path / f'{delays}')
    branch = Run(tokenizer, store, length, delays=delays, partial=partial, batches=4)
    branch.explorer.restore(json.loads(run.states[1]))
    batches = branch.batches(1, 4)
    for step, (batch, _) in enumerate(batches, 1):
      assert all(spans(member.sample)[-1][2] == step for member in batch), 'of its own weights'
    report = audit(store)
    assert report.ok and report.live == (), report.lines
    found.append(content(batches))
    store.close()
  assert all(other == found[0] for other in found)


def test_groups_that_the_end_of_a_stage_leaves_parked_are_counted(tokenizer, store):
  ((_, counts),) = Run(tokenizer, store, one_long, batches=1).batches(0, 1)
  assert (counts['dropped/given_up'], counts['partial/open']) == (2, 0)
  report = audit(store)
  assert report.ok and report.reasons == {'dropped(given up)': 2}, report.lines


def test_a_limit_that_was_lowered_below_an_open_answer_is_refused_in_one_line(tokenizer, store):
  exploration = Run(tokenizer, store, one_long).exploration
  task = exploration.tasks[0]

  def span(tokens, finish):
    end = Segment(start=0, end=tokens, version=Version(0, 0), engine='e', finish='budget')
    return Span(
      tokens=np.ones(tokens, np.int32),
      logprobs=np.zeros(tokens, np.float32),
      segments=(end,),
      finish=finish,
    )

  for limit, finish, says in ((3, None, 'continues after 3'), (2, Finish.STOP, 'has 3')):
    exploration.runner.workflow.max_tokens = limit
    order = GroupOrder(f'grpo/{task.uid}/0', task, 0, Sampling(), [[span(3, finish)], []])
    with pytest.raises(UserError, match=rf'max_response_length: got {limit}, .* {says} tokens; '):
      asyncio.run(exploration.runner.run(order))


def test_a_group_that_is_masked_as_a_whole_is_dropped_with_the_true_reason(tokenizer, store):
  """The only answer that is of the current weights is masked by a processor."""

  def mask(members, step):
    return [dataclasses.replace(m, masked=m.masked or m.sample.response_len == 7) for m in members]

  run = Run(
    tokenizer, store, one_long, processors=(('repetition', mask),), max_dropped_groups=0, batches=3
  )
  with pytest.raises(NothingToLearn, match='all of its 2 samples are masked: 1 have no token') as e:
    run.batches(0, 3)
  assert '1 are masked by a processor (repetition)' in str(e.value)


@pytest.mark.parametrize('fields', [{'budget': 0}, {'budget': 4, 'max_spans': 0}])
def test_a_budget_that_means_nothing_is_refused(fields):
  with pytest.raises(UserError, match=r'rollout\.partial\.\w+: got 0, wanted at least 1'):
    PartialConfig(**fields)


@pytest.mark.parametrize(
  ('rollout', 'source', 'line'),
  [
    ({'engine': 'fixtures.own_engine:ENGINE'}, {}, 'wanted embedded or vllm'),
    ({'max_steps': 2}, {}, 'rollout.max_steps 2; wanted 1'),
    ({'embedded': EmbeddedConfig(prefill_buckets=(16,))}, {}, 'prefill_buckets up to 16'),
    ({'partial': LAST_2}, {'bound': 0}, "stages.grpo.source.bound 0 and loss 'last_k'"),
    ({'partial': PartialConfig(budget=4, groups=31)}, {'bound': 1}, 'bound + 1 = 32 above rollout'),
    (
      {'engine': 'vllm', 'vllm': VllmConfig(discover=2)},
      {'bound': 0},
      'bound 0 and rollout.vllm.discover, with which servers join and leave',
    ),
    (
      {'engine': 'vllm', 'vllm': VllmConfig(lengths=(64, None))},
      {'bound': 0},
      'bound 0 and servers for sequences of 64 tokens (rollout.vllm.lengths or min_length); wanted',
    ),
    (
      {},
      {'response_lengths': ((0, 9), (5, 8))},
      'response_lengths [9, 8], which would cut answers that have begun; wanted ascending lengths',
    ),
    ({}, {'past': PastConfig(groups=1, max_uses=2)}, 'stages.grpo.source.past; remove it'),
    (
      {},
      {'selection': SelectionConfig(kind='pairs')},
      "selection 'pairs'; wanted 'all' or 'mixed'",
    ),
    ({'partial': PartialConfig(budget=4, groups=3)}, {}, 'bound + 1 = 16 above rollout.partial'),
  ],
)
def test_options_unsupported_by_partial_rollouts_are_refused_in_one_line(rollout, source, line):
  config = load_file('configs/quickstart.py', Config)
  sft, grpo = config.stages
  embedded = {'partial': BUDGETED, 'embedded': EmbeddedConfig()}

  def build(rollout, source):
    return dataclasses.replace(
      config,
      rollout=dataclasses.replace(
        config.rollout, **{**embedded, 'max_response_length': 64, **rollout}
      ),
      stages=(sft, dataclasses.replace(grpo, source=dataclasses.replace(grpo.source, **source))),
    )

  assert build({}, {}).rollout.partial == BUDGETED
  assert build({'engine': 'vllm', 'embedded': config.rollout.embedded}, {}).rollout.partial
  with pytest.raises(UserError, match=r'^rollout\.partial: cannot be combined with ') as refused:
    build(rollout, source)
  assert line in str(refused.value) and '\n' not in str(refused.value)


@pytest.mark.parametrize('begun', [0, 4])
def test_an_answer_that_repeats_itself_where_its_budget_ends_has_ended(begun):
  whole = np.array([4, 5, 6, 4, 5, 6], np.int32)

  def generated(tokens):
    end = Segment(start=0, end=len(tokens), version=Version(0, 1), engine='e', finish='length')
    return Completion(
      tokens=tokens,
      logprobs=np.zeros(len(tokens), np.float32),
      finish=Finish.LENGTH,
      segments=(end,),
    )

  sampling = Sampling(repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=2))
  before = partials._new_span(generated(whole[:begun]), None, 9, sampling) if begun else None
  assert before is None or (before.finish, before.segments[-1].finish) == (None, 'budget')
  span = partials._new_span(generated(whole[begun:]), before, 9, sampling)
  assert (span.finish, span.segments[-1].finish) == (Finish.REPETITION, 'repetition')
  assert partials._new_span(generated(whole[begun:]), before, 9, Sampling()).finish is None


def test_a_masked_sample_is_not_trained_on(tokenizer, store):
  ((batch, _),) = Run(tokenizer, store, one_long, batches=1).batches(0, 1)
  samples = [member.sample for member in batch]
  rows = [
    step_rows(
      dataclasses.replace(member, masked=number == 0), {member.sample.uid: ('file', number)}
    )[0]
    for number, member in enumerate(batch)
  ]
  # Four answers of two tokens each.
  assert resolve(_partial_metrics(rows, samples))['partial/trained_ratio'] == 6 / 8


@pytest.mark.parametrize('bound', [0, 1])
def test_every_generated_token_is_in_one_class(tokenizer, store, bound):
  """Also those of spans, of groups that a full batch returns, and of the last groups."""
  run = Run(tokenizer, store, various, delays=3, bound=bound)
  ledgers, running = [], run.explorer.complete

  def complete():
    running()
    ledgers.append(run.explorer.take_tokens() | {'generated': run.engine.generated})
    ledgers[-1]['open'] = run.exploration.hub.take_metrics()['goodput/tokens/open']

  run.explorer.complete = complete
  run.batches(0, 6)
  ledgers.append(run.explorer.take_tokens() | {'generated': run.engine.generated, 'open': 0})
  total = collections.Counter()
  for ledger in ledgers:
    total.update({name: ledger[name] for name in ('trained', 'dropped', 'discarded')})
    stocks = sum(ledger[name] for name in ('waiting', 'partial', 'open'))
    assert sum(total.values()) + stocks == ledger['generated']
  assert max(ledger['partial'] for ledger in ledgers) > 0 and total['trained'] > 0
