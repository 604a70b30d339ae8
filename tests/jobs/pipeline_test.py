"""A pipeline of stages: each with its own rewards and initial weights, and one that learns from
rollouts that an earlier one has stored.
"""

import collections
import json

import job
import pytest

from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.data.streams import all_rows
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.segments import SegmentReader

pytestmark = pytest.mark.full

STEPS = {
  'cold_start': 12,
  'reasoning': 4,
  'collect': 3,
  'distil': 6,
  'helpfulness': 2,
  'all_rewards': 3,
}
PIPELINE = (
  '--config=configs/r1.py',
  *job.SMALL,
  *job.RIGHT,
  *(f'--config.stages.{name}.steps={steps}' for name, steps in STEPS.items()),
  '--config.stages.cold_start.source.count=400',
  *(
    f'--config.stages.{name}.source.{field}'
    for name in ('reasoning', 'collect', 'all_rewards')
    for field in ('groups_per_batch=6', 'group_size=4')
  ),
  '--config.stages.reasoning.source.response_lengths=[[0, 3], [2, 7]]',
  '--config.stages.distil.evaluate_every=2',
  '--config.stages.all_rewards.init_from=["reasoning", "best:distil"]',
  '--config.checkpoint.keep=1',
)
"""DeepSeek-R1's pipeline in seconds. Its last stage begins with the mean of the end of an earlier
one and the best evaluation of another.
"""


@pytest.fixture(scope='module')
def pipeline():
  return job.finished('pipeline', config=PIPELINE)


def steps(run, stage):
  return [row for row in job.rows(run) if row['stage'] == stage and 'training/global_step' in row]


def collected(run):
  """Rewards of the samples that `collect` has stored, keyed by uid."""
  return {row['uid']: row['reward'] for plan in job.plans(run, 'collect') for row in plan['rows']}


def test_a_stage_learns_from_the_stored_rollouts_that_its_selection_accepts(pipeline):
  rewards = collected(pipeline)
  accepted = {uid for uid, reward in rewards.items() if reward >= 1}
  assert 0 < len(accepted) < len(rewards) == 3 * 6 * 4
  rows = all_rows(pipeline, 'data/distil.arrayrecord')
  assert {row.uid for row in rows} == accepted
  trained = [row for plan in job.plans(pipeline, 'distil') for row in plan['rows']]
  assert len(trained) == 6 * 64 and {row['uid'] for row in trained} <= accepted
  reader = SegmentReader(pipeline)
  samples = reader.read([(row.source, row.index) for row in rows])
  for sample in samples:
    assert (sample.loss_mask == (sample.role == Role.POLICY)).all()
    assert not sample.sampled.any() and not sample.behaviour_logprobs.any()


def test_the_reward_model_learns_from_a_pair_of_each_group_whose_rewards_differ(pipeline):
  of_groups = collections.defaultdict(set)
  for uid, reward in collected(pipeline).items():
    of_groups[uid.rpartition('/')[0]].add(reward)
  differing = [group for group, rewards in of_groups.items() if len(rewards) > 1]
  rows = all_rows(pipeline, 'data/helpfulness.arrayrecord')
  assert len(rows) == 2 * len(differing) > 0
  last = steps(pipeline, 'helpfulness')[-1]
  assert last['actor/rm_loss'] > 0


def test_a_stage_begins_with_the_weights_that_it_names(pipeline):
  """`distil` begins with the base weights: its first loss is that of random ones."""
  losses = {
    name: [row['actor/loss'] for row in steps(pipeline, name) if 'actor/loss' in row]
    for name in ('cold_start', 'distil')
  }
  assert losses['distil'][0] > 3 > losses['cold_start'][-1]


def test_each_stage_is_judged_by_its_own_scorers(pipeline):
  names = {
    stage: {key for row in steps(pipeline, stage) for key in row if key.startswith('rewards/')}
    for stage in STEPS
  }
  assert any(key.startswith('rewards/verifier') for key in names['reasoning'])
  assert not any(key.startswith('rewards/overlong') for key in names['reasoning'])
  for scorer in ('overlong', 'helpful'):
    judged = [name for name in STEPS if any(f'rewards/{scorer}' in key for key in names[name])]
    assert judged == ['all_rewards']


def test_a_stage_raises_the_limit_of_its_responses(pipeline):
  rows = [row for row in steps(pipeline, 'reasoning') if 'response_length/limit' in row]
  assert [row['response_length/limit'] for row in rows] == [3, 3, 7, 7]
  longest = [row['response_length/max'] for row in rows]
  assert longest[:2] == [3, 3] and max(longest[2:]) > 3
  assert not any('response_length/limit' in row for row in steps(pipeline, 'all_rewards'))


def test_replaced_weights_are_another_attempt_and_every_sample_is_accounted_for(pipeline):
  report = audit(pipeline / 'replay')
  assert report.ok, report.lines
  trained = [row for plan in job.plans(pipeline, 'all_rewards') for row in plan['rows']]
  samples = SegmentReader(pipeline).read([(row['source'], row['index']) for row in trained])
  begun = sum(STEPS.values()) - STEPS['all_rewards']
  versions = {(s.version.attempt, s.version.step - begun) for x in samples for s in x.segments}
  assert versions == {(2, 0), (2, 1), (2, 2)}
  # Attempt 1 is that of `distil`, whose weights were published for its evaluation.
  assert int((pipeline / 'attempt').read_text()) == 2


def test_a_commit_names_the_best_evaluation_of_a_stage(pipeline):
  measured = [row for row in job.accuracies(pipeline) if row[0] == 'distil']
  assert [step for _, step, _ in measured] == [21, 23, 25]
  best = max(accuracy for *_, accuracy in measured)
  step = next(step for _, step, accuracy in measured if accuracy == best)
  newest = max(job.commits(pipeline))
  host = json.loads((pipeline / 'checkpoints' / str(newest) / 'host.json').read_text())
  assert host['bests']['distil'] == [best, step]


def test_killed_after_the_selection_and_in_the_last_stage_it_ends_bit_for_bit(pipeline, tmp_path):
  """The second start knows the best evaluation of the stage in progress, the third one chooses."""
  before_distil, distil, helpfulness = 12 + 4 + 3 + 4, 6 + 3, STEPS['helpfulness']
  counts = before_distil + 4, before_distil + distil + helpfulness + 1
  run = job.killed_and_resumed(tmp_path / 'run', *counts, config=PIPELINE)
  job.assert_equal_runs(run, pipeline)
