"""Scorer `instructions`: whether a completion follows verifiable instructions, such as 'in at most
50 words'.

The scorer supports the 25 kinds of instructions of IFEval (Zhou et al., arXiv:2311.07911). It reads
them and their arguments from a row's `instruction_id_list` and `kwargs`. The checks differ from
IFEval's evaluator in three ways: keywords are plain text instead of regular expressions, sentences
and capital words are found without NLTK, and languages are recognised as in the scorer `language`.

Invariant: checking a completion takes time linear in its length for each instruction.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Attempt, OverrunIsZero, Scorer, Verdict, read_options
from jaxrl_llm.rewards.scorers.language import Language, prose, share, words

_RELATIONS = ('less than', 'at least')
_RESPONSES = ('My answer is yes.', 'My answer is no.', 'My answer is maybe.')
_OWN_SCRIPTS = {
  'th': 'THAI', 'te': 'TELUGU', 'kn': 'KANNADA', 'gu': 'GUJARATI', 'pa': 'GURMUKHI',
  'ml': 'MALAYALAM', 'mr': 'DEVANAGARI', 'ne': 'DEVANAGARI', 'ur': 'ARABIC', 'fa': 'ARABIC',
  'bg': 'CYRILLIC',
}  # fmt: skip
"""Scripts of languages that are recognised by script alone, keyed by language. Languages that share
a script are not distinguished.
"""
_MAIN = 0.5
"""Minimum share of a text's words that must be in a language for the text to count as written in
that language.
"""
_END = re.compile(r'[.!?。！？]["\'”’)\]]*(?=\s|$)|[。！？]')
_ABBREVIATIONS = frozenset({
  'mr', 'mrs', 'ms', 'dr', 'prof', 'st', 'jr', 'sr', 'vs', 'e.g', 'i.e', 'etc', 'no', 'fig', 'al',
  'inc', 'ltd', 'co', 'u.s', 'u.k', 'a.m', 'p.m', 'approx', 'dept', 'est',
})  # fmt: skip
_CAPITAL_WORD = re.compile(r"[^\W_]+(?:[-'][^\W_]+)*")
_MAX_INSTRUCTIONS = 64
_MAX_TEXT = 10_000


def count_sentences(text: str) -> int:
  """Returns the number of sentences. A full stop after an initial or a common abbreviation does not
  end a sentence.
  """
  count, start, length = 0, 0, len(text.rstrip())
  for end in _END.finditer(text):
    last = text[max(start, end.start() - 20) : end.start()].rpartition(' ')[2].lower().lstrip('("')
    short = last in _ABBREVIATIONS or (len(last) == 1 and last.isalpha() and last != 'i')
    quoted = len(end[0]) > 1
    if end[0].startswith('.') and short and not quoted and end.end() < length:
      continue
    if text[start : end.start()].strip():
      count += 1
    start = end.end()
  return count + bool(text[start:].strip())


def _compare(count: int, relation: str, wanted: int) -> bool:
  return count < wanted if relation == _RELATIONS[0] else count >= wanted


def _keywords_exist(text: str, keywords: tuple[str, ...]) -> bool:
  return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
  found = re.findall(re.escape(keyword.strip()), text, re.IGNORECASE)
  return _compare(len(found), relation, frequency)


def _no_forbidden_words(text: str, forbidden_words: tuple[str, ...]) -> bool:
  return not any(
    re.search(rf'\b{re.escape(word)}\b', text, re.IGNORECASE) for word in forbidden_words
  )


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
  return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def _in_language(text: str, language: str) -> bool:
  if language in get_args(Language):
    return share(text, language)[0] >= _MAIN
  scripts = [script for _, script in words(prose(unicodedata.normalize('NFC', text)))]
  return bool(scripts) and scripts.count(_OWN_SCRIPTS[language]) >= _MAIN * len(scripts)


def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
  return _compare(count_sentences(text), relation, num_sentences)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
  paragraphs = [part.strip() for part in text.split('***')]
  inner = paragraphs[1:-1]
  return all(inner) and sum(map(bool, paragraphs)) == num_paragraphs


def _number_words(text: str, num_words: int, relation: str) -> bool:
  return _compare(sum(1 for _ in re.finditer(r'\w+', text)), relation, num_words)


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
  paragraphs = text.split('\n\n')
  count = sum(bool(part.strip()) for part in paragraphs)
  if not 1 <= nth_paragraph <= count or not paragraphs[nth_paragraph - 1].split():
    return False
  word = paragraphs[nth_paragraph - 1].split()[0].lstrip('\'"')
  word = re.split(r'[.,?!\'"]', word)[0].lower()
  return count == num_paragraphs and word == first_word.lower()


def _number_placeholders(text: str, num_placeholders: int) -> bool:
  count = 0
  for line in text.splitlines():
    position = 0
    while (start := line.find('[', position)) >= 0 and (end := line.find(']', start)) >= 0:
      count, position = count + 1, end + 1
  return count >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
  lowered = text.lower()
  patterns = {'P.P.S': r'p\.\s?p\.\s?s', 'P.S.': r'p\.\s?s\.'}
  if postscript_marker in patterns:
    return re.search(patterns[postscript_marker], lowered) is not None
  return postscript_marker.lower() in lowered


def _number_bullets(text: str, num_bullets: int) -> bool:
  lines = [line.strip() for line in text.splitlines()]
  count = sum(line.startswith('-') or (line[:1] == '*' and line[1:2] not in '*') for line in lines)
  return count == num_bullets


def _constrained(text: str) -> bool:
  return any(response in text for response in _RESPONSES)


def _highlights(text: str, num_highlights: int) -> bool:
  single = re.findall(r'\*[^\n*]*\*', text)
  double = re.findall(r'\*\*[^\n*]*\*\*', text)
  count = sum(bool(part.strip('*').strip()) for part in [*single, *double])
  return count >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
  return len(re.findall(rf'{re.escape(section_spliter)}\s?\d+', text)) >= num_sections


def _is_json(text: str) -> bool:
  bare = text.strip()
  for fence in ('```json', '```Json', '```JSON', '```'):
    bare = bare.removeprefix(fence)
  try:
    parse_json(bare.removesuffix('```').strip())
  except ValueError:
    return False
  return True


def _title(text: str) -> bool:
  for line in text.splitlines():
    start, end = line.find('<<'), line.rfind('>>')
    if 0 <= start < end and line[start:end].strip('<> '):
      return True
  return False


def _two_responses(text: str) -> bool:
  parts = [part.strip() for part in text.split('******')]
  if not all(parts[1:-1]):
    return False
  answers = [part for part in parts if part]
  return len(answers) == 2 and answers[0] != answers[1]


def _repeats(text: str, prompt_to_repeat: str) -> bool:
  return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
  return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
  bare = text.strip()
  return len(bare) > 1 and bare[0] == bare[-1] == '"'


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
  count = sum(word.isupper() for word in _CAPITAL_WORD.findall(text))
  return _compare(count, capital_relation, capital_frequency)


def _capital(text: str) -> bool:
  return text.isupper() and _in_language(text, 'en')


def _lowercase(text: str) -> bool:
  return text.islower() and _in_language(text, 'en')


def _no_comma(text: str) -> bool:
  return ',' not in text


def _language_code(value: str) -> bool:
  return value in get_args(Language) or value in _OWN_SCRIPTS


Check = Callable[..., bool]
_COUNT, _TEXT, _TEXTS, _RELATION, _LETTER, _CODE = (
  'an integer of at least 0',
  'a text',
  'a list of texts',
  "'less than' or 'at least'",
  'one character',
  f'a language of {sorted({*get_args(Language), *_OWN_SCRIPTS})}',
)
INSTRUCTIONS: Mapping[str, tuple[Check, Mapping[str, str]]] = {
  'change_case:capital_word_frequency': (
    _capital_words,
    {'capital_frequency': _COUNT, 'capital_relation': _RELATION},
  ),
  'change_case:english_capital': (_capital, {}),
  'change_case:english_lowercase': (_lowercase, {}),
  'combination:repeat_prompt': (_repeats, {'prompt_to_repeat': _TEXT}),
  'combination:two_responses': (_two_responses, {}),
  'detectable_content:number_placeholders': (_number_placeholders, {'num_placeholders': _COUNT}),
  'detectable_content:postscript': (_postscript, {'postscript_marker': _TEXT}),
  'detectable_format:constrained_response': (_constrained, {}),
  'detectable_format:json_format': (_is_json, {}),
  'detectable_format:multiple_sections': (
    _sections,
    {'section_spliter': _TEXT, 'num_sections': _COUNT},
  ),
  'detectable_format:number_bullet_lists': (_number_bullets, {'num_bullets': _COUNT}),
  'detectable_format:number_highlighted_sections': (_highlights, {'num_highlights': _COUNT}),
  'detectable_format:title': (_title, {}),
  'keywords:existence': (_keywords_exist, {'keywords': _TEXTS}),
  'keywords:forbidden_words': (_no_forbidden_words, {'forbidden_words': _TEXTS}),
  'keywords:frequency': (
    _keyword_frequency,
    {'keyword': _TEXT, 'frequency': _COUNT, 'relation': _RELATION},
  ),
  'keywords:letter_frequency': (
    _letter_frequency,
    {'letter': _LETTER, 'let_frequency': _COUNT, 'let_relation': _RELATION},
  ),
  'language:response_language': (_in_language, {'language': _CODE}),
  'length_constraints:nth_paragraph_first_word': (
    _first_word,
    {'num_paragraphs': _COUNT, 'nth_paragraph': _COUNT, 'first_word': _TEXT},
  ),
  'length_constraints:number_paragraphs': (_number_paragraphs, {'num_paragraphs': _COUNT}),
  'length_constraints:number_sentences': (
    _number_sentences,
    {'num_sentences': _COUNT, 'relation': _RELATION},
  ),
  'length_constraints:number_words': (_number_words, {'num_words': _COUNT, 'relation': _RELATION}),
  'punctuation:no_comma': (_no_comma, {}),
  'startend:end_checker': (_ends_with, {'end_phrase': _TEXT}),
  'startend:quotation': (_quoted, {}),
}
"""Check and arguments of each kind of instruction, keyed by its published id. The arguments are a
mapping from argument name to a description of the valid values.
"""


def _argument(value: Json, wanted: str) -> Any:
  """Returns the value of an argument, or None if it does not match the description `wanted`."""
  if wanted == _COUNT:
    whole = (isinstance(value, int) and not isinstance(value, bool)) or (
      isinstance(value, float) and value.is_integer()
    )
    return int(value) if whole and 0 <= value < 1 << 40 else None
  if wanted == _TEXTS:
    fits = isinstance(value, Sequence) and not isinstance(value, str) and 0 < len(value) <= 256
    texts = fits and all(_argument(text, _TEXT) is not None for text in value)
    return tuple(value) if texts else None
  if not isinstance(value, str) or not 0 < len(value.strip()) <= len(value) <= _MAX_TEXT:
    return None
  fits = {
    _RELATION: value in _RELATIONS,
    _LETTER: len(value) == 1,
    _CODE: _language_code(value),
  }
  return value if fits.get(wanted, True) else None


def read_instructions(fields: Mapping[str, Json]) -> list[tuple[str, Callable[[str], bool]]]:
  """Returns (id, function that checks a text) for each instruction of a row.

  Raises ValueError if there are no instructions or too many, or if one is unknown or has a missing
  or invalid argument.
  """
  ids, arguments = fields.get('instruction_id_list'), fields.get('kwargs')
  if not isinstance(ids, Sequence) or isinstance(ids, str) or not 0 < len(ids) <= _MAX_INSTRUCTIONS:
    raise ValueError(f'instruction_id_list is {ids!r:.80}, wanted 1 to {_MAX_INSTRUCTIONS} ids')
  if arguments is None:
    arguments = [{}] * len(ids)
  if not isinstance(arguments, Sequence) or len(arguments) != len(ids):
    raise ValueError(f'kwargs is {arguments!r:.80}, wanted an object for each of {len(ids)} ids')
  checks = []
  for name, given in zip(ids, arguments, strict=True):
    if not isinstance(name, str) or name not in INSTRUCTIONS:
      raise ValueError(f'no instruction {name!r:.80}; known are {", ".join(sorted(INSTRUCTIONS))}')
    if given is not None and not isinstance(given, Mapping):
      raise ValueError(f'kwargs of {name} are {given!r:.80}, wanted an object')
    check, wanted = INSTRUCTIONS[name]
    read = {key: _argument((given or {}).get(key), form) for key, form in wanted.items()}
    for key, value in read.items():
      if value is None:
        raise ValueError(f'{key} of {name} is {(given or {}).get(key)!r:.80}, wanted {wanted[key]}')
    checks.append((name, functools.partial(check, **read)))
  return checks


def loosened(text: str) -> list[str]:
  """Returns the variants of a text to which IFEval's loose criterion is applied: the text itself,
  the text without its first line, its last line or both, and each of these without asterisks.
  """
  lines = text.split('\n')
  kept = [lines, lines[1:], lines[:-1], lines[1:-1]]
  variants = ['\n'.join(part).strip() if part is not lines else text for part in kept]
  return [*variants, *(variant.replace('*', '') for variant in variants)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstructionsOptions:
  credit: Literal['all', 'fraction'] = 'all'
  """Value of a completion. all: 1 if the completion follows every instruction, otherwise 0;
  fraction: the share of instructions that the completion follows.
  """
  loose: bool = False
  """Whether an instruction also counts as followed if a variant of the completion follows it, such
  as the completion without its first line (see `loosened`).
  """


def score_instructions(attempt: Attempt, *, options: InstructionsOptions) -> Verdict:
  """Scores whether the text after the thoughts follows the row's instructions (see
  `InstructionsOptions.credit`). Blank text follows no instruction. The value is None if the row's
  instructions are invalid.
  """
  try:
    checks = read_instructions(attempt.task.fields)
  except ValueError as error:
    return Verdict(value=None, evidence={'reason': str(error)})
  text = attempt.completion.rpartition('</think>')[2]
  variants = loosened(text) if options.loose else [text]
  variants = [variant for variant in variants if variant.strip()]
  followed = [any(check(variant) for variant in variants) for _, check in checks]
  rate = sum(followed) / len(followed)
  missed = [name for (name, _), good in zip(checks, followed, strict=True) if not good]
  names = collections.Counter(name for name, _ in checks)
  parts = {
    name: sum(good for (other, _), good in zip(checks, followed, strict=True) if other == name)
    / count
    for name, count in names.items()
  }
  value = rate if options.credit == 'fraction' else float(not missed)
  return Verdict(value=value, parts={'followed': rate, **parts}, evidence={'missed': missed})


def instructions_scorer(**options: Any) -> Scorer:
  """Returns a scorer that checks whether the completion follows verifiable instructions (IFEval).
  The options are `InstructionsOptions`.
  """
  read = read_options(InstructionsOptions, options, 'instructions')
  return OverrunIsZero(functools.partial(score_instructions, options=read))
