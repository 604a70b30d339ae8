"""Garbage collection of a trainer's process.

A full collection stops all threads while it visits every object that it tracks: about 90 objects
for each sample that is being generated. So the objects of the set-up, which live as long as the
run, are left out, and full collections take place between two steps, when the fewest samples are
being generated.
"""

from __future__ import annotations

import gc

_DUE = 10
"""Number of collections of younger objects after which a full collection is due: Python's own
default.
"""
_OVERDUE = 300
"""Number of collections of younger objects after which Python starts a full collection itself."""


def freeze() -> None:
  """Leaves all present objects out of later collections. From now on, `collect_if_due` starts the
  full collections.
  """
  gc.collect()
  gc.freeze()
  youngest, younger, _ = gc.get_threshold()
  gc.set_threshold(youngest, younger, _OVERDUE)


def collect_if_due() -> None:
  """Starts a full collection if one is due. Call this function between two steps."""
  if gc.get_count()[2] >= _DUE:
    gc.collect()
