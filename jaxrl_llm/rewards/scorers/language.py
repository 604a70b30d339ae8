"""Language-consistency scorer: the share of a text's words that are in the target language.

Source: DeepSeek-R1 (arXiv:2501.12948, section 2.3.2) rewards the proportion of target-language
words in the reasoning. The paper does not define a word. These rules are our own; they are
deterministic and need no model:

1. Code (fenced blocks, `code`), LaTeX (`$…$`, `$$…$$`, `\\(…\\)`, `\\[…\\]`, `\\begin{…}…\\end{…}`,
   commands), tags and URLs are removed. A fenced block that is never closed extends to the end of
   the text.
2. A word is a run of letters of one script; each Han, Hiragana or Katakana character is a word.
   In other scripts, a single letter is not a word, since it is usually a variable (`x`) or the
   label of an option (`A`). Digits and signs are not words either.
3. A word belongs to a language that uses its script. If several supported languages use the
   script, the sentence decides. A sentence ends at a full stop, an exclamation mark or a question
   mark, or at the end of the line. Latin words belong to the language whose function words are
   most frequent in the sentence; if there is a tie, they belong to the target language. Han
   characters are Japanese in a sentence with kana and Chinese in a sentence without kana. If a
   sentence has fewer than five Han characters and no kana, the characters count as either
   language.

A text without words scores 0.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import unicodedata
from typing import Any, Literal

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.api import Attempt, Scorer, Verdict, read_options
from jaxrl_llm.rewards.scorers.format import Piece, read_fields, read_template

Language = Literal[
  'ar', 'bn', 'de', 'el', 'en', 'es', 'fr', 'he', 'hi', 'it', 'ja', 'ko', 'nl', 'pl', 'pt', 'ru',
  'ta', 'tr', 'vi', 'zh',
]  # fmt: skip
"""ISO 639-1 codes of the supported languages. If only one of these languages uses a script, all
text in that script counts as that language. For example, Persian counts as `ar`.
"""

SCRIPTS: dict[str, frozenset[str]] = {
  'ar': frozenset({'ARABIC'}), 'bn': frozenset({'BENGALI'}), 'el': frozenset({'GREEK'}),
  'he': frozenset({'HEBREW'}), 'hi': frozenset({'DEVANAGARI'}), 'ja': frozenset({'HAN', 'KANA'}),
  'ko': frozenset({'HANGUL'}), 'ru': frozenset({'CYRILLIC'}), 'ta': frozenset({'TAMIL'}),
  'zh': frozenset({'HAN'}),
}  # fmt: skip
"""Scripts, keyed by language. Languages that are not listed use the Latin script."""

FUNCTION_WORDS: dict[str, frozenset[str]] = {
  language: frozenset(words.split())
  for language, words in {
    'de': (
      'der die das und ist nicht ein eine einen mit auf für von zu dem den wir wenn dann auch sich '
      'sind es ich aber oder wie also daher durch bei nach aus'
    ),
    'en': (
      'the and is of to that it we so this are be with for if then by have has not no which was '
      'there from let what can will its how therefore because'
    ),
    'es': (
      'el la los las es de que en un una por con para se si no como del lo son entonces más pero '
      'su este esta hay'
    ),
    'fr': (
      'le la les et est de des que un une dans pour par avec si ne pas nous il elle ce cette sont '
      'donc du au plus sur ou alors mais'
    ),
    'it': (
      'il lo la gli di che un una in per con se non come del della sono quindi più ma questo '
      'questa abbiamo'
    ),
    'nl': (
      'de het een en is van dat niet met op voor we als dan ook zijn er maar of dus door bij naar '
      'uit deze'
    ),
    'pl': 'nie na jest się do że to jak dla od ale więc po co czy przez ma są lub tym',
    'pt': (
      'os as de que em um uma por com para se não como do da dos das são então mais mas seu este '
      'esta'
    ),
    'tr': 've bir bu için ile de da ne gibi daha çok olarak olan ise var değil ama sonra kadar',
    'vi': 'là và của có không được một cho các trong với này đó khi để ta thì từ số vậy nên bằng',
  }.items()
}
"""Frequent function words, keyed by language, for languages in Latin script."""

_FEW_HAN = 5
_SINGLE = ('HAN', 'KANA')
_SENTENCE = re.compile(r'[^.!?。！？\n]+')
_REMOVED = re.compile(r'\\[a-zA-Z]+\*?|</?[a-zA-Z][^<>\n]{0,80}>|(?:https?://|www\.)\S+')
_OPENING = re.compile(r'```|~~~|`|\$\$|\$(?=\S)|\\\(|\\\[|\\begin\{(?P<name>[a-zA-Z]{1,20}\*?)\}')
_CLOSING = {'```': '```', '~~~': '~~~', '`': '`', '$$': '$$', r'\(': r'\)', r'\[': r'\]'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageOptions:
  language: Language = 'en'
  field: str = 'think'
  """Field of the template whose content is scored. A completion that does not have the template's
  form scores 0. If `field` is empty, the whole completion is scored and the template is not used.
  """
  template: str = '<think>{think}</think><answer>{answer}</answer>'


def _closing(text: str, opening: re.Match) -> tuple[str, int, int]:
  """Returns the mark that closes `opening`, and the start and end of the range in which to search
  for it.

  `$` and the backtick must be closed on the same line.
  """
  mark = opening.group()
  start = opening.end()
  if opening['name']:
    return f'\\end{{{opening["name"]}}}', start, len(text)
  if mark in ('$', '`'):
    end = text.find('\n', start)
    return mark, start, len(text) if end < 0 else end
  return _CLOSING[mark], start, len(text)


def prose(text: str) -> str:
  """Removes code, LaTeX, tags and URLs from a text, in linear time."""
  kept, position, unclosed = [], 0, set()
  while opening := _OPENING.search(text, position):
    mark, start, limit = _closing(text, opening)
    end = -1 if mark in unclosed else text.find(mark, start, limit)
    if end < 0 and mark in ('```', '~~~'):
      kept.append(text[position : opening.start()])
      position = len(text)
      break
    if end < 0:
      # If the closing mark does not occur before the end of the text, it is also missing for every
      # later opening mark.
      unclosed |= {mark} if limit == len(text) else set()
      kept.append(text[position:start])
      position = start
      continue
    kept.append(text[position : opening.start()])
    position = end + len(mark)
  return _REMOVED.sub(' ', ' '.join([*kept, text[position:]]))


@functools.lru_cache(maxsize=8192)
def script(letter: str) -> str:
  """Returns a character's script (`LATIN`, `HAN`, `KANA`, …). Returns `MARK` for a combining mark,
  and an empty string for any other character that is not a letter.
  """
  category = unicodedata.category(letter)
  if category[0] != 'L':
    return 'MARK' if category[0] == 'M' else ''
  first = re.split(
    '[ -]', unicodedata.name(letter, '').removeprefix('FULLWIDTH ').removeprefix('HALFWIDTH ')
  )[0]
  return {'CJK': 'HAN', 'IDEOGRAPHIC': 'HAN', 'HIRAGANA': 'KANA', 'KATAKANA': 'KANA'}.get(
    first, first
  )


def words(sentence: str) -> list[tuple[str, str]]:
  """Returns the words of a sentence in order, each with its script."""
  tokens: list[tuple[str, str]] = []
  word, word_script = '', ''
  for letter in f'{sentence} ':
    letter_script = script(letter)
    if letter_script == 'MARK' or (letter_script == word_script and letter_script not in _SINGLE):
      word += letter
      continue
    if word_script in _SINGLE or len(word) > 1:
      tokens.append((word, word_script))
    word, word_script = letter, letter_script
  return [(word, word_script) for word, word_script in tokens if word_script]


def _latin(sentence: list[str], language: str) -> bool:
  """Returns whether words in Latin script, all from one sentence, belong to the language."""
  occurrences = collections.Counter(word.casefold() for word in sentence)
  counts = {
    name: sum(occurrences[word] for word in function) for name, function in FUNCTION_WORDS.items()
  }
  return counts[language] == max(counts.values())


def share(text: str, language: Language) -> tuple[float, int]:
  """Returns (share of the words that are in the language, number of words). Returns (0, 0) if there
  are no words.
  """
  scripts = SCRIPTS.get(language, frozenset({'LATIN'}))
  right = total = 0
  for sentence in _SENTENCE.findall(prose(unicodedata.normalize('NFC', text))):
    counted = words(sentence)
    by_script = collections.Counter(of for _, of in counted)
    total += len(counted)
    fits = {of: by_script[of] for of in scripts}
    if scripts == {'LATIN'} and not _latin(
      [word for word, of in counted if of == 'LATIN'], language
    ):
      fits['LATIN'] = 0
    few = by_script['HAN'] < _FEW_HAN
    if (language == 'ja' and not by_script['KANA'] and not few) or (
      language == 'zh' and by_script['KANA']
    ):
      fits['HAN'] = 0
    right += sum(fits.values())
  return (right / total if total else 0.0), total


def score_language(
  attempt: Attempt, *, options: LanguageOptions, pieces: tuple[Piece, ...]
) -> Verdict:
  """Scores the share of words in the language, in [0, 1]. The value is 0 if there are no words or
  the completion does not have the template's form.
  """
  text = attempt.completion
  if options.field:
    fields, wrong = read_fields(text, pieces)
    if wrong:
      return Verdict(value=0.0, evidence={'reason': wrong})
    text = fields[options.field]
  value, count = share(text, options.language)
  return Verdict(
    value=value, evidence={'words': count} if count else {'words': 0, 'reason': 'no words'}
  )


def language_scorer(**options: Any) -> Scorer:
  """Returns a scorer whose value is the share of target-language words in the reasoning (R1's
  language consistency). The options are `LanguageOptions`.
  """
  read = read_options(LanguageOptions, options, 'language')
  pieces = read_template(read.template, 'language') if read.field else ()
  names = [piece.text for piece in pieces if piece.field]
  if read.field and read.field not in names:
    raise UserError(
      f"scorer 'language': template {read.template!r} has no field {read.field!r}; it has {names}"
    )
  return functools.partial(score_language, options=read, pieces=pieces)
