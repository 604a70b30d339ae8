"""A finished step's metrics and rollouts, worked by hand."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_llm.batching.plan import Row, StepPlan, pack_step, plan_shape
from jaxrl_llm.core.records.sample import Finish, Role, Sample, Segment, Source
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Version
from jaxrl_llm.data.load import PackedStep
from jaxrl_llm.learner.algorithm import Annotation
from jaxrl_llm.master.batches import step_rows
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.mismatch import MismatchConfig
from jaxrl_llm.master.records import (
  _span_metrics,
  batch_metrics,
  logprob_pairs,
  rollout_rows,
  step_metrics,
)
from jaxrl_llm.master.trainer import Batch, Updated
from jaxrl_llm.rewards.api import Reward
from jaxrl_llm.runtime.metric_descriptions import describe
from jaxrl_llm.runtime.metrics import resolve

TASK = Task(
  taskset='train',
  domain='general',
  prompt=({'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': 'say'}),
  truth='yes',
  fields={},
)
# Prompt 2 tokens each; responses of 1, 3, 4 and 2 tokens. The third was cut, the fourth sampled one
# step earlier.
RESPONSES, REWARDS, VERSIONS = (1, 3, 4, 2), (1.0, 0.0, 0.5, 1.0), (5, 5, 5, 4)
PARTS = (
  {'judge': 1.0, 'judge/a': 0.2},
  {'judge': 0.0, 'judge/a': 0.4},
  {'judge': 0.5},
  {'judge': 1.0, 'format': 1.0},
)


def text(ids):
  return ''.join(f'<{i}>' for i in ids)


def member(i: int) -> Experience:
  length = 2 + RESPONSES[i]
  sampled = np.arange(length) >= 2
  version = Version(0, VERSIONS[i])
  sample = Sample(
    uid=f'g{i // 2}/{i % 2}',
    task_id=TASK.uid,
    visit=0,
    sample_index=i % 2,
    group_id=f'g{i // 2}',
    trajectory_id=f'g{i // 2}/{i % 2}',
    taskset='train',
    domain='general',
    source=Source.ROLLOUT,
    tokens=np.arange(length, dtype=np.int32) + 10 * i,
    prompt_len=2,
    role=sampled.astype(np.uint8),
    loss_mask=sampled,
    sampled=sampled,
    behaviour_logprobs=np.where(sampled, -0.5 * i, 0).astype(np.float32),
    segments=(
      Segment(start=2, end=3, version=version, engine='fake', finish='load'),
      Segment(start=3, end=length, version=Version(0, 5), engine='fake', finish='stop'),
    ),
    finish_reason=Finish.LENGTH if i == 2 else Finish.STOP,
  )
  score = Score(
    uid=sample.uid, scorer='judge', value=REWARDS[i], parts={'a': 0.25}, evidence={'answer': 'x'}
  )
  reward = Reward(value=REWARDS[i], parts=dict(PARTS[i]))
  return Experience(
    sample=sample, task=TASK, completion=f'answer {i}', scores=(score,), reward=reward
  )


@pytest.fixture
def closed():
  """(batch, what it was made from): four rows in one optimizer step, the second not in the loss;
  chunks of 16.
  """
  members = [member(i) for i in range(4)]
  places = {m.sample.uid: ('00000005.arrayrecord', i) for i, m in enumerate(members)}
  rows = tuple(row for m in members for row in step_rows(m, places))
  plan = StepPlan(
    step=5,
    stage='grpo',
    rows=rows,
    optimizer_steps=((3, 1, 0, 2),),
    counts={'dropped/unscorable': 3, 'dropped/not_selected': 2, 'dropped/groups': 1},
  )
  annotation = Annotation(np.array([1.0, 0.0, -2.0, 0.5]), np.array([True, False, True, True]), {})
  return Batch(plan, annotation, [packed(plan)]), {m.sample.uid: m for m in members}


def packed(plan: StepPlan) -> PackedStep:
  packing = pack_step(plan, 0, plan_shape(rows=8, ranks=1, chunks=2, chunk_len=16))
  return PackedStep(None, packing=packing, rows=plan.optimizer_steps[0], grid=None, loss_mask=None)


def test_metrics_of_a_batch_of_rollouts_by_hand(closed):
  found = resolve(batch_metrics(*closed))
  assert found == pytest.approx(
    {
      'response_length/mean': 2.5,  # (1 + 3 + 4 + 2) / 4
      'response_length/max': 4.0,
      'response_length/min': 1.0,
      'response_length/clip_ratio': 0.25,
      'prompt_length/mean': 2.0,
      'prompt_length/max': 2.0,
      'prompt_length/min': 2.0,
      'num_turns/mean': 1.0,
      'num_turns/max': 1.0,
      'num_turns/min': 1.0,
      'response/aborted_ratio': 0.0,
      'response/repetition_ratio': 0.0,
      'perf/total_num_tokens': 18.0,  # 10 + 4 * 2
      # 18 tokens in chunks of 16 take two of them, which is one micro-batch of 32 places.
      'perf/packing_utilisation': 18 / 32,
      'perf/shared_tokens_ratio': 0.0,
      'critic/score/mean': 0.625,
      'critic/score/max': 1.0,
      'critic/score/min': 0.0,
      'critic/rewards/mean': 0.625,
      'critic/rewards/max': 1.0,
      'critic/rewards/min': 0.0,
      # Per trained token, the second row left out: (1 * 1 - 2 * 4 + 0.5 * 2) / (1 + 4 + 2).
      'critic/advantages/mean': -6 / 7,
      'critic/advantages/max': 1.0,
      'critic/advantages/min': -2.0,
      'staleness/mean': 0.25,
      'staleness/max': 1.0,  # the fourth row's first token is of step 4
      'staleness/min': 0.0,
      'rewards/judge/mean': 0.625,
      'rewards/judge/a': 0.3,  # of the two that have it
      'rewards/format/mean': 1.0,
      'num_unscorable': 3.0,
      'run/dropped/unscorable': 3.0,
      'run/dropped/not_selected': 2.0,
      'run/dropped/groups': 1.0,
    }
  )


def test_turns_and_samples_that_were_aborted_or_repeat_are_counted(closed):
  batch, taken = closed
  first, _, third, fourth = (row.uid for row in batch.plan.rows)
  # Six tokens: prompt, prompt, then the policy's, a tool's, the policy's, the policy's.
  sample = taken[third].sample
  two_turns = dataclasses.replace(
    sample,
    role=np.array(
      [Role.PROMPT, Role.PROMPT, Role.POLICY, Role.TOOL, Role.POLICY, Role.POLICY], np.uint8
    ),
  )
  aborted = dataclasses.replace(taken[fourth].sample, finish_reason=Finish.ABORT)
  endless = dataclasses.replace(taken[first].sample, finish_reason=Finish.REPETITION)
  taken = taken | {third: dataclasses.replace(taken[third], sample=two_turns)}
  taken |= {fourth: dataclasses.replace(taken[fourth], sample=aborted)}
  taken |= {first: dataclasses.replace(taken[first], sample=endless)}
  metrics = resolve(batch_metrics(batch, taken))
  assert [metrics[f'num_turns/{kind}'] for kind in ('mean', 'max', 'min')] == [1.25, 2.0, 1.0]
  assert metrics['response/aborted_ratio'] == metrics['response/repetition_ratio'] == 0.25


def test_every_metric_is_documented(closed):
  assert [key for key in resolve(batch_metrics(*closed)) if describe(key) is None] == []


def test_a_batch_of_demonstrations_has_lengths_and_no_rewards(closed):
  batch, _ = closed
  found = resolve(batch_metrics(batch, {}))
  assert {key.split('/')[0] for key in found} == {'response_length', 'prompt_length', 'perf'}


def test_a_batch_with_nothing_in_the_loss_has_no_advantages(closed):
  batch, taken = closed
  batch = batch._replace(annotation=batch.annotation._replace(in_loss=np.zeros(4, bool)))
  assert not any(
    key.startswith('critic/advantages') for key in resolve(batch_metrics(batch, taken))
  )


def test_rollouts_carry_each_completion_tokens_numbers_in_the_order_of_the_plan(closed):
  batch, taken = closed
  # The trainer's logprobs are per token of the whole sequence: -0.1, -0.2, ... plus the row's
  # number.
  logprobs = {i: -0.1 * np.arange(1, 3 + RESPONSES[i]) - i for i in range(4)}
  rows = rollout_rows(batch, Updated({}, logprobs, True), taken, decode=text)
  assert [row['uid'] for row in rows] == ['g0/0', 'g0/1', 'g1/0', 'g1/1']
  third = rows[2]
  assert third['token_ids'].tolist() == [22, 23, 24, 25]
  assert third['tokens'] == ['<22>', '<23>', '<24>', '<25>']
  assert third['behaviour_logprobs'].tolist() == [-1.0] * 4
  assert third['trainer_logprobs'] == pytest.approx([-2.3, -2.4, -2.5, -2.6])
  assert third['advantages'].tolist() == [-2.0] * 4
  assert (third['group_id'], third['sample_index'], third['taskset']) == ('g1', 0, 'train')
  assert (third['prompt'], third['completion'], third['truth']) == ('say', 'answer 2', 'yes')
  assert (third['reward'], third['finish_reason'], third['version_step']) == (0.5, 'length', 5)
  assert third['scores'] == {'judge': {'value': 0.5, 'parts': {'a': 0.25}, 'status': 'ok'}}
  assert [row['version_step'] for row in rows] == [5, 5, 5, 4]
  json.dumps([{k: v for k, v in row.items() if not isinstance(v, np.ndarray)} for row in rows])


def test_rollouts_say_which_tokens_are_whose_turn_with_its_reward_and_versions(closed):
  """The third sample: two tokens of the policy, one of a tool, one of the policy. The first has one
  turn, of one version.
  """
  batch, taken = closed
  third = taken['g1/0']
  role = np.array([Role.PROMPT] * 2 + [Role.POLICY] * 2 + [Role.TOOL, Role.POLICY], np.uint8)
  drawn = role == Role.POLICY
  sample = dataclasses.replace(
    third.sample,
    role=role,
    sampled=drawn,
    loss_mask=drawn,
    behaviour_logprobs=np.zeros(6, np.float32),
    segments=(
      Segment(start=2, end=3, version=Version(0, 4), engine='fake', finish='load'),
      Segment(start=3, end=4, version=Version(0, 5), engine='fake', finish='stop'),
      Segment(start=5, end=6, version=Version(0, 5), engine='fake', finish='stop'),
    ),
  )
  reward = dataclasses.replace(third.reward, turn_values=(0.25,))
  taken = {**taken, 'g1/0': dataclasses.replace(third, sample=sample, reward=reward)}

  def decode(ids):  # of a character that is spread over two tokens
    return 'é' if ids == [24] else text(ids)

  first, _, row, last = rollout_rows(batch, Updated({}, None, False), taken, decode)
  assert row['turns'] == [['policy', 0, 2], ['observation', 2, 3], ['policy', 3, 4]]
  assert row['tokens'][2] == 'é'
  assert row['turn_rewards'] == [0.25, 0.5]
  assert row['versions'] == [[0, 1, 4], [1, 2, 5], [3, 4, 5]]
  assert not {'turns', 'turn_rewards', 'versions'} & first.keys()
  assert last['versions'] == [[0, 1, 4], [1, 2, 5]]
  assert first['context'] == '<0><1>' and row['context'] == '<20><21>'


def test_a_prompt_is_written_once_a_group_and_a_huge_one_is_cut(closed):
  batch, taken = closed
  same = {}
  for uid, member in taken.items():
    tokens = np.array([1, 2, *member.sample.tokens[2:]], np.int32)
    sample = dataclasses.replace(member.sample, tokens=tokens)
    same[uid] = dataclasses.replace(member, sample=sample)
  rows = rollout_rows(batch, Updated({}, None, False), same, text)
  assert [row.get('context') for row in rows] == ['<1><2>', None, '<1><2>', None]
  assert [row.get('context_of') for row in rows] == [None, 'g0/0', None, 'g1/0']
  huge = rollout_rows(batch, Updated({}, None, False), same, lambda ids: 'x' * 10**6)[0]['context']
  assert len(huge) < 21_000 and '… [980,000 characters left out] …' in huge


def test_large_steps_have_transcripts_of_whole_groups(closed):
  batch, taken = closed

  def written(most):
    rows = rollout_rows(batch, Updated({}, None, False), taken, str, most_tokens=most)
    return [row['uid'] for row in rows], {row.get('step_samples') for row in rows}

  total = sum(RESPONSES)
  every = ['g0/0', 'g0/1', 'g1/0', 'g1/1']
  assert written(None) == written(total) == (every, {None})
  for most in (1, total - 1):
    uids, samples = written(most)
    assert uids in (every[:2], every[2:]) and samples == {4}
    assert written(most)[0] == uids, 'the same ones after a resume'


def test_a_batch_that_was_not_trained_on_is_compared_with_no_trainer(closed):
  batch, taken = closed
  passed = Updated({}, None, False)
  rows = rollout_rows(batch, passed, taken, decode=str)
  assert [len(row['trainer_logprobs']) for row in rows] == [len(row['token_ids']) for row in rows]
  assert all(np.isnan(row['trainer_logprobs']).all() for row in rows), 'null in the file'
  assert logprob_pairs(batch, passed, taken) == []


def test_trainer_and_sampler_are_compared_on_trained_and_sampled_tokens_alone(closed):
  batch, taken = closed
  # Of the third's four completion tokens a tool wrote the second, and the last one is not trained
  # on.
  sample = taken['g1/0'].sample
  sampled, trained = sample.sampled.copy(), sample.loss_mask.copy()
  sampled[3], trained[5] = False, False
  behaviour = np.where(sampled, [0, 0, -1, -2, -3, -4], 0).astype(np.float32)
  sample = dataclasses.replace(
    sample, sampled=sampled, loss_mask=trained, behaviour_logprobs=behaviour
  )
  taken = {**taken, 'g1/0': dataclasses.replace(taken['g1/0'], sample=sample)}
  logprobs = {i: -0.1 * np.arange(1, 3 + RESPONSES[i]) - i for i in range(4)}
  pairs = logprob_pairs(batch, Updated({}, logprobs, True), taken)
  assert [len(trainer) for trainer, _ in pairs] == [1, 3, 2, 2]
  trainer, sampler = pairs[2]
  assert trainer == pytest.approx([-2.3, -2.5]) and sampler.tolist() == [-1.0, -3.0]
  assert pairs[3][0] == pytest.approx([-3.3, -3.4]) and pairs[3][1].tolist() == [-1.5, -1.5]


def test_mismatch_is_measured_for_the_tokens_of_each_version(closed):
  """The fourth's first token is of step 4, all others are of step 5, that of the batch."""
  batch, taken = closed
  logprobs = {i: taken[row.uid].sample.behaviour_logprobs for i, row in enumerate(batch.plan.rows)}
  logprobs[3] = logprobs[3] + np.array([0, 0, 0.1, -0.2], np.float32)
  found = resolve(_span_metrics(batch, Updated({}, logprobs, True), taken))
  k3 = [np.expm1(r) - r for r in (0.1, -0.2)]
  assert found == pytest.approx(
    {
      'rollout_corr/lag/0/tokens': 9.0,
      'rollout_corr/lag/0/kl': 0.2 / 9,
      'rollout_corr/lag/0/k3_kl': k3[1] / 9,
      'rollout_corr/lag/1/tokens': 1.0,
      'rollout_corr/lag/1/kl': -0.1,
      'rollout_corr/lag/1/k3_kl': k3[0],
    },
    rel=1e-4,
  )
  assert all(describe(key) for key in found)
  alone = {uid: member for uid, member in taken.items() if uid != 'g1/1'}
  assert _span_metrics(batch, Updated({}, logprobs, True), alone) == {}, 'no sample of two versions'


def test_each_step_of_a_trajectory_is_compared_with_its_own_row(closed):
  """The second step is shorter, and its first token is of step 4."""
  batch, taken = closed
  first, second = taken['g1/0'], taken['g1/1'].sample
  second = dataclasses.replace(
    second, uid='g1/0.1', trajectory_id=first.sample.trajectory_id, step_index=1
  )
  whole = dataclasses.replace(first, later=(second,))
  places = {step.uid: ('00000005.arrayrecord', i) for i, step in enumerate(whole.steps)}
  batch = replanned(
    batch, step_rows(whole, places), advantages=np.ones(2), in_loss=np.ones(2, bool)
  )
  logprobs = {i: step.behaviour_logprobs.copy() for i, step in enumerate(whole.steps)}
  logprobs[1][2:] += np.array([0.1, -0.2], np.float32)
  found, _ = step_metrics(
    batch, Updated({}, logprobs, True), dict.fromkeys(places, whole), MismatchConfig()
  )
  assert (found['num_steps/max'], found['rollout_corr/lag/0/tokens']) == (2.0, 5.0)
  assert found['rollout_corr/lag/1/tokens'] == 1.0
  assert found['rollout_corr/lag/0/kl'] == pytest.approx(0.2 / 5, rel=1e-4)
  assert found['rollout_corr/lag/1/kl'] == pytest.approx(-0.1, rel=1e-4)


def replanned(batch: Batch, rows, **annotation) -> Batch:
  """The batch of other rows, in one optimizer step."""
  plan = dataclasses.replace(
    batch.plan, rows=tuple(rows), optimizer_steps=(tuple(range(len(rows))),)
  )
  return Batch(plan, batch.annotation._replace(**annotation), [packed(plan)])


def test_advantages_per_token_count_token_by_token(closed):
  """A row's array is of the whole sequence; what stands at the prompt, or in a row outside the
  loss, is nothing.
  """
  batch, taken = closed
  own = [[9, 9, 2.0], [9] * 5, [9, 9, -1.0, 0.0, 1.0, 4.0], [9, 9, 0.5, -3.0]]
  batch = batch._replace(
    annotation=batch.annotation._replace(advantages=[np.array(a, np.float64) for a in own])
  )
  found = resolve(batch_metrics(batch, taken))
  # Rows 0, 2 and 3: 2;  -1 0 1 4;  0.5 -3.
  assert found['critic/advantages/mean'] == pytest.approx(3.5 / 7)
  assert (found['critic/advantages/max'], found['critic/advantages/min']) == (4.0, -3.0)
  logprobs = {i: np.zeros(2 + RESPONSES[i]) for i in range(4)}
  rows = rollout_rows(batch, Updated({}, logprobs, True), taken, decode=str)
  assert [row['advantages'].tolist() for row in rows] == [a[2:] for a in own]


def test_shaped_rewards_are_reported_separately_from_scores(closed):
  batch, taken = closed
  batch = batch._replace(annotation=batch.annotation._replace(rewards=[0.5, None, -1.0, 2.0]))
  found = resolve(batch_metrics(batch, taken))
  assert found['critic/score/mean'] == 0.625
  assert [found[f'critic/rewards/{kind}'] for kind in ('mean', 'max', 'min')] == [0.5, 2.0, -1.0]


def test_expert_rows_count_as_tokens_and_nowhere_else(closed):
  batch, taken = closed
  plain = resolve(batch_metrics(batch, taken))
  experts = [
    Row(
      uid=f'e{i}', source='x', index=i, length=16, prompt_len=1, group='e', reward=None,
      is_expert=True, truncated=True, version_step=None,
    )
    for i in range(2)
  ]  # fmt: skip
  mixed = replanned(
    batch,
    [*batch.plan.rows, *experts],
    advantages=[*batch.annotation.advantages, 7.0, 7.0],
    in_loss=np.array([*batch.annotation.in_loss, True, True]),
    rewards=[1.0, 0.0, 0.5, 1.0, None, None],
  )
  found = resolve(batch_metrics(mixed, taken))
  assert found.pop('perf/total_num_tokens') == plain.pop('perf/total_num_tokens') + 32
  # 18 + 32 tokens in four chunks of 16: two micro-batches of 32.
  assert found.pop('perf/packing_utilisation') == 50 / 64 and plain.pop('perf/packing_utilisation')
  assert found == pytest.approx(plain)
  logprobs = {i: np.zeros(row.length) for i, row in enumerate(mixed.plan.rows)}
  updated = Updated({}, logprobs, True)
  assert len(logprob_pairs(mixed, updated, taken)) == 4
  assert [row['uid'] for row in rollout_rows(mixed, updated, taken, str)] == [
    'g0/0',
    'g0/1',
    'g1/0',
    'g1/1',
  ]


def test_a_sample_of_several_pairs_is_written_down_once(closed):
  """0 against 1 and 3, and 2 alone: row 2 is sample 0 again."""
  batch, taken = closed
  rows = [batch.plan.rows[i] for i in (0, 1, 0, 3, 2)]
  again = replanned(batch, rows, advantages=np.arange(5.0), in_loss=np.ones(5, bool))
  logprobs = {i: np.full(row.length, -float(i)) for i, row in enumerate(rows)}
  written = rollout_rows(again, Updated({}, logprobs, True), taken, decode=str)
  assert [row['uid'] for row in written] == ['g0/0', 'g0/1', 'g1/1', 'g1/0']
  assert [row['trainer_logprobs'][0] for row in written] == [0.0, -1.0, -3.0, -4.0]
  assert len(logprob_pairs(again, Updated({}, logprobs, True), taken)) == 4


def test_a_rows_version_is_the_oldest_of_its_tokens(closed):
  batch, _ = closed
  assert isinstance(batch.plan.rows[3], Row)
  assert [row.version_step for row in batch.plan.rows] == [5, 5, 5, 4]
  assert [row.truncated for row in batch.plan.rows] == [False, False, True, False]


def test_only_rollouts_of_the_current_policy_count_against_the_budget(closed):
  """One sample of four was drawn a version earlier."""
  batch, taken = closed
  logprobs = {i: np.zeros(row.length) for i, row in enumerate(batch.plan.rows)}
  updated = Updated({}, logprobs, True)
  assert [row.version_step for row in batch.plan.rows].count(batch.plan.step) == 3
  assert len(logprob_pairs(batch, updated, taken, fresh=True)) == 3
  assert len(logprob_pairs(batch, updated, taken)) == 4
