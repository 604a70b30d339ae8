"""A model that others trained, SmolLM2-135M-Instruct: read, sampled, trained, exported, served and
asked for judgements. By hand (acceptance), after the preparation of docs/start/smollm2.md; what
each test measured is in docs/develop/acceptance.md.

Memory: a training process takes 7.8 GB; a comparison of commits takes some more.
"""

import asyncio
import collections
import itertools
import json
import os
import pathlib
import random

import jax
import jax.numpy as jnp
import job
import numpy as np
import pytest
import serving
from fixtures.rewards_scorers import attempt
from paths import ROOT

from jaxrl_llm.core.net.client import Malformed
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.api import build_model, stack_layers
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rewards.scorers.judge.scorer import judge_scorer
from jaxrl_llm.rollout.api import Request, Sampling, Weights
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.tasks.tokenizer import Tokenizer
from jaxrl_llm.weights.hf import load_params, read_spec

pytestmark = pytest.mark.acceptance
MODEL = ROOT / 'runs/models/smollm2'
ROWS = ROOT / 'runs/next_number.jsonl'
CONFIG = 'configs/smollm2.py'
NEAR_TIE = 1e-3
"""Difference of two logits, of which the largest are about 20, below which either may win."""
QUESTIONS = (
  'What is the capital of France?',
  'Write one sentence about rain.',
  'Why is the sky blue? Answer briefly.',
  'Translate "good morning" into French.',
  'List three fruits.',
  'What is 12 + 30?',
  'Who wrote Hamlet?',
  'Say "naïve café, 東京 🙂" and nothing else.',
  'Write a line of Python that prints 1 to 10.',
  'Is water wet?',
  'Name a planet\n\n  with   rings.',
  'Finish: roses are red,',
)
ANSWER_TOKENS = 40


@pytest.fixture(scope='module', autouse=True)
def prepared():
  for file in (MODEL / 'config.json', ROWS):
    if not file.is_file():
      pytest.skip(f'{file} is missing: docs/start/smollm2.md says how to prepare it')


def train(workdir, *flags, variant='full', control=None):
  """Trains as users do: programs compiled with all optimizations, and kept for the next job."""
  config = (f'--config={CONFIG}:{variant}',)
  environ = job.environment(XLA_FLAGS='')
  if control is None:
    job.train(workdir, *flags, config=config, environ=environ, timeout_s=4 * 3600)
  else:
    command = job.command(workdir, *flags, config=config)[2:]
    job.call('tests/support/controls.py', control, *command, environ=environ, timeout_s=4 * 3600)
  return workdir


# The same model as in transformers


@pytest.fixture(scope='module')
def peer():
  torch = pytest.importorskip('torch')
  import transformers

  return torch, transformers.AutoModelForCausalLM.from_pretrained(
    MODEL, dtype=torch.float32, attn_implementation='eager'
  ).eval()


@pytest.fixture(scope='module')
def ours():
  spec = read_spec(MODEL)
  return build_model(spec, ModelOptions()), jax.tree.map(jnp.asarray, load_params(MODEL, spec))


@pytest.fixture(scope='module')
def answers(ours):
  """Prompt and greedy answer of the embedded engine for each question, as tokens."""
  ours, params = ours
  tokenizer = Tokenizer.from_directory(MODEL)
  config = EmbeddedConfig(slots=12, prefill_rows=4, prefill_buckets=(64,), filters=False)
  scanned = build_model(ours.spec, ModelOptions(scan_layers=True))

  async def main():
    thread = DeviceThread()
    engine = EmbeddedEngine(scanned, config, max_length=64 + ANSWER_TOKENS, seed=0, run=thread.run)
    await engine.start()
    await engine.load(Weights.of(stack_layers(params), Version(0, 0)))

    async def answer(number, question):
      prompt = tuple(tokenizer.render_prompt([{'role': 'user', 'content': question}]))
      request = Request(
        uid=f'q{number}',
        prompt=prompt,
        max_tokens=ANSWER_TOKENS,
        key=(number,),
        sampling=Sampling(temperature=0.0),
        stop_ids=tokenizer.stop_ids,
      )
      ((_, completion),) = [pair async for pair in engine.generate(request)]
      return prompt, [int(token) for token in completion.tokens]

    try:
      return await asyncio.gather(*itertools.starmap(answer, enumerate(QUESTIONS)))
    finally:
      await engine.close()

  return asyncio.run(main())


def test_prompts_are_those_of_transformers(answers):
  transformers = pytest.importorskip('transformers')
  peer = transformers.AutoTokenizer.from_pretrained(MODEL)
  for question, (prompt, _) in zip(QUESTIONS, answers, strict=True):
    messages = [{'role': 'user', 'content': question}]
    rendered = peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert rendered['input_ids'] == list(prompt)
    assert question in peer.decode(prompt)


def test_logits_and_greedy_answers_are_those_of_transformers(ours, answers, peer):
  """In each position of each answer: a token of the largest logit, or one nearly as large."""
  ours, params = ours
  torch, peer = peer
  texts = [[*prompt, *answer] for prompt, answer in answers]
  longest = max(map(len, texts))
  tokens = jnp.array([text + [0] * (longest - len(text)) for text in texts])
  real = jnp.array([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
  positions = jnp.tile(jnp.arange(longest), (len(texts), 1))
  hidden = ours.apply(params, tokens, positions, real)
  different, largest = 0, 0.0
  for (prompt, answer), text, row in zip(answers, texts, hidden, strict=True):
    with torch.no_grad():
      wanted = peer(torch.tensor([text])).logits[0].numpy()
    found = np.asarray(row[: len(text)] @ ours.head_kernel(params).T)
    largest = max(largest, float(np.abs(found - wanted).max() / np.abs(wanted).max()))
    given = wanted[len(prompt) - 1 : -1]
    chosen = given[np.arange(len(answer)), answer]
    assert np.all(given.max(-1) - chosen < NEAR_TIE)
    different += int(np.sum(given.argmax(-1) != answer))
  print(f'largest difference of a logit {largest:.1e}; {different} near-ties')
  assert largest < 1e-4
  assert different <= 2
  assert any(2 in answer for _, answer in answers), 'no answer ends'


# It learns


def measured(workdir):
  """Sampled accuracy of each evaluation, and the mean reward of the first and last five batches."""
  rows = job.rows(workdir)
  key = 'val-core/eval/acc/mean@4'
  accuracy = [row[key] for row in rows if key in row]
  rewards = [row['critic/rewards/mean'] for row in rows if 'critic/rewards/mean' in row]
  return accuracy, float(np.mean(rewards[:5])), float(np.mean(rewards[-5:]))


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('variant', ['full', 'lora'])
def test_grpo_raises_what_the_model_can_do(tmp_path, variant, seed):
  accuracy, first, last = measured(
    train(tmp_path / 'run', f'--config.seed={seed}', variant=variant)
  )
  print(accuracy, first, last)
  assert 0.1 <= accuracy[0] <= 0.6
  assert accuracy[-1] >= accuracy[0] + 0.15 and last > first


@pytest.mark.parametrize('seed', range(3))
def test_shuffled_rewards_teach_nothing(tmp_path, seed):
  run = train(tmp_path / 'run', f'--config.seed={seed}', control='shuffled')
  accuracy, first, last = measured(run)
  print(accuracy, first, last)
  assert accuracy[-1] <= accuracy[0] + 0.1


# It survives a kill, and goes on elsewhere

FEW = (
  '--config.stages.grpo.steps=4',
  '--config.stages.grpo.source.groups_per_batch=1',
  '--config.learner.chunks_per_rank=1',
  '--config.stages.grpo.evaluate_every=4',
  '--config.checkpoint.every_steps=1',
  '--config.evaluation.held_out.tasks=8',
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return train(tmp_path_factory.mktemp('smollm2') / 'run', *FEW)


def killed(workdir):
  """A run of FEW, killed when its metrics have the second step."""
  config = (f'--config={CONFIG}',)
  process = job.start(workdir, *FEW, config=config, environ=job.environment(XLA_FLAGS=''))
  job.wait_for_rows(workdir, 3, process, timeout_s=3600)
  job.kill(process)
  return workdir


def test_after_a_kill_the_run_is_the_same_bit_for_bit(run, tmp_path):
  job.assert_equal_runs(train(killed(tmp_path / 'run'), *FEW), run)
  assert any(row.get('actor/grad_norm', 0.0) > 0 for row in job.rows(run)), 'nothing was learnt'


def test_after_a_kill_the_run_goes_on_with_another_learning_rate(run, tmp_path):
  workdir = killed(tmp_path / 'run')
  begun = job.commits(workdir)[-1]
  train(workdir, *FEW, '--config.stages.grpo.optimizer.peak_lr=1e-6')
  rates = [row['actor/lr'] for row in job.rows(workdir) if 'actor/lr' in row]
  assert np.allclose(rates, [3e-6] * begun + [1e-6] * (4 - begun))
  (change,) = [json.loads(line) for line in (workdir / 'history.jsonl').open()][1:]
  assert change['step'] == begun + 1
  # The steps before the kill are those of the run that was not killed.
  assert job.untimed(workdir)[: begun + 1] == job.untimed(run)[: begun + 1]


@pytest.fixture
def vllm():
  """The environment of real servers."""
  if not os.access(pathlib.Path(serving.ENVIRONMENT) / 'bin/python', os.X_OK):
    pytest.skip(f'no vLLM in {serving.ENVIRONMENT}: bash launch/install_vllm.sh makes it')
  return serving.ENVIRONMENT


def served(source: pathlib.Path, folder: pathlib.Path, work):
  """What `work(client, model)` returns beside a real vLLM server of the model in `source`.

  Args:
    folder: directory, not there yet, for the server's own files.
  """
  folder.mkdir()
  for file in source.iterdir():
    (folder / file.name).symlink_to(file.absolute())

  async def main():
    (server,) = serving.servers_of(None, folder, count=1, load='auto', max_model_len=2048)
    try:
      await serving.started([server])
      client = VllmClient(server.address)
      try:
        (model,) = (await client.call('GET', '/v1/models'))['data']
        return await work(client, model['id'])
      finally:
        await client.close()
    finally:
      await server.stop()

  return asyncio.run(main())


def test_a_server_says_what_the_run_said_last_and_transformers_too(run, vllm, tmp_path):
  """Greedy answers of the last evaluation, through chat requests and through transformers."""
  torch = pytest.importorskip('torch')
  import transformers

  file = sorted((run / 'evals/grpo').glob('*.jsonl'))[-1]
  rows = [json.loads(line) for line in file.read_text().splitlines()]
  rows = [row for row in rows if row['mode'] == 'greedy']
  (taskset,) = (
    one
    for one in json.loads((run / 'config.json').read_text())['tasksets']
    if one['name'] == 'eval'
  )
  (shot,) = taskset['shots']

  def chat(row):
    return [
      {'role': 'system', 'content': taskset['system']},
      {'role': 'user', 'content': shot['question']},
      {'role': 'assistant', 'content': shot['answer']},
      {'role': 'user', 'content': row['prompt']},
    ]

  async def ask(client, model):
    said = []
    for row in rows:
      body = {'model': model, 'messages': chat(row), 'temperature': 0, 'max_tokens': 4}
      answer = await client.call('POST', '/v1/chat/completions', body, deadline_s=120)
      said.append(answer['choices'][0]['message']['content'])
    return said

  tokenizer = transformers.AutoTokenizer.from_pretrained(run / 'hf')
  exported = transformers.AutoModelForCausalLM.from_pretrained(
    run / 'hf', dtype=torch.float32, attn_implementation='eager'
  ).eval()
  wanted = [row['completion'].strip() for row in rows]
  found = collections.Counter()
  for row, text in zip(rows, wanted, strict=True):
    prompt = tokenizer.apply_chat_template(
      chat(row), add_generation_prompt=True, return_tensors='pt', return_dict=True
    )
    with torch.no_grad():
      tokens = exported.generate(**prompt, do_sample=False, max_new_tokens=4)[0]
    answer = tokenizer.decode(tokens[prompt['input_ids'].shape[1] :], skip_special_tokens=True)
    found['transformers'] += answer.strip() == text
  said = served(run / 'hf', tmp_path / 'served', ask)
  found['vllm'] += sum(text.strip() == other for text, other in zip(said, wanted, strict=True))
  print(len(rows), dict(found))
  assert min(found['transformers'], found['vllm']) >= len(rows) - 1


def test_a_run_goes_on_on_real_servers(run, vllm, tmp_path):
  flags = (
    *FEW,
    f'--config.policy.init_from={run}',
    '--config.stages.grpo.steps=2',
    '--config.rollout.engine=vllm',
    f'--config.rollout.vllm.environment={vllm}',
    '--config.rollout.vllm.servers=1',
  )
  rows = job.rows(train(tmp_path / 'run', *flags))
  key = 'sampling/sampling_logp_difference/max'
  differences = [row[key] for row in rows if key in row]
  print(differences)
  assert len(differences) == 2 and max(differences) < 1e-2
  accuracies = [accuracy for _, _, accuracy in job.accuracies(tmp_path / 'run')]
  assert abs(accuracies[0] - job.accuracies(run)[-1][2]) <= 1 / 8


# It judges

PAIRS = 200
SOLUTIONS = ROOT.parent / 'shared/data/gsm8k/preference_pairs.jsonl'
"""Outside of the repository: {prompt, chosen, rejected}."""
JUDGE = """Which answer to the question is right?

Question:
{question}

Answer A:
{first}

Answer B:
{second}"""
VERDICTS = [json.dumps({'winner': winner}) for winner in ('A', 'B', 'tie')]
"""A model of this size seldom writes JSON of its own accord; the server lets it write nothing
else."""
IN_FLIGHT = 64
"""Requests at a time."""


def sums():
  """Questions, each with a right answer and a wrong one."""
  from reasoning_gym.factory import create_dataset

  rng, pairs = random.Random(0), {}
  options = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)
  for entry in create_dataset('chain_sum', seed=0, size=2 * PAIRS, **options):
    right = int(entry['answer'])
    wrong = right + rng.choice([-10, -3, -2, -1, 1, 2, 3, 10])
    pairs[f'What is {entry["metadata"]["expression"]}?'] = str(right), str(wrong)
  return list(pairs.items())[:PAIRS]


def solutions():
  """GSM8K's shortest questions, each with a model's right solution and a wrong one."""
  if not SOLUTIONS.is_file():
    pytest.skip(f'{SOLUTIONS} is missing')
  rows = sorted(SOLUTIONS.read_text().splitlines(), key=len)[:PAIRS]
  fields = (json.loads(row) for row in rows)
  return [(row['prompt'], (row['chosen'], row['rejected'])) for row in fields]


@pytest.mark.parametrize('pairs', [sums, solutions])
def test_the_judge_with_a_real_model(vllm, tmp_path, pairs):
  """Its figures are reported whatever they are; what is asserted is that they are of 200 pairs in
  both orders.
  """
  print(judged(tmp_path, pairs()))


def judged(folder: pathlib.Path, pairs: list[tuple[str, tuple[str, str]]]) -> str:
  """Figures of the judge's verdicts on (question, (right answer, wrong answer))."""
  cache, count = folder / 'judged.jsonl', len(pairs)

  async def judge(client, model):
    scorer = judge_scorer(
      addresses=[client.address],
      model=model,
      mode='pairwise',
      template=JUDGE,
      max_tokens=24,
      malformed_retries=0,
      concurrency=IN_FLIGHT,
      request_deadline_s=600.0,
      cache_file=str(cache),
      request={'structured_outputs': {'choice': VERDICTS}},
    )
    limit = asyncio.Semaphore(IN_FLIGHT // 2)
    async with scorer.open() as score:

      async def value(question, *answers):
        """The right answer's value; None: no verdict."""
        group = tuple(attempt(text, prompt=question) for text in answers)
        async with limit:
          try:
            right, wrong = await score(group, ((), ()))
          except Malformed:
            return None
        assert right.value + wrong.value == 1.0
        return right.value

      return await asyncio.gather(*(value(asked, *answers) for asked, answers in pairs))

  values = collections.Counter(served(MODEL, folder / 'served', judge))
  said = collections.Counter(
    json.loads(line)['answer']['winner'] for line in cache.read_text().splitlines()
  )
  assert sum(values.values()) == count and set(values) <= {None, 0.0, 0.5, 1.0}
  assert sum(said.values()) >= 2 * (count - values[None])
  return (
    f'{count} pairs: right preferred in both orders {values[1.0]}, wrong {values[0.0]}, tie or '
    f'orders disagree {values[0.5]}, no verdict {values[None]}; answers by place {dict(said)}'
  )
