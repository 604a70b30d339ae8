"""Extracts the single answer from a completion. A completion with two different answers has no
answer.

Invariants: extraction takes linear time for any text. A verbatim copy of the prompt in a completion
is not an answer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple

Method = Literal['whole', 'boxed', 'hashes', 'tags', 'phrase', 'bold', 'formula', 'number']
"""Place where an answer is looked for. whole: the whole text; boxed: in `\\boxed{…}`; hashes: after
`####`; tags: in `<tag>…</tag>`; phrase: after "the answer is" or a label `Answer:`; bold: in bold
(`**…**`) at the very end; formula: the formulas (`$…$`, `\\(…\\)`, `\\[…\\]`) of the last sentence
that has any; number: the last number.

`boxed`, `hashes`, `tags` and `phrase` find every occurrence, and all occurrences must agree.
"""

Methods = Method | tuple[Method, ...]
"""One extraction method, or several methods in order. The first method that finds anything decides,
even if the answers that it finds disagree. If `whole` stands before another method, it applies only
to text without prose.
"""

EXPLICIT = ('boxed', 'hashes', 'tags')
"""Methods that look for an explicit mark. Even if another method decides, the answers that the
configured explicit methods find must agree with the answer of the deciding method. Answers that
cannot be read as a value do not count.
"""

NO_ANSWER = 'no answer'
"""Text of the entry `reason` in a verdict's evidence if no method finds an answer."""
MAX_TRUTH = 300
"""Maximum length in characters of a truth that is the answer itself. A longer truth is treated as a
solution that contains the answer.
"""
MAX_LENGTH = 2000
"""Maximum length of an answer in characters."""

NUMBER = re.compile(
  r'(?<![\w.])[$€£¥]?[-+\u2212]?[$€£¥]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)'
  r'(?:[eE][-+]?\d+)?(?:/\d+)?\\?%?',
  re.ASCII,
)
_PHRASE = re.compile(
  r'\bthe (?:final |correct |right |best )?(?:answer|option|choice) is\b[:\s]*'
  r'|(?:^|(?<=[.!?])[ \t])[ \t]*\**(?:final |correct )?answer\**[ \t]*:\**[:\s]*'
  r'|^(?=[ \t]{0,9}[#*])[ \t#*]{1,20}final answer[*:]*[ \t]*\n\s*',
  re.IGNORECASE | re.MULTILINE,
)
_LEAD = re.compile(
  r'(?:the|its|our|their|that|so)\b(?:\s+(?:[a-z]+|\$[^$\d]{1,40}\$)){1,12}?\s+is\s+(?!not\b)',
  re.IGNORECASE,
)
"""Matches a lead-in before the answer, as in "Answer: the largest n is 34"."""
_REASON = re.compile(r'(?<=[\w)}$*]),?\s+(?:because|since)\s|(?<=[\w)}$*]),\s+not\s', re.IGNORECASE)
"""Matches the words that end an answer: "because" in "the answer is 42, because …", or "not" in
"the answer is 42, not 41".
"""
_SENTENCE_END = re.compile(r'\n|[.!?](?=\s|$)')
_BRACES = re.compile(r'\\\\?(?:boxed|fbox)\s*\{|\\.|[{}]', re.DOTALL)
_FORMULA = re.compile(
  r'\$\$(?:[^$\\]|\\.){1,400}\$\$|(?<![\\$])\$(?:[^$\\]|\\.){1,400}\$'
  r'|\\\((?:[^\\]|\\[^)]){1,400}\\\)|\\\[(?:[^\\]|\\[^\]]){1,400}\\\]',
  re.DOTALL,
)
_PROSE = re.compile(r'[^\W\d_]{2}\s+[^\W\d_]{2}')
"""Matches two adjacent words, which occur only in prose."""
_BARE_BOX = re.compile(r'\\boxed\s+([^\s${}\\]+?)(?=[.,;]?(?:[\s$]|$))')
"""Matches a box without braces: `\\boxed 42`."""
_BOLD = re.compile(r'\*\*([^*\n]+)\*\*[.!]?\s*\Z')
_FINAL = re.compile(r'\bfinal answer\b', re.IGNORECASE)
_MAX_GAP = 40
"""Maximum number of characters between two adjacent boxes that form one list."""
_TOGETHER = re.compile(
  r'(?:\s|\$|\\[()\[\],;!]|\\q?quad)*|[^.!?]*?(?:,|;|&|\b(?:and|or)\b)[^.!?]*', re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Extraction:
  answer: str | None
  reason: str = ''
  """Reason why there is no answer; empty if there is one."""


def collapse(text: str) -> str:
  """Collapses every run of white space to one space and strips both ends."""
  return ' '.join(text.split())


class _Boxed(NamedTuple):
  begin: int
  start: int
  """Position at which the box's content starts."""
  end: int


def _boxes(text: str) -> tuple[list[_Boxed], list[_Boxed]]:
  """Returns the outermost boxes and the nested boxes, both ordered by their ends."""
  outer, inner, stack, open_boxes = [], [], [], 0
  for match in _BRACES.finditer(text):
    token = match.group()
    if token == '}':
      if stack:
        boxed, begin, start = stack.pop()
        open_boxes -= boxed
        if boxed:
          (inner if open_boxes else outer).append(_Boxed(begin, start, match.start()))
    elif token.endswith('{') and token != r'\{':
      stack.append((token != '{', match.start(), match.end()))
      open_boxes += token != '{'
  if open_boxes:  # A box that is never closed does not count, so boxes within it may be outermost.
    last, inner, within = -1, [], sorted(inner)
    for box in within:
      (inner if box.begin < last else outer).append(box)
      last = max(last, box.end)
    outer.sort()
  return outer, inner


def _held(text: str) -> list[tuple[_Boxed, str]]:
  """Returns the outermost boxes with their contents. Each nested box in the contents is replaced by
  the text inside the nested box.
  """
  outer, inner = _boxes(text)
  cuts = sorted(
    [(box.begin, box.start) for box in inner] + [(box.end, box.end + 1) for box in inner]
  )
  held, next_cut = [], 0
  for box in outer:
    pieces, at = [], box.start
    while next_cut < len(cuts) and cuts[next_cut][0] < box.end:
      cut, after = cuts[next_cut]
      next_cut += 1
      if cut >= at:
        pieces.append(text[at:cut])
        at = after
    pieces.append(text[at : box.end])
    held.append((box, ' '.join(piece.strip() for piece in pieces if piece.strip())))
  return held


def _boxed(text: str) -> list[list[str]]:
  """Returns the contents of the boxes in groups. Adjacent boxes (`\\boxed{2} and \\boxed{3}`) form
  a group.

  If the words "final answer" precede a box, boxes before these words do not count.
  """
  boxes = [(box, held) for box, held in _held(text) if held]
  if not boxes:
    boxes = [
      (_Boxed(match.start(), match.start(1), match.end(1)), match[1])
      for match in _BARE_BOX.finditer(text)
    ]
  if marker := _FINAL.search(text):
    boxes = [(box, held) for box, held in boxes if box.begin >= marker.end()] or boxes
  groups: list[list[str]] = []
  last = None
  for box, held in boxes:
    if (
      last is not None
      and box.begin - last <= _MAX_GAP
      and _TOGETHER.fullmatch(text, last, box.begin)
    ):
      groups[-1].append(held)
    else:
      groups.append([held])
    last = box.end + 1
  return groups


def _joined(group: Sequence[str], key: Callable[[str], Hashable]) -> str:
  """Joins the contents of adjacent boxes into one answer, a list that contains each value once."""
  values = {key(held): held for held in reversed(group)}
  return ', '.join(reversed(values.values()))


def boxed_lists(text: str) -> list[str]:
  """Returns the contents of the boxes. The contents of adjacent boxes are joined into one list."""
  return [_joined(group, collapse) for group in _boxed(text)]


def _between(text: str, left: str, right: str) -> list[str]:
  parts = []
  start = text.find(left)
  while start >= 0:
    end = text.find(right, start + len(left))
    if end < 0:
      break
    parts.append(text[start + len(left) : end])
    start = text.find(left, end + len(right))
  return parts


def _formulas(text: str) -> list[str]:
  """Returns the text from the first to the last formula of the last sentence that has formulas, as
  the only element of a list. The list is empty if there are no formulas.
  """
  begin = end = None
  for match in _FORMULA.finditer(text):
    if begin is None or _SENTENCE_END.search(text, end, match.start()):
      begin = match.start()
    end = match.end()
  if begin is None:
    return []
  # Text after the last formula, such as a unit in words, is left out.
  return [text[begin:end]]


def _phrases(text: str) -> list[str]:
  starts = list(_PHRASE.finditer(text))
  phrases = []
  for match, following in zip(starts, [*[m.start() for m in starts[1:]], len(text)]):
    lead = _LEAD.match(text, match.end(), following)
    begin = lead.end() if lead else match.end()
    formula = _FORMULA.match(text, begin, following)
    end = _SENTENCE_END.search(text, formula.end() if formula else begin, following)
    end = end.start() if end else following
    reason = _REASON.search(text, begin, end)
    phrases.append(text[begin : reason.start() if reason else end])
  return phrases


def candidates(text: str, method: Method, tag: str = 'answer') -> list[str]:
  """Returns, in order, all answers that `method` finds in the text. White space at both ends of an
  answer is removed, and blank answers are left out.
  """
  match method:
    case 'whole':
      answers = [text]
    case 'boxed':
      answers = [held for group in _boxed(text) for held in group]
    case 'hashes':
      answers = [part.partition('\n')[0] for part in text.split('####')[1:]]
    case 'tags':
      answers = _between(text, f'<{tag}>', f'</{tag}>')
    case 'phrase':
      answers = _phrases(text)
    case 'bold':
      answers = _BOLD.findall(text[-MAX_LENGTH:])
    case 'formula':
      answers = _formulas(text)
    case 'number':
      answers = NUMBER.findall(text)[-1:]
  return [answer.strip() for answer in answers if answer.strip()]


def _without_echo(text: str, prompts: Sequence[str], method: Method, tag: str) -> str:
  """Removes verbatim copies of those prompts in which the method would find an answer, for example
  the answer of a worked example.
  """
  for prompt in prompts:
    echo = prompt.strip()
    if echo and echo in text and candidates(echo, method, tag):
      # A match inside a longer word or number is not a copy: "13" does not repeat the prompt "3".
      text = re.sub(rf'(?<![\w.]){re.escape(echo)}(?!\w)', '\n', text)
  return text


def said(text: str) -> str:
  """Returns the text after the thoughts (`<think>…</think>`). If there are no thoughts or no text
  after them, returns the whole text.
  """
  after = text.partition('</think>')[2]
  return after if after.strip() else text


def extract(
  text: str,
  *,
  method: Methods,
  tag: str = 'answer',
  prompts: Sequence[str] = (),
  key: Callable[[str], Hashable] = collapse,
) -> Extraction:
  """Extracts the answer of a completion.

  Args:
    text: the completion.
    method: extraction method, or several methods in order: the first that finds anything decides.
    tag: tag name for method `tags`.
    prompts: contents of the prompt's messages; all methods but `whole` ignore verbatim copies of
      them.
    key: maps an answer to a key. Equal keys mean the same answer; a key that is text means that the
      answer could not be read as a value.
  """
  methods, answers = (method,) if isinstance(method, str) else method, []
  text = said(text)
  for method in methods:
    if method == 'whole' and method != methods[-1] and _PROSE.search(text):
      continue
    searched = text if method == 'whole' else _without_echo(text, prompts, method, tag)
    answers = candidates(searched, method, tag)
    if answers:
      break
  else:
    return Extraction(None, NO_ANSWER)
  if method == 'boxed' and max(map(len, answers)) <= MAX_LENGTH:
    answers = [_joined(group, key) for group in _boxed(searched)]
  if max(map(len, answers)) > MAX_LENGTH:
    return Extraction(None, f'answer longer than {MAX_LENGTH} characters')
  answer = answers[-1]
  if method == 'tags' and any(f'<{tag}>' in a for a in answers):
    return Extraction(None, 'answer inside an answer')
  keys = {key(a) for a in set(answers)}
  for other in (m for m in methods if m in EXPLICIT and m != method):
    also = set(candidates(_without_echo(text, prompts, other, tag), other, tag))
    keys |= {
      value
      for value in map(key, (a for a in also if len(a) <= MAX_LENGTH))
      if not isinstance(value, str)
    }
  if len(keys) > 1:
    return Extraction(None, f'{len(keys)} answers that differ')
  return Extraction(answer)


def reference(truth: str) -> str:
  """Extracts the reference answer from a dataset's truth.

  The reference answer is the text after the last `####`. If there is none, it is the content of the
  last box and of the boxes adjacent to it. If there is no box and the truth is longer than
  `MAX_TRUTH`, it is the text after the last phrase such as "the final answer is". Otherwise, it is
  the whole truth.
  """
  if hashes := candidates(truth, 'hashes'):
    return hashes[-1]
  if boxes := boxed_lists(truth):
    return boxes[-1]
  phrases = candidates(truth, 'phrase') if len(truth) > MAX_TRUTH else []
  return phrases[-1] if phrases else truth.strip()
