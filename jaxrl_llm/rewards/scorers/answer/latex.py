r"""Converts mathematics in LaTeX and plain text to a canonical spelling.

The conversion unifies spaces, fonts, sizes, Unicode characters, fractions and words.

Invariants: the conversion takes linear time and never changes the meaning. Unknown text is kept.
"""

from __future__ import annotations

import functools
import re
import unicodedata

_SUPERSCRIPTS = str.maketrans('⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ', '0123456789+-()ni')
_SUBSCRIPTS = str.maketrans('₀₁₂₃₄₅₆₇₈₉', '0123456789')
_UNICODE = {
  '−': '-', '–': '-', '×': r'\times ', '·': r'\cdot ', '⋅': r'\cdot ', '÷': r'\div ', '∕': '/',
  '∞': r'\infty ', 'π': r'\pi ', 'θ': r'\theta ', 'α': r'\alpha ', 'β': r'\beta ', 'γ': r'\gamma ',
  'φ': r'\phi ', 'λ': r'\lambda ', 'μ': r'\mu ', 'ω': r'\omega ', 'σ': r'\sigma ', 'Δ': r'\Delta ',
  'ε': r'\epsilon ', '±': r'\pm ', '∓': r'\mp ', '≤': r'\le ', '⩽': r'\le ', '≥': r'\ge ',
  '⩾': r'\ge ', '≠': r'\ne ', '≈': r'\approx ', '∪': r'\cup ', '∩': r'\cap ', '∈': r'\in ',
  '∅': r'\emptyset ', 'ℝ': r'\mathbb{R}', 'ℤ': r'\mathbb{Z}', '√': r'\sqrt ', '∛': r'\sqrt[3]',
  '°': r'^\circ ', '⟨': r'\langle ', '⟩': r'\rangle ', '⌊': r'\lfloor ', '⌋': r'\rfloor ',
  '⌈': r'\lceil ', '⌉': r'\rceil ', '½': r'\frac{1}{2}', '⅓': r'\frac{1}{3}', '⅔': r'\frac{2}{3}',
  '¼': r'\frac{1}{4}', '¾': r'\frac{3}{4}', '⅕': r'\frac{1}{5}', '⅙': r'\frac{1}{6}',
  '⅛': r'\frac{1}{8}', '′': "'", '’': "'", '…': r'\ldots ', '∖': r'\setminus ', '\u00a0': ' ',
  '\u202f': ' ', '\u2009': ' ', '\u200b': '', '∧': r'\wedge ', '∨': r'\vee ',
}  # fmt: skip
_UNICODE_MARK = re.compile('[' + ''.join(_UNICODE) + ']')
_RUNS = (
  (re.compile('[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+'), lambda match: '^{' + match[0].translate(_SUPERSCRIPTS) + '}'),
  (re.compile('[₀₁₂₃₄₅₆₇₈₉]+'), lambda match: '_{' + match[0].translate(_SUBSCRIPTS) + '}'),
)
_ROOT = re.compile(r'√\s*\(')
_ROOT_OF_NUMBER = re.compile(r'√\s*(\d+(?:\.\d+)?)')
"""Matches roots such as `√12`. In LaTeX, the number needs braces, because `\\sqrt 12` means the
root of 1, followed by 2.
"""
_END = r'(?![a-zA-Z])'
_FONT = r'\\(?:mathrm|mathit|mathbf|mathsf|mathtt|mathnormal|operatorname\*?)'
_STEPS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
  (re.compile(pattern), new)
  for pattern, new in (
    (r'(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|text|left|right|pi|infty|cup|le|ge|leq|geq|'
     r'cdot|times|pm|begin|end)(?![a-zA-Z]))',
     r'\\'),
    (r'\\text\s*\{\s*([,;])\s*\}', r'\1 '),
    (r',\s*\\!\s*|\{\s*,\s*\}\s*', ','),
    (r'\{\s*:\s*\}|\\colon' + _END + r'|\\!:\\!|\\text\s*\{\s*:\s*\}', ':'),
    (r'(?<=\d)(?:(?<!\\)\\[,;:> ]|\\(?:thinspace|enspace)' + _END + r'|~)(?=\d{3}(?!\d))', ' '),
    (r'(?<!\\)\\[!/]|\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|'
     r'limits|nolimits|mathstrut|strut|'
     r'boldsymbol|bm|bf|rm|it|hfill|noindent|nonumber|middle)' + _END + r'(?:\.(?!\d))?', ''),
    (r'\\(?:[hv]space|phantom|hphantom|label|tag)\*?\s*\{[^{}]*\}', ' '),
    (r'\\q?quad|(?<!\\)\\[,;:> ]|\\(?:thinspace|enspace|space|newline)' + _END + '|~|&nbsp;', ' '),
    (r'\\(?:text)?color\s*\{[^{}]*\}|\\underline(?=\s*\{)', ''),
    (r'\((\d+)\)\s*_', r'\1_'),
    (r'(?<![\w*])\*\*(?=\S)([^*]+?)(?<=\S)\*\*(?![\w*])', r'\1'),
    (r'\{\s*(\\times|\\cdot|[=:/])\s*\}', r'\1 '),
    (r'\\[dtc]frac' + _END, r'\\frac'),
    (r'\\[dt]binom' + _END, r'\\binom'),
    (r'\\(?:le|leq|leqslant|leqq)' + _END + '|<=', r'\\le '),
    (r'\\(?:ge|geq|geqslant|geqq)' + _END + '|>=', r'\\ge '),
    (r'\\(?:ne|neq)' + _END + '|!=', r'\\ne '),
    (r'\\lt' + _END, '<'),
    (r'\\gt' + _END, '>'),
    (r'\\(?:cdotp|centerdot|bullet)' + _END, r'\\cdot '),
    (r'\\(?:lvert|rvert|vert|lVert|rVert|mid)' + _END, '|'),
    (r'\\(?:varnothing)' + _END, r'\\emptyset '),
    (r'\\(?:lbrace)' + _END, r'\\{'),
    (r'\\(?:rbrace)' + _END, r'\\}'),
    (r'\\(?:lparen)' + _END, '('),
    (r'\\(?:rparen)' + _END, ')'),
    (r'\\(?:text(?:bf|it|rm|normal|sf|tt|up)|mbox|hbox|emph)(?=\s*\{)', r'\\text'),
    (_FONT + r'\s*\{\s*([a-zA-Z])\s*\}', r' \1 '),
    (rf'(?:{_FONT}|\\text)\s*\{{\s*\\?(arcsin|arccos|arctan|sin|cos|tan|cot|'
     rf'sec|csc|log|ln|lg|exp|cis|sinh|cosh|tanh)\s*\}}',
     r'\\\1 '),
    (rf'(?:{_FONT}|\\text)\s*\{{([-+\d.,/\s]*\d[.,\s]*)\}}', r' \1 '),
    (r'\\(?:mathrm|mathit|mathsf|mathtt|mathnormal|operatorname\*?)(?=\s*\{)', r'\\text'),
    (r'\\mathbf(?=\s*\{\s*[a-zA-Z(])', r'\\text'),
    (r'_\s*\{\s*\\text\s*\{\s*(\w+)\s*\}\s*\}|_\s*\\text\s*\{\s*(\w+)\s*\}', r'_{\1\2}'),
    (r'\\frac\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}',
     r'\\text{\1/\2}'),
    (r'\\text\s*\{\s*,?\s*(and|or)\s*,?\s*\}', r' \1 '),
    (r'\\(?:vee|lor)' + _END, ' or '),
    (r'\\(?:wedge|land)' + _END, ' and '),
    (r'\\(?:degree|degrees)' + _END + r'|\^\s*\{\s*\\circ\s*\}|\^\s*\{\s*o\s*\}', r'^\\circ '),
    (r'\\mathbb\s*R' + _END + r'|\\Bbb\s*\{?R\}?|\\(?:R|reals|Reals|RR)' + _END
     + r'|\\text\s*\{\s*R\s*\}(?=\s*$)',
     r'\\mathbb{R}'),
    (r'\\(?:backslash)' + _END, r'\\setminus '),
    (r'\\%', '%'),
    (r'\s*\\text\s*\{\s*(?:percent(?:age)?|per cent|pct)\.?\s*\}'
     r'|\s*\b(?:percent(?:age)?|per cent|pct)\b\.?\s*$', '%'),
  )
)  # fmt: skip
_DELIMITERS = (('$$', '$$'), ('$', '$'), (r'\(', r'\)'), (r'\[', r'\]'), ('**', '**'), ('`', '`'))
_TRAILING = re.compile(r'(?:\s|(?<!\\)(?<!\\left)(?<!\\right)[.;:,!?](?<!\d!)(?<![a-zA-Z)\]}]!))+$')


_REPEATED = re.compile(r'(?<=\.)(\d{0,9}?)(\d)\2\2+\s*(?:\.{3}|…|\\[lc]?dots(?![a-zA-Z]))')
_REALS = re.compile(
  r'(?:\\text\s*\{)?\s*(?:the set of )?all (?:real numbers|reals)(?: [a-z])?\s*\}?', re.IGNORECASE
)


def undelimited(text: str) -> str:
  """Strips enclosing math delimiters, bold marks and final punctuation."""
  text = text.strip()
  for _ in range(3):
    before = text
    text = _TRAILING.sub('', text) if text[-1:] in '.;:,!?' and not text.endswith('!') else text
    for left, right in _DELIMITERS:
      if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
        inner = text[len(left) : -len(right)]
        if left not in inner.replace('\\' + left, '') and not text.endswith('\\' + right):
          text = inner.strip()
    if text == before:
      break
  return text.replace('**', '') if text.count('**') == 1 and text.endswith('**') else text


@functools.lru_cache(maxsize=1024)
def canonical(text: str) -> str:
  r"""Returns the text in canonical LaTeX: `\frac12` for `\dfrac12`, `\sqrt ` for `√`, ` and ` for
  `\text{ and }`.

  LaTeX commands for spaces and sizes are removed, as are font commands around a single letter, a
  number or a function name. Other words keep `\text{}`. A LaTeX space that separates thousands
  becomes a plain space.
  """
  text = undelimited(_REPEATED.sub(r'\1\\overline{\2}', text))
  if not text.isascii():
    text = _ROOT_OF_NUMBER.sub(r'\\sqrt{\1}', _ROOT.sub(r'\\sqrt(', text))
    for pattern, new in _RUNS:
      text = pattern.sub(new, text)
    text = _UNICODE_MARK.sub(lambda match: _UNICODE[match[0]], text)
    text = ''.join(unicodedata.normalize('NFKC', c) if '！' <= c <= '～' else c for c in text)
  for pattern, new in _STEPS:
    text = pattern.sub(new, text)
  text = re.sub(r'\$', '', text) if re.search(r'(?<!\\)\$.*\$', text) else text
  text = ' '.join(undelimited(text).split())
  return r'\mathbb{R}' if _REALS.fullmatch(text) else text
