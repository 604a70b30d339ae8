"""Length-prefixed JSON messages over a stream socket."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct('!I')
MAX_MESSAGE = 256 << 20
"""Maximum size of a message in bytes."""


class ChannelClosed(Exception):
  """Raised if the other end has closed the channel or sent an invalid message."""


class Channel:
  def __init__(self, connection: socket.socket):
    self.socket = connection

  def send(self, message: Any) -> None:
    body = json.dumps(message).encode()
    try:
      self.socket.sendall(_LENGTH.pack(len(body)) + body)
    except OSError as error:
      raise ChannelClosed(str(error)) from None

  def receive(self) -> Any:
    """Returns the next message.

    Raises ChannelClosed if the channel fails, and TimeoutError after the socket's timeout.
    """
    (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
    if length > MAX_MESSAGE:
      raise ChannelClosed(f'a message of {length} bytes')
    try:
      return json.loads(self._exactly(length))
    except (ValueError, RecursionError) as error:
      raise ChannelClosed(str(error)) from None

  def _exactly(self, count: int) -> bytes:
    parts = []
    while count:
      try:
        part = self.socket.recv(min(count, 1 << 20))
      except TimeoutError:
        raise
      except OSError as error:
        raise ChannelClosed(str(error)) from None
      if not part:
        raise ChannelClosed('end of file')
      parts.append(part)
      count -= len(part)
    return b''.join(parts)

  def close(self) -> None:
    self.socket.close()
