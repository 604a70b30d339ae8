"""Code and data on the pages of the documentation."""

import re

from paths import ROOT


def code(page: str, name: str) -> str:
  """Returns the Python block of a page that is marked as the file `name`."""
  return block(page, name, 'python') + '\n'


def parts(page: str) -> dict[str, str]:
  """Returns the marked parts of a page, keyed by name."""
  marked = r'<!-- begin: ([^\n]+) -->\n(.*?)<!-- end'
  return dict(re.findall(marked, (ROOT / page).read_text(), re.DOTALL))


def block(page: str, name: str, language: str) -> str | None:
  """Returns the first block of a language in a marked part of a page, or None if there is none."""
  found = re.search(rf'```{language}\n(.*?)\n```', parts(page)[name], re.DOTALL)
  return None if found is None else found[1]


def blocks(page: str, language: str) -> list[str]:
  """Returns the code blocks of a page in a language."""
  return re.findall(
    rf'^```{language}\n(.*?)^```$', (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
  )
