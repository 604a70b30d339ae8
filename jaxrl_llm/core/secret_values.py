"""Hides the secrets of the environment, such as HF_TOKEN, in texts that others will read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

NAME = r'(?i:(?<![^\W_])(?:api_?key|key|token|password|passwd|secret|credentials?))'
"""Pattern of the end of a name whose value is secret, such as that of WANDB_API_KEY."""
_MIN_LENGTH = 8
"""Minimum length of a secret in characters; a shorter value may well be a word of the text."""


def hide_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
  """Replaces the values of the environment's secrets by `…`."""
  values = {
    value
    for name, value in environment.items()
    if len(value) >= _MIN_LENGTH and re.search(f'{NAME}$', name)
  }
  # The longest first, as one value may begin with another.
  for value in sorted(values, key=len, reverse=True):
    text = text.replace(value, '…')
  return text
