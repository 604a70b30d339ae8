"""A model card says how its model came about, and nothing that the run's names could smuggle in."""

import json
import re
import xml.etree.ElementTree

import pytest
import yaml
from job import quick_run

from jaxrl_llm.runtime import model_card, writers
from jaxrl_llm.runtime.model_card import Origin, typed_command

HOSTILE = '<img src=x onerror=alert(1)> | `rm` ](javascript:x)\n# Heading'
CONFIG = {
  'name': 'spelling',
  'policy': {'init_from': 'org/base', 'lora': None},
  'tasksets': [
    {'name': 'train', 'source': 'datasets:org/words#train'},
    {'name': HOSTILE, 'source': '/home/someone/secret place/rows.jsonl'},
  ],
  'preferences': [],
  'rewards': {'scorers': [{'name': 'verifier', 'kind': 'answer'}]},
  'learner': {'optimizer': {'peak_lr': 1e-6}},
  'stages': [
    {
      'name': 'grpo',
      'algorithm': {'name': 'my_file:sharp', 'options': {'clip_ratio_high': 0.28}},
      'source': {'tasksets': ['train'], 'groups_per_batch': 16, 'group_size': 8},
      'steps': 100,
      'optimizer': None,
    }
  ],
}


def run(workdir, config=CONFIG, steps=600):
  workdir.mkdir()
  (workdir / 'config.json').write_text(json.dumps(config))
  log = writers.MetricsWriter(workdir, committed=0)
  accuracy = {'val-core/words/acc/greedy': 0.25, 'val-core/words/acc/greedy/stderr': 0.02}
  log.write('grpo', 0, accuracy)
  for step in range(1, steps + 1):
    log.write('grpo', step, {'critic/score/mean': step / steps, 'actor/entropy': 0.5})
  log.write('grpo', steps, {**accuracy, 'val-core/words/acc/greedy': 0.75})
  log.close()
  return workdir


def parts(directory):
  """The front matter and the text of a card."""
  _, head, body = (directory / 'README.md').read_text().split('---\n', 2)
  return yaml.safe_load(head), body


def test_a_card_has_what_the_run_did(tmp_path):
  workdir = run(tmp_path / 'run')
  origin = Origin(base='org/base', command=('jaxrl', 'train', '--config=words.py'))
  model_card.write_run_card(tmp_path, workdir, origin)
  head, body = parts(tmp_path)
  assert head['library_name'] == 'transformers' and head['base_model'] == 'org/base'
  assert head['tags'] == ['jaxrl_llm', 'sharp'] and head['datasets'] == ['org/words']
  (result,) = head['model-index'][0]['results']
  assert result['metrics'] == [{'type': 'accuracy', 'value': 0.75, 'name': 'greedy'}]
  row = r'| grpo | my\_file:sharp | `{"clip_ratio_high": 0.28}` | train | 16 groups of 8 | 100 |'
  assert f'{row} 1e-06 |' in body
  assert '| grpo | 0 | 0.250 ± 0.020 |' in body and '| grpo | 600 | 0.750 ± 0.020 |' in body
  assert 'jaxrl train --config=words.py' in body and 'jax 0' in body
  assert '![Curves of the run](curves.svg)' in body
  figure = xml.etree.ElementTree.fromstring((tmp_path / 'curves.svg').read_text())
  texts = [node.text for node in figure.iter('{http://www.w3.org/2000/svg}text')]
  assert {'words: greedy accuracy', 'Reward', 'Entropy', 'step', '600'} <= {*texts}
  lines = [node.get('points') for node in figure.iter('{http://www.w3.org/2000/svg}polyline')]
  assert [len(line.split()) for line in lines] == [2, 300, 300]
  rising = [float(point.partition(',')[2]) for point in lines[1].split()]
  assert rising == sorted(rising, reverse=True)  # SVG's y grows downwards


def test_names_are_text_and_directories_lose_their_paths(tmp_path):
  stage = {**CONFIG['stages'][0], 'name': HOSTILE}
  workdir = run(tmp_path / 'run', {**CONFIG, 'name': HOSTILE, 'stages': [stage]}, steps=3)
  base = tmp_path / 'a base'
  base.mkdir()
  model_card.write_run_card(tmp_path, workdir, Origin(part='critic', base=str(base)))
  head, body = parts(tmp_path)
  assert 'base_model' not in head and 'pipeline_tag' not in head
  assert '<img' not in body and '\n# Heading' not in body
  assert not re.search(r'(?<!\\)\]\(javascript', body)
  assert str(tmp_path) not in body and 'secret place' not in body
  assert 'the directory `a base`' in body and '`rows.jsonl`' in body
  tables = [line for line in body.splitlines() if line.startswith('| ')]
  assert {line.replace(r'\|', '').count('|') for line in tables} <= {4, 8}


def test_a_run_without_a_log_or_a_configuration_still_has_a_card(tmp_path):
  (tmp_path / 'run').mkdir()
  model_card.write_run_card(tmp_path, tmp_path / 'run', Origin())
  head, body = parts(tmp_path)
  assert head['tags'] == ['jaxrl_llm'] and 'from random weights' in body
  assert not (tmp_path / 'curves.svg').exists()


def test_a_converted_model_keeps_its_card_or_gets_that_of_its_run(tmp_path):
  source, target = tmp_path / 'source', tmp_path / 'target'
  source.mkdir()
  target.mkdir()
  (source / 'README.md').write_text('---\nlicense: mit\n---\n\n# Theirs\n')
  options = {'name': 'org/theirs', 'dtype': 'bfloat16', 'origin': Origin(base='org/theirs')}
  model_card.write_converted_card(target, source, **options)
  head, body = parts(target)
  assert head == {'license': 'mit'} and '# Theirs' in body
  assert 'Converted from [org/theirs](https://huggingface.co/org/theirs) to bfloat16' in body
  (source / 'README.md').unlink()
  model_card.write_converted_card(target, source, **options)
  assert parts(target)[0]['base_model'] == 'org/theirs'
  export = run(tmp_path / 'run', steps=3) / 'hf'
  export.mkdir()
  model_card.write_converted_card(
    target, export, name=str(export), dtype='float32', origin=Origin(base=str(export))
  )
  head, body = parts(target)
  assert head['base_model'] == 'org/base' and '100 steps of my' in body


def test_the_command_keeps_secrets_and_places_to_itself(monkeypatch):
  monkeypatch.setenv('HOME', '/home/someone')
  words = (
    '--config.x.api_key=abc',
    '--config.o={"token": "hf_1", "b": 2}',
    '--config.max_tokens=5',
  )
  command = typed_command(['/opt/bin/jaxrl', 'train', *words, '--workdir=/home/someone/runs/a'])
  assert command[:2] == ['jaxrl', 'train'] and command[4:] == [
    '--config.max_tokens=5',
    '--workdir=~/runs/a',
  ]
  assert 'abc' not in ' '.join(command) and 'hf_1' not in ' '.join(command)
  assert typed_command(['launch/train.py', '--seed=1']) == ['jaxrl', 'train', '--seed=1']
  assert typed_command(['/a/mine.py']) == ['python', 'mine.py']


@pytest.mark.full
def test_a_run_writes_a_card_beside_its_export():
  head, body = parts(quick_run() / 'hf')
  assert {'jaxrl_llm', 'sft', 'grpo'} == {*head['tags']} and head['model-index']
  assert 'jaxrl train --config=configs/quickstart.py' in body and '![Curves' in body
  assert (quick_run() / 'hf' / 'curves.svg').is_file()
