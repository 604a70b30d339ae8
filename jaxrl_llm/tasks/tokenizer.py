"""Converts text to tokens and back, with the model's tokenizer and chat template.

Rollouts use `render_prompt`, and demonstrations and preference data use `render_answer`. Both
tokenize a prompt in the same way.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import tokenizers
from absl import logging
from tokenizers import decoders, models, pre_tokenizers, trainers

# PyTorch is not needed here, so silence the advice that transformers prints at import if PyTorch is
# missing.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

from transformers import PreTrainedTokenizerFast

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.files import check_regular, parse_json, read_bytes
from jaxrl_llm.core.records.task import ChatMessage, Message, Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.tasks.rendering import Rendered, RenderError, TemplateProcess

Template = Literal['plain', 'chatml']

# 'plain' adds only an end token after an answer; 'chatml' is Qwen's template without its default
# system message.
_TEMPLATES = {
  'plain': (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
  ),
  'chatml': (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
  ),
}
_EOS = {'plain': '<eos>', 'chatml': '<|im_end|>'}
_SPECIALS = {'plain': ['<pad>', '<eos>'], 'chatml': ['<pad>', '<|im_start|>', '<|im_end|>']}
_SCAFFOLD = {'plain': '', 'chatml': 'systemuserassistanttool\n'}
_GENERATION = 'generation_config.json'
_FILE_BYTES = 256 << 20
"""Maximum size in bytes of each file of a tokenizer."""
_LONG = 1024
"""Number of tokens above which decoding takes long enough to delay other threads."""
_SUFFIXES = ('.json', '.jinja', '.txt', '.model')
"""Suffixes of files that transformers may open in a tokenizer directory."""
_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template.jinja',
  'chat_template.json',
  'vocab.json',
  'merges.txt',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
  """Tokenizer of a run: the directory of an existing tokenizer, or the settings for a new one."""

  path: str | None = None
  """Directory of an existing tokenizer; the other fields are then ignored. If None, a tokenizer is
  built.
  """
  kind: Literal['character', 'bpe'] = 'character'
  template: Template = 'plain'
  vocab_size: int = 1024
  """Vocabulary size of a 'bpe' tokenizer, including special tokens. For 'character', the characters
  determine the size.
  """


class Tokenizer:
  """Immutable tokenizer, loaded from the directory of a `PreTrainedTokenizerFast`."""

  def __init__(
    self,
    fast: PreTrainedTokenizerFast,
    *,
    files: dict[str, bytes],
    stop_ids: Sequence[int],
    name: str,
  ):
    self._fast = fast
    # Calling the tokenizers library directly avoids transformers' work on each call. `encode` wants
    # all tokens, without padding.
    self._table = fast.backend_tokenizer
    self._table.no_truncation()
    self._table.no_padding()
    self._files = files
    self._name = name
    self.vocab_size: int = len(fast)
    self.eos_id: int = fast.eos_token_id
    self.eos_token: str = str(fast.eos_token)
    self.pad_id: int = fast.eos_token_id if fast.pad_token_id is None else fast.pad_token_id
    self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([fast.eos_token_id, *stop_ids]))
    model = json.loads(files['tokenizer.json'])['model']
    # The built-in templates are known to terminate. Other templates are rendered in a process that
    # can be killed.
    self.template: str = fast.get_chat_template()
    template = self.template
    self._process = None if template in _TEMPLATES.values() else TemplateProcess(template)
    self._special_tokens = {
      name: list(map(str, value)) if isinstance(value, list | tuple) else str(value)
      for name, value in fast.special_tokens_map.items()
    }
    """Variables of chat templates: the special tokens, keyed by role, such as 'bos_token'."""
    specials = [token.content for token in fast.added_tokens_decoder.values()]
    self._alphabet = frozenset(model['vocab']) if model.get('type') == 'WordLevel' else None
    self._specials = re.compile('|'.join(map(re.escape, specials)) or r'(?!)')

  @classmethod
  def from_directory(cls, directory: str | pathlib.Path) -> Tokenizer:
    """Loads a tokenizer. Raises UserError if it is missing, damaged, or lacks an end token or a
    chat template.
    """
    path = pathlib.Path(directory)
    if not (path / 'tokenizer.json').exists():
      raise UserError(
        f'tokenizer {path}: no tokenizer.json there; wanted a directory that jaxrl tokenizer made'
      )
    files = _read_files(path)
    try:
      with _panics_raised():
        fast = PreTrainedTokenizerFast.from_pretrained(str(path))
    except Exception as error:  # The tokenizers library raises plain Exception.
      raise UserError(
        f'tokenizer {path}: cannot be read: {one_line(error)}; fetch it again'
      ) from error
    if fast.eos_token_id is None:
      raise UserError(
        f'tokenizer {path}: has no eos_token, so no answer would end; name one in '
        'tokenizer_config.json'
      )
    if fast.chat_template is None:
      raise UserError(f'tokenizer {path}: has no chat template; add a chat_template.jinja')
    if not _has_template(fast):
      raise UserError(
        f'tokenizer {path}: its chat template is not a text, or it has several and none of them is '
        'the default; correct it'
      )
    return cls(fast, files=files, stop_ids=_generation_stops(path, fast), name=str(path))

  def with_template(self, file: str | pathlib.Path) -> Tokenizer:
    """Returns a copy of this tokenizer with the chat template in a file. Raises UserError if the
    file cannot be read.
    """
    try:
      template = read_bytes(file, _FILE_BYTES).decode()
    except (OSError, ValueError) as error:
      raise UserError(f'chat template {file}: cannot be read: {one_line(error)}') from None
    other = copy.copy(self)
    other._process, other._name = TemplateProcess(template), f'{self._name} with {file}'
    other.template = template
    return other

  @property
  def vocabulary(self) -> tuple[dict[str, int], tuple[int, ...]]:
    """Token ids keyed by token, and the ids of the tokens that end a completion."""
    return self._fast.get_vocab(), tuple(self.stop_ids)

  @property
  def renders_elsewhere(self) -> bool:
    """Whether another process renders the chat template. If so, `render_prompt` may block."""
    return self._process is not None

  def check_fits(self, vocab_size: int, model: str) -> None:
    """Raises UserError if an end, stop or padding token is outside a model's vocabulary of
    `vocab_size` tokens.

    Other tokens outside the model's vocabulary cause only a warning, because many tokenizers have
    tokens that no text is encoded to.

    Args:
      model: name of the model for messages.
    """
    lacking = sorted(token for token in self._fast.get_vocab().values() if token >= vocab_size)
    if not lacking:
      return
    used = [token for token in (*self.stop_ids, self.pad_id) if token >= vocab_size]
    token = used[0] if used else lacking[-1]
    line = (
      f'tokenizer {self._name}: has token {token} ({self.token_text(token)!r}), but {model} has '
      f'only {vocab_size} tokens'
    )
    if used:
      raise UserError(f'{line}; take the tokenizer of that model, or raise its vocab_size')
    logging.warning('%s; %d tokens cannot be used', line, len(lacking))

  def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Encodes text.

    Args:
      add_special_tokens: whether to add the special tokens that the tokenizer itself puts around a
        text, such as a BOS token. A chat template already contains them.

    Raises UserError if the text cannot be encoded, for example because of unknown characters.
    """
    if self._alphabet is not None and not self._alphabet.issuperset(text):
      self._check_characters(text)
    try:
      with _panics_raised():
        # Unlike `encode`, this computes no offsets, and releases Python's global lock.
        (encoding,) = self._table.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids
    # The tokenizers library raises plain Exception, and TypeError for a lone surrogate.
    except Exception as error:
      raise UserError(
        f'tokenizer {self._name}: cannot encode {one_line(repr(text), 100)}: {one_line(error)}; '
        'correct the text'
      ) from error

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    if len(ids) > _LONG:
      # Unlike `decode`, this releases Python's global lock, so that other threads can run.
      return self._table.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
    return self._table.decode(list(ids), skip_special_tokens=skip_special)

  def token_text(self, token: int) -> str:
    """Returns the text of a token, including special tokens. Incomplete characters are shown as
    U+FFFD.
    """
    return self.decode([token], skip_special=False)

  def render_chat(
    self,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Json] | None = None,
    variables: Mapping[str, Json] | None = None,
  ) -> Rendered:
    """Renders messages, which may have tool calls, with the chat template.

    Args:
      add_generation_prompt: whether to end the text with the opening of an answer.
      tools: descriptions of the tools, as JSON schemas; None if there are no tools.
      variables: further variables for the template. They replace special tokens of the same name.

    Raises UserError if the template fails.
    """
    plain = [dict(message) for message in messages]
    if self._process is None:  # The built-in templates use only roles and contents.
      text = self._fast.apply_chat_template(
        [{'content': '', **message} for message in plain],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
      )
      return Rendered(text, ())
    try:
      return self._process.render(
        plain,
        add_generation_prompt=add_generation_prompt,
        variables={**self._special_tokens, **(variables or {})},
        tools=tools,
      )
    except RenderError as error:
      raise UserError(
        f'tokenizer {self._name}: its chat template refuses {one_line(plain)}: {error}; correct '
        'the template'
      ) from error

  def render_prompt(self, messages: Sequence[Message]) -> list[int]:
    """Returns the token ids of a prompt: the messages, followed by the opening of an answer (the
    generation prompt).
    """
    return self.encode(self._render(messages, add_generation_prompt=True))

  def render_answer(self, messages: Sequence[Message], answer: str) -> tuple[list[int], list[int]]:
    """Returns (token ids of the prompt, token ids of the answer with its stop token). The prompt is
    the same as in `render_prompt`.

    The prompt and the answer are encoded separately, as in a rollout, so no token contains text of
    both.
    """
    prompt = self._render(messages, add_generation_prompt=True)
    whole = self._render(
      [*messages, {'role': 'assistant', 'content': answer}], add_generation_prompt=False
    )
    if not whole.startswith(prompt):
      raise UserError(
        f'tokenizer {self._name}: its generation prompt is not how its chat template begins an '
        'answer'
      )
    completion = self.encode(whole[len(prompt) :])
    while (
      completion
      and completion[-1] not in self.stop_ids
      and _is_blank(self.token_text(completion[-1]))
    ):
      completion.pop()  # chatml adds a line break after the stop token of an answer.
    if not completion or completion[-1] not in self.stop_ids:
      completion = [*self.encode(whole[len(prompt) :]), self.eos_id]
    return self.encode(prompt), completion

  @property
  def files(self) -> dict[str, bytes]:
    """Contents of the tokenizer's files, keyed by file name. `from_directory` can load a directory
    with these files.
    """
    return {**self._files, _GENERATION: json.dumps({'eos_token_id': list(self.stop_ids)}).encode()}

  def save(self, directory: str | pathlib.Path) -> None:
    """Writes the tokenizer's files to a directory, such that `from_directory` loads the same
    tokenizer. generation_config.json is written only if it lists additional stop tokens.
    """
    path = pathlib.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    files = self.files if len(self.stop_ids) > 1 else self._files
    for name, data in files.items():
      (path / name).write_bytes(data)

  def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    return self.render_chat(messages, add_generation_prompt=add_generation_prompt).text

  def _check_characters(self, text: str) -> None:
    lacking = sorted(set(self._specials.sub('', text)) - self._alphabet)
    if lacking:
      character = lacking[0]
      name = unicodedata.name(character, 'unnamed')
      at = text.index(character)
      raise UserError(
        f'tokenizer {self._name}: its character table lacks {character!r} (U+{ord(character):04X} '
        f'{name}), found in {text[max(0, at - 20) : at + 20]!r}; build the tokenizer from texts '
        'that contain the character, or with kind bpe'
      )


def task_texts(tasks: Iterable[Task]) -> Iterable[str]:
  """Yields the texts from which a tokenizer is built: the messages and reference answers of all
  tasks.
  """
  for task in tasks:
    for message in task.prompt:
      yield message['content']
    if task.truth is not None:
      yield task.truth


def build_tokenizer(
  config: TokenizerConfig, texts: Iterable[str], directory: str | pathlib.Path
) -> Tokenizer:
  """Loads the tokenizer at `config.path`, or builds one from `texts`. Writes its files to
  `directory`.
  """
  if config.path is not None:
    tokenizer = Tokenizer.from_directory(config.path)
    tokenizer.save(directory)
    return tokenizer
  if config.kind == 'character':
    return build_character_tokenizer(texts, directory, template=config.template)
  return build_bpe_tokenizer(
    texts, directory, vocab_size=config.vocab_size, template=config.template
  )


def build_character_tokenizer(
  texts: Iterable[str], directory: str | pathlib.Path, *, template: Template
) -> Tokenizer:
  """Builds a tokenizer with one token for each Unicode character in the texts and the chat
  template.

  The characters are ordered by code point, and special tokens follow them.
  """
  characters = set(_SCAFFOLD[template]).union(*texts)
  if not characters:
    raise UserError('character tokenizer: the texts are empty, so it would have no character')
  table = tokenizers.Tokenizer(models.WordLevel({c: i for i, c in enumerate(sorted(characters))}))
  table.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r'[\s\S]'), 'isolated')
  table.decoder = decoders.Fuse()
  table.add_special_tokens(_SPECIALS[template])
  return _write(table, pathlib.Path(directory), template)


def build_bpe_tokenizer(
  texts: Iterable[str], directory: str | pathlib.Path, *, vocab_size: int, template: Template
) -> Tokenizer:
  """Trains a byte-level BPE tokenizer, which can encode any text and decode it again. Special
  tokens come first.
  """
  smallest = 256 + len(_SPECIALS[template])
  if vocab_size < smallest:
    raise UserError(
      f'BPE tokenizer: vocab_size is {vocab_size}, wanted at least {smallest}, for 256 bytes and '
      'the special tokens'
    )
  table = tokenizers.Tokenizer(models.BPE())
  table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  table.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=_SPECIALS[template],
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  table.train_from_iterator(texts, trainer)
  return _write(table, pathlib.Path(directory), template)


def _write(table: tokenizers.Tokenizer, directory: pathlib.Path, template: Template) -> Tokenizer:
  fast = PreTrainedTokenizerFast(
    tokenizer_object=table,
    eos_token=_EOS[template],
    pad_token='<pad>',
    clean_up_tokenization_spaces=False,
    chat_template=_TEMPLATES[template],
  )
  fast.save_pretrained(str(directory))
  # transformers 5 writes a new class name into this file, which version 4 cannot load. Both
  # versions accept the old name.
  path = directory / 'tokenizer_config.json'
  config = {**json.loads(path.read_text()), 'tokenizer_class': 'PreTrainedTokenizerFast'}
  path.write_text(json.dumps(config, indent=2, sort_keys=True) + '\n')
  return Tokenizer.from_directory(directory)


def _read_files(path: pathlib.Path) -> dict[str, bytes]:
  """Returns the contents of a tokenizer's files, keyed by name. Raises UserError if a file is not a
  regular file, or if a .json file does not contain a JSON object.
  """
  files = {}
  try:
    for entry in sorted([*path.iterdir(), *path.glob('additional_chat_templates/*')]):
      if entry.suffix in _SUFFIXES:
        with contextlib.suppress(OSError):  # Directories and dangling links are never read.
          check_regular(entry)
    for name in _FILES:
      if (path / name).exists():
        files[name] = read_bytes(path / name, _FILE_BYTES)
        if name.endswith('.json'):
          _parse_object(path / name, files[name])
  except (OSError, ValueError) as error:
    raise UserError(
      f'tokenizer {path}: cannot be read: {one_line(error)}; fetch it again'
    ) from None
  return files


@contextlib.contextmanager
def _panics_raised() -> Iterator[None]:
  """Converts a panic (a Rust error) of the tokenizers library into ValueError, because `except
  Exception` does not catch panics.
  """
  try:
    yield
  except BaseException as error:
    if type(error).__name__ != 'PanicException':
      raise
    raise ValueError(str(error)) from error


def _parse_object(path: pathlib.Path, data: bytes) -> dict[str, Any]:
  """Parses a JSON object. Raises ValueError, with the path, if the data are not a JSON object."""
  try:
    value = parse_json(data.decode())
  except ValueError as error:
    raise ValueError(f'{path.name}: {error}') from None
  if not isinstance(value, dict):
    raise ValueError(f'{path.name}: holds a {type(value).__name__}, wanted a JSON object')
  return value


def _has_template(fast: PreTrainedTokenizerFast) -> bool:
  try:
    return isinstance(fast.get_chat_template(), str)
  except ValueError:
    return False


def _generation_stops(path: pathlib.Path, fast: PreTrainedTokenizerFast) -> list[int]:
  """Returns the ids of the stop tokens in generation_config.json. Its `eos_token_id` is one id or a
  list.
  """
  config = path / _GENERATION
  if not config.exists():
    return []
  try:
    stops = _parse_object(config, read_bytes(config, _FILE_BYTES)).get('eos_token_id')
  except (OSError, ValueError) as error:
    raise UserError(
      f'tokenizer {path}: cannot be read: {one_line(error)}; fetch it again'
    ) from None
  stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
  vocabulary = set(fast.get_vocab().values())
  for stop in stops:
    if type(stop) is not int or stop not in vocabulary:
      raise UserError(
        f'tokenizer {path}: eos_token_id of {_GENERATION} has {one_line(stop, 100)}, wanted ids of '
        f'its {len(vocabulary)} tokens; correct the file'
      )
  return stops


def _is_blank(text: str) -> bool:
  return not text.strip()
