"""Reads TRL arguments from command lines, YAML files, and calls in Python files.

Python files are parsed and never run.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping

from jaxrl_llm.app.importers.given import Given, read_mapping, read_text, value_of
from jaxrl_llm.app.importers.shell import Command
from jaxrl_llm.app.importers.shell_words import Word
from jaxrl_llm.app.importers.start import find_start
from jaxrl_llm.app.importers.trl_table import TABLES, TRAINERS
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.files import path_inside
from jaxrl_llm.core.types import Json

_CONFIGS = {
  'SFTConfig': 'sft',
  'DPOConfig': 'dpo',
  'RewardConfig': 'reward',
  'GRPOConfig': 'grpo',
  'RLOOConfig': 'rloo',
}
_TRAINERS = {f'{name.removesuffix("Config")}Trainer': kind for name, kind in _CONFIGS.items()}
_ARGUMENTS = {
  'model': 'model_name_or_path',
  'train_dataset': 'dataset_name',
  'eval_dataset': 'eval_dataset',
}
"""Names of arguments on TRL's command line, keyed by their names in Python, as in
`DPOTrainer(train_dataset=…)`.
"""
_ADAPTER = {'r': 'lora_r', 'target_modules': 'lora_target_modules', 'task_type': 'lora_task_type'}
_SCRIPT = re.compile(r'(?:.*/)?([\w.-]+)\.py|trl\.scripts\.(\w+)')
_MOST_LITERALS = 100_000
_KIND = re.compile(r'\b(sft|dpo|reward|grpo|gspo|rloo)\b')


@dataclasses.dataclass(frozen=True)
class Arguments:
  """Arguments that a file gives to a trainer."""

  trainer: str
  given: list[Given]
  notes: list[str]


def read_file(path: pathlib.Path, define: Mapping[str, str], trainer: str | None) -> Arguments:
  """Returns the arguments that a file gives.

  Args:
    path: Python or YAML file (its name ends in .py, .yaml or .yml) or shell script.
    define: values of a script's variables.
    trainer: one of TRAINERS. If None, the file determines it.

  Raises:
    UserError: the file cannot be read, gives no arguments, or does not determine the trainer.
  """
  content = read_text(path)
  if path.suffix in ('.yaml', '.yml'):
    given, notes, named = _yaml(content, path), [], None
  elif path.suffix == '.py':
    given, notes, named = _python(content, path, define)
  else:
    given, notes, named = _shell(content, path, define)
  trainer = trainer or named or _kind_of(path.stem) or _by_keys(given)
  if trainer is None:
    raise UserError(
      f'{path}: does not say which trainer its arguments are for; pass --trainer='
      f'{"|".join(TRAINERS)}'
    )
  return Arguments(trainer, given, notes)


def _kind_of(name: str) -> str | None:
  words = re.sub(r'[^a-z]+', ' ', name.lower())
  match = None if 'online' in words else _KIND.search(words)
  return match and {'gspo': 'grpo'}.get(match[1], match[1])


def _by_keys(given: list[Given]) -> str | None:
  """Returns the trainer whose table contains all given keys; None unless there is exactly one."""
  keys = {item.key for item in given}
  fitting = [name for name, table in TABLES.items() if keys <= set(table)]
  return fitting[0] if len(fitting) == 1 else None


def _yaml(content: str, path: pathlib.Path) -> list[Given]:
  tree = read_mapping(content, path)
  return [Given(key.replace('-', '_'), value, path.name) for key, value in tree.items()]


# Reading of command lines.


def _shell(
  content: str, path: pathlib.Path, define: Mapping[str, str]
) -> tuple[list[Given], list[str], str | None]:
  wanted = (
    f'a trainer; wanted trl {"|".join(TRAINERS)} --key value …, or python FILE.py --key value …'
  )
  command, at, notes = find_start(content, path, define, _start, wanted)
  given = _options(command, path)
  name = command.words[at].text
  match = _SCRIPT.fullmatch(name)
  return given, notes, _kind_of(match[1] or match[2]) if match else name


def _start(command: Command) -> int | None:
  """Returns the index of the trainer's name in the words of a command; None if it starts no
  trainer.
  """
  texts = [word.text for word in command.words]
  last = max((at for at, text in enumerate(texts) if text.startswith('--')), default=0)
  for at, name in enumerate(texts):
    if at and pathlib.PurePath(texts[at - 1]).name == 'trl' and name in TRAINERS:
      return at
    if at < last and _SCRIPT.fullmatch(name):
      return at
  return None


def _options(command: Command, path: pathlib.Path) -> list[Given]:
  given: list[Given] = []
  where = f'line {command.line}'
  file: str | None = None
  words = collections.deque(command.words)
  while words:
    word = words.popleft()
    if not word.text.startswith('--') or word.text == '--':
      continue
    name, equals, rest = word.text[2:].partition('=')
    values = [Word(rest, word.missing)] if equals else []
    while not equals and words and not re.match(r'--?[A-Za-z]', words[0].text):
      if values and _SCRIPT.fullmatch(words[0].text):
        break
      values.append(words.popleft())
    key = name.replace('-', '_')
    if key == 'config' and values and not values[0].missing:
      file = values[0].text  # As in TRL, the last value is used.
      continue
    if key.startswith('no_') and not values:
      given.append(Given(key.removeprefix('no_'), False, where))
      continue
    missing = tuple(part for value in values for part in value.missing)
    read = [value_of(value.text.strip(',')) for value in values]
    value: Json = True if not read else read[0] if len(read) == 1 else read
    given.append(Given(key, value, where, missing))
  return given if file is None else [*_beside(path, file), *given]


def _beside(path: pathlib.Path, name: str) -> list[Given]:
  """Returns the keys in the YAML file that --config names. The file must be in the script's
  directory or below it.
  """
  try:
    other = path_inside(path.parent, name)
  except ValueError as error:
    raise UserError(f'{path}: --config {one_line(name)}: {one_line(error)}') from None
  return _yaml(read_text(other), other)


# Reading of Python files.


def _python(
  content: str, path: pathlib.Path, define: Mapping[str, str]
) -> tuple[list[Given], list[str], str | None]:
  try:
    tree = ast.parse(content)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise UserError(f'{path}: not Python: {one_line(error, 200)}') from None
  reader = _Calls(tree)
  given = list(reader.given())
  notes = list(reader.notes)
  trainer = reader.trainer
  document = ast.get_docstring(tree) or ''
  command = None if reader.has_config else _in_document(document, path, define)
  if command is not None:
    # A script that parses its command line usually shows an example in its docstring. Values that
    # the script takes from its command line are read from this example.
    given = [*(item for item in given if not item.missing), *command[0]]
    trainer = trainer or command[1]
    notes.append('the arguments are read from the first trainer command in the docstring')
  if all(item.missing for item in given):
    raise UserError(
      f'{path}: gives no arguments: no {", ".join(_CONFIGS)} or trainer has literal values; '
      'import the shell script or YAML file that gives them'
    )
  return given, notes, trainer


def _in_document(
  document: str, path: pathlib.Path, define: Mapping[str, str]
) -> tuple[list[Given], str | None] | None:
  """Returns the arguments and the trainer of the first command in a docstring that starts a
  trainer; None if no command does.
  """
  for block in re.split(r'^[ \t]*(?:```.*)?$', document, flags=re.MULTILINE):
    try:
      given, _, kind = _shell(block, path, define)
    except UserError:
      continue
    return given, kind
  return None


class _Calls:
  """The calls in a Python program that configure a trainer."""

  def __init__(self, tree: ast.Module):
    self._names: dict[str, ast.expr | None] = {}
    self._functions = {
      node.name
      for node in ast.walk(tree)
      if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    self._imported: dict[str, str] = {}
    self._parsed: set[str] = set()
    self._changed: set[str] = set()
    """Names of datasets that the program changes after loading them."""
    self._calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    self._left = _MOST_LITERALS
    self.notes: list[str] = []
    self.trainer: str | None = None
    self.has_config = False
    for node in ast.walk(tree):
      if isinstance(node, ast.Assign):
        self._assign(node)
      elif isinstance(node, ast.ImportFrom) and node.module:
        self._imported |= {
          alias.asname or alias.name: f'{node.module}.{alias.name}' for alias in node.names
        }

  def _assign(self, node: ast.Assign) -> None:
    for target in node.targets:
      if isinstance(target, ast.Tuple):
        named = [
          (element, ast.Subscript(value=node.value, slice=ast.Constant(index)))
          for index, element in enumerate(target.elts)
        ]
      else:
        named = [(target, node.value)]
      for element, value in named:
        if isinstance(element, ast.Name):
          self._name(element.id, value)

  def _name(self, name: str, value: ast.expr) -> None:
    root, calls = value, 0
    while isinstance(root, ast.Call | ast.Attribute | ast.Subscript):
      calls += isinstance(root, ast.Call)
      root = root.func if isinstance(root, ast.Call) else root.value
      if isinstance(root, ast.Attribute) and root.attr.startswith('parse_'):
        self._parsed.add(name)
    if name not in self._names:
      self._names[name] = value
    elif calls and isinstance(root, ast.Name) and root.id == name:
      self._changed.add(name)  # For example, `rows = rows.map(f)`.
    else:
      self._names[name] = None  # A name that is assigned several times has no known value.

  def given(self) -> Iterator[Given]:
    """Yields the arguments of the calls that create configurations, adapters and trainers."""
    for call in self._calls:
      name = _called(call)
      if name in _CONFIGS or name in ('ModelConfig', 'ScriptArguments', 'TrainingArguments'):
        self.has_config = self.has_config or name in _CONFIGS
        self.trainer = self.trainer or _CONFIGS.get(name)
        yield from self._keywords(call, {})
      elif name == 'LoraConfig':
        yield Given('use_peft', True, f'line {call.lineno}')
        for item in self._keywords(call, _ADAPTER):
          key = item.key if item.key.startswith(('lora_', 'use_')) else f'lora_{item.key}'
          yield dataclasses.replace(item, key=key)
      elif name in _TRAINERS:
        self.trainer = _TRAINERS[name]
        yield from self._trainer(call)

  def _trainer(self, call: ast.Call) -> Iterator[Given]:
    for keyword in call.keywords:
      where = f'line {keyword.value.lineno}'
      if keyword.arg in ('args', 'peft_config', 'quantization_config'):
        continue  # A nested call's arguments are read separately.
      if self._root(keyword.value) in self._parsed:
        continue  # The program parses this value from its command line, which is read separately.
      if keyword.arg in ('train_dataset', 'eval_dataset'):
        yield from self._dataset(keyword.arg, keyword.value, where)
      elif keyword.arg == 'reward_funcs':
        yield self._rewards(keyword.value, where)
      else:
        yield from self._keyword(keyword, _ARGUMENTS)

  def _keywords(self, call: ast.Call, names: Mapping[str, str]) -> Iterator[Given]:
    for keyword in call.keywords:
      yield from self._keyword(keyword, names)
    if call.args:
      where = f'line {call.lineno}'
      yield Given(_called(call), _shown(call.args[0]), where, ('a positional argument',))

  def _keyword(self, keyword: ast.keyword, names: Mapping[str, str]) -> Iterator[Given]:
    where = f'line {keyword.value.lineno}'
    if keyword.arg is None:
      yield Given('**', _shown(keyword.value), where, (f'**{_shown(keyword.value)}',))
      return
    key = names.get(keyword.arg, keyword.arg)
    if key == 'model_init_kwargs' and isinstance(keyword.value, ast.Dict):
      for name, value in zip(keyword.value.keys, keyword.value.values):
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
          yield self._value(name.value, value, where)
        else:
          yield Given(key, _shown(value), where, (_shown(value),))
      return
    yield self._value(key, keyword.value, where)

  def _value(self, key: str, node: ast.expr, where: str) -> Given:
    try:
      return Given(key, self._literal(node), where)
    except ValueError:
      return Given(key, _shown(node), where, (_shown(node),))

  def _literal(self, node: ast.expr, depth: int = 0) -> Json:
    """Returns the value of an expression that consists of literals and of names with known values.
    Raises ValueError for other expressions.
    """
    self._left -= 1
    if depth > 20 or self._left < 0:
      raise ValueError('too many or too deeply nested values')
    match node:
      case ast.Constant(value=str() | int() | float() | None as value):
        return value
      case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
        return -value
      case ast.List(elts=items) | ast.Tuple(elts=items):
        return [self._literal(item, depth + 1) for item in items]
      case ast.Dict(keys=keys, values=values) if all(keys):
        pairs = zip(keys, values)
        return {str(self._literal(k, depth + 1)): self._literal(v, depth + 1) for k, v in pairs}
      case ast.Attribute(value=ast.Name(id='torch'), attr=name):
        return name
      case ast.Name(id=name) if self._names.get(name) is not None:
        return self._literal(self._names[name], depth + 1)
    raise ValueError('not a literal')

  @staticmethod
  def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
      node = node.value
    return node.id if isinstance(node, ast.Name) else None

  def _dataset(self, argument: str, node: ast.expr, where: str) -> Iterator[Given]:
    """Yields the name, configuration and split of the dataset that an expression loads."""
    shown, changed = _shown(node), False
    part: Json = None
    for _ in range(50):
      match node:
        case ast.Name(id=name) if self._names.get(name) is not None:
          node, changed = self._names[name], changed or name in self._changed
        case ast.Subscript(value=inner, slice=ast.Constant(value=str() | int() as index)):
          node, part = inner, index
        case ast.Call(func=ast.Attribute(value=inner)):
          node, changed = inner, True
        case _:
          break
    is_train = argument == 'train_dataset'
    if _called(node) != 'load_dataset':
      yield Given('dataset_name' if is_train else argument, shown, where, (shown,))
      return
    if changed:
      self.notes.append(
        f'{where}: {shown} is changed after loading, but the imported configuration reads the rows '
        'as they are stored: convert them with the templates of the source (prompt, system, '
        'truth), or write the changed rows to a file'
      )
    split = 'dataset_train_split' if is_train else 'dataset_test_split'
    if is_train:
      for key, argument_node in zip(('dataset_name', 'dataset_config'), node.args):
        yield self._value(key, argument_node, where)
    if isinstance(part, str):
      yield Given(split, part, where)
    for keyword in node.keywords:
      if keyword.arg == 'split':
        given = self._value(split, keyword.value, where)
        if isinstance(part, int) and isinstance(given.value, list) and part < len(given.value):
          given = dataclasses.replace(given, value=given.value[part])
        yield given
      elif is_train:
        key = {'path': 'dataset_name', 'name': 'dataset_config'}.get(
          str(keyword.arg), f'load_dataset.{keyword.arg}'
        )
        yield self._value(key, keyword.value, where)

  def _rewards(self, node: ast.expr, where: str) -> Given:
    items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    names: list[Json] = []
    for item in items:
      if isinstance(item, ast.Constant) and isinstance(item.value, str):
        names.append(item.value)
      elif isinstance(item, ast.Name) and item.id in self._functions:
        names.append(f'def {item.id}')
      elif isinstance(item, ast.Name) and item.id in self._imported:
        full = self._imported[item.id]
        names.append(item.id if full.startswith('trl.') else full)
      elif isinstance(item, ast.Call) and _called(item) in self._imported:
        names.append(_called(item))
      else:
        return Given('reward_funcs', _shown(node), where, (_shown(item),))
    return Given('reward_funcs', names, where)


def _called(node: ast.expr) -> str:
  """Returns the name of the function that an expression calls, without its module; an empty text if
  the expression is not a call.
  """
  match node:
    case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
      return name
  return ''


def _shown(node: ast.expr) -> str:
  try:
    return one_line(ast.unparse(node), 60)
  except RecursionError:
    return '…'
