"""Requests for ranges of published files, and the responses."""

from __future__ import annotations

import os
import pathlib
import re
from typing import NamedTuple

from aiohttp import web

from jaxrl_llm.core.net.server import SERVER, Refusal, split_path, write

WEIGHTS_PATH = '/weights'
_QUERY = re.compile(r'bundle=(?P<bundle>[0-9a-f]{32})&file=(?P<file>[A-Za-z0-9_.-]{1,128})')
_RANGE = re.compile(r'bytes=(?P<first>[0-9]{1,16})-(?P<last>[0-9]{1,16})')
_CHUNK = 1 << 18
_READ_S = 600.0
"""Seconds after which a host that does not read a range is disconnected. The range would otherwise
keep its file open, and thus in memory.
"""


class FileRange(NamedTuple):
  """Part of a file of a bundle that a client asks for."""

  bundle: str
  """Id of the bundle."""
  file: str
  start: int
  """Position of the first byte."""
  stop: int
  """Position after the last byte."""


def read_range(request: web.BaseRequest) -> FileRange | None:
  """Returns the range that a request asks for; None if it has neither a query nor a range, and only
  asks whether the server can be reached. Raises Refusal if the request is malformed.
  """
  _, query = split_path(request)
  ranges = request.headers.getall('Range', [])
  if not query and not ranges:
    return None
  asked, part = _QUERY.fullmatch(query), _RANGE.fullmatch(ranges[0]) if len(ranges) == 1 else None
  if asked is None or part is None or int(part['last']) < int(part['first']):
    raise Refusal(
      400, f'wanted {WEIGHTS_PATH}?bundle=ID&file=NAME with one header "Range: bytes=FIRST-LAST"'
    )
  return FileRange(asked['bundle'], asked['file'], int(part['first']), int(part['last']) + 1)


def send_nothing() -> web.Response:
  """Returns the response to a client that only asks whether the server can be reached."""
  return web.Response(headers=SERVER)


async def send_range(
  request: web.BaseRequest, path: pathlib.Path, asked: FileRange
) -> web.StreamResponse:
  """Sends a range of a file. Raises Refusal if the file is missing or shorter."""
  try:
    descriptor = os.open(path, os.O_RDONLY)
  except OSError:
    raise Refusal(404, f'{asked.file} is no longer published') from None
  try:
    size = os.fstat(descriptor).st_size
    if asked.stop > size:
      raise Refusal(416, f'{asked.file} has only {size} bytes')
    response = web.StreamResponse(
      status=206,
      headers={
        **SERVER,
        'Content-Type': 'application/octet-stream',
        'Content-Range': f'bytes {asked.start}-{asked.stop - 1}/{size}',
      },
    )
    response.content_length = asked.stop - asked.start
    await response.prepare(request)
    position = asked.start
    while position < asked.stop:
      data = os.pread(descriptor, min(_CHUNK, asked.stop - position), position)
      if not data:
        raise ConnectionError(f'{path} was truncated while it was sent')
      if not await write(request, response, data, read_s=_READ_S):
        break
      position += len(data)
    return response
  finally:
    os.close(descriptor)
