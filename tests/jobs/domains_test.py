"""One run over four domains: code through the sandbox, math with a rule and a reward model, school
questions with a judge, and places in pictures; pictures also from recorded answers.
"""

import base64
import collections
import contextlib
import json
import string
import time

import jax
import job
import numpy as np
import pytest
import warm
from services import Service, chat

from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.browse import open_copy
from jaxrl_llm.tasks.tokenizer import build_character_tokenizer
from jaxrl_llm.weights.hf import export

pytestmark = pytest.mark.full
PIXEL = (
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=='
)
ROWS = {
  'code': [
    {
      'question': f'f adds {n}>',
      'answer': f'def f(x):\n  return x + {n}',
      'tests': [f'assert f({k}) == {k + n}' for k in (0, 5)],
    }
    for n in range(1, 7)
  ],
  'math': [{'question': f'{n}+{n}>', 'answer': f'{2 * n}'} for n in range(11, 17)],
  'k12': [
    {'question': f'capital of {country}>', 'answer': city}
    for country, city in (
      ('France', 'Paris'),
      ('Spain', 'Madrid'),
      ('Italy', 'Rome'),
      ('Peru', 'Lima'),
    )
  ],
  'vision': [
    {
      'question': f'where is it, {n}>',
      'answer': f'[{n}, 2, {n + 3}, 9]',
      'media': [{'kind': 'image', 'bytes': PIXEL}],
    }
    for n in range(1, 5)
  ],
}
SCORERS = {
  'code': {'code'},
  'math': {'answer', 'preference'},
  'k12': {'judge'},
  'vision': {'box_iou'},
}


def said_by(body):
  """The text that a judge was sent."""
  return '\n'.join(message['content'] for message in body['messages'])


def verdict(body):
  """A judge with recorded verdicts: right answers, word for word."""
  text = said_by(body)
  # The reference answer is in it once, and a right answer a second time.
  right = any(text.count(row['answer']) > 1 and row['question'] in text for row in ROWS['k12'])
  return chat(json.dumps({'reasoning': 'recorded', 'score': 1.0 if right else 0.0}))


@contextlib.contextmanager
def reward_service(directory):
  """launch/serve.py --role=reward with a random model; its address."""
  tokenizer = build_character_tokenizer(
    [string.printable], directory / 'tokenizer', template='plain'
  )
  spec = with_head(tiny('llama', tokenizer.vocab_size), 'scalar')
  params = jax.tree.map(np.asarray, build_model(spec, ModelOptions()).init(jax.random.key(1)))
  how = dict(
    tokenizer_dir=directory / 'tokenizer', eos_ids=tokenizer.stop_ids, pad_id=tokenizer.pad_id
  )
  export(directory / 'model', params, spec, **how)
  file = directory / 'address.json'
  serve = ['launch/serve.py', '--role=reward', f'--model={directory / "model"}', '--dtype=float32']
  process = warm.start(
    [*serve, f'--addresses_file={file}'], cwd=job.ROOT, env=job.environment(), piped=False
  )
  try:
    while not file.exists():
      assert process.poll() is None
      time.sleep(0.1)
    yield json.loads(file.read_text())[0]
  finally:
    process.terminate()
    assert process.wait(30) == 0


def test_each_domain_is_judged_by_its_own_scorers(tmp_path):
  data, run, judge = tmp_path / 'data', tmp_path / 'run', Service(verdict)
  data.mkdir()
  assert base64.b64decode(PIXEL)
  for domain, rows in ROWS.items():
    (data / f'{domain}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  with reward_service(tmp_path) as address, judge.in_thread():
    job.train(
      run, config=(f'--config=configs/domains.py:{data},{address},{judge.address},recorded',)
    )
  report = audit(run / 'replay')
  assert report.ok and report.states['trained'] == 3 * 12 * 4, report.lines
  store = open_copy(run / 'replay', tmp_path / 'copy')
  uids = [uid for group in store.sealed() for uid in group]
  samples, scores = {sample.uid: sample for sample in store.read(uids)}, store.scores(uids)
  store.close()
  rewards = {row['uid']: row['reward'] for plan in job.plans(run, 'grpo') for row in plan['rows']}
  best = collections.defaultdict(float)
  for uid, of in scores.items():
    domain = samples[uid].domain
    assert {score.scorer for score in of} == SCORERS[domain], uid
    assert all(str(score.status) == 'ok' for score in of)
    value = {score.scorer: score.value for score in of}
    weights = {'preference': 0.1}
    assert rewards[uid] == pytest.approx(
      sum(weights.get(name, 1.0) * v for name, v in value.items())
    )
    assert bool(samples[uid].media) == (domain == 'vision')
    if domain == 'code':
      assert of[0].evidence['isolation'] in ('namespaces', 'bubblewrap')
    main = 'answer' if domain == 'math' else next(iter(SCORERS[domain]))
    best[domain] = max(best[domain], value[main])
  assert best == dict.fromkeys(ROWS, 1.0), 'in each domain the policy was right at least once'
  assert judge.seen and all(
    any(row['question'] in said_by(body) for row in ROWS['k12']) for body in judge.seen
  )


def test_pictures_are_scored_from_recorded_answers(tmp_path):
  recorded = [
    ('box_iou', 'the box is [1, 2, 4, 9]', '[1, 2, 4, 9]', 1.0),
    ('box_iou', 'the box is [11, 2, 14, 9]', '[1, 2, 4, 9]', 0.0),
    ('point', 'at (3, 5)', '[1, 2, 4, 9]', 1.0),
    ('point', 'at (30, 5)', '[1, 2, 4, 9]', 0.0),
    ('answer', 'two dogs', 'two dogs', 1.0),
    ('answer', 'two cats', 'two dogs', 0.0),
  ]
  for scorer in ('box_iou', 'point', 'answer'):
    rows = [(said, truth, value) for name, said, truth, value in recorded if name == scorer]
    file, out = tmp_path / f'{scorer}.jsonl', tmp_path / f'{scorer}-scores.jsonl'

    def row(said, truth):
      return {
        'prompt': 'Where?',
        'completion': said,
        'ability': 'vision',
        'reward_model': {'style': 'rule', 'ground_truth': truth},
        'images': [{'kind': 'image', 'bytes': PIXEL}],
      }

    file.write_text('\n'.join(json.dumps(row(said, truth)) for said, truth, _ in rows))
    job.call('launch/score.py', f'--scorer={scorer}', f'--rows={file}', f'--out={out}')
    assert [json.loads(line)['value'] for line in out.open()] == [value for *_, value in rows]
