"""Writes the pages of docs/reference/ that come from the code: configuration, public names,
commands, metrics.

  python docs/generate.py [--check]

--check writes nothing; the exit code is 1 if a page is not current.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import html
import inspect
import io
import pathlib
import re
import signal
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm import api
from jaxrl_llm.app.commands import cli, launch, serve
from jaxrl_llm.app.composition.scorers import SCORERS
from jaxrl_llm.app.importers import table as importing
from jaxrl_llm.app.importers import trl_table, verl_table
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.annotations import describe, field_types, is_record
from jaxrl_llm.config.documents import body_documents, field_documents
from jaxrl_llm.learner.catalogue import ALGORITHMS
from jaxrl_llm.master.exploring.processors import PROCESSORS as GROUP_PROCESSORS
from jaxrl_llm.objectives.surrogates import SURROGATES
from jaxrl_llm.runtime import metric_names
from jaxrl_llm.tasks.processors import PROCESSORS as TASK_PROCESSORS

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / 'docs' / 'reference'
NOTE = '<!-- Written by docs/generate.py; do not edit. -->'


def scorer_options(make: Any) -> type:
  """The dataclass of a scorer's options, which its docstring names."""
  name = re.findall(r'`(\w+Options)`', make.__doc__)[-1]
  return getattr(sys.modules[make.__module__], name)


OPTIONS: Mapping[str, Mapping[str, type]] = {
  'Algorithms': {name: options for name, (options, _) in ALGORITHMS.items()},
  'Surrogates': {name: options for name, (options, _) in SURROGATES.items()},
  'Scorers': {name: scorer_options(make) for name, make in SCORERS.items()},
  'Processors of tasksets': {name: options for name, (options, _) in TASK_PROCESSORS.items()},
  'Processors of groups': {name: options for name, (options, _) in GROUP_PROCESSORS.items()},
}
"""Dataclasses of options by the names that select them in a configuration."""


def records(annotation: Any) -> Iterator[type]:
  """The dataclasses within an annotation."""
  if is_record(annotation):
    yield annotation
  for argument in typing.get_args(annotation):
    yield from records(argument)


def reachable(root: type) -> list[type]:
  """`root` and the dataclasses within its fields, each after the one that first names it."""
  classes = [root]
  for cls in classes:
    for annotation in field_types(cls).values():
      classes.extend(
        dict.fromkeys(record for record in records(annotation) if record not in classes)
      )
  return classes


def value_text(value: Any) -> str:
  """Source text of a field's value; of a dataclass, only what differs from its defaults."""
  if isinstance(value, enum.Enum):
    return str(value)
  if isinstance(value, tuple):
    return f'({", ".join(map(value_text, value))}{"," if len(value) == 1 else ""})'
  if not dataclasses.is_dataclass(value):
    return repr(value)
  pairs = [(field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
  changed = [f'{field.name}={value_text(held)}' for field, held in pairs if held != default(field)]
  return f'{type(value).__name__}({", ".join(changed)})'


def default(field: dataclasses.Field) -> Any:
  """The default of a field; `dataclasses.MISSING` where it has none."""
  return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def escaped(text: str, *, bars: bool = False) -> str:
  """Markdown in which `<` outside of code begins no tag and, with `bars`, `|` ends no cell of a
  table.
  """
  parts = re.split('(`[^`]*`)', text)
  for i, part in enumerate(parts):
    if not part.startswith('`'):
      parts[i] = part.replace('<', '&lt;').replace('|', '&#124;' if bars else '|')
    elif bars and '|' in part:  # GitHub and Python-Markdown disagree about `\|` in code.
      parts[i] = f'<code>{html.escape(part[1:-1], quote=False).replace("|", "&#124;")}</code>'
  return ''.join(parts)


def cell(text: str) -> str:
  """`text` in one line of a table."""
  return ' '.join(escaped(text, bars=True).split())


def title(cls: type, sections: Iterable[type]) -> str:
  """Heading of a dataclass's section, with its module where another section's dataclass has the
  same name.
  """
  alike = [section for section in sections if section.__name__ == cls.__name__]
  return cls.__name__ if len(alike) < 2 else f'{cls.__name__} in {cls.__module__}'


def link(cls: type, sections: Iterable[type]) -> str:
  anchor = re.sub(r'[^a-z0-9_-]', '', title(cls, sections).lower().replace(' ', '-'))
  return f'[{cls.__name__}](#{anchor})'


def kind_text(annotation: Any, sections: Sequence[type]) -> str:
  """What a field accepts, in words, with links to `sections`."""
  text = re.sub(r'a tuple of \((.+?), \.\.\.\)', r'tuple of \1', describe(annotation))
  text = re.sub(r'\ban? ', '', text)
  for record in set(records(annotation)).intersection(sections):
    text = text.replace(record.__name__, link(record, sections))
  return cell(text)


def table(cls: type, names: Iterable[str], sections: Sequence[type]) -> list[str]:
  """A table of the fields `names`; types link to `sections` of the page."""
  documents, kinds = field_documents(cls), field_types(cls)
  fields = {field.name: field for field in dataclasses.fields(cls)}
  lines = ['| field | type | default | |', '|---|---|---|---|']
  for name in names:
    text = documents.get(name) or next((summary(record) for record in records(kinds[name])), '')
    value = default(fields[name])
    shown = 'required' if value is dataclasses.MISSING else cell(f'`{value_text(value)}`')
    lines.append(f'| `{name}` | {kind_text(kinds[name], sections)} | {shown} | {cell(text)} |')
  return lines


def document(cls: type) -> str:
  """The docstring that a class itself has; dataclasses without one get their signature instead."""
  text = inspect.getdoc(cls) or ''
  return '' if text.startswith(f'{cls.__name__}(') else text


def summary(cls: type) -> str:
  return document(cls).partition('\n\n')[0].replace('\n', ' ')


def shared_base(cls: type, classes: Sequence[type]) -> type | None:
  """The nearest base class whose fields several of `classes` inherit."""
  bases = (base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base))
  return next(
    (base for base in bases if sum(issubclass(other, base) for other in classes) > 1), None
  )


def section(
  cls: type, sections: Sequence[type], names: Sequence[str] = (), base: type | None = None
) -> list[str]:
  """Heading, docstring and fields of a dataclass; those of `base` are left to its own section."""
  lines = [f'### {title(cls, sections)}', '', escaped(document(cls)), '']
  if names:
    lines += ['Name in a configuration: ' + ', '.join(f'`{name}`' for name in names) + '.', '']
  fields = list(field_types(cls))
  if base is not None:
    declared = inspect.get_annotations(cls)
    fields = [name for name in fields if name in declared or name not in field_types(base)]
    which = (
      'with these fields of their own or with other defaults'
      if fields
      else 'with the same defaults'
    )
    lines += [f'The fields of {link(base, sections)}, {which}.', '']
  return [*lines, *(table(cls, fields, sections) if fields else []), '']


def option_records(options: Mapping[str, type]) -> list[type]:
  """The dataclasses of `options` that have fields, base classes with shared fields first."""
  kinds = [cls for cls in dict.fromkeys(options.values()) if field_types(cls)]
  bases = [base for cls in kinds if (base := shared_base(cls, kinds))]
  return list(dict.fromkeys([*bases, *(part for cls in kinds for part in reachable(cls))]))


def configuration() -> str:
  """The page of all configuration dataclasses."""
  lines = ['# Configuration', '', NOTE, '', *CONFIGURATION, '', '## The run and its parts', '']
  for cls in reachable(Config):
    lines += section(cls, SECTIONS)
  for heading, options in OPTIONS.items():
    lines += [f'## {heading}', '']
    without = [f'`{name}`' for name, cls in options.items() if not field_types(cls)]
    lines += [f'Without options: {", ".join(without)}.', ''] if without else []
    kinds = set(options.values())
    for cls in option_records(options):
      names = [name for name, kind in options.items() if kind is cls]
      lines += section(cls, SECTIONS, names, shared_base(cls, kinds) if cls in kinds else None)
  return '\n'.join(lines)


CONFIGURATION = (
  'A configuration is a Python file whose `get_config(variant)` returns a [Config](#config). Any '
  'field can be set on',
  'the command line by its path, such as `--config.policy.dtype=bfloat16` or '
  '`--config.stages.grpo.steps=100`;',
  'elements of a tuple are addressed by name or by index. The `options` of algorithms, scorers and '
  'processors take the',
  'fields of the dataclasses in the later sections.',
)
SECTIONS = list(dict.fromkeys(sum(map(option_records, OPTIONS.values()), start=reachable(Config))))
"""All dataclasses of the page."""


def markdown(document: str | None) -> str:
  """A docstring as Markdown: its sections (`Args:`, `Returns:`, `Raises:`) become lists."""
  lines = []
  for line in inspect.cleandoc(escaped(document or '')).splitlines():
    if re.fullmatch(r'(Args|Raises|Returns|Yields):', line):
      lines += [f'**{line[:-1]}**', '']
    elif item := re.match(r'  (\*{0,2}\w+): (.*)', line):
      lines.append(f'- `{item[1]}`: {item[2]}')
    else:
      lines.append(line)
  return '\n'.join(lines)


def header(node: ast.FunctionDef | ast.AsyncFunctionDef, source: Sequence[str]) -> list[str]:
  """A code block with the signature, as the source writes it."""
  end = max(node.body[0].lineno - 1, node.lineno)
  start = min(part.lineno for part in (node, *node.decorator_list))
  text = textwrap.dedent('\n'.join(source[start - 1 : end]))
  return ['```python', text.removesuffix(' ...').removesuffix(':'), '```', '']


def public_class(node: ast.ClassDef, source: Sequence[str]) -> list[str]:
  """Docstring, fields and public methods of a class."""
  lines = [markdown(ast.get_docstring(node)), '']
  values = [ast.unparse(item) for item in node.body if isinstance(item, ast.Assign)]
  lines += [f'Values: {", ".join(f"`{value}`" for value in values)}.', ''] if values else []
  documents = body_documents(node)
  fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
  if fields:
    lines += ['| field | type | default | |', '|---|---|---|---|']
    for item in fields:
      name, shown = (
        item.target.id,
        cell(f'`{ast.unparse(item.value)}`') if item.value else 'required',
      )
      kind, text = cell(f'`{ast.unparse(item.annotation)}`'), cell(documents.get(name, ''))
      lines.append(f'| `{name}` | {kind} | {shown} | {text} |')
    lines.append('')
  for item in node.body:
    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not re.match(
      '_(?!_(init|call)__)', item.name
    ):
      lines += [
        f'#### {node.name}.{item.name}',
        '',
        *header(item, source),
        markdown(ast.get_docstring(item)),
        '',
      ]
  return lines


def public_name(name: str) -> list[str]:
  """Heading, signature, docstring and members of a public name, from the source of its module."""
  text = inspect.getsource(sys.modules[api._MODULES[name]])
  body, source = ast.parse(text).body, text.splitlines()
  lines = [f'### {name}', '', f'From `{api._MODULES[name]}`.', '']
  for node, below in zip(body, [*body[1:], ast.Pass()]):
    match node:
      case ast.FunctionDef(name=defined) if defined == name:
        return [*lines, *header(node, source), markdown(ast.get_docstring(node)), '']
      case ast.ClassDef(name=defined) if defined == name:
        return [*lines, *public_class(node, source)]
      case ast.Assign(targets=[ast.Name(id=defined)]) if defined == name:
        document = below.value.value if isinstance(below, ast.Expr) else ''
        return [*lines, '```python', ast.unparse(node), '```', '', markdown(document), '']
  raise LookupError(f'{api._MODULES[name]} defines no {name}')


def public_names() -> str:
  """The page of `jaxrl_llm.api`, in the groups that its source names."""
  lines = ['# Public names', '', NOTE, '', *PUBLIC_NAMES, '']
  _, *groups = re.split(
    r'^  # (.+)\n', inspect.getsource(api).partition('_NAMES = (')[2], flags=re.MULTILINE
  )
  for title, body in zip(groups[::2], groups[1::2]):
    names = [name for name in api.__all__ if re.search(rf'\b{name}\b', body.partition('\n)\n')[0])]
    lines += [f'## {title}', '']
    configured = [name for name in names if getattr(api, name) in SECTIONS]
    links = [
      link(getattr(api, name), SECTIONS).replace('(#', '(configuration.md#') for name in configured
    ]
    lines += (
      [*textwrap.wrap(', '.join(links) + '.', 120, break_on_hyphens=False), ''] if links else []
    )
    for name in names:
      lines += public_name(name) if name not in configured else []
  return '\n'.join(lines)


PUBLIC_NAMES = (
  'What configurations, scorers, workflows and algorithms import: `from jaxrl_llm.api import '
  'NAME`. Other modules may',
  'change without notice.',
)


def command_help(*words: str, without: str = '') -> list[str]:
  """A section with what `jaxrl WORDS --help` prints, less `without` and the flags that absl adds to
  every command.
  """
  handler, text = signal.getsignal(signal.SIGINT), io.StringIO()
  with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
    cli.launch(words[0], [f'jaxrl {words[0]}', *words[1:], '--help'])  # Ends with SystemExit.
  signal.signal(signal.SIGINT, handler)
  shown = re.sub(r'absl\.flags:\n(  .*\n)+\n?', '', text.getvalue() + '\n')
  return [
    f'## jaxrl {" ".join(words)}',
    '',
    '```text',
    shown.replace(without, '').strip(),
    '```',
    '',
  ]


def command_line() -> str:
  """The page of commands and their flags."""
  lines = ['# Command line', '', NOTE, '', '```text', cli.__doc__.strip(), '```', '']
  for name in cli.COMMANDS:
    lines += command_help(name)
  for launcher in launch.LAUNCHERS:
    lines += command_help('launch', launcher, without=launch.__doc__.strip())
  for role in list(serve.ROLES)[1:]:
    lines += command_help('serve', f'--role={role}', without=serve.__doc__.strip())
  return '\n'.join(lines)


IMPORTED_KEYS = (
  'What `jaxrl import-verl` and `jaxrl import-trl` make of each key of the other library. In keys, '
  '`*` stands for any',
  'text. `stages.NAME` is the stage; names without a dot are options of its algorithm. A key whose '
  'fate depends on its',
  'value is in several tables. A key that is in none is reported as not supported.',
)


def imported_keys() -> str:
  """The page of the importers' tables."""
  lines = ['# Imported keys', '', NOTE, '', *IMPORTED_KEYS, '']
  lines += key_tables('verl', verl_table.TABLE, verl_table.DEFAULTS)
  lines += key_tables('TRL: all trainers', trl_table.COMMON, {})
  for trainer, rows in trl_table.TABLES.items():
    own = {key: row for key, row in rows.items() if trl_table.COMMON.get(key) is not row}
    lines += key_tables(f'TRL: {trainer}', own, trl_table.DEFAULTS[trainer])
  return '\n'.join(lines)


def key_tables(
  title: str, rows: Mapping[str, importing.Row], defaults: Mapping[str, Any]
) -> list[str]:
  """A section with a table for each fate of keys, and one of the library's defaults."""
  found: dict[str, list[tuple[str, str]]] = {fate: [] for fate in importing.FATES}
  for key, row in rows.items():
    for end in dict.fromkeys(importing.final_rows(row)):
      match end:
        case importing.Mapped(to=to):
          names = ', '.join(f'`{name}`' for name in to.split(', '))
          found['mapped'].append((key, names))
        case importing.NotNeeded(why=why):
          found['not needed'].append((key, why))
        case importing.NotSupported(why=why):
          found['not supported'].append((key, why))
  lines = [f'## {title}', '']
  for fate, items in found.items():
    if items:
      lines += [f'### {title}: {fate}', '', f'| theirs | {"ours" if fate == "mapped" else "why"} |']
      lines += ['|---|---|', *(f'| `{key}` | {cell(text)} |' for key, text in items), '']
  if defaults:
    lines += [f'### {title}: defaults', '', 'Their defaults hold for keys that are not given:', '']
    lines += ['| theirs | default |', '|---|---|']
    lines += [*(f'| `{key}` | `{value}` |' for key, value in defaults.items()), '']
  return lines


PAGES = {
  'configuration.md': configuration,
  'api.md': public_names,
  'command_line.md': command_line,
  'imported_keys.md': imported_keys,
  'metrics.md': metric_names.document,
}


def main(arguments: Sequence[str]) -> int:
  """Returns the exit code."""
  stale = []
  for name, text in PAGES.items():
    file, page = FOLDER / name, re.sub(r'\n{3,}', '\n\n', text()).strip() + '\n'
    if not file.exists() or file.read_text() != page:
      stale.append(str(file.relative_to(ROOT)))
      if '--check' not in arguments:
        file.write_text(page)
  if '--check' not in arguments:
    print(f'written: {", ".join(stale) or "nothing, all pages are current"}')
    return 0
  if stale:
    print(f'not current: {", ".join(stale)}; run python docs/generate.py', file=sys.stderr)
  return bool(stale)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
