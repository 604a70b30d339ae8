"""Code on the pages of the documentation."""

import re

from paths import ROOT


def code(page: str, name: str) -> str:
  """The block of a page that is marked as the file `name`."""
  pattern = rf'<!-- begin: {re.escape(name)} -->\n```python\n(.*?)```\n<!-- end'
  return re.search(pattern, (ROOT / page).read_text(), re.DOTALL)[1]


def blocks(page: str, language: str) -> list[str]:
  """The code blocks of a page in a language."""
  return re.findall(
    rf'^```{language}\n(.*?)^```$', (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
  )
