"""The quickstart learns, its checkpoint says the same through transformers, and nothing learns from
broken signals.
"""

import collections
import json

import job
import pytest

pytestmark = pytest.mark.full
CONFIG = ('--config=configs/quickstart.py',)


def assert_learnt(workdir):
  accuracy = {(stage, step): value for stage, step, value in job.accuracies(workdir)}
  assert accuracy['sft', 500] <= 0.5
  assert list(accuracy.values())[-1] >= 0.9


@pytest.fixture(scope='module')
def quickstart(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('quickstart') / 'run'
  # As users compile it.
  job.train(workdir, config=CONFIG, environ=job.environment(XLA_FLAGS=''), timeout_s=1800)
  return workdir


def test_grpo_solves_what_sft_could_not(quickstart):
  assert_learnt(quickstart)


def test_exported_checkpoint_answers_the_same_through_transformers(quickstart):
  torch = pytest.importorskip('torch')
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(quickstart / 'hf')
  model = transformers.AutoModelForCausalLM.from_pretrained(
    quickstart / 'hf', dtype=torch.float32, attn_implementation='eager'
  ).eval()
  file = sorted((quickstart / 'evals' / 'grpo').glob('*.jsonl'))[-1]
  answers = [json.loads(line) for line in file.read_text().splitlines()]
  assert len(answers) == 512
  prompts = collections.defaultdict(list)
  for row in answers:
    messages = [{'role': 'user', 'content': row['prompt']}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
      'input_ids'
    ]
    prompts[len(tokens)].append((tokens, row))
  same = 0
  for length, of_one_length in prompts.items():
    given = torch.tensor([tokens for tokens, _ in of_one_length])
    with torch.no_grad():
      found = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=7,
        output_scores=True,
        return_dict_in_generate=True,
      )
    for place, (_, row) in enumerate(of_one_length):
      completion = found.sequences[place, length:]
      if tokenizer.decode(completion, skip_special_tokens=True) == row['completion']:
        same += 1
        continue
      ours = [
        *tokenizer.encode(row['completion'], add_special_tokens=False),
        tokenizer.eos_token_id,
      ]
      first = next(i for i, (a, b) in enumerate(zip(completion.tolist(), ours)) if a != b)
      top = torch.topk(found.scores[first][place], 2).values
      assert float(top[0] - top[1]) < 1e-4, row
  assert same >= 0.99 * len(answers)


@pytest.mark.acceptance
@pytest.mark.parametrize('seed', range(3))
def test_three_seeds_learn(tmp_path, seed):
  job.train(tmp_path / 'run', f'--config.seed={seed}', config=CONFIG)
  assert_learnt(tmp_path / 'run')


@pytest.mark.acceptance
def test_sft_alone_for_the_same_time_stays_below_half(tmp_path):
  """1,600 steps take what 500 steps of SFT and all of GRPO take."""
  job.train(
    tmp_path / 'run',
    '--config.stages.sft.steps=1600',
    '--config.stages.grpo.steps=1',
    config=CONFIG,
  )
  after_sft = next(value for stage, step, value in job.accuracies(tmp_path / 'run') if step == 1600)
  assert after_sft <= 0.5


@pytest.mark.acceptance
def test_two_processes_learn_by_themselves(tmp_path):
  job.train(tmp_path / 'run', config=CONFIG, processes=2)
  assert_learnt(tmp_path / 'run')


def control(workdir, name, seed, *flags):
  train = job.command(workdir, f'--config.seed={seed}', *flags, config=CONFIG)
  job.call('tests/support/controls.py', name, *train[2:], timeout_s=3600)


@pytest.mark.acceptance
@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('name', ['shuffled', 'coin'])
def test_broken_signals_teach_nothing(tmp_path, name, seed):
  control(
    tmp_path / 'run',
    name,
    seed,
    '--config.stages.grpo.steps=80',
    '--config.stages.grpo.evaluate_every=20',
  )
  accuracies = job.accuracies(tmp_path / 'run')
  before = next(value for _, step, value in accuracies if step == 500)
  assert max(value for stage, _, value in accuracies if stage == 'grpo') <= before + 0.05


def test_zero_reward_changes_no_bit_of_the_parameters(tmp_path):
  """The small job, for the same is true whatever it had learnt before."""
  run = tmp_path / 'run'
  flags = ('--config.rewards.scorers.0.options={}', '--config.checkpoint.keep=50')
  job.call('tests/support/controls.py', 'zero', *job.command(run, *flags)[2:])
  before, after = (
    {path: array for path, array in job.arrays(run, step).items() if "['params']" in path}
    for step in (12, 20)
  )
  assert before and before == after
  rows = [row for row in job.rows(run) if row['stage'] == 'grpo']
  assert [row['run/empty_updates'] for row in rows if 'actor/lr' in row] == [1.0] * 8
  assert {row['frac_reward_zero_std'] for row in rows if 'actor/pg_loss' in row} == {1.0}
