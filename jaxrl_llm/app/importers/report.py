"""The result of an import: the configuration, and a report on each given key."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence

from jaxrl_llm.app.importers.draft import assemble
from jaxrl_llm.app.importers.table import FATES, Import, Outcome
from jaxrl_llm.app.importers.writing import Comments, source_text
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.types import Json


@dataclasses.dataclass(frozen=True)
class Imported:
  """Result of an import."""

  library: str
  config: Config
  outcomes: Sequence[Outcome]
  notes: Sequence[str]
  comments: Comments

  def counts(self) -> dict[str, int]:
    """Returns the numbers of given keys that are mapped, not needed and not supported."""
    return {fate: sum(item.fate == fate for item in self.outcomes) for fate in FATES}

  def source(self, imported: pathlib.Path, target: pathlib.Path) -> str:
    """Returns the text of the configuration file.

    Args:
      imported: file that was imported.
      target: configuration file to write.
    """
    algorithm = self.config.stages[0].algorithm.name
    return source_text(
      self.config,
      title=f"{algorithm}, imported from {self.library}'s {imported.name}.",
      command=f'jaxrl train --config={shlex.quote(str(target))}',
      comments=self.comments,
    )

  def lines(self) -> list[str]:
    """Returns the lines of the report: one for each given key, the notes, and a line of counts.

    Keys are grouped into those that are mapped, not needed and not supported.
    """
    lines = []
    for fate in FATES:
      items = [item for item in self.outcomes if item.fate == fate]
      if items:
        lines += [f'{fate} ({len(items)})', *(f'  {_pair(item)}: {item.text}' for item in items)]
    if self.notes:
      lines += ['notes', *(f'  {note}' for note in self.notes)]
    counts = ', '.join(f'{count} {fate}' for fate, count in self.counts().items())
    return [*lines, f'{len(self.outcomes)} keys: {counts}']

  def json(self) -> Json:
    """Returns the report as JSON."""
    return {
      'library': self.library,
      'keys': [dataclasses.asdict(item) for item in self.outcomes],
      'counts': self.counts(),
      'notes': list(self.notes),
    }


def imported(library: str, keys: Import, notes: Sequence[str]) -> Imported:
  """Returns the result of an import, with the configuration built from the draft of `keys`."""
  return Imported(
    library, assemble(keys.draft), keys.outcomes(), [*notes, *keys.notes], keys.comments
  )


def _pair(item: Outcome) -> str:
  return one_line(f'{item.key}={item.value}', 120)
