"""Media of taskset rows. They are read and validated when the taskset loads, so a run never starts
with a missing, changed or invalid image.

A row's `media` is a list of `{kind: 'image', path | bytes, digest?}`. `path` is relative to the
directory of the taskset's file and must stay inside that directory. `bytes` is base64 text or, in
Parquet, bytes. `digest` is the hexadecimal xxh3-128 digest of the bytes. A row may instead have
`images` as in verl's data, a list of paths or of `{bytes | path}`.
"""

from __future__ import annotations

import base64
import binascii
import json
import pathlib
from collections.abc import Mapping

import xxhash

from jaxrl_llm.core.files import path_inside, read_bytes
from jaxrl_llm.core.records.task import Media
from jaxrl_llm.core.types import Json

KINDS = ('image',)
_SIGNATURES = (
  b'\x89PNG\r\n\x1a\n',
  b'\xff\xd8\xff',
  b'GIF87a',
  b'GIF89a',
  b'BM',
  b'II*\x00',
  b'MM\x00*',
)
_DATA = 'data:;base64,'
MAX_BYTES = 32 << 20
"""Maximum size of an image file in bytes."""


def media_bytes(reference: str, root: pathlib.Path | None) -> bytes:
  """Reads the bytes that a `Media.reference` refers to. Paths are relative to `root`. Raises
  ValueError if the reference is invalid.
  """
  if reference.startswith(_DATA):
    try:
      return base64.b64decode(reference.removeprefix(_DATA), validate=True)
    except binascii.Error as error:
      raise ValueError(f'bytes are not base64: {error}') from None
  if root is None:
    raise ValueError(
      f'path {reference!r}, but the source has no directory to which it could be relative; wanted '
      'bytes'
    )
  path = path_inside(root, reference)
  try:
    return read_bytes(path, MAX_BYTES)
  except OSError as error:
    raise ValueError(f'{path}: {error.strerror or error}') from None


def read_media(fields: Mapping[str, Json], root: pathlib.Path | None) -> tuple[Media, ...]:
  """Reads and validates the media of a row. Raises ValueError with a one-line message if an item is
  invalid.
  """
  if 'media' in fields and fields['media'] is not None:
    listed, key = fields['media'], 'media'
  else:
    listed, key = fields.get('images') or [], 'images'
  if not isinstance(listed, list):
    raise ValueError(f'{key} is {json.dumps(listed)[:80]}, wanted a list')
  media = []
  for number, item in enumerate(listed):
    try:
      media.append(
        _one(
          {'path': item} if isinstance(item, str) else item,
          root,
          kind=None if key == 'media' else 'image',
        )
      )
    except ValueError as error:
      raise ValueError(f'{key}[{number}]: {error}') from None
  return tuple(media)


def _one(item: Json, root: pathlib.Path | None, *, kind: str | None) -> Media:
  if not isinstance(item, Mapping):
    raise ValueError(f'is {json.dumps(item)[:80]}, wanted {{kind, path or bytes, digest?}}')
  kind = item.get('kind', kind)
  if kind not in KINDS:
    raise ValueError(f'kind is {kind!r}, wanted {" or ".join(map(repr, KINDS))}')
  data, path = item.get('bytes'), item.get('path')
  if isinstance(data, str) and data:
    reference = f'{_DATA}{data}'
  elif isinstance(path, str) and path:
    reference = path
  else:
    raise ValueError('has no path and no bytes')
  content = media_bytes(reference, root)
  where = 'bytes' if reference.startswith(_DATA) else reference
  if not (content.startswith(_SIGNATURES) or (content[:4] == b'RIFF' and content[8:12] == b'WEBP')):
    raise ValueError(
      f'{where}: {len(content)} bytes that are not a PNG, JPEG, GIF, WebP, BMP or TIFF image'
    )
  digest = xxhash.xxh3_128_hexdigest(content)
  if item.get('digest') not in (None, digest):
    raise ValueError(
      f'{where}: digest is {digest}, but the row says {item["digest"]}; the file is another one or '
      'has changed'
    )
  return Media(kind=kind, digest=digest, reference=reference)
