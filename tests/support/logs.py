"""Log messages of the program."""

import contextlib
import logging

import absl.logging


@contextlib.contextmanager
def absl_lines():
  """Yields a list, to which each message is added that absl logs in the block."""
  said = []
  handler = logging.Handler()
  handler.emit = lambda record: said.append(record.getMessage())
  logger = absl.logging.get_absl_logger()
  logger.addHandler(handler)
  yield said
  logger.removeHandler(handler)
