"""Processors: each against numbers by hand, their order and lineage, and through the explorer into
a real store.
"""

import asyncio
import dataclasses

import exploring
import jax
import numpy as np
import pytest

from jaxrl_llm.app.composition.stages import build_processors, build_stages
from jaxrl_llm.app.schema import AlgorithmConfig, Config, StageConfig
from jaxrl_llm.app.sources import PastConfig, Rollouts
from jaxrl_llm.config.load import load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.master.exploring.limits import TaskLimits
from jaxrl_llm.master.exploring.processors import PROCESSORS, ProcessorConfig, process
from jaxrl_llm.master.exploring.recall import recall
from jaxrl_llm.master.exploring.selection import Experience, SelectionConfig, choose
from jaxrl_llm.parallel.mesh import build_mesh
from jaxrl_llm.replay import browse
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.rewards.api import Reward
from jaxrl_llm.rollout.api import Completion
from jaxrl_llm.rollout.workflow import rollout_sample

TASK = exploring.make_tasks(1)[0]


def member(
  i, value, *, tokens=(5, 6, 7), correct=False, finish=Finish.STOP, version=3, logprob=-1.0, **parts
):
  completion = Completion(
    tokens=np.array(tokens, np.int32),
    logprobs=np.full(len(tokens), logprob, np.float32),
    finish=finish,
    segments=(
      Segment(start=0, end=len(tokens), version=Version(0, version), engine='e', finish='stop'),
    ),
  )
  sample = rollout_sample(TASK, 0, i, [1, 2], completion, group='g', temperature=1.0)
  reward = Reward(value=value, parts=dict(parts), correct=correct)
  return Experience(sample=sample, task=TASK, completion='', scores=(), reward=reward)


def run(members, *configs, step=3):
  """Each configuration a kind, or a pair of it and its options."""
  whole = [config if isinstance(config, tuple) else (config, {}) for config in configs]
  processors = build_processors(
    [ProcessorConfig(name=kind, options=options) for kind, options in whole]
  )
  return process(processors, members, step)


def values(processed):
  return [m.reward.value for m in processed.members]


def names(processed):
  return [m.sample.sample_index for m in processed.members]


def test_records_that_contradict_themselves_are_left_out():
  members = [member(0, 1.0), member(1, 1.0, logprob=0.5), member(2, 0.0)]
  nothing = dataclasses.replace(members[2].sample, loss_mask=np.zeros(5, bool))
  uncovered = dataclasses.replace(members[0].sample, uid='g/4', sample_index=4, segments=())
  members += [
    dataclasses.replace(members[2], sample=dataclasses.replace(nothing, uid='g/3', sample_index=3)),
    dataclasses.replace(members[0], sample=uncovered),
  ]
  done = run(members, 'aligned')
  assert names(done) == [0, 2] and done.dropped == {'aligned': ['g/1', 'g/3', 'g/4']}
  assert done.counts == {'aligned/in': 5, 'aligned/out': 2} and done.lineage == []


@pytest.mark.parametrize(('max_age', 'left'), [(0, 0), (1, 0), (2, 2), (3, 2)])
def test_a_group_is_as_fresh_as_its_oldest_token(max_age, left):
  done = run(
    [member(0, 1.0, version=5), member(1, 1.0, version=3)], ('fresh', {'max_age': max_age}), step=5
  )
  assert len(done.members) == left


def test_groups_without_variance_are_left_out_before_any_rounding():
  equal = [member(i, 0.1) for i in range(3)]
  assert run(equal, 'reward_std').members == [] and run(equal, 'reward_std').dropped == {
    'reward_std': ['g/0', 'g/1', 'g/2']
  }
  assert len(run([member(0, 0.1), member(1, np.nextafter(0.1, 1.0))], 'reward_std').members) == 2
  spread = [member(0, 0.0), member(1, 1.0)]  # deviation 0.5
  assert len(run(spread, ('reward_std', {'min_std': 0.49})).members) == 2
  assert run(spread, ('reward_std', {'min_std': 0.5})).members == []

  # Turns count: they make the one group differ, and the other not.
  def earning(member, *turns):
    return dataclasses.replace(member, reward=dataclasses.replace(member.reward, turn_values=turns))

  assert len(run([earning(member(0, 1.0), 0.5), member(1, 1.0)], 'reward_std').members) == 2
  assert run([earning(member(0, 0.0), 0.75, 0.25), member(1, 1.0)], 'reward_std').members == []


@pytest.mark.parametrize(
  ('correct', 'kept'), [((0, 0, 0), False), ((1, 0, 0), True), ((1, 1, 1), False)]
)
def test_dynamic_sampling_keeps_groups_of_right_and_wrong_answers(correct, kept):
  members = [member(i, 0.5, correct=bool(right)) for i, right in enumerate(correct)]
  assert bool(run(members, 'dynamic_sampling').members) is kept


def test_cut_answers_stay_in_the_group_and_are_masked():
  done = run([member(0, 0.0, finish=Finish.LENGTH), member(1, 1.0)], 'mask_truncated')
  assert [m.masked for m in done.members] == [True, False]
  assert done.lineage == [('g/0', 'mask_truncated', {'masked': True})]


@pytest.mark.parametrize(
  ('options', 'rewards', 'masked'),
  [
    ({}, [0.25 - 1.0, 1.0], [False, False]),
    ({'penalty': 0.5}, [0.25 - 0.5, 1.0], [False, False]),
    ({'penalty': 0.0, 'mask': True}, [0.25, 1.0], [True, False]),
  ],
)
def test_answers_that_repetition_ended_are_penalised_or_masked(options, rewards, masked):
  members = [member(0, 0.25, finish=Finish.REPETITION), member(1, 1.0)]
  done = run(members, ('repetition', options))
  assert (values(done), [m.masked for m in done.members]) == (rewards, masked)
  assert [row[:2] for row in done.lineage] == [('g/0', 'repetition')]


@pytest.mark.parametrize('penalty', [-1.0, float('inf')])
def test_a_penalty_that_rewards_or_is_infinite_is_refused(penalty):
  with pytest.raises(UserError, match='processor repetition: penalty'):
    run([member(0, 1.0)], ('repetition', {'penalty': penalty}))


@pytest.mark.parametrize(
  ('options', 'expected'),
  [
    ({}, [1.0 + 0.75, 0.5 + 0.25]),
    ({'offset': -0.5, 'weight': 2.0}, [1.0 + 0.5, 0.5 - 0.5]),
    ({'operation': 'subtract', 'weight': 2.0}, [1.0 - 1.5, 0.5 - 0.5]),
    ({'operation': 'multiply'}, [0.75, 0.125]),
    ({'operation': 'divide', 'offset': 0.25}, [1.0, 1.0]),
  ],
)
def test_shaping_by_a_score(options, expected):
  members = [member(0, 1.0, **{'judge/quality': 0.75}), member(1, 0.5, **{'judge/quality': 0.25})]
  done = run(members, ('shape', {'key': 'judge/quality', **options}))
  assert values(done) == pytest.approx(expected)
  assert done.members[0].reward.parts == {'judge/quality': 0.75}, 'the raw score stays'
  changed = [
    (m.sample.uid, m.reward.value, now) for m, now in zip(members, values(done), strict=True)
  ]
  assert done.lineage == [
    (uid, 'shape', {'reward': [was, now]}) for uid, was, now in changed if was != now
  ]


def test_a_score_that_is_not_there_and_a_division_by_zero_are_said():
  with pytest.raises(UserError, match=r"g/0 has no score 'judge'; it has \['other'\]"):
    run([member(0, 1.0, other=1.0)], ('shape', {'key': 'judge'}))
  with pytest.raises(UserError, match='g/0 would be divided by 0'):
    run([member(0, 1.0, judge=0.0)], ('shape', {'key': 'judge', 'operation': 'divide'}))


def test_diversity_rewards_unusual_answers_and_decays():
  """Pairs of answers 0 and 1 are the same three, of answer 2 another three: the mean is (2, 2, 2,
  1, 1, 1).
  """
  members = [member(0, 0.0), member(1, 0.0), member(2, 0.0, tokens=(8, 9, 8))]
  like, unlike = (2 * 3) / np.sqrt(3 * 15), (1 * 3) / np.sqrt(3 * 15)
  options = {'weight': 0.5, 'final_weight': 0.3, 'decay_steps': 10}
  for step, weight in ((0, 0.5), (5, 0.4), (10, 0.3), (50, 0.3)):
    done = run(members, ('diversity', options), step=step)
    assert values(done) == pytest.approx([weight * (1 - like)] * 2 + [weight * (1 - unlike)])
  assert values(run(members[:2], ('diversity', {}))) == pytest.approx([0.0, 0.0], abs=1e-12)


def test_processors_run_in_their_order_and_stop_where_nothing_is_left():
  members = [member(0, 1.0, length=1.0), member(1, 1.0, length=0.0)]
  shape = ('shape', {'key': 'length'})
  assert run(members, 'reward_std', shape).counts == {'reward_std/in': 2, 'reward_std/out': 0}
  after = run(members, shape, 'reward_std')
  assert values(after) == [2.0, 1.0] and after.counts == {
    'shape/in': 2,
    'shape/out': 2,
    'reward_std/in': 2,
    'reward_std/out': 2,
  }


def test_every_kind_of_the_catalogue_is_pure():
  """Twice the same from the same, and the members that went in are as they were."""
  options = {'shape': {'key': 'judge'}, 'fresh': {'max_age': 9}}
  members = [
    member(0, 1.0, judge=0.5, correct=True),
    member(1, 0.0, judge=0.25, finish=Finish.LENGTH),
  ]
  before = [(m.reward, m.masked) for m in members]
  for kind in PROCESSORS.keys() - {'judge'}:  # That one asks a model: verifying_test.py.
    first, second = (run(members, (kind, options.get(kind, {}))) for _ in range(2))
    assert (values(first), first.lineage, first.counts) == (
      values(second),
      second.lineage,
      second.counts,
    )
    assert [(m.reward, m.masked) for m in members] == before


STAGE = dict(name='rl', algorithm=AlgorithmConfig(name='grpo'), steps=4)


@pytest.mark.parametrize(
  ('processors', 'words'),
  [
    ([ProcessorConfig(name='reward_sdt')], ('reward_sdt', 'reward_std')),
    ([ProcessorConfig(name='a', kind='aligned')] * 2, ("2 are called 'a'",)),
    ([ProcessorConfig(name='not_selected', kind='aligned')], ("'not_selected' is reserved",)),
    (
      [ProcessorConfig(name='kl')],
      ("'kl'", 'after the batch is closed', 'could no longer be replaced'),
    ),
  ],
)
def test_invalid_processor_input_is_refused_in_one_line(processors, words):
  with pytest.raises(UserError) as caught:
    StageConfig(**STAGE, source=Rollouts(tasksets=('train',), processors=tuple(processors)))
  assert '\n' not in str(caught.value) and all(word in str(caught.value) for word in words)


def test_a_filter_on_trainer_quantities_is_refused_with_the_reason():
  with pytest.raises(
    UserError,
    match=r"the trainer computes shape\.key='reference_logprobs/mean' after the batch is closed",
  ):
    build_processors([ProcessorConfig(name='shape', options={'key': 'reference_logprobs/mean'})])
  with pytest.raises(UserError, match='options of processor fresh'):
    build_processors([ProcessorConfig(name='fresh', options={'max_agee': 1})])


def test_through_the_explorer_counts_add_up_and_raw_and_verified_are_both_there(tmp_path):
  """Tasks 0 and 2 have right and wrong answers, task 1 only right ones: it is dropped and replaced.
  Rewards are shaped by the judge's part (0.5 each) after that; the store has both, and a resumed
  explorer reads the shaped ones.
  """
  tokenizer = exploring.make_tokenizer(tmp_path / 'tokenizer')
  store = exploring.new_store(tmp_path / 'replay')
  configs = [
    ProcessorConfig(name='dynamic_sampling'),
    ProcessorConfig(
      name='centre', kind='shape', options={'key': 'judge/half', 'operation': 'subtract'}
    ),
    ProcessorConfig(name='mask_truncated'),
  ]

  def judge(attempt):
    return 1.0 if exploration.number(attempt) == 1 or attempt.uid.endswith('/1') else 0.0

  exploration = exploring.Exploration(tokenizer, store, judge, processors=build_processors(configs))
  ((batch, counts),) = asyncio.run(exploration.batches(1))
  tasks = exploration.tasks
  assert [c.task.uid for c in batch] == [tasks[n].uid for n in (0, 0, 2, 2)]
  assert [c.reward.value for c in batch] == [-0.5, 0.5] * 2
  assert [c.masked for c in batch] == [c.sample.finish_reason == 'length' for c in batch]
  found = {name: count for name, count in counts.items() if count}
  assert found == {
    'dropped/dynamic_sampling': 2,
    'dropped/groups': 1,
    'processors/dynamic_sampling/in': 6,
    'processors/dynamic_sampling/out': 4,
    'processors/centre/in': 4,
    'processors/centre/out': 4,
    'processors/mask_truncated/in': 4,
    'processors/mask_truncated/out': 4,
  }
  report = audit(store)
  assert report.ok and report.reasons == {'dropped(dynamic sampling)': 2}
  told = browse.history(tmp_path / 'replay', batch[0].sample.uid)
  assert any('score of judge' in line and ' 0.0,' in line for line in told), told
  assert any(line.endswith('centre: {"reward": [0.0, -0.5]}') for line in told), told
  again = recall(
    store,
    [f'grpo/{tasks[0].uid}/0/{i}' for i in range(2)],
    tasks=exploration.sampler.task,
    text=exploration.runner.workflow.text,
    rewards=exploring.REWARDS,
  )
  assert [(c.reward, c.masked, c.completion) for c in again] == [
    (c.reward, c.masked, c.completion) for c in batch[:2]
  ]
  store.close()


def test_masked_answers_are_in_no_pair_and_not_imitated_and_a_group_of_them_alone_teaches_nothing():
  """The shortest correct answer is masked, and one of two wrong ones."""

  def mask(m):
    return dataclasses.replace(m, masked=True)

  members = [
    mask(member(0, 1.0, correct=True, tokens=(5,))),
    member(1, 1.0, correct=True),
    mask(member(2, 0.0, tokens=(6,))),
    member(3, 0.0, tokens=(6, 7)),
  ]
  pairs = choose(SelectionConfig(kind='pairs', pairs_per_group=4), members)
  assert [(c.sample.sample_index, c.label) for c in pairs] == [(1, 1), (3, -1)]
  (best,) = choose(SelectionConfig(kind='shortest_correct'), members)
  assert best.sample.sample_index == 1
  assert len(choose(SelectionConfig(), members)) == 4, 'in the baseline'
  assert choose(SelectionConfig(), [members[0], members[2]]) == []


def test_unsupported_processors_are_reported_before_loading():
  """The quickstart's scorer is the verifier."""
  config = load_file('configs/quickstart.py', Config)

  def build(minibatches=1, **fields):
    sft, grpo = config.stages
    stage = dataclasses.replace(
      grpo, minibatches=minibatches, source=dataclasses.replace(grpo.source, **fields)
    )
    changed = dataclasses.replace(config, stages=(sft, stage))
    return build_stages(changed, build_mesh(changed.learner.mesh, jax.devices()[:1]), 29, {})

  def shaped(key):
    return (ProcessorConfig(name='shape', options={'key': key}),)

  assert len(build(processors=shaped('verifier/part'))) == 2
  with pytest.raises(UserError, match="no scorer is named 'judge'; configured are"):
    build(processors=shaped('judge/part'))
  with pytest.raises(UserError, match=r"processor 'math:pi': wanted \(options dataclass"):
    build(processors=(ProcessorConfig(name='own', kind='math:pi'),))
  with pytest.raises(UserError, match=r'needs rollout\.repetition_detection, which is not set'):
    build(processors=(ProcessorConfig(name='repetition'),))
  past = PastConfig(groups=8, max_uses=2)
  assert len(build(past=past, minibatches=4)) == 2
  with pytest.raises(UserError, match='group_size 8 cannot be divided into 16 minibatches'):
    build(past=past, minibatches=16)
  with pytest.raises(
    UserError, match='3 tries of 2000 s are 6000 s, and the wait for a batch ends after'
  ):
    build(limits=TaskLimits(timeout_s=2000.0))


def test_what_earlier_weights_sampled_is_no_age_where_it_is_not_in_the_loss():
  """An answer of weights 1 and 3, of which only the tokens of weights 3 are in the loss."""
  old = member(0, 1.0, version=1)
  parts = (
    Segment(start=2, end=4, version=Version(0, 1), engine='e', finish='budget'),
    Segment(start=4, end=5, version=Version(0, 3), engine='e', finish='stop'),
  )
  mask = np.array([False, False, False, False, True])
  sample = dataclasses.replace(old.sample, segments=parts, loss_mask=mask)
  grown = dataclasses.replace(old, sample=sample)
  assert values(run([grown], 'fresh', step=3)) == [1.0]
  assert values(run([old], 'fresh', step=3)) == []


def test_a_sample_that_is_masked_as_a_whole_stays_in_its_groups_baseline():
  first = member(0, 1.0)
  nothing = dataclasses.replace(first.sample, loss_mask=np.zeros(5, bool))
  masked = dataclasses.replace(first, sample=nothing, masked=True)
  assert values(run([masked, member(1, 0.0)], 'aligned')) == [1.0, 0.0]
  assert values(run([dataclasses.replace(masked, masked=False), member(1, 0.0)], 'aligned')) == [
    0.0
  ]
