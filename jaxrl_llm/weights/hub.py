"""Uploads a model directory to the Hugging Face hub, through huggingface_hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
  HfHubHTTPError,
  HFValidationError,
  HTTPError,
  LocalTokenNotFoundError,
  OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from jaxrl_llm.core.errors import UserError, one_line


def check_repository(repository: str) -> None:
  """Checks the repository's id and the presence of a token, without using the network.

  Raises:
    UserError: the id of the repository is malformed, or there is no token.
  """
  try:
    validate_repo_id(repository)
  except HFValidationError as error:
    raise UserError(
      f'--push_to_hub={repository}: not a repository id ({one_line(error, 200)}); wanted USER/NAME'
    ) from None
  if huggingface_hub.get_token() is None:
    raise UserError(
      f'--push_to_hub={repository}: no token; run `hf auth login`, or set HF_TOKEN to one that may '
      'write'
    )


def push(directory: Path, repository: str, *, private: bool) -> str:
  """Uploads all files of a directory as one commit, and returns the address of the repository.

  The repository is created if it does not exist.

  Args:
    private: whether a new repository is visible to its owner only.

  Raises:
    UserError: the hub cannot be reached, or it refuses the upload.
  """
  where = f'--push_to_hub={repository}'
  try:
    address = huggingface_hub.create_repo(repository, private=private, exist_ok=True)
    huggingface_hub.upload_folder(
      repo_id=repository,
      folder_path=directory,
      commit_message='Upload a model of jaxrl_llm',
    )
  except LocalTokenNotFoundError:
    raise UserError(f'{where}: no token; run `hf auth login`, or set HF_TOKEN') from None
  except HfHubHTTPError as error:
    status = error.response.status_code
    reason = {
      401: 'the hub does not know the token; log in again (`hf auth login`)',
      403: 'the token has no right to write to this repository; use one that has',
    }.get(status, f'the hub answered {status} ({one_line(error, 200)}); try again later')
    raise UserError(f'{where}: {reason}; {directory} is complete') from None
  except ImportError as error:
    raise UserError(
      f'{where}: needs {error.name or error}, which is not installed; pip install '
      "'huggingface_hub[hf_xet]'"
    ) from None
  except (OfflineModeIsEnabled, OSError, HTTPError) as error:
    raise UserError(
      f'{where}: the hub cannot be reached ({one_line(error, 200) or type(error).__name__}); '
      f'{directory} is complete: repeat the command where there is a network'
    ) from None
  except (ValueError, RuntimeError) as error:  # The hub's storage rejected a file.
    raise UserError(f'{where}: {one_line(error, 200)}; {directory} is complete') from None
  return str(address)
