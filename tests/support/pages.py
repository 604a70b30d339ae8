"""Code and data on the pages of the documentation."""

import re

from paths import ROOT


def code(page: str, name: str) -> str:
  """The Python block of a page that is marked as the file `name`."""
  return block(page, name, 'python') + '\n'


def parts(page: str) -> dict[str, str]:
  """The marked parts of a page, keyed by name."""
  marked = r'<!-- begin: ([^\n]+) -->\n(.*?)<!-- end'
  return dict(re.findall(marked, (ROOT / page).read_text(), re.DOTALL))


def block(page: str, name: str, language: str) -> str | None:
  """The first block of a language in a marked part of a page; None if it has none."""
  found = re.search(rf'```{language}\n(.*?)\n```', parts(page)[name], re.DOTALL)
  return None if found is None else found[1]


def blocks(page: str, language: str) -> list[str]:
  """The code blocks of a page in a language."""
  return re.findall(
    rf'^```{language}\n(.*?)^```$', (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
  )
