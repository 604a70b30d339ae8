"""A model card says how its model came about, and nothing that the run's names could smuggle in."""

import json
import re
import xml.etree.ElementTree

import pytest
import yaml
from job import quick_run

from jaxrl_llm.runtime import model_card, writers
from jaxrl_llm.runtime.curves_figure import Panel, figure
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


@pytest.mark.parametrize('kind', ['tasksets', 'preferences', 'examples'])
def test_a_card_names_every_kind_of_data(tmp_path, kind):
  part = {'name': 'mine', 'source': 'datasets:org/rows#train'}
  others = {'tasksets': [], 'preferences': [], 'examples': []}
  workdir = run(tmp_path / 'run', config=CONFIG | others | {kind: [part]})
  model_card.write_run_card(tmp_path, workdir, Origin(base='org/base', command=('jaxrl',)))
  head, body = parts(tmp_path)
  assert head['datasets'] == ['org/rows'] and f'| mine | {kind} |' in body


def test_a_card_describes_the_run(tmp_path):
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
  drawing = xml.etree.ElementTree.fromstring((tmp_path / 'curves.svg').read_text())
  texts = [node.text for node in drawing.iter('{http://www.w3.org/2000/svg}text')]
  assert {'words: greedy accuracy', 'Reward', 'Entropy', 'step', '600'} <= {*texts}
  lines = [node.get('points') for node in drawing.iter('{http://www.w3.org/2000/svg}polyline')]
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


@pytest.mark.parametrize('damage', ['text', 7, ['text'], [7], {'scorers': 7, 'optimizer': 'text'}])
def test_a_configuration_of_other_types_still_has_a_card(tmp_path, damage):
  workdir = run(tmp_path / 'run', dict.fromkeys(CONFIG, damage), steps=3)
  stages = [dict.fromkeys(CONFIG['stages'][0], damage), damage]
  for config in (dict.fromkeys(CONFIG, damage), {**CONFIG, 'stages': stages}):
    (workdir / 'config.json').write_text(json.dumps(config))
    (workdir / 'hf').mkdir(exist_ok=True)
    model_card.write_converted_card(
      tmp_path, workdir / 'hf', name='hf', dtype='float32', origin=Origin()
    )
    assert '## Training' in parts(tmp_path)[1]


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


@pytest.mark.parametrize(
  ('word', 'shown'),
  [
    ('--config.x.api_key=abc', '--config.x.api_key=…'),
    ('--config.o={"token": "hf_1", "b": 2}', '--config.o={"token":…'),
    ("--config.o={'WANDB_API_KEY': 'abc'}", "--config.o={'WANDB_API_KEY':…"),
    ('--config.o={token: hf_1}', '--config.o={token:…'),
    ('--config.max_tokens=5', '--config.max_tokens=5'),
    ('--workdir=/home/someone/runs/a', '--workdir=~/runs/a'),
    ('--workdir=/home/someone_else/runs/a', '--workdir=a'),
    ('--workdir=/scratch/my project/a/', '--workdir=a'),
    ('/scratch/a', 'a'),
    ('--init_from=runs/a', '--init_from=runs/a'),
    ('--config.files=/scratch/a.jsonl,/scratch/b.jsonl', '--config.files=a.jsonl,b.jsonl'),
    ('--config.o={"file": "/scratch/a", "n": 0.5}', '--config.o={"file": "a", "n": 0.5}'),
    ('--config.o={"at": "https://host/name"}', '--config.o={"at": "https://host/name"}'),
  ],
)
def test_the_command_keeps_secrets_and_places_to_itself(monkeypatch, word, shown):
  monkeypatch.setenv('HOME', '/home/someone')
  assert typed_command(['/opt/bin/jaxrl', 'train', word]) == ['jaxrl', 'train', shown]


def test_a_secret_may_be_a_word_of_its_own_and_a_home_may_be_the_root(monkeypatch):
  command = typed_command(['jaxrl', 'train', '--config.x.token', 'hf_1', '--config.y', 'a'])
  assert command[2:] == ['--config.x.token', '…', '--config.y', 'a']
  monkeypatch.setenv('HOME', '/')
  assert typed_command(['jaxrl', 'train', '--init_from=org/base'])[2:] == ['--init_from=org/base']


def test_the_command_begins_with_the_program_without_its_path():
  assert typed_command(['launch/train.py', '--seed=1']) == ['jaxrl', 'train', '--seed=1']
  assert typed_command(['/a/mine.py']) == ['python', 'mine.py']


def test_secrets_of_the_environment_and_directories_are_not_in_a_card(tmp_path, monkeypatch):
  monkeypatch.setenv('WANDB_API_KEY', 'a1b2c3d4e5')
  options = {'note': 'with a1b2c3d4e5', 'table': '/scratch/project/table.json'}
  stage = {**CONFIG['stages'][0], 'algorithm': {'name': 'grpo', 'options': options}}
  tasksets = [{'name': 'mine', 'source': 'datasets:/scratch/project/rows#train'}]
  config = {**CONFIG, 'stages': [stage], 'tasksets': tasksets, 'name': 'a1b2c3d4e5'}
  model_card.write_run_card(tmp_path, run(tmp_path / 'run', config, steps=3), Origin())
  _, body = parts(tmp_path)
  assert 'a1b2c3d4e5' not in (tmp_path / 'README.md').read_text() and '/scratch' not in body
  assert '`{"note": "with …", "table": "table.json"}`' in body and '`datasets:rows#train`' in body


def drawn_rise(values, noise):
  """The number of pixels between the lowest and the highest point of a curve."""
  points = list(enumerate(values))
  root = xml.etree.ElementTree.fromstring(figure([Panel('KL', 'nats', noise, points)]))
  (line,) = root.iter('{http://www.w3.org/2000/svg}polyline')
  heights = [float(point.partition(',')[2]) for point in line.get('points').split()]
  return max(heights) - min(heights)


def test_the_figure_draws_no_rounding_error_and_no_constant_as_a_curve():
  assert drawn_rise([1e-7, 3e-7, 2e-7], 1e-6) < 10 < drawn_rise([1e-7, 3e-7, 2e-7], 0.0)
  svg = figure([Panel('Entropy', 'nats', 1e-6, [(1, 0.0), (2, 0.0)])])
  assert '>-' not in svg and drawn_rise([0.0, 0.0], 0.0) == 0
  assert drawn_rise([-3.0, -3.0], 0.0) == 0


@pytest.mark.full
def test_a_run_writes_a_card_into_its_export():
  head, body = parts(quick_run() / 'hf')
  assert {'jaxrl_llm', 'sft', 'grpo'} == {*head['tags']} and head['model-index']
  assert 'jaxrl train --config=configs/quickstart.py' in body and '![Curves' in body
  assert (quick_run() / 'hf' / 'curves.svg').is_file()
