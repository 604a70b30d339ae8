"""Links of the README and the documentation lead to files and headings that exist."""

import collections
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted(
  str(page.relative_to(ROOT)) for page in [ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')]
)
TARGET = re.compile(r'\]\(([^()\s]+)(?: "[^"]*")?\)|(?:src|srcset|href)="([^"]+)"')
FENCED = re.compile(r'^(```+|~~~+).*?^\1', re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
  """Targets of the links and images of a page, without those to other sites."""
  prose = re.sub(r'`[^`\n]+`', '', FENCED.sub('', text))
  targets = [markdown or html for markdown, html in TARGET.findall(prose)]
  return [target for target in targets if not re.match(r'[a-z]+:', target)]


def anchors(text: str) -> set[str]:
  """Anchors of a page's headings, as GitHub makes them."""
  headings = re.findall(r'^#{1,6} +(.+?)(?: +#+)?$', FENCED.sub('', text), re.MULTILINE)
  counts, names = collections.Counter(), set(re.findall(r'\bid="([^"]+)"', text))
  for heading in headings:
    label = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading).replace('`', '').replace('*', '')
    slug = re.sub(r'[^\w\- ]', '', label.strip().lower()).replace(' ', '-')
    names.add(f'{slug}-{counts[slug]}' if counts[slug] else slug)
    counts[slug] += 1
  return names


def broken(page: pathlib.Path) -> list[str]:
  """Links of `page` that lead nowhere."""
  failures = []
  for target in links(page.read_text()):
    path, _, anchor = target.partition('#')
    file = page.parent / path if path else page
    if not file.exists():
      failures.append(f'{target}: no such file')
    elif anchor and file.suffix == '.md' and anchor not in anchors(file.read_text()):
      failures.append(f'{target}: no such heading')
  return failures


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_to_files_and_headings(page):
  assert broken(ROOT / page) == []


def test_broken_links_are_found(tmp_path):
  (tmp_path / 'other.md').write_text(
    '# Tasks & `replay`\n\n## Twice\n\n## Twice\n\n```bash\n# no heading\n```\n'
  )
  page = tmp_path / 'page.md'
  page.write_text(
    '[a](other.md) [b](other.md#tasks--replay) [c](other.md#twice-1) [d](#here) '
    '[e](https://host/x.md) `[f](g.md)`\n'
    '[![h](missing.svg)](other.md) [i](other.md#twice-2) [j](other.md#no-heading) '
    '[k](#nowhere)\n<img src="gone.svg">\n'
    '# Here\n```\n[l](m.md)\n```\n'
  )
  assert broken(page) == [
    'missing.svg: no such file',
    'other.md#twice-2: no such heading',
    'other.md#no-heading: no such heading',
    '#nowhere: no such heading',
    'gone.svg: no such file',
  ]
