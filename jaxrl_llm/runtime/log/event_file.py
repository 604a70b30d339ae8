"""Writes TensorBoard event files with scalars. A file is flushed after each event.

The format is simple and stable. A file is a sequence of TFRecords. Each record consists of a
length, the masked CRC-32C of the length, data, and the masked CRC-32C of the data. The data is a
protocol buffer `tensorflow.Event`.

The library tensorboardX is not used for two reasons. It imports torch wherever torch is installed,
which takes seconds and is not allowed in trainer processes. It also puts the time in whole seconds
into the names of its files, so that a quick restart would overwrite a file. Only the tests use
tensorboardX, to read the written files.

Invariant: a file starts with two records that are not rows. The first one has the version of the
format. The second one marks the start of a session and makes a running TensorBoard discard what it
has read before. Each later record is the result of one call of `write`.
"""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Mapping

import numpy as np

_HEADER_RECORDS = 2


class EventFile:
  """A new event file. TensorBoard finds only files named `events.out.tfevents.<anything>`."""

  def __init__(self, path: pathlib.Path, wall_time: float):
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = path.open('wb')
    self._record(_wall_time(wall_time) + _message(3, b'brain.Event:2'))
    start = _number(1, 1)  # Sets SessionLog.status to START.
    self._record(_wall_time(wall_time) + _message(7, start))

  def write(self, step: int, scalars: Mapping[str, float | int], wall_time: float) -> None:
    """Appends an event with the scalars of a step, and flushes the file.

    Args:
      wall_time: time of the event in seconds since 1970.
    """
    with np.errstate(over='ignore'):
      values = [
        (tag.encode(), np.float32(value).astype('<f4').tobytes()) for tag, value in scalars.items()
      ]
    summary = b''.join(_message(1, _message(1, tag) + b'\x15' + value) for tag, value in values)
    self._record(_wall_time(wall_time) + _number(2, step) + _message(5, summary))

  def close(self) -> None:
    self._file.close()

  def _record(self, event: bytes) -> None:
    length = struct.pack('<Q', len(event))
    self._file.write(length + _masked_crc(length) + event + _masked_crc(event))
    self._file.flush()


def row_times(path: pathlib.Path) -> list[float]:
  """Returns the wall time of each row of an event file.

  Rows after an incomplete record are ignored.
  """
  data, times, at = path.read_bytes(), [], 0
  while at + 12 <= len(data):
    (length,) = struct.unpack_from('<Q', data, at)
    if length < 9 or at + 16 + length > len(data):
      break
    # Every event begins with field 1, which contains its wall time.
    times.append(struct.unpack_from('<d', data, at + 13)[0])
    at += 16 + length
  return times[_HEADER_RECORDS:]


def _varint(value: int) -> bytes:
  digits = bytearray()
  while value > 0x7F:
    digits.append(value & 0x7F | 0x80)
    value >>= 7
  return bytes([*digits, value])


def _number(field: int, value: int) -> bytes:
  return bytes([field << 3]) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
  return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _wall_time(seconds: float) -> bytes:
  return b'\x09' + struct.pack('<d', seconds)


def _crc_table() -> list[int]:
  table = []
  for value in range(256):
    for _ in range(8):
      value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    table.append(value)
  return table


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
  """Returns the CRC-32C (Castagnoli, RFC 3720) of `data`, masked as TFRecord requires.

  Masking means that the checksum is rotated and a constant is added.
  """
  crc = 0xFFFFFFFF
  for byte in data:
    crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
  crc ^= 0xFFFFFFFF
  return struct.pack('<I', ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
