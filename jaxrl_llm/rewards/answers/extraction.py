"""Finds the one answer in a completion; a completion that offers two different ones has none.

Invariants: linear time whatever the text; what a completion copies verbatim from the prompt is no answer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

Method = Literal['whole', 'boxed', 'hashes', 'tags', 'phrase', 'number']
"""Where the answer stands: the whole text; `\\boxed{…}`; after `####`; `<tag>…</tag>`; after "the answer is" or a label
`Answer:`; the last number. All but `whole` and `number` look at every occurrence and want them to agree."""

Methods = Method | tuple[Method, ...]
"""One, or several in their order: the first that finds anything decides, also that there is no one answer."""

EXPLICIT = ('boxed', 'hashes', 'tags')
"""Of several methods these contradict each other where what they find can be read as values that differ."""

MAX_LENGTH = 2000
"""Longer than this, in characters, nothing is an answer."""

NUMBER = re.compile(
  r'(?<![\w.])[$€£¥]?[-+\u2212]?[$€£¥]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?\\?%?',
  re.ASCII,
)
_PHRASE = re.compile(
  r'\bthe (?:final |correct |right |best )?(?:answer|option|choice) is\b[:\s]*'
  r'|^[ \t]*\**(?:final |correct )?answer\**[ \t]*:\**[:\s]*',
  re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r'\n|[.!?](?=\s|$)')
_BRACES = re.compile(r'\\(?:boxed|fbox)\s*\{|\\.|[{}]', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Extraction:
  answer: str | None
  reason: str = ''
  """Why there is no answer."""


def collapse(text: str) -> str:
  """The text with every run of white space made one space, and none at its ends."""
  return ' '.join(text.split())


def _boxed(text: str) -> list[str]:
  """Of boxes in boxes the innermost and the outermost: all of them would be long as the square of the text."""
  found, stack, open_boxes, last = [], [], 0, 0
  for match in _BRACES.finditer(text):
    token = match.group()
    if token == '}':
      if stack:
        boxed, start = stack.pop()
        open_boxes -= boxed
        if boxed and (not open_boxes or last <= start):
          found.append(text[start : match.start()])
        if boxed:
          last = match.end()
    elif token.endswith('{') and token != r'\{':
      stack.append((token != '{', match.end()))
      open_boxes += token != '{'
  return found


def _between(text: str, left: str, right: str) -> list[str]:
  found = []
  start = text.find(left)
  while start >= 0:
    end = text.find(right, start + len(left))
    if end < 0:
      break
    found.append(text[start + len(left) : end])
    start = text.find(left, end + len(right))
  return found


def _phrases(text: str) -> list[str]:
  starts = list(_PHRASE.finditer(text))
  found = []
  for match, following in zip(starts, [*[m.start() for m in starts[1:]], len(text)]):
    end = _SENTENCE_END.search(text, match.end(), following)
    found.append(text[match.end() : end.start() if end else following])
  return found


def candidates(text: str, method: Method, tag: str = 'answer') -> list[str]:
  """Every non-blank answer that `method` sees in the text, in order, stripped of white space at both ends."""
  match method:
    case 'whole':
      found = [text]
    case 'boxed':
      found = _boxed(text)
    case 'hashes':
      found = [part.partition('\n')[0] for part in text.split('####')[1:]]
    case 'tags':
      found = _between(text, f'<{tag}>', f'</{tag}>')
    case 'phrase':
      found = _phrases(text)
    case 'number':
      found = NUMBER.findall(text)[-1:]
  return [answer.strip() for answer in found if answer.strip()]


def _without_echo(text: str, prompts: Sequence[str], method: Method, tag: str) -> str:
  """Cuts verbatim copies of those prompts that would themselves give an answer (an example, an instruction)."""
  for prompt in prompts:
    echo = prompt.strip()
    if echo and echo in text and candidates(echo, method, tag):
      # Not inside a longer word or number: the prompt "3" is not echoed by "13".
      text = re.sub(rf'(?<![\w.]){re.escape(echo)}(?!\w)', '\n', text)
  return text


def extract(
  text: str,
  *,
  method: Methods,
  tag: str = 'answer',
  prompts: Sequence[str] = (),
  key: Callable[[str], Hashable] = collapse,
) -> Extraction:
  """The answer of a completion.

  Args:
    text: the completion.
    method: where its answer stands; of several, the first that finds anything.
    tag: the tag's name, for method `tags`.
    prompts: contents of the prompt's messages. For the searching methods, verbatim copies of them count for nothing.
    key: answers with equal keys are the same answer; a key that is text says that it could not be read as a value.
  """
  methods, found = (method,) if isinstance(method, str) else method, []
  for method in methods:
    told = text if method == 'whole' else _without_echo(text, prompts, method, tag)
    found = candidates(told, method, tag)
    if found:
      break
  else:
    return Extraction(None, 'no answer')
  answer = found[-1]
  if max(map(len, found)) > MAX_LENGTH:
    return Extraction(None, f'answer longer than {MAX_LENGTH} characters')
  nested = {'boxed': r'\boxed', 'tags': f'<{tag}>'}
  if method in nested and any(nested[method] in a for a in found):
    return Extraction(None, 'answer inside an answer')
  keys = {key(a) for a in found}
  for other in (m for m in methods if m in EXPLICIT and m != method):
    also = map(key, candidates(_without_echo(text, prompts, other, tag), other, tag))
    keys |= {value for value in also if not isinstance(value, str)}
  if len(keys) > 1:
    return Extraction(None, f'{len(keys)} answers that differ')
  return Extraction(answer)
