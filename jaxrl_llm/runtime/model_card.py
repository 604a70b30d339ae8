"""Model cards: the README.md that the Hugging Face hub shows with the files of a model.

A card is built only from the run directory (config.json, metrics.jsonl) and the arguments. Because
cards are published, texts from these sources are escaped, and paths on this machine are reduced to
their last components. Figures are written next to the card, to the file `FIGURES`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

import jaxrl_llm
from jaxrl_llm.core.disk import write_durably
from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.secret_values import NAME, hide_secrets
from jaxrl_llm.runtime import report, writers
from jaxrl_llm.runtime.curves_figure import Panel, figure
from jaxrl_llm.runtime.metric_names import label
from jaxrl_llm.runtime.transcripts import is_number

CARD, FIGURES = 'README.md', 'curves.svg'
_FIGURE_KEYS = (
  'critic/score/mean',
  'actor/sft_loss',
  'rewards/accuracies',
  'response_length/mean',
  'actor/entropy',
  'actor/kl_loss',
)
_MAX_PANELS = 6
_LIBRARIES = ('jax', 'flax', 'optax', 'transformers', 'safetensors')
_HUB_ID = re.compile(r'[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?')
_SECRET = re.compile(rf'{NAME}["\']?\s*[=:]')
_SECRET_FLAG = re.compile(rf'--?[\w.-]*{NAME}')
_PATH = re.compile(r'(?<![\w.~/])/(?!/)[^\s"\',]+')
"""Matches an absolute path in a text, but not the path in an address such as https://host/name."""

_LOADING = {
  'policy': """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(NAME)
tokenizer = AutoTokenizer.from_pretrained(NAME)
```""",
  'critic': """```python
from transformers import AutoModelForTokenClassification

critic = AutoModelForTokenClassification.from_pretrained(NAME)  # its logits are values of tokens
```""",
  'adapter': """```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained(NAME)
```""",
}
"""Code that loads an exported model, keyed by part of the run (see `Origin.part`)."""
_WHAT = {'policy': 'Policy', 'critic': 'Critic', 'adapter': 'Adapters of the policy'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
  """Origin of an exported model."""

  part: str = 'policy'
  """Exported part of the run: 'policy', 'critic' or 'adapter'."""
  base: str | None = None
  """Base model: a hub id or a directory; None for random weights."""
  command: Sequence[str] = ()
  """Words of the command line that wrote the export; empty if unknown."""


def write_run_card(directory: pathlib.Path, workdir: pathlib.Path, origin: Origin) -> None:
  """Writes the model card and figures for an export of the run in `workdir` to `directory`."""
  config, rows = _config(workdir), []
  log = workdir / writers.METRICS_FILE
  if log.is_file():
    rows, _ = writers.read_jsonl(log)
  stages = report.stages_of(rows)
  curves = _panels(rows, stages)
  if curves:
    write_durably(directory / FIGURES, figure(curves))
  data = _front_matter(config, rows, origin)
  name = str(config.get('name') or workdir.resolve().name)
  sections = [
    f'# {_text(name)}',
    _introduction(config, origin),
    f'`NAME` is the directory or the repository of these files:\n\n{_LOADING[origin.part]}',
    f'## Training\n\n{_training(config)}',
    f'## Data\n\n{_data(config)}',
    f'## Curves\n\n![Curves of the run]({FIGURES})' if curves else '',
    _evaluation(rows, stages),
    _provenance(origin),
  ]
  _write(directory, data, sections)


def write_converted_card(
  directory: pathlib.Path, source: pathlib.Path, *, name: str, dtype: str, origin: Origin
) -> None:
  """Writes the model card of a converted model.

  If the source is an export in a run directory, the model card of the run is written. Otherwise, if
  the source has a card, a copy of this card with a note is written. Otherwise, a short card is
  written.

  Args:
    source: directory of the source.
    name: directory or hub id of the source, as the user gave it.
    dtype: data type of the converted weights.
  """
  note = f'Converted from {_place(name)} to {dtype} weights by jaxrl_llm {jaxrl_llm.__version__}.'
  workdir = source.resolve().parent
  if (workdir / writers.METRICS_FILE).is_file() and (workdir / 'config.json').is_file():
    init = _mapping(_config(workdir).get('policy')).get('init_from')
    part = source.resolve().name
    base = init if isinstance(init, str) else None
    origin = dataclasses.replace(origin, base=base, part=part if part == 'critic' else 'policy')
    write_run_card(directory, workdir, origin)
    return
  card = source / CARD
  if card.is_file():
    text = card.read_text(encoding='utf-8', errors='replace')
    write_durably(directory / CARD, f'{text.rstrip()}\n\n---\n\n{note}\n')
    if (source / FIGURES).is_file():
      shutil.copyfile(source / FIGURES, directory / FIGURES)
    return
  data = ModelCardData(
    base_model=_hub_id(name), library_name='transformers', tags=['jaxrl_llm'], model_name=None
  )
  _write(directory, data, [f'# {_text(directory.name)}', note, _provenance(origin)])


def typed_command(argv: Sequence[str]) -> list[str]:
  """Returns the words of a command line in a form that may be published.

  A word or value that is a path in the home directory begins with `~`. Any other absolute path is
  reduced to its last component. The value of a flag that is called a token, key, password or secret
  becomes `…`.
  """
  program, *words = argv
  path = pathlib.Path(program)
  if path.name == 'jaxrl':
    first = ['jaxrl']
  elif path.parent.name == 'launch':
    first = ['jaxrl', path.stem]
  else:
    first = ['python', path.name]
  shown = []
  for before, word in zip(['', *words], words):
    if _SECRET_FLAG.fullmatch(before):
      shown.append('…')
    elif match := _SECRET.search(word):
      shown.append(f'{word[: match.end()]}…')
    else:
      shown.append(_without_home(word))
  return [*first, *shown]


def _without_home(word: str) -> str:
  """Returns a word of a command line in which paths are shortened, as in `typed_command`."""
  name, equals, value = word.partition('=') if word.startswith('-') else ('', '', word)
  if not value.startswith('/') or ',' in value:
    return _without_paths(word)
  path, home = pathlib.Path(value), pathlib.Path(os.path.expanduser('~'))
  within = home.name and path.is_relative_to(home)
  return f'{name}{equals}{"~" / path.relative_to(home) if within else path.name}'


def _without_paths(text: str) -> str:
  """Reduces each absolute path in a text to its last component."""
  return _PATH.sub(lambda match: pathlib.Path(match[0]).name, text)


def _config(workdir: pathlib.Path) -> Mapping[str, Any]:
  try:
    config = parse_json((workdir / 'config.json').read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return {}
  return _mapping(config)


def _mapping(value: Any) -> Mapping[str, Any]:
  """Returns `value` if it is a mapping, otherwise an empty mapping."""
  return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
  """Returns the mappings in a list; none if `value` is not a list."""
  return [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []


def _write(directory: pathlib.Path, data: ModelCardData, sections: Sequence[str]) -> None:
  body = '\n\n'.join(section for section in sections if section)
  card = f'---\n{data.to_yaml().strip()}\n---\n\n{body}\n'
  write_durably(directory / CARD, hide_secrets(card))


def _text(value: object, limit: int = 300) -> str:
  """Returns a value as one line, with Markdown's special characters escaped."""
  line = one_line(value, limit).replace('&', '&amp;').replace('<', '&lt;')
  return re.sub(r'([\\`*_\[\]|#!])', r'\\\1', line)


def _code(value: object, limit: int = 300) -> str:
  return '`' + one_line(value, limit).replace('`', "'").replace('|', '¦') + '`'


def _hub_id(name: str | None) -> str | None:
  """Returns `name` if it is a hub id and no directory of this machine has this name; otherwise
  None.
  """
  if name is None or not _HUB_ID.fullmatch(name) or pathlib.Path(name).exists():
    return None
  return name


def _place(name: str | None) -> str:
  """Describes a model's location in Markdown: a hub id as a link, a directory by the last component
  of its path.
  """
  if name is None:
    return 'random weights'
  if hub := _hub_id(name):
    return f'[{_text(hub)}](https://huggingface.co/{hub})'
  return f'the directory {_code(pathlib.Path(name).name)}'


def _stages(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
  return _mappings(config.get('stages'))


def _algorithm(stage: Mapping[str, Any]) -> str:
  algorithm = stage.get('algorithm')
  return str(algorithm.get('name')) if isinstance(algorithm, dict) else '?'


def _front_matter(
  config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], origin: Origin
) -> ModelCardData:
  algorithms = list(
    dict.fromkeys(_algorithm(stage).rpartition(':')[2] for stage in _stages(config))
  )
  last: dict[str, float] = {}
  for row in rows:
    for key, value in row.items():
      if re.fullmatch(r'val-core/.+/acc/[^/]+', key) and is_number(value):
        last[key] = value
  results = [
    EvalResult(
      task_type='text-generation',
      dataset_type=key.removeprefix('val-core/').partition('/acc/')[0],
      dataset_name=key.removeprefix('val-core/').partition('/acc/')[0],
      metric_type='accuracy',
      metric_name=key.rpartition('/')[2],
      metric_value=round(value, 6),
    )
    for key, value in last.items()
  ]
  return ModelCardData(
    base_model=_hub_id(origin.base),
    library_name='peft' if origin.part == 'adapter' else 'transformers',
    pipeline_tag=None if origin.part == 'critic' else 'text-generation',
    tags=['jaxrl_llm', *algorithms],
    datasets=_hub_datasets(config) or None,
    model_name=one_line(config.get('name', 'model'), 100) if results else None,
    eval_results=results or None,
  )


def _sources(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
  """Returns the (name, kind, source) of each taskset, preference set and example set."""
  sources = []
  for kind in ('tasksets', 'preferences', 'examples'):
    for part in _mappings(config.get(kind)):
      sources.append((str(part.get('name')), kind, str(part.get('source'))))
  return sources


def _hub_datasets(config: Mapping[str, Any]) -> list[str]:
  names = [
    source.removeprefix('datasets:').partition('#')[0]
    for _, _, source in _sources(config)
    if source.startswith('datasets:')
  ]
  return list(dict.fromkeys(name for name in names if _hub_id(name)))


def _introduction(config: Mapping[str, Any], origin: Origin) -> str:
  steps = ', then '.join(
    f'{stage.get("steps")} steps of {_text(_algorithm(stage))}' for stage in _stages(config)
  )
  adapted = ' with LoRA' if _mapping(config.get('policy')).get('lora') else ''
  how = f': {steps}' if steps else ''
  return (
    f'{_WHAT[origin.part]}, trained{adapted} by jaxrl_llm {jaxrl_llm.__version__} from '
    f'{_place(origin.base)}{how}.'
  )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [head, ['---'] * len(head), *rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _training(config: Mapping[str, Any]) -> str:
  rows = []
  for stage in _stages(config):
    source, algorithm = _mapping(stage.get('source')), _mapping(stage.get('algorithm'))
    optimizer = _mapping(stage.get('optimizer') or _mapping(config.get('learner')).get('optimizer'))
    batch = (
      f'{source["groups_per_batch"]} groups of {source.get("group_size")}'
      if 'groups_per_batch' in source
      else f'{source.get("sequences_per_batch")} sequences'
    )
    tasksets = source.get('tasksets')
    named = isinstance(tasksets, list) and tasksets
    names = tasksets if named else [source.get('train') or source.get('run') or '']
    rows.append(
      [
        _text(stage.get('name')),
        _text(algorithm.get('name')),
        _code(_without_paths(json.dumps(algorithm.get('options') or {}))),
        _text(', '.join(pathlib.Path(str(name)).name for name in names)),
        _text(batch),
        _text(stage.get('steps')),
        _text(optimizer.get('peak_lr')),
      ]
    )
  return _table(['stage', 'algorithm', 'options', 'data', 'batch', 'steps', 'learning rate'], rows)


def _data(config: Mapping[str, Any]) -> str:
  rows = []
  for name, kind, source in _sources(config):
    local = source.startswith(('/', '~')) or source.endswith(('.jsonl', '.parquet'))
    shown = pathlib.Path(source).name if local else _without_paths(source)
    rows.append([_text(name), kind, _code(shown)])
  used = [
    f'{_text(scorer.get("name"))} ({_code(scorer.get("kind"))})'
    for scorer in _mappings(_mapping(config.get('rewards')).get('scorers'))
  ]
  rewards = f'\n\nRewards: {", ".join(used)}.' if used else ''
  return _table(['name', 'kind', 'source'], rows) + rewards


def _panels(rows: list[dict[str, Any]], stages: list[dict[str, Any]]) -> list[Panel]:
  """Returns the curves to draw: first the accuracies on held-out tasks, then the training
  metrics.
  """
  keys = dict.fromkeys(key for row in rows for key in row)
  accuracies = [key for key in keys if re.fullmatch(r'val-core/.+/acc/greedy', key)][:2]
  panels = []
  for key in [*accuracies, *_FIGURE_KEYS]:
    points = [
      (report.step_of(row) + stages[report.stage_index(row, stages)]['offset'], row[key])
      for row in rows
      if is_number(row.get(key))
    ]
    if len(points) > 1:
      panels.append(Panel(*label(key), label(key).noise, points))
  return panels[:_MAX_PANELS]


def _evaluation(rows: list[dict[str, Any]], stages: list[dict[str, Any]]) -> str:
  """Returns a table of evaluations: the first one of the run, and the last one of each stage."""
  pattern = re.compile(r'val-core/.+/(acc/[^/]+|rewards/accuracies)')
  measured = [row for row in rows if any(pattern.fullmatch(key) for key in row)]
  if not measured:
    return ''
  last = {row.get(writers.STAGE): row for row in measured}
  chosen = list({id(row): row for row in (measured[0], *last.values())}.values())
  keys = sorted({key for row in chosen for key in row if pattern.fullmatch(key)})

  def cell(row: Mapping[str, Any], key: str) -> str:
    error = row.get(f'{key}/stderr')
    value = f'{row[key]:.3f}' if is_number(row.get(key)) else '–'
    return f'{value} ± {error:.3f}' if is_number(error) else value

  table = [
    [_text(row.get(writers.STAGE)), f'{report.step_of(row):,}', *(cell(row, key) for key in keys)]
    for row in chosen
  ]
  return '## Evaluation\n\n' + _table(
    ['stage', 'step', *(_text(label(key).name) for key in keys)], table
  )


def _provenance(origin: Origin) -> str:
  versions = [f'Python {platform.python_version()}', f'jaxrl_llm {jaxrl_llm.__version__}']
  for library in _LIBRARIES:
    try:
      versions.append(f'{library} {importlib.metadata.version(library)}')
    except importlib.metadata.PackageNotFoundError:
      continue
  command = shlex.join(origin.command).replace('```', "'''")
  ran = f'```bash\n{command}\n```\n\n' if origin.command else ''
  return f'## Command and versions\n\n{ran}{", ".join(versions)}'
