"""Examples: rows that the policy imitates. A row is a conversation, a prompt with a completion, or
a text.

Every row is counted in `read` and in exactly one of `kept`, `corrupt`, `duplicate` and
`other_split`. Rows with equal prompts are always in the same split. By default, all of them are
kept (see `deduplicate`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import xxhash
from absl import logging

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.records.task import ChatMessage, is_held_out, prompt_digest
from jaxrl_llm.core.types import Json
from jaxrl_llm.tasks import sources, templates
from jaxrl_llm.tasks.messages import called_name, chat_messages, roles

_COUNTS = ('read', 'kept', 'corrupt', 'duplicate', 'other_split')
_NAME = re.compile(r'[A-Za-z0-9_.-]+')
_RESERVED = frozenset(
  (
    *('messages', 'conversations', 'tools', 'documents', 'chat_template'),
    *('add_generation_prompt', 'continue_final_message', 'return_assistant_tokens_mask'),
  )
)
"""Names that `chat_template_kwargs` may not set, because the rendering itself uses them."""


LossOn = Literal['answers', 'completions', 'all']


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExamplesConfig:
  """Configuration of an example set: its source, form and split, and the treatment of unsuitable
  rows.

  Without templates, the first of these forms that a row has is used: (1) a conversation in
  `messages` or `conversations`; (2) `prompt` and `completion`, each a text or messages; (3) `text`.
  The loss covers the assistant's turns of (1), the completion of (2) and all tokens of (3). If a
  completion also has messages of other roles, the loss covers only the assistant's turns in it.
  """

  name: str
  source: str
  """Path of a .jsonl or .parquet file, or 'datasets:<directory or hub id>[#split]'."""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Arguments passed to `datasets.load_dataset`. Must be empty if `source` is a file."""
  domain: str = 'general'
  """Domain of the rows that have no field `ability`."""
  size: int | None = None
  """Maximum number of rows to read."""
  messages_key: str = 'messages'
  """Name of the column with the conversations."""
  prompt: str | None = None
  """Template of a user message. If it is set, `completion`, the template of the answer, must be set
  too, and every row becomes a conversation with these two messages, regardless of its own form.
  Templates are Python format strings over the row's fields (see `tasks.templates`).
  """
  completion: str | None = None
  """Template of the assistant's answer to `prompt`."""
  text: str | None = None
  """Template of a text. If it is set, every row becomes a text, regardless of its own form."""
  system: str | None = None
  """System message of all conversations. If None, conversations keep their own system messages."""
  chat_template: str | None = None
  """File with a Jinja chat template for these conversations, for example one that marks the
  assistant's turns with `{% generation %}`. If None, the tokenizer's template is used.
  """
  loss_on: LossOn = 'answers'
  """Tokens in the loss. 'answers': the assistant's turns in a conversation or in a completion that
  consists of messages, a completion that is text, and all tokens of a row that is only a text.
  'completions': a row's completion, or all tokens if the row has none. 'all': all tokens.
  """
  deduplicate: Literal['none', 'rows', 'prompts'] = 'none'
  """Rows that are dropped as duplicates. none: no rows; rows: rows that equal an earlier row;
  prompts: rows with the same prompt as an earlier row.
  """
  split: Literal['all', 'train', 'eval'] = 'all'
  holdout: float = 0.0
  """Fraction of the prompts that form the split 'eval', in [0, 1). A taskset with the same holdout
  holds out the same prompts.
  """
  too_long: Literal['truncate', 'split', 'skip', 'fail'] = 'truncate'
  """Treatment of a row with more tokens than a sequence may have. truncate: only its beginning is
  kept. split: it becomes several sequences. skip: it is left out. fail: the run does not start.
  """
  on_corrupt: Literal['fail', 'skip'] = 'fail'
  """Treatment of a row that has no known form or whose answers cannot be located among its tokens.
  fail: the run does not start. skip: the row is left out and counted.
  """

  def __post_init__(self):
    where = f'examples {self.name}'
    if not _NAME.fullmatch(self.name):
      raise UserError(
        f'examples name {self.name!r}: wanted letters, digits, dots, dashes and underscores only'
      )
    if self.source.startswith('reasoning_gym:'):
      raise UserError(
        f'{where}: source {self.source!r} has tasks; make a taskset of it and set Demonstrations '
        'as the source of the stage'
      )
    if (self.prompt is None) != (self.completion is None):
      raise UserError(
        f'{where}: only one of the templates prompt and completion is set; set both, or neither'
      )
    if self.text is not None and (self.prompt is not None or self.system is not None):
      raise UserError(
        f'{where}: text cannot be combined with prompt or system; remove text, or the other two'
      )
    if not 0 <= self.holdout < 1:
      raise UserError(f'{where}: holdout is {self.holdout}, wanted a fraction in [0, 1)')
    if self.split == 'eval' and not self.holdout:
      raise UserError(
        f"{where}: split 'eval' with holdout 0 has no rows; set the same holdout as for 'train'"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
  """Messages of a conversation, and the tools and variables that its chat template uses."""

  messages: tuple[ChatMessage, ...]
  prompt_messages: int | None = None
  """Number of messages at the beginning that form the prompt. If None, the conversation has no
  fixed prompt, and every turn of the assistant is an answer.
  """
  tools: tuple[Json, ...] | None = None
  """Descriptions of the available tools, as JSON schemas; None if there are no tools."""
  variables: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  """Additional variables for the chat template, such as `enable_thinking`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """A prompt and its completion as plain texts, without a chat template."""

  prompt: str
  completion: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
  """A text without a prompt. The loss covers all of its tokens."""

  text: str


Content = Conversation | Completion | Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """A row that the policy imitates."""

  uid: str
  """Name of the example set and number of the row, counted from 0, for example `chat:17`."""
  where: str
  """Location of the row, for error messages: file and line, or dataset and index."""
  name: str
  """Name of the example set."""
  domain: str
  digest: str
  """Digest of the prompt (see `prompt_digest`). A task with the same prompt has the same digest."""
  content: Content

  @property
  def task_id(self) -> str:
    """Identifier that a task with the same prompt has in a taskset with the name of this example
    set.
    """
    return f'{self.name}:{self.digest[:16]}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleSet:
  """Examples in the order of their source, and counts of the rows."""

  config: ExamplesConfig
  examples: tuple[Example, ...]
  counts: Mapping[str, int]
  """Numbers of rows, keyed by `read`, `kept`, `corrupt`, `duplicate` and `other_split`."""


def load_examples(config: ExamplesConfig) -> ExampleSet:
  """Reads, deduplicates and splits examples.

  Raises:
    UserError: the source cannot be read, a row is corrupt and `on_corrupt` is 'fail', or no row is
      left.
  """
  counts = dict.fromkeys(_COUNTS, 0)
  examples, seen = [], set()
  rows = sources.read_rows(config.source, options=config.options, size=config.size, seed=0)
  results = sources.converted(
    rows,
    lambda row: _example(row, config, counts['read'] - 1),
    counts,
    reader=f'examples {config.name}',
    on_corrupt=config.on_corrupt,
  )
  for _, example in results:
    fate = _fate(example, config, seen)
    counts[fate] += 1
    if fate == 'kept':
      examples.append(example)
  summary = sources.listed(counts)
  logging.info('examples %s: %s', config.name, summary)
  if not examples:
    raise UserError(f'examples {config.name}: no row of {config.source} is left: {summary}')
  return ExampleSet(config=config, examples=tuple(examples), counts=counts)


def example_texts(examples: ExampleSet) -> Iterator[str]:
  """Yields the texts of all examples, from which a tokenizer can be built."""
  for example in examples.examples:
    match example.content:
      case Conversation(messages=messages):
        yield from (str(message.get('content', '')) for message in messages)
      case Completion(prompt=prompt, completion=completion):
        yield from (prompt, completion)
      case Text(text=text):
        yield text


def _fate(example: Example, config: ExamplesConfig, seen: set[str]) -> str:
  """Returns 'kept', 'duplicate' or 'other_split' for an example, and adds its key to `seen`."""
  if config.deduplicate != 'none':
    key = example.digest if config.deduplicate == 'prompts' else _content_digest(example.content)
    if key in seen:
      return 'duplicate'
    seen.add(key)
  is_eval = is_held_out(example.digest, config.holdout)
  if config.split != 'all' and is_eval != (config.split == 'eval'):
    return 'other_split'
  return 'kept'


def _content_digest(content: Content) -> str:
  canonical = json.dumps(dataclasses.asdict(content), sort_keys=True, ensure_ascii=False)
  return xxhash.xxh3_128_hexdigest(canonical.encode())


def _example(row: sources.SourceRow, config: ExamplesConfig, number: int) -> Example:
  """Converts a row of the source to an example. Raises ValueError if that is not possible."""
  content = _content(row.fields, config)
  ability = row.fields.get('ability')
  return Example(
    uid=f'{config.name}:{number}',
    where=row.where,
    name=config.name,
    domain=ability if isinstance(ability, str) and ability else config.domain,
    digest=prompt_digest(_prompt(content)),
    content=content,
  )


def _prompt(content: Content) -> tuple[Mapping[str, str], ...]:
  """Returns the prompt as text messages, in the form in which a task stores its prompt."""
  match content:
    case Completion(prompt=text) | Text(text=text):
      return ({'role': 'user', 'content': text},)
  first = content.prompt_messages
  if first is None:
    first = roles(content.messages).index('assistant')
  return tuple(
    {'role': message['role'], 'content': message.get('content', '')}
    for message in content.messages[:first]
  )


def _content(fields: Mapping[str, Json], config: ExamplesConfig) -> Content:
  """Converts the fields of a row. Raises ValueError if they have none of the known forms, or if the
  values are invalid for the form.
  """
  if config.text is not None:
    return _text_of(templates.render(config.text, fields))
  if config.prompt is not None:
    messages = [
      {'role': 'user', 'content': templates.render(config.prompt, fields)},
      {'role': 'assistant', 'content': templates.render(config.completion, fields)},
    ]
    return _conversation(chat_messages('messages', messages), 1, fields, config)
  for key in (config.messages_key, 'conversations'):
    if fields.get(key) is not None:
      return _conversation(_messages(key, fields[key]), None, fields, config)
  prompt, completion = fields.get('prompt'), fields.get('completion')
  if prompt is not None and completion is not None:
    return _completion(prompt, completion, fields, config)
  if fields.get('text') is not None:
    if config.system is not None:
      raise ValueError('the row is a text, which has no system message; remove system')
    return _text_of(fields['text'])
  raise ValueError(
    f"none of {config.messages_key!r}, 'conversations', 'prompt' with 'completion', or 'text' "
    f'among its fields {one_line(", ".join(sorted(fields)), 200)}'
  )


def _text_of(text: Json) -> Text:
  if not isinstance(text, str) or not text.strip():
    raise ValueError(f'text is {one_line(json.dumps(text), 80)}, wanted text that is not empty')
  return Text(text=text)


def _completion(
  prompt: Json, completion: Json, fields: Mapping[str, Json], config: ExamplesConfig
) -> Content:
  if isinstance(prompt, str) and isinstance(completion, str):
    if config.system is not None:
      raise ValueError(
        'prompt and completion are texts, which have no system message; remove system, or set the '
        'templates prompt and completion'
      )
    if not completion.strip():
      raise ValueError('completion is empty')
    return Completion(prompt=prompt, completion=completion)
  before = _messages('prompt', _as_message(prompt, 'user'))
  after = _messages('completion', _as_message(completion, 'assistant'))
  if after[0]['role'] != 'assistant':
    raise ValueError(
      f"completion must begin with a message of 'assistant', its roles are {roles(after)}"
    )
  return _conversation([*before, *after], len(before), fields, config)


def _as_message(value: Json, role: str) -> Json:
  return [{'role': role, 'content': value}] if isinstance(value, str) else value


def _messages(name: str, value: Json) -> list[ChatMessage]:
  if not isinstance(value, list) or not value:
    raise ValueError(f'{name} is {one_line(json.dumps(value), 80)}, wanted a list of messages')
  return chat_messages(name, value)


def _conversation(
  messages: list[ChatMessage],
  prompt_messages: int | None,
  fields: Mapping[str, Json],
  config: ExamplesConfig,
) -> Conversation:
  if 'assistant' not in roles(messages):
    raise ValueError(
      f"no message of 'assistant', so there is nothing to learn; the roles are {roles(messages)}"
    )
  if config.system is not None:
    system_messages = roles(messages[:prompt_messages]).count('system')
    messages = [message for message in messages if message['role'] != 'system']
    messages.insert(0, {'role': 'system', 'content': config.system})
    prompt_messages = None if prompt_messages is None else prompt_messages - system_messages + 1
  return Conversation(
    messages=tuple(messages),
    prompt_messages=prompt_messages,
    tools=_tools(fields.get('tools')),
    variables=_variables(fields.get('chat_template_kwargs')),
  )


def _tools(value: Json) -> tuple[Json, ...] | None:
  """Returns a row's tools. They may also be given as JSON text, because an Arrow column can have
  only one type.
  """
  if isinstance(value, str):
    try:
      value = parse_json(value) if value.strip() else None
    except ValueError as error:
      raise ValueError(f'tools is not JSON: {error}') from None
  if not value and (value is None or isinstance(value, list)):
    return None
  if not isinstance(value, list) or any(called_name(tool) is None for tool in value):
    raise ValueError(
      f'tools is {one_line(json.dumps(value), 80)}, wanted a list of {{type: "function", '
      'function: {name, parameters}}'
    )
  return tuple(value)


def _variables(value: Json) -> Mapping[str, Json]:
  if value is None:
    return {}
  if not isinstance(value, dict):
    raise ValueError(
      f'chat_template_kwargs is {one_line(json.dumps(value), 80)}, wanted an object of variables'
    )
  if taken := sorted(_RESERVED & value.keys()):
    raise ValueError(f'chat_template_kwargs sets {taken[0]!r}, which the rendering sets itself')
  return {name: given for name, given in value.items() if given is not None}
