"""What the program logs."""

import contextlib
import logging

import absl.logging


@contextlib.contextmanager
def absl_lines():
  """What absl logs meanwhile."""
  said = []
  handler = logging.Handler()
  handler.emit = lambda record: said.append(record.getMessage())
  logger = absl.logging.get_absl_logger()
  logger.addHandler(handler)
  yield said
  logger.removeHandler(handler)
