"""Hugging Face model directories: lookup, special tokens, tokenizer files and complete exports.

Invariant: transformers and vLLM can load a directory that `export` wrote without any conversion,
and `load_params` reads exactly the exported weights from it.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import huggingface_hub
import numpy as np
from absl import logging
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from jaxtyping import Shaped

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.families import Family, find_family
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.weights.hf_config import one_or_list, read_json, read_spec, write_config, write_json
from jaxrl_llm.weights.layout import from_hf, to_hf
from jaxrl_llm.weights.safetensors_files import SHARD_BYTES, load_params, save_params, writing

__all__ = [
  'SpecialTokens',
  'copy_tokenizer',
  'describe',
  'export',
  'from_hf',
  'load_params',
  'read_spec',
  'read_special_tokens',
  'resolve',
  'save_params',
  'to_hf',
  'write_config',
]

_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'tokenizer.model',
  'chat_template.jinja',
  'chat_template.json',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialTokens:
  """Special token ids of a model directory."""

  bos_id: int | None
  """Id of the beginning-of-text token; None if there is none."""
  eos_ids: tuple[int, ...]
  """Ids of the tokens that end a completion."""
  pad_id: int | None
  """Id of the padding token; None if there is none."""


def read_special_tokens(directory: str | Path) -> SpecialTokens:
  """Reads the ids of special tokens from generation_config.json. Ids that this file does not have
  are read from config.json.

  Raises UserError for an id outside the vocabulary.
  """
  directory = Path(directory)
  values = read_json(directory / 'config.json')
  vocab_size = values.get('vocab_size')
  if (directory / 'generation_config.json').exists():
    generation = read_json(directory / 'generation_config.json')
    values = {**values, **{name: value for name, value in generation.items() if value is not None}}
  for name in ('bos_token_id', 'pad_token_id'):
    if values.get(name) == -1:  # Early Llama models use -1 for an absent token.
      values[name] = None
  eos = values.get('eos_token_id')
  eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
  single_ids = [
    (name, values[name])
    for name in ('bos_token_id', 'pad_token_id')
    if values.get(name) is not None
  ]
  for name, token in [('eos_token_id', token) for token in eos_ids] + single_ids:
    if type(token) is not int or token < 0 or (type(vocab_size) is int and token >= vocab_size):
      raise UserError(
        f'{directory}: {name} has {one_line(token, 100)}, wanted token ids below vocab_size '
        f'{vocab_size} of config.json; correct it there or in generation_config.json'
      )
  return SpecialTokens(
    bos_id=values.get('bos_token_id'), eos_ids=eos_ids, pad_id=values.get('pad_token_id')
  )


def copy_tokenizer(source: str | Path, target: str | Path) -> list[str]:
  """Copies the files of the tokenizer and its chat templates. Returns the names of the copied
  files.
  """
  source, target = Path(source), Path(target)
  names = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
  names += [
    str(path.relative_to(source))
    for path in sorted(source.glob('additional_chat_templates/*.jinja'))
  ]
  for name in names:
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / name, target / name)
  return names


def _warn_of_misreading(family: Family, tokenizer_dir: Path) -> None:
  # For a qwen2 model, transformers 5 ignores the tokenizer class named in tokenizer_config.json and
  # always uses Qwen2's tokenizer class, which may split text differently.
  path = tokenizer_dir / 'tokenizer_config.json'
  name = read_json(path).get('tokenizer_class') if path.exists() else None
  if family.tokenizers and name not in family.tokenizers:
    logging.warning(
      "%s: for a %s model, transformers' AutoTokenizer builds a %s, but this is a %s; it may "
      'produce '
      'other tokens without a warning: load it with PreTrainedTokenizerFast, or train another '
      'family',
      tokenizer_dir,
      family.name,
      family.tokenizers[0],
      name,
    )


def export(
  directory: str | Path,
  params: Params | Iterable[tuple[str, Shaped[np.ndarray, '...']]],
  spec: ModelSpec,
  *,
  dtype: str = 'float32',
  tokenizer_dir: str | Path | None,
  eos_ids: Sequence[int],
  pad_id: int | None,
  bos_id: int | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
  """Writes a model directory that transformers and vLLM can load without any conversion.

  The weights are written last, so that their presence marks the directory as complete. Raises
  UserError if the model cannot be expressed in Hugging Face's form, and RunError if a file cannot
  be written. For the other arguments and errors, see `describe`.

  Args:
    params: parameter tree of NumPy arrays or addressable JAX arrays, with stacked layers (scanned)
      or separate layers (unrolled); or a stream of its arrays, see `save_params`.
    shard_bytes: maximum size of a weights file in bytes; see `save_params`.

  Returns:
    Paths of the weights files.
  """
  describe(
    directory,
    spec,
    dtype=dtype,
    tokenizer_dir=tokenizer_dir,
    eos_ids=eos_ids,
    pad_id=pad_id,
    bos_id=bos_id,
  )
  return save_params(directory, params, spec, dtype=dtype, shard_bytes=shard_bytes)


def describe(
  directory: str | Path,
  spec: ModelSpec,
  *,
  dtype: str,
  tokenizer_dir: str | Path | None,
  eos_ids: Sequence[int],
  pad_id: int | None,
  bos_id: int | None = None,
) -> None:
  """Writes all files of a model directory except the weights.

  A model with a 'scalar' head is written for AutoModelForSequenceClassification, and a model with a
  'value' head for AutoModelForTokenClassification. Both are written with one label and without
  generation_config.json. Raises UserError if `tokenizer_dir` has no tokenizer, and RunError if a
  file cannot be written.

  Args:
    directory: output directory, created if missing.
    spec: spec of the model.
    dtype: data type of the weights in the files.
    tokenizer_dir: directory from which the tokenizer and its chat templates are copied. If None,
      the directory is written without a tokenizer.
    eos_ids: ids of the tokens that end a completion.
    pad_id: id of the padding token, or None if there is none. If it is None and the head is
      'scalar', see `write_config`.
    bos_id: id of the beginning-of-text token, or None if there is none.
  """
  directory = Path(directory)
  if tokenizer_dir is not None and not any(
    (Path(tokenizer_dir) / name).is_file() for name in _TOKENIZER_FILES
  ):
    raise UserError(f'{tokenizer_dir}: holds no tokenizer; wanted a directory with tokenizer.json')
  with writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, spec, dtype=dtype, bos_id=bos_id, eos_ids=eos_ids, pad_id=pad_id)
    if spec.head == 'lm':
      generation = {
        'bos_token_id': bos_id,
        'eos_token_id': one_or_list(eos_ids),
        'pad_token_id': pad_id,
      }
      write_json(
        directory / 'generation_config.json', {k: v for k, v in generation.items() if v is not None}
      )
    else:
      # An earlier export may have left this file, whose special tokens would override those in
      # config.json.
      (directory / 'generation_config.json').unlink(missing_ok=True)
    if tokenizer_dir is not None:
      _warn_of_misreading(find_family(spec.family), Path(tokenizer_dir))
      copy_tokenizer(tokenizer_dir, directory)


_HUB_ID = re.compile(r'[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?')
_HUB_FILES = ('*.json', '*.safetensors', '*.jinja', '*.txt', 'tokenizer.model')


def resolve(source: str | Path) -> Path:
  """Returns a model's directory. This is `source` itself if it is a directory; otherwise `source`
  is a hub id, and the directory is the local snapshot of that model.

  If huggingface_hub's cache does not contain the snapshot, it is downloaded. Raises UserError if
  there is neither such a directory nor such a model, or if the download fails.
  """
  path, name = Path(source).expanduser(), str(source)
  if path.is_dir():
    return path
  if path.exists():
    raise UserError(
      f'{name}: is a file, wanted a model directory or a hub id such as Qwen/Qwen3-0.6B'
    )
  # A name such as 'runs/quickstart' could be a path or a hub id. It is taken as a path if there is
  # a directory 'runs'.
  if not _HUB_ID.fullmatch(name) or ('/' in name and path.parent.is_dir()):
    raise UserError(f'{name}: no such directory, and not a hub id either (such as Qwen/Qwen3-0.6B)')
  try:
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
  except RepositoryNotFoundError:
    raise UserError(
      f'{name}: neither a local directory nor a model on the hub (or a private one: set HF_TOKEN)'
    ) from None
  except LocalEntryNotFoundError:
    raise UserError(
      f'{name}: no such directory, and as a hub id it is not in the local cache and the hub cannot '
      'be reached; check the network, or give a directory'
    ) from None
  except (HfHubHTTPError, OSError, ValueError) as error:
    raise UserError(
      f'{name}: cannot be fetched from the hub ({" ".join(str(error).split())})'
    ) from None
