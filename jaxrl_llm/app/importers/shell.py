"""Reads the commands of a shell script without running anything.

Invariant: nothing is executed and no other file is opened. Variables that the script sets, defaults
such as `${NAME:-8}`, integer arithmetic and arrays are substituted. An expansion that cannot be
substituted, such as `$(date)` or an environment variable, leaves a placeholder in the text and is
listed in the word's `missing`. Reading takes time and memory proportional to the size of the text
and of its substitutions. Both sizes are limited.

A condition that compares known words determines which branch is read. In a branch whose condition
is unknown, commands are read, an assignment takes effect only if the variable has no value yet, and
a note reports the assignment.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence

from jaxrl_llm.app.importers.shell_arithmetic import computed
from jaxrl_llm.app.importers.shell_words import Word, condition, matches, unread
from jaxrl_llm.core.errors import UserError

_LONGEST_WORD = 100_000
_MOST_WORDS = 20_000
_MOST_CHARACTERS = 2_000_000
_DEEPEST = 20
_LONGEST_ARITHMETIC = 200
_NAME = re.compile(r'[A-Za-z_]\w*')
_ASSIGNMENT = re.compile(r'([A-Za-z_]\w*)(\+?)=')
_PARAMETER = re.compile(r'(\w+)(\[[@*]\])?(?:(:?[-=+?])(.*))?', re.DOTALL)
_PLAIN = re.compile(r"""[^\s\0;&|()<>$`'"\\{}]+""")
"""Matches characters that have no special meaning anywhere in a word."""
_REDIRECTION = re.compile(r'(?:\d*|&)(<<<|<<-?|<>|>>|>&|<&|>\||>|<)')
_BLANK = re.compile(r'[ \t\r\n]*')
_OPERATORS = (';;', '&&', '||', ';', '&', '|', '(', ')', '\n')
_OPENING = ('then', 'do', 'else', '{', '!')
_CLOSING = ('fi', 'done', 'esac', '}')
_LOOPS = ('for', 'while', 'until', 'select')
_DECLARING = ('export', 'readonly', 'local', 'declare', 'typeset')


@dataclasses.dataclass(frozen=True)
class Command:
  """A simple command: its name and arguments."""

  words: tuple[Word, ...]
  line: int
  """Line of the script, counted from 1, on which the command begins."""


@dataclasses.dataclass(frozen=True)
class Script:
  """Commands that a script would run, including commands whose conditions are unknown."""

  commands: tuple[Command, ...]
  notes: tuple[str, ...]
  """Remarks about assignments whose conditions are unknown, one line each."""


@dataclasses.dataclass
class _Branch:
  """State of a compound command (such as `if`, `case` or a loop) during reading.

  `active` says whether the script would run the commands of the current branch. `active` and
  `taken` are None if they depend on an unknown condition.
  """

  active: bool | None
  taken: bool | None = None
  """Whether the script would run the current or an earlier branch of the same `if` or `case`; None
  if unknown.
  """
  subject: Word | None = None
  """Word that a `case` compares with its patterns."""
  patterns: list[Word] | None = None
  """Patterns read so far for the next branch of a `case`; None inside a branch."""


def read_script(text: str, define: Mapping[str, str]) -> Script:
  """Reads a script's commands.

  Args:
    text: text of the script.
    define: values of variables and positional parameters, keyed by name or number. The script's own
      assignments do not change them.

  Raises:
    UserError: a quote or bracket is not closed, or the script or a substitution exceeds a limit.
  """
  return _Reader(text, define).read()


class _Reader:
  """Reads the text of a script once, from its beginning to its end."""

  def __init__(self, text: str, define: Mapping[str, str]):
    self._text, self._at = text.replace('\r\n', '\n'), 0
    self._defined = {'HOME': os.path.expanduser('~'), **define}
    self._variables: dict[str, list[Word]] = {
      name: [Word(value)] for name, value in self._defined.items()
    }
    self._branches: list[_Branch] = []
    self._heredocs: list[str] = []
    self._line = 1
    """Number of the line on which the current command begins."""
    self._words = self._characters = 0
    self._depth = 0
    self._notes: list[str] = []

  def read(self) -> Script:
    commands, before, counted = [], '\n', 0
    while self._at < len(self._text):
      if not self._heredocs:
        self._at = _BLANK.match(self._text, self._at).end()
      self._line += self._text.count('\n', counted, self._at)
      counted = self._at
      words, end = self._simple_command()
      before_this, before = before, end
      words = self._enter(words, end, before_this)
      conditional = before_this in ('&&', '||') or end == ')'
      if words and self._active(conditional) is not False:
        commands.append(Command(tuple(words), self._line))
    return Script(tuple(commands), tuple(dict.fromkeys(self._notes)))

  def _wrong(self, problem: str) -> UserError:
    return UserError(f'line {self._line}: {problem}')

  def _active(self, conditional: bool = False) -> bool | None:
    states = [branch.active for branch in self._branches]
    if False in states:
      return False
    return None if conditional or None in states else True

  # Reading of compound commands.

  def _enter(self, words: list[Word], end: str, before: str) -> list[Word]:
    """Processes the words of a command if they begin with a keyword, such as `if` or `done`, and
    then returns an empty list. Otherwise, the words form a simple command and are returned
    unchanged.
    """
    top = self._branches[-1] if self._branches else None
    if top is not None and top.patterns is not None:
      return self._pattern(top, words, end)
    keyword, *rest = words or [Word('')]
    match keyword.text:
      case 'if':
        known = None if end in ('&&', '||', '|') else condition(rest)
        self._branches.append(_Branch(active=known, taken=known))
      case 'elif' if top is not None:
        self._next(top, None if end in ('&&', '||', '|') else condition(rest))
      case 'else' if top is not None:
        self._next(top, True)
      case 'case':
        top = _Branch(active=False, taken=False, subject=(rest or [Word('')])[0], patterns=[])
        self._branches.append(top)
        return self._pattern(top, rest[2:], end)
      case name if name in (*_LOOPS, 'function'):
        self._branches.append(_Branch(active=None))
      case '{':
        self._branches.append(_Branch(active=None if before in (')', '&&', '||') else True))
      case name if name in _CLOSING:
        if self._branches:
          self._branches.pop()
        top = self._branches[-1] if self._branches else None
      case name if name not in _OPENING:
        rest = words
    if top is not None and top.subject is not None and end == ';;':
      top.patterns = []
    return rest if rest is words else []

  def _pattern(self, top: _Branch, words: list[Word], end: str) -> list[Word]:
    """Reads the patterns of the next branch of a `case`."""
    if words and words[0].text == 'esac':
      self._branches.pop()
    elif words:
      top.patterns += words
      if end == ')':
        self._next(top, matches(top.subject, top.patterns))
        top.patterns = None
    return []

  @staticmethod
  def _next(branch: _Branch, known: bool | None) -> None:
    """Begins the next branch of an `if` or `case`.

    Args:
      known: whether the branch's condition is true; None if it is not known.
    """
    if branch.taken is True:
      branch.active = False
    elif branch.taken is None:
      branch.active = None if known is not False else False
    else:
      branch.active = branch.taken = known

  # Reading of simple commands and words.

  def _simple_command(self) -> tuple[list[Word], str]:
    """Reads words up to an operator. Returns the words, without leading assignments, and the
    operator.

    A keyword before a command is returned by itself, because it decides whether the assignments
    that follow it have an effect.
    """
    words: list[Word] = []
    while True:
      self._skip_blanks()
      end = next((op for op in _OPERATORS if self._text.startswith(op, self._at)), '')
      if not end and self._at < len(self._text):
        if self._redirection(words):
          continue
        words += self._word(leading=all(_is_declaring(word) for word in words))
        self._count(len(words))
        if len(words) == 1 and words[0].text in _OPENING:
          return words, ''  # Another command follows the keyword.
        continue
      self._at += len(end)
      if end == '\n':
        self._skip_heredocs()
      return ([] if words and _is_declaring(words[0]) else words), end

  def _count(self, words: int) -> None:
    self._words += 1
    self._limit(max(self._words, words))

  def _limit(self, words: int) -> None:
    if words > _MOST_WORDS:
      raise self._wrong(f'more than {_MOST_WORDS:,} words; wanted a script that starts training')

  def _skip_blanks(self) -> None:
    while self._at < len(self._text):
      if self._text.startswith('\\\n', self._at):
        self._at += 2
      elif self._text[self._at] in ' \t\r':
        self._at += 1
      elif self._text[self._at] == '#':
        end = self._text.find('\n', self._at)
        self._at = len(self._text) if end < 0 else end
      else:
        return

  def _redirection(self, words: list[Word]) -> bool:
    """Skips a redirection and returns whether there was one. Records the delimiter of a
    here-document.
    """
    match = _REDIRECTION.match(self._text, self._at)
    if match is None or self._text.startswith(('<(', '>('), self._at):
      return False
    self._at = match.end()
    self._skip_blanks()
    target = self._word(leading=False)
    if match[1] in ('<<', '<<-'):
      self._heredocs.append(target[0].text if target else '')
    return True

  def _skip_heredocs(self) -> None:
    for delimiter in self._heredocs:
      line = None
      while line != delimiter and self._at < len(self._text):
        end = self._text.find('\n', self._at)
        end = len(self._text) if end < 0 else end
        line = self._text[self._at : end].lstrip('\t')
        self._at = end + 1
    self._heredocs.clear()

  def _word(self, *, leading: bool) -> list[Word]:
    """Reads a word and returns the words that its substitution yields.

    Args:
      leading: whether only assignments precede the word, so that it may also be an assignment.
    """
    match = _ASSIGNMENT.match(self._text, self._at)
    if leading and match is not None:
      self._at = match.end()
      value = self._array() if self._text.startswith('(', self._at) else [self._joined()]
      self._assign(match[1], value, append=bool(match[2]))
      return []
    return self._fields()

  def _joined(self) -> Word:
    """Reads the value of an assignment, which is always a single word."""
    words = self._fields(split=False)
    return words[0] if words else Word('')

  def _array(self) -> list[Word]:
    self._at += 1
    words: list[Word] = []
    while True:
      self._skip_blanks()
      if self._at >= len(self._text):
        raise self._wrong('the closing ) of an array is missing')
      if self._text[self._at] == '\n':
        self._at += 1
      elif self._text[self._at] == ')':
        self._at += 1
        return words
      elif self._text[self._at] in ';&|(<>':
        raise self._wrong(f'{self._text[self._at]!r} in an array; wanted words')
      else:
        words += self._fields()
        self._count(len(words))

  def _assign(self, name: str, value: list[Word], *, append: bool) -> None:
    active = self._active()
    if active is False or name in self._defined:
      return
    old = self._variables.get(name, [])
    if active is None and any(word.text for word in old):
      self._notes.append(
        f'line {self._line}: {name} changes under a condition that only running the script '
        'decides; its earlier value is used'
      )
      return
    if active is None:
      self._notes.append(
        f'line {self._line}: {name} is set under a condition that only running the script '
        'decides; this value is used'
      )
    if append and len(value) == 1 and len(old) == 1:
      value = [Word(old[0].text + value[0].text, old[0].missing + value[0].missing)]
    elif append:
      value = [*old, *value]
    if sum(len(word.text) for word in value) > _LONGEST_WORD:
      raise self._wrong(f'{name} is longer than {_LONGEST_WORD:,} characters')
    self._variables[name] = value

  def _fields(self, *, split: bool = True, until: str = '') -> list[Word]:
    """Reads a word up to a blank or operator, or a text up to the character `until`. Returns the
    words that result from substitution.

    Args:
      split: whether substituted values are split at blanks.
    """
    fields: list[Word] = []
    text, missing, begun = '', [], False

    def close() -> None:
      nonlocal text, missing, begun
      if begun:
        fields.append(Word(text, tuple(missing)))
      text, missing, begun = '', [], False

    def add(parts: Sequence[Word], *, quoted: bool) -> None:
      nonlocal text, begun
      for index, part in enumerate(parts):
        if index:
          close()
        pieces = [part.text] if quoted or not split else re.split(r'[ \t\n]+', part.text)
        for place, piece in enumerate(pieces):
          if place:
            close()
          text += piece
          begun = begun or quoted or bool(piece)
        missing.extend(part.missing)
        if len(text) > _LONGEST_WORD:
          raise self._wrong(f'a word is longer than {_LONGEST_WORD:,} characters')
        self._characters += len(part.text) + 1
        self._limit(len(fields))
        if self._characters > _MOST_CHARACTERS:
          raise self._wrong(f'substitution gives more than {_MOST_CHARACTERS:,} characters')

    while self._at < len(self._text):
      char = self._text[self._at]
      if until and char == until:
        break
      if not until and (char in ' \t\r\n;&|()' or (char in '<>' and split)):
        break
      if char == '\\':
        if not self._text.startswith('\\\n', self._at):
          add([Word(self._text[self._at + 1 : self._at + 2])], quoted=True)
        self._at += 2
      elif char == "'" and until != '"':
        add([Word(self._quoted("'"))], quoted=True)
      elif self._text.startswith("$'", self._at) and until != '"':
        self._at += 1
        add([Word(self._quoted("'"))], quoted=True)
      elif char == '"':
        self._at += 1
        is_empty = self._text.startswith('"', self._at)
        parts = self._nested(lambda: self._fields(split=False, until='"'))
        self._expect('"')
        add([Word('')] if is_empty else parts, quoted=True)
      elif char == '$':
        add(self._nested(self._dollar), quoted=bool(until))
      elif char == '`':
        add([unread(f'`{self._quoted("`")}`')], quoted=True)
      else:
        plain = _PLAIN.match(self._text, self._at)
        self._at = self._at + 1 if plain is None else plain.end()
        add([Word(char if plain is None else plain[0])], quoted=True)
    close()
    return fields

  def _nested(self, read: Callable[[], list[Word]]) -> list[Word]:
    self._depth += 1
    if self._depth > _DEEPEST:
      raise self._wrong(f'quotes and ${{…}} are nested more than {_DEEPEST} levels deep')
    words = read()
    self._depth -= 1
    return words

  def _expect(self, closing: str) -> None:
    if not self._text.startswith(closing, self._at):
      raise self._wrong(f'the closing {closing} is missing')
    self._at += len(closing)

  def _quoted(self, quote: str) -> str:
    end = self._text.find(quote, self._at + 1)
    if end < 0:
      raise self._wrong(f'the closing {quote} is missing')
    inner = self._text[self._at + 1 : end]
    self._at = end + 1
    return inner

  # Substitution of variables and commands.

  def _dollar(self) -> list[Word]:
    text, at = self._text, self._at
    if text.startswith('$((', at):
      inner = self._bracketed(at + 3, '(', ')')
      if text.startswith(')', self._at):
        self._at += 1
        return [self._arithmetic(inner)]
      self._at = at
    if text.startswith('$(', at):
      inner = self._bracketed(at + 2, '(', ')')
      return [unread(f'$({inner})')]
    if text.startswith('${', at):
      return self._parameter(self._bracketed(at + 2, '{', '}'))
    match = re.compile(r'[A-Za-z_]\w*|\d').match(text, at + 1)
    if match is not None:
      self._at = match.end()
      return self._value(match[0])
    special = text[at + 1 : at + 2]
    if special and special in '@*':
      self._at += 2
      return []
    self._at += 2 if special and special in '?!$#-' else 1
    return [Word(text[at : self._at], (text[at : self._at],) if special in '?!$#-' else ())]

  def _bracketed(self, start: int, opening: str, closing: str) -> str:
    """Returns the text from `start` up to the closing bracket, and moves the reading position past
    the bracket.
    """
    depth, at = 1, start
    while at < len(self._text):
      char = self._text[at]
      if char == '\\':
        at += 1
      elif char in '\'"' and (char == '"' or opening == '('):
        end = self._text.find(char, at + 1)
        at = len(self._text) if end < 0 else end
      elif char == opening:
        depth += 1
      elif char == closing:
        depth -= 1
        if not depth:
          self._at = at + 1
          return self._text[start:at]
      at += 1
    raise self._wrong(f'the closing {closing} is missing')

  def _value(self, name: str) -> list[Word]:
    if name in self._variables:
      return self._variables[name][:1]
    return [Word(f'${name}', (f'${name}',))]

  def _parameter(self, inner: str) -> list[Word]:
    """Returns the words that replace `${inner}`."""
    match = _PARAMETER.fullmatch(inner)
    if inner in ('@', '*'):
      return []
    if match is None:
      return [unread(f'${{{inner}}}')]
    name, whole, sign, other = match.groups()
    value = self._variables.get(name)
    if whole:
      return list(value or [])
    is_set = value is not None and (not sign or sign[0] != ':' or bool(value and value[0].text))
    if sign and sign[-1] == '+':
      return self._expanded(other) if is_set else []
    if is_set:
      return value[:1] or [Word('')]
    if sign and sign[-1] in '-=':
      words = self._expanded(other)
      if sign[-1] == '=' and name not in self._defined and not name.isdigit():
        self._assign(name, words or [Word('')], append=False)
      return words
    return [Word(f'${name}', (f'${name}',))]

  def _expanded(self, text: str) -> list[Word]:
    """Returns the words of a text, such as a default, after substitution."""
    whole, at = self._text, self._at
    self._text, self._at = text, 0
    try:
      words = self._nested(lambda: self._fields(split=False, until='\0'))
    finally:
      self._text, self._at = whole, at
    return words

  def _arithmetic(self, inner: str) -> Word:
    """Returns the value of `$((inner))`, or a placeholder if `inner` is long or contains anything
    other than known integers and operators.
    """
    if len(inner) > _LONGEST_ARITHMETIC:
      return unread(f'$(({inner}))')
    missing: list[str] = []

    def number(match: re.Match) -> str:
      word = self._value(match[1])[0]
      if not re.fullmatch(r'-?\d{1,19}', word.text):
        missing.extend(word.missing or (f'${match[1]}',))
        return '0'
      return f'({word.text})'

    text = re.sub(r'\$?\{?([A-Za-z_]\w*)\}?', number, inner)
    result = None if missing or '$' in text else computed(text)
    if result is None:
      return unread(f'$(({inner}))')
    return Word(str(result))


def _is_declaring(word: Word) -> bool:
  return word.text in _DECLARING or bool(re.fullmatch(r'-[a-zA-Z]+', word.text))
