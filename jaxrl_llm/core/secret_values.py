"""Hides the values of secret environment variables, such as HF_TOKEN, in texts that other people
will read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

NAME = r'(?i:(?<![^\W_])(?:api_?key|key|token|password|passwd|secret|credentials?))'
"""Regular expression that matches the end of a secret environment variable's name, such as API_KEY
in WANDB_API_KEY.
"""
_MIN_LENGTH = 8
"""Minimum number of characters of a secret. A shorter value is not hidden, because it may occur in
the text as an ordinary word.
"""


def hide_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
  """Replaces each value of a secret environment variable in `text` by `…`."""
  values = {
    value
    for name, value in environment.items()
    if len(value) >= _MIN_LENGTH and re.search(f'{NAME}$', name)
  }
  # Longest values first, because a shorter value may be the beginning of a longer one.
  for value in sorted(values, key=len, reverse=True):
    text = text.replace(value, '…')
  return text
