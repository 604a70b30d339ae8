"""Partial rollouts of workflows of several turns, in this process and in explorers, with a
deterministic engine and a real store.

A token depends on its request's key, its sample's index and its position alone.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import random

import crews
import exploring
import numpy as np
import pytest
from clocks import simulated

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Role, Segment
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.records.span import Piece, Span, by_request, decode_span, encode_span, joined
from jaxrl_llm.core.types import Version
from jaxrl_llm.master.exploring.partial import (
  GroupCut,
  PartialConfig,
  PartialGenerator,
  keep_loss,
)
from jaxrl_llm.master.exploring.runner import GroupRunner
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.rewards.api import Reward
from jaxrl_llm.rollout.api import BUDGET, Request, Sampling
from jaxrl_llm.rollout.episodes.workflow import Episodes

BUDGETED = PartialConfig(budget=3, max_spans=6, groups=8)
LONGEST, TURNS = 24, 3


def drawn_length(request, index):
  """1 to 5 tokens."""
  return random.Random(f'length {request.key} {index}').randrange(1, 6)


class Lengths(exploring.ContinuingEngine):
  def __init__(self, tokenizer, *, delays=0):
    super().__init__(tokenizer, drawn_length, delays=delays)


class Talk(Episodes):
  """Three turns, each of which the environment answers with a letter."""

  says = staticmethod(lambda episode: 'h')

  async def play(self, episode):
    episode.observe(episode.task.prompt)
    for _ in range(TURNS):
      await episode.act()
      await asyncio.sleep(0)
      episode.observe(self.says(episode))


class Run(exploring.Batches):
  def __init__(self, tokenizer, store, *, delays=0, make=Talk, **config):
    super().__init__(
      tokenizer,
      store,
      Lengths(tokenizer, delays=delays),
      delays=delays,
      max_tokens=LONGEST,
      make=make,
      **{'partial': BUDGETED, **config},
    )

  def batches(self, first, end):
    """The members of each batch from `first` to before `end`."""
    return [batch for batch, _ in simulated(self.collect(first, end), deadline_s=60)]


def content(batches):
  """What is trained on, whoever generated it."""
  return [
    (
      member.sample.uid,
      member.sample.tokens.tolist(),
      member.sample.role.tolist(),
      member.sample.loss_mask.tolist(),
      member.sample.behaviour_logprobs.tolist(),
      [(s.start, s.end, s.version.step, s.finish) for s in member.sample.segments],
      member.reward,
      member.masked,
    )
    for batch in batches
    for member in batch
  ]


def test_turns_that_are_cut_anywhere_are_those_in_one_go(tokenizer, tmp_path):
  answers = []
  for partial in (BUDGETED, None):
    store = exploring.new_store(tmp_path / f'{partial is None}')
    run = Run(tokenizer, store, partial=partial)
    members = [member for batch in run.batches(0, 6) for member in batch]
    answers.append({m.sample.uid: m for m in members})
    store.close()
  both = answers[0].keys() & answers[1].keys()
  assert len(both) >= 12
  versions = collections.Counter()
  for uid in both:
    cut, whole = answers[0][uid].sample, answers[1][uid].sample
    for field in ('tokens', 'role', 'sampled', 'behaviour_logprobs'):
      np.testing.assert_array_equal(getattr(cut, field), getattr(whole, field))
    assert cut.finish_reason == whole.finish_reason
    assert answers[0][uid].completion == answers[1][uid].completion
    assert (whole.role == Role.TOOL).sum() == TURNS - 1
    versions[len({segment.version.step for segment in cut.segments})] += 1
  assert versions[2] and max(versions) >= 3, 'they are cut'


def test_a_sample_spends_its_budget_over_its_turns_and_is_scored_and_trained_on_once(
  tokenizer, store
):
  run = Run(tokenizer, store)
  batches = run.batches(0, 5)
  by_iteration = collections.defaultdict(collections.Counter)
  for member in (member for batch in batches for member in batch):
    sample = member.sample
    for segment in sample.segments:
      by_iteration[sample.uid][segment.version.step] += segment.end - segment.start
    newest = max(segment.version.step for segment in sample.segments)
    group = [
      other for batch in batches for other in batch if other.sample.group_id == sample.group_id
    ]
    last = max(s.version.step for other in group for s in other.sample.segments)
    trained = {s.version.step for s in sample.segments if sample.loss_mask[s.start : s.end].any()}
    assert trained == ({last} if newest == last else set()) and member.masked == (not trained)
  spent = [counts for counts in by_iteration.values() if len(counts) > 1]
  assert len(spent) >= 4
  for counts in spent:
    *earlier, _ = [counts[step] for step in sorted(counts)]
    assert {count % BUDGETED.budget for count in earlier} == {0}, 'it is spent to the last token'
  assert set(run.scored.values()) == {1}
  ends = {s.finish for batch in batches for m in batch for s in m.sample.segments}
  assert ends == {'any', BUDGET}
  report = audit(store)
  assert report.ok and set(report.uses) == {1}, report.lines


def test_timing_and_a_kill_change_nothing(tokenizer, tmp_path):
  contents = []
  for delays in range(4):
    store = exploring.new_store(tmp_path / f'{delays}')
    run = Run(tokenizer, store, delays=delays)
    contents.append((content(run.batches(0, 5)), run.states))
    store.close()
  assert all(other == contents[0] for other in contents)
  for step in (1, 2, 4):
    store = exploring.new_store(tmp_path / f'killed {step}')
    killed = Run(tokenizer, store, delays=5)
    before = killed.batches(0, step)
    store.close()
    store = open_store(tmp_path / f'killed {step}', synchronous='normal')
    store.recover(step)
    again = Run(tokenizer, store, attempt=store.attempt)
    again.explorer.restore(json.loads(killed.states[step]))
    assert content([*before, *again.batches(step, 5)]) == contents[0][0]
    report = audit(store)
    assert report.ok and set(report.uses) == {1}, report.lines
    store.close()


def test_what_a_turn_cost_is_not_generated_again(tokenizer, store):
  run = Run(tokenizer, store)
  run.batches(0, 5)
  asked = collections.Counter(
    (request.key, index, request.begun)
    for request in run.engine.requests
    for index in range(request.first, request.first + request.samples)
  )
  returned = 2 * run.exploration.config.groups_per_batch
  assert sum(count > 1 for count in asked.values()) <= returned * TURNS
  assert any(begun for _, _, begun in asked)


def test_a_workflow_that_does_not_repeat_itself_wastes_tokens_and_a_warning_says_so(
  tokenizer, store, caplog
):
  """Its samples are those of its last run, and nothing of the others is in them."""

  class Fickle(Talk):
    calls = 0

    def says(self, episode):
      Fickle.calls += 1
      return exploring.LETTERS[Fickle.calls % 8]

  run = Run(tokenizer, store, make=Fickle, max_dropped_groups=0)
  members = [member for batch in run.batches(0, 6) for member in batch]
  assert len(members) == 24 and all(member.sample.segments for member in members)
  for member in members:
    policy = member.sample.role == Role.POLICY
    turns = np.flatnonzero(np.diff(policy.astype(int)) == 1) + 1
    # The logprobs of each turn count from its first token: none is from another request.
    assert all(member.sample.behaviour_logprobs[start] == -1 for start in turns)
  assert 'made other requests than in an earlier batch' in caplog.text
  report = audit(store)
  assert report.ok and set(report.uses) == {1}, report.lines
  assert set(report.reasons) <= {'dropped(given up)'}, 'only what the end of the stage leaves'


def test_an_engine_that_fails_ends_the_group(tokenizer, store):
  run = Run(tokenizer, store)
  run.engine.fail_at, run.engine.error = 9, UserError('the engine is gone')
  with pytest.raises(BaseException) as raised:
    run.batches(0, 4)
  assert 'the engine is gone' in repr(raised.value)


class Explored(Run):
  """Its workflow runs in explorers, which are tasks of this event loop, over a real socket."""

  def __init__(self, directory, store, *names, partial=BUDGETED, keeps=True, **config):
    self.setting = crews.Setting(
      directory,
      lambda config, hub, tokenizer, most, *_: Talk(hub, tokenizer, max_tokens=most),
      max_tokens=LONGEST,
      **config,
    )
    super().__init__(self.setting.tokenizer, store, partial=partial)
    self.names = names
    self.setting.crew._hub = self.exploration.hub
    runner: GroupRunner = self.exploration.runner
    runner.workflow, runner._may_repeat = self.setting.crew, keeps

  def batches(self, first, end, meanwhile=None):
    async def main():
      async with self.setting.running(*self.names), contextlib.AsyncExitStack() as stack:
        if meanwhile is not None:
          task = asyncio.create_task(meanwhile(self))
          stack.callback(task.cancel)
        return [batch for batch, _ in await self.collect(first, end)]

    return asyncio.run(main())


def test_explorers_generate_what_this_process_generates_also_when_one_is_lost(tokenizer, tmp_path):
  store = exploring.new_store(tmp_path / 'here')
  here = Run(tokenizer, store)
  wanted = content(here.batches(0, 4))
  store.close()

  async def lose(run):
    """Loses an explorer with all of its first requests unanswered."""
    run.engine.hold = lambda request: 'b' not in run.setting.explorers
    while len(run.engine.requests) < 4:
      await asyncio.sleep(0.01)
    run.setting.explorers.pop('a').cancel()
    run.setting.come('b')

  for name, meanwhile in (('whole', None), ('lost', lose)):
    store = exploring.new_store(tmp_path / name)
    run = Explored(tmp_path / name, store, 'a', silent_s=3.0)
    assert content(run.batches(0, 4, meanwhile)) == wanted
    report = audit(store)
    assert report.ok and set(report.uses) == {1}, report.lines
    store.close()


@pytest.mark.parametrize('keeps', [True, False])
def test_without_a_budget_a_lost_explorer_costs_nothing_that_its_master_has_asked_for(
  tokenizer, tmp_path, keeps
):
  store = exploring.new_store(tmp_path / 'here')
  here = Run(tokenizer, store, partial=None)
  wanted = content(here.batches(0, 3))
  store.close()

  async def lose(run):
    """Loses an explorer with turns answered, and others that the engine is working on."""
    run.engine.hold = lambda request: (
      len(run.engine.requests) > 6 and 'b' not in run.setting.explorers
    )
    while len(run.engine.requests) < 7:
      await asyncio.sleep(0.01)
    run.setting.explorers.pop('a').cancel()
    run.setting.come('b')

  store = exploring.new_store(tmp_path / 'lost')
  run = Explored(tmp_path / 'lost', store, 'a', partial=None, keeps=keeps, silent_s=3.0)
  assert content(run.batches(0, 3, lose)) == wanted
  asked = collections.Counter(
    (request.key, request.prompt, request.first + i)
    for request in run.engine.requests
    for i in range(request.samples)
  )
  assert (max(asked.values()) == 1) == keeps, 'the engine works on each request once'
  report = audit(store)
  assert report.ok and set(report.uses) == {1}, report.lines
  store.close()


def one_request(key, samples=1, *, first=0, prompt=(5,), max_tokens=9):
  return Request(
    uid='grpo/g/0',
    prompt=prompt,
    max_tokens=max_tokens,
    stop_ids=(1,),
    samples=samples,
    first=first,
    key=(key,),
  )


class Rolled:
  """What `collect` reads of a rollout."""

  verdict = None

  def __init__(self, index):
    self.sample = dataclasses.make_dataclass('Sample', ['sample_index'])(index)


def cut(engine, config, spans, *, waits_for_all=False):
  """One iteration of a group whose samples are one request: the spans that it adds."""

  async def main():
    partials = PartialGenerator(engine.generate)

    async def workflow():
      rollouts = []
      async for index, _ in partials.generate(one_request(7, len(spans), max_tokens=LONGEST)):
        rollouts.append(Rolled(index))
        if not waits_for_all:
          yield rollouts[-1]
      for rollout in rollouts if waits_for_all else ():
        yield rollout

    with pytest.raises(GroupCut) as raised:
      await partials.collect('grpo/g/0', config, spans, workflow())
    assert raised.value.by_clock == waits_for_all
    return raised.value.spans

  return simulated(main(), deadline_s=600)


def test_samples_that_begin_are_asked_for_together_and_those_that_continue_one_by_one(tokenizer):
  engine, config = Lengths(tokenizer), PartialConfig(budget=1, max_spans=9)
  new = cut(engine, config, [[]] * 8)
  assert [(r.first, r.samples, r.max_tokens) for r in engine.requests] == [(0, 8, 1)]
  unfinished = {index for index, span in new.items() if span.finish is None}
  assert new.keys() == {*range(8)} and len(unfinished) > 2
  # Three samples lose their span, and begin again while others continue: two neighbours together.
  first, second = next((i, j) for i in unfinished for j in unfinished if j - i > 1)
  lost = {first, second, second + 1}
  spans = [[] if index in lost else [new[index]] for index in range(8)]
  engine.requests.clear()
  later = cut(engine, config, spans)
  asked = {(r.first, r.samples, r.begun) for r in engine.requests}
  continued = {(i, 1, 1) for i in unfinished - lost}
  together = {(first, 3, 0)} if second == first + 1 else {(first, 1, 0), (second, 2, 0)}
  assert asked == continued | together
  assert later.keys() == unfinished | lost


def test_a_workflow_that_waits_for_all_answers_is_ended_by_the_clock(tokenizer):
  config = PartialConfig(budget=1, max_spans=9)
  whole = cut(Lengths(tokenizer), config, [[], [], [], []])
  waiting = cut(Lengths(tokenizer), config, [[], [], [], []], waits_for_all=True)
  assert {i: span.tokens.tolist() for i, span in waiting.items()} == {
    i: span.tokens.tolist() for i, span in whole.items()
  }


def test_a_request_that_is_made_twice_is_answered_once_and_others_pass_by(tokenizer):
  engine = Lengths(tokenizer)

  async def main():
    partials = PartialGenerator(engine.generate)

    async def answer(request):
      return [(i, c.tokens.tolist()) async for i, c in partials.generate(request)]

    async def workflow():
      both = await asyncio.gather(*[answer(one_request(7)) for _ in range(2)])
      assert both[0] == both[1]
      elsewhere = dataclasses.replace(one_request(7), uid='grpo/other/0', samples=2)
      assert len(await answer(elsewhere)) == 2
      assert {index for index, _ in await answer(one_request(7, 3, first=5))} == {5, 6, 7}
      colder = dataclasses.replace(one_request(7), sampling=Sampling(temperature=0.5))
      assert len(await answer(colder)) == 1
      yield Rolled(0)

    config = PartialConfig(budget=LONGEST)
    return await partials.collect('grpo/g/0', config, [[]], workflow())

  assert len(asyncio.run(main())) == 1
  assert [request.samples for request in engine.requests] == [1, 2, 3, 1]


def test_an_error_of_the_engine_reaches_the_request_which_may_be_made_again(tokenizer):
  engine = Lengths(tokenizer)
  engine.fail_at, engine.error = 0, UserError('too long for the engine')

  async def main():
    partials = PartialGenerator(engine.generate)

    async def workflow():
      with pytest.raises(UserError, match='too long'):
        async for _ in partials.generate(one_request(7)):
          pass
      assert [index async for index, _ in partials.generate(one_request(7))] == [0]
      yield Rolled(0)

    config = PartialConfig(budget=LONGEST)
    return await partials.collect('grpo/g/0', config, [[]], workflow())

  assert len(asyncio.run(main())) == 1


def test_a_sample_that_gives_up_waiting_is_continued_all_the_same(tokenizer):
  async def main():
    engine = exploring.ContinuingEngine(tokenizer, lambda request, index: 4)
    partials = PartialGenerator(engine.generate)

    async def workflow():
      with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
          async for _ in partials.generate(one_request(7)):
            pass
      yield Rolled(0)
      yield Rolled(1)

    config = PartialConfig(budget=1, max_spans=9)
    with pytest.raises(GroupCut) as cut:
      await partials.collect('grpo/g/0', config, [[], []], workflow())
    return cut.value

  cut = simulated(main(), deadline_s=60)
  assert cut.spans[0].finish is None and not cut.by_clock


def part(*tokens, step=0, finish=None):
  segments = (
    Segment(start=0, end=len(tokens), version=Version(0, step), engine='e', finish='any'),
  )
  return Span(
    tokens=np.array(tokens, np.int32),
    logprobs=-np.array(tokens, np.float32),
    segments=segments,
    finish=finish,
  )


def test_a_span_of_several_requests_is_kept_bit_for_bit():
  first = joined(
    [part(1, 2, finish=Finish.STOP), part(3)], [Piece('x', 2, Finish.STOP), Piece('y', 3, None)]
  )
  again = decode_span(encode_span(first))
  assert again.pieces == first.pieces and again.tokens.tolist() == [1, 2, 3]
  second = joined([part(4, 5, step=1, finish=Finish.STOP)], [Piece('y', 2, Finish.STOP)])
  found = by_request([again, second])
  assert [*found] == ['x', 'y']
  assert (found['x'].tokens.tolist(), found['x'].finish) == ([1, 2], Finish.STOP)
  assert (found['y'].tokens.tolist(), found['y'].finish) == ([3, 4, 5], Finish.STOP)
  assert [(s.start, s.end, s.version.step) for s in found['y'].segments] == [(0, 1, 0), (1, 3, 1)]


def test_spans_from_before_pieces_are_those_of_a_single_request():
  second = joined([part(4, 5, finish=Finish.STOP)], [Piece('y', 2, Finish.STOP)])
  found = by_request([part(1), second])
  assert [*found] == [''] and found[''].tokens.tolist() == [1, 4, 5]
  assert by_request([]) == {}


@pytest.mark.parametrize(
  'pieces', [[('x', 1, None)], [('x', 2, None), ('y', 2, None)], [('x', 3, None)]]
)
def test_a_span_whose_pieces_do_not_fit_is_refused(pieces):
  with pytest.raises(ValueError, match='pieces'):
    joined([part(1, 2)], [Piece(*piece) for piece in pieces])


def test_rewards_of_turns_that_do_not_enter_the_loss_are_those_of_the_first_turn_that_does(
  tokenizer, store
):
  run = Run(tokenizer, store, partial=PartialConfig(budget=LONGEST))
  member = run.batches(0, 1)[0][0]
  sample = member.sample
  turns = [
    dataclasses.replace(segment, version=Version(0, step))
    for segment, step in zip(sample.segments, (1, 2, 2), strict=True)
  ]
  sample = dataclasses.replace(sample, segments=tuple(turns))
  score = Score(uid=sample.uid, scorer='judge', value=1.0, turn_values=(0.5, 0.25))
  reward = Reward(value=1.0, parts={}, turn_values=(0.5, 0.25))
  member = dataclasses.replace(member, sample=sample, scores=(score,), reward=reward, masked=False)
  (kept,) = keep_loss([member], BUDGETED)
  assert kept.reward.turn_values == kept.scores[0].turn_values == (0.75,)
  assert (kept.reward.total, kept.reward.value) == (1.75, 1.0)
  newest = dataclasses.replace(turns[2], version=Version(0, 3))
  sample = dataclasses.replace(sample, segments=(*turns[:2], newest))
  (kept,) = keep_loss([dataclasses.replace(member, sample=sample)], BUDGETED)
  assert (kept.reward.turn_values, kept.reward.value, kept.reward.total) == ((), 1.75, 1.75)
